"""The entry to the benchmarks, with suites that do next to nothing."""

from __future__ import annotations

import argparse
import asyncio
import json

import pytest

from benchmarks import bench_serving, load
from jaxoverlap.cli import bench
from jaxoverlap.cli.bench_report import compared, tables, to_html, to_markdown
from jaxoverlap.observe import figures
from tests.cli.conftest import ROOT

SUITE = """
import json, sys
assert sys.argv[-2] == "--json"
if "--fail" in sys.argv:
    raise SystemExit(3)
rows = [{"rows": 1, "ms": 2.0}, {"rows": 8, "ms": 4.0 * ("--slow" in sys.argv) + 4.0}]
open(sys.argv[-1], "w").write(json.dumps({"benchmark": "x", "environment": {"revision": "abc"}, "rows": rows}))
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name in ("__init__", "report"):
        (folder / f"{name}.py").write_text("")
    (folder / "bench_host.py").write_text(SUITE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def test_every_suite_is_there_and_every_script_has_a_suite():
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("bench_*.py")}
    assert {module for module, *_ in bench.SUITES.values()} == scripts


def test_results_reports_and_a_comparison(cli, checkout):
    assert cli("bench", "host", "--json", "old.json").exit_code == 0
    again = cli(
        "bench", "host", "--args", "--slow", "--compare", "old.json", "--report", "new.html", "--json", "n.json"
    )
    assert again.exit_code == 0 and "| 8 | 2 |" in again.stdout and "| 1 | 1 |" in again.stdout
    assert json.loads((checkout / "n.json").read_text())["host"]["environment"] == {"revision": "abc"}
    page = (checkout / "new.html").read_text()
    assert 'style="--share:25%">2<' in page and "host, new / old" in page
    assert cli("bench", "host", "--report", "new.md").exit_code == 0
    assert "### rows\n\n| rows | ms |\n| --- | --- |\n| 1 | 2 |" in (checkout / "new.md").read_text()


def test_a_suite_may_ask_for_lines(monkeypatch):
    plot = {"title": "<Times>", "table": "rows", "x": "rate", "lines": ["p50", "p99"], "unit": "ms", "log": True}
    rows = [{"rate": 2.0, "p50": 1.0, "p99": None}, {"rate": 4.0, "p50": 3.0, "p99": 9.0}]
    results = {"latency": {"environment": {}, "rows": rows, "plots": [plot]}}
    page = to_html(results)
    assert page.count("<svg") == 1 and "&lt;Times&gt;" in page and "<h3>plots</h3>" not in page
    assert page == to_html(results)  # the same results, the same report
    monkeypatch.setattr(figures, "can_plot", lambda: False)
    assert "pip install &#x27;jaxoverlap[plots]&#x27;" in to_html(results)


def test_a_suite_that_fails_does_not_hold_up_the_report(cli, checkout):
    result = cli("bench", "host", "--args", "--fail", "--json", "r.json")
    assert result.exit_code == 1 and "error: bench_host has ended with exit code 3" in result.stderr
    assert json.loads((checkout / "r.json").read_text()) == {}


def test_ctrl_c_in_a_suite_keeps_the_results_of_those_before_it(cli, checkout):
    (checkout / "benchmarks" / "bench_wishes.py").write_text("import os, signal; os.kill(os.getppid(), signal.SIGINT)")
    assert cli("bench", "host", "wishes", "--json", "out.json").exit_code == 130
    assert list(json.loads((checkout / "out.json").read_text())) == ["host"]


def test_what_is_not_here_is_said(cli, checkout, tmp_path_factory, monkeypatch):
    assert "no such suite; there are overlap, host" in cli("bench", "speed").stderr
    (checkout / "bad.json").write_text("[]")
    assert "not what jaxoverlap bench --json has written" in cli("bench", "host", "--compare", "bad.json").stderr
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    result = cli("bench", "host")
    assert result.exit_code == 2 and "run this from the root of a checkout" in result.stderr


def test_only_rows_that_both_have_are_compared():
    old = {"a": {"environment": {"jax": "1"}, "t": [{"rows": 1, "ms": 2.0}, {"rows": 2, "ms": 1.0}]}}
    new = {"a": {"environment": {"jax": "2"}, "t": [{"rows": 1, "ms": 3.0}, {"rows": 4, "ms": 1.0}]}, "b": {"t": []}}
    assert compared(old, new) == {"a": {"environment": {"jax": "1 → 2"}, "t": [{"rows": 1, "ms": 1.5}]}}
    assert "<b>" not in to_html({"<b>": {"t": [{"<b>": "<b>"}]}}) and "x\\|y" in to_markdown(
        {"s": {"t": [{"n": "x|y"}]}}
    )


def test_rows_are_told_apart_by_the_columns_that_a_suite_names():
    rows = [{"rate": 2, "steps": 10, "ms": 1.0}, {"rate": 4.0, "steps": 30, "ms": 3.0}]
    old = {"latency": {"environment": {}, "rows": rows}}
    new = {"latency": {"environment": {}, "rows": [{"rate": 4, "steps": 15, "ms": 6.0}], "keys": {"rows": ["rate"]}}}
    assert compared(old, new)["latency"]["rows"] == [{"rate": 4, "steps": 0.5, "ms": 2.0}]


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_results_beside_themselves_are_all_ones(path):
    results = {"suite": json.loads(path.read_text())}
    found = compared(results, results)["suite"]
    assert "not compared" not in found
    for name, rows in tables(results["suite"]):
        assert len(found[name]) == len(rows)
        for row, ratios in zip(rows, found[name], strict=True):
            assert all(value == row[column] or value == 1.0 for column, value in ratios.items())
    if path.stem == "serving_sweep":
        assert [row["rate"] for row in found["rows"]] == [8.0, 16.0, 32.0, 64.0]
        assert all(row["TTFT p50"] == row["tok/s"] == 1.0 for row in found["rows"])


def test_rows_that_nothing_tells_apart_are_not_compared():
    twice = {
        "a": {"environment": {}, "t": [{"case": "x", "ms": 1.0}, {"case": "x", "ms": 2.0}, {"case": "y", "ms": 1.0}]}
    }
    found = compared(twice, twice)["a"]
    assert found["t"] == [{"case": "y", "ms": 1.0}]
    assert found["not compared"] == [{"table": "t", "rows": 1, "are not told apart by": "case"}]


def test_each_rate_of_a_sweep_has_prompts_of_its_own():
    """Or the prefix cache would do the work from the second rate on."""
    asked = []

    async def run(client, work, moments):
        asked.append({tuple(one.prompt) for one in work})
        return [], 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(load, "run", run)
        patch.setattr(load, "summary", lambda *args: {})
        args = argparse.Namespace(
            rates=[2.0, 4.0], requests=5, prompt_len="20", output_len="4", lengths=None, context=64, burst=1,
            first_token_ms=500, token_ms=50,
        )  # fmt: skip
        asyncio.run(bench_serving.sweep(args, "127.0.0.1:1"))
    first, second = asked
    assert len(first) == len(second) == 5 and not first & second
