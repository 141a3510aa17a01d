"""Results of benchmarks as tables: Markdown, HTML with bars, and ratios to earlier results.

Results are by suite: `environment`, and any number of tables, each a list of rows (objects) under its name. `plots` are
what `bench_plots` draws, `keys` says of a table which columns tell its rows apart; other values are settings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from jaxoverlap.cli import bench_plots
from jaxoverlap.observe import figures

Results = Mapping[str, Mapping[str, Any]]
Rows = Sequence[Mapping[str, Any]]

_STYLE = """
:root { color-scheme: light dark; }
body { margin: 24px; font: 14px/1.4 system-ui, sans-serif; background: Canvas; color: CanvasText; }
table { border-collapse: collapse; margin: 8px 0 20px; }
th, td { padding: 3px 10px; text-align: right; border-bottom: 1px solid color-mix(in srgb, CanvasText 20%, Canvas); }
td.bar { background: linear-gradient(to right, color-mix(in srgb, #4c78a8 45%, Canvas) var(--share), transparent 0); }
p { opacity: 0.7; }
svg text { fill: CanvasText; }
"""


def tables(result: Mapping[str, Any]) -> Iterator[tuple[str, Rows]]:
    """Those of a suite, by name."""
    for name, value in result.items():
        if name != "plots" and isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            yield name, value


def compared(old: Results, new: Results) -> dict[str, dict[str, Any]]:
    """Ratios of new to old for each measured number, of rows that both have: those whose keys are equal.

    Results of before there were `keys` are told apart by their first column and by whatever is no number with decimals.
    Where that does not tell rows apart, they are not compared, and a table "not compared" says so.
    """
    found: dict[str, dict[str, Any]] = {}
    for suite, result in new.items():
        before = dict(tables(old.get(suite, {})))
        kept: dict[str, Any] = {}
        unclear = []
        for name, rows in tables(result):
            if name not in before:
                continue
            keys = _keys(name, [*before[name], *rows], old[suite], result)
            earlier, later = _by_identity(before[name], keys), _by_identity(rows, keys)
            both = [identity for identity in later if identity in earlier]
            clear = [identity for identity in both if len(earlier[identity]) == len(later[identity]) == 1]
            if clear:
                kept[name] = [_ratios(earlier[identity][0], later[identity][0], keys) for identity in clear]
            if count := len(both) - len(clear):
                unclear.append({"table": name, "rows": count, "are not told apart by": ", ".join(keys)})
        if unclear:
            kept["not compared"] = unclear
        if kept:
            found[suite] = {"environment": _both(old[suite], result), **kept}
    return found


def _keys(name: str, rows: Rows, *results: Mapping[str, Any]) -> list[str]:
    """The columns that tell rows of a table apart, as the newest of the results says that has any."""
    for result in reversed(results):
        if name in result.get("keys", {}):
            return list(result["keys"][name])
    first, *columns = _columns(rows)
    measured = {column for column in columns for row in rows if _is_measured(column, row.get(column))}
    return [first, *(column for column in columns if column not in measured)]


def _is_measured(name: str, value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, str) and value.endswith("%")) or name == "verdict"


def _by_identity(rows: Rows, keys: Sequence[str]) -> dict[tuple[Any, ...], list[Mapping[str, Any]]]:
    found: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(tuple(_comparable(row.get(key)) for key in keys), []).append(row)
    return found


def _comparable(value: Any) -> Any:
    """Numbers as they are, so that 4 is 4.0."""
    return value if isinstance(value, int | float) else str(value)


def _ratios(old: Mapping[str, Any], new: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    row = {name: new.get(name) for name in keys}
    for name, value in new.items():
        if name not in keys and _is_number(value) and _is_number(old.get(name)) and old[name]:
            row[name] = value / old[name]
    return row


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _both(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    names = {**old.get("environment", {}), **new.get("environment", {})}
    return {
        name: str(after) if before == after else f"{before} → {after}"
        for name in names
        for before, after in [(old.get("environment", {}).get(name), new.get("environment", {}).get(name))]
    }


def to_markdown(results: Results) -> str:
    lines = ["# Benchmarks", ""]
    for suite, result in results.items():
        lines += [f"## {suite}", "", _environment(result), ""]
        for name, rows in tables(result):
            columns = _columns(rows)
            lines += [f"### {name}", "", "| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
            lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows]
            lines.append("")
    return "\n".join(lines)


def to_html(results: Results) -> str:
    """One page that needs nothing else. A bar behind a number is its share of the column's largest."""
    parts = ["<!DOCTYPE html>", '<html lang="en"><head><meta charset="utf-8"><title>jaxoverlap bench</title>']
    parts += [f"<style>{_STYLE}</style></head><body><h1>Benchmarks</h1>"]
    for suite, result in results.items():
        parts.append(f"<h2>{escape(suite)}</h2><p>{escape(_environment(result))}</p>")
        for name, rows in tables(result):
            columns = _columns(rows)
            most = {column: max(map(_size, (row.get(column) for row in rows))) for column in columns}
            parts.append(f"<h3>{escape(name)}</h3><table><tr>")
            parts += [f"<th>{escape(column)}</th>" for column in columns] + ["</tr>"]
            for row in rows:
                parts.append(
                    "<tr>" + "".join(_html_cell(row.get(column), most[column]) for column in columns) + "</tr>"
                )
            parts.append("</table>")
        plots = result.get("plots", [])
        if plots and not figures.can_plot():
            parts.append(f"<p>{escape(figures.HOW_TO_GET)}</p>")
        elif plots:
            parts += [bench_plots.to_svg(plot, result) for plot in plots]
    return "\n".join([*parts, "</body></html>", ""])


def _html_cell(value: Any, most: float) -> str:
    text = escape(_cell(value))
    if isinstance(value, float) and most:
        return f'<td class="bar" style="--share:{100 * abs(value) / most:.0f}%">{text}</td>'
    return f"<td>{text}</td>"


def _environment(result: Mapping[str, Any]) -> str:
    return " · ".join(f"{name} {value}" for name, value in result.get("environment", {}).items())


def _columns(rows: Rows) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")


def _size(value: Any) -> float:
    return abs(value) if isinstance(value, float) else 0.0
