"""`jaxoverlap bench`: the suites of benchmarks/, one after the other, as a report that can be compared with another.

A suite is a module that prints its tables and writes its results as JSON; what it warms up, repeats and alternates is
its own. They come with a checkout of the repository and not with the package.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxoverlap.cli import command
from jaxoverlap.cli.bench_report import compared, to_html, to_markdown

SUITES = {
    "overlap": ["bench_overlap"],
    "host": ["bench_host"],
    "throughput": ["bench_throughput"],
    "latency": ["bench_serving", "sweep"],
    "serving": ["bench_serving", "overhead"],
    "soak": ["bench_serving", "soak"],
    "prefix-cache": ["bench_prefix_cache"],
    "long-prompt": ["bench_long_prompt"],
    "attention": ["bench_attention"],
    "kernels": ["bench_kernels"],
    "detokenizer": ["bench_detokenizer"],
    "structured": ["bench_structured"],
    "wishes": ["bench_wishes"],
    "simulate": ["bench_simulate"],
    "cache-host": ["bench_cache_host"],
    "deterministic": ["bench_deterministic"],
}
"""By name, the module and its first arguments."""


def bench(
    suites: Annotated[
        list[str], typer.Argument(metavar=f"SUITE… [{'|'.join(SUITES)}]", help="What to measure, in this order.")
    ],
    arguments: Annotated[
        str | None,
        typer.Option("--args", metavar="TEXT", show_default=False, help="Passed to each suite, as '--steps 50'."),
    ] = None,
    as_json: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", show_default=False, callback=command.writable, help="The results."),
    ] = None,
    report: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", show_default=False, callback=command.writable, help="Tables: HTML by .html, else Markdown."
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(metavar="FILE", show_default=False, help="An earlier --json: shows ratios of new to old."),
    ] = None,
) -> int:
    """Run benchmarks of a checkout, from its root. Suites print their tables as they go.

    The results have the environment they were measured in: date, git revision, versions, cores. After Ctrl-C --json has
    those of the suites that are done.

    Exit codes: 0 done, 1 a suite has failed, 2 they are not here, or an error.
    """
    for name in suites:
        if name not in SUITES:
            raise command.CommandError(f"{name}: no such suite; there are {', '.join(SUITES)}")
    root = _root()
    old = _read(compare) if compare is not None else None
    results: dict[str, Any] = {}
    try:
        for name in suites:
            command.say(f"== {name}")
            result = _run(SUITES[name], (arguments or "").split(), root)
            if result is not None:
                results[name] = result
    finally:
        if as_json is not None:
            command.write_text(as_json, json.dumps(results, indent=2) + "\n")
    ratios = {} if old is None else compared(old, results)
    if old is not None:
        print(to_markdown(ratios))
    if report is not None:
        shown = {**results, **{f"{name}, new / old": rows for name, rows in ratios.items()}}
        command.write_text(report, to_html(shown) if report.endswith((".html", ".htm")) else to_markdown(shown))
    return command.OK if len(results) == len(set(suites)) else command.SOME_FAILED


def _root() -> Path:
    root = Path.cwd()
    if not (root / "benchmarks" / "report.py").is_file():
        raise command.CommandError(
            f"there is no benchmarks/ in {root}: it comes with the repository, not with the package; run this from the "
            "root of a checkout"
        )
    return root


def _run(module: list[str], arguments: list[str], root: Path) -> dict[str, Any] | None:
    """A suite's results; None if it has failed, having said why on standard error."""
    name, *first = module
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        words = [sys.executable, "-m", f"benchmarks.{name}", *first, *arguments, "--json", str(path)]
        code = subprocess.run(words, cwd=root, check=False).returncode
        if code or not path.is_file():
            command.say(f"error: {name} has ended with exit code {code}")
            return None
        return json.loads(path.read_text())


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except OSError as error:
        raise command.CommandError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise command.CommandError(f"{path}: no JSON: {error}") from error
    if not isinstance(found, dict) or not all(isinstance(result, dict) for result in found.values()):
        raise command.CommandError(f"{path}: not what jaxoverlap bench --json has written")
    return found
