"""--trace, and what looks at it."""

from __future__ import annotations

import gzip
import json
import os

import pytest

from jaxoverlap.cli import trace
from jaxoverlap.observe import trace_file
from jaxoverlap.observe.chrome_trace import DEVICE, ENGINE
from jaxoverlap.observe.trace_page import to_page
from tests.cli.conftest import write_lines

REQUEST = {"custom_id": "1", "url": "/v1/completions", "body": {"prompt": "abc", "max_tokens": 5}}


def lanes(path) -> set[str]:
    return {event["cat"] for event in trace_file.read(path)["traceEvents"] if event["ph"] == "X"}


def test_every_command_with_an_engine_writes_a_trace(cli, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", REQUEST)
    for name, args, stdin in (
        ("generate", ["abc", "--max-tokens", 5], None),
        ("batch", ["-i", source, "-o", tmp_path / "out.jsonl"], None),
        ("chat", ["--max-tokens", 5, "--temperature", 0], "hi\n"),
    ):
        path = tmp_path / f"{name}.json"
        assert cli(name, *args, "-q", "--trace", path, stdin=stdin).exit_code == 0
        recorded = trace_file.read(path)
        assert {"host", "device", "request"} <= lanes(path) and recorded["otherData"]["model"] == "toy"
        about = {name: recorded["otherData"][name] for name in ("platform", "schedule", "lookahead")}
        assert about == {"platform": "cpu", "schedule": "overlap", "lookahead": 1}
        names = {event["name"] for event in recorded["traceEvents"] if event.get("cat") == "host"}
        assert {"plan", "launch", "wait", "commit", "detokenize"} <= names


def test_a_trace_becomes_a_page(cli, tmp_path):
    path = tmp_path / "t.json.gz"
    cli("generate", "abc", "--max-tokens", 5, "-q", "--trace", path)
    result = cli("trace", "view", path)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 't.html'}\n")
    assert "<canvas" in (tmp_path / "t.html").read_text()
    assert cli("trace", "view", path, "-o", tmp_path / "other.html").stdout == f"{tmp_path / 'other.html'}\n"


def test_traces_become_a_picture(cli, tmp_path, monkeypatch):
    for schedule in ("serial", "overlap"):
        cli(
            "generate", "abc", "--max-tokens", 5, "-q", "--schedule", schedule, "--trace", tmp_path / f"{schedule}.json"
        )
    traces = [tmp_path / "serial.json", tmp_path / "overlap.json"]
    path = tmp_path / "both.svg"
    assert cli("trace", "picture", *traces, "-o", path, "--length-ms", 50).stdout == f"{path}\n"
    drawn = path.read_text()
    assert all(word in drawn for word in ("serial", "overlap", "host", "device", "launch", "decode"))
    assert cli("trace", "picture", traces[0], "-o", tmp_path / "one.png").exit_code == 0
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")
    assert "no step from 90000 ms on" in cli("trace", "picture", traces[0], "--start-ms", 90_000).stderr
    monkeypatch.setattr(trace, "can_plot", lambda: False)
    assert "pip install 'jaxoverlap[plots]'" in cli("trace", "picture", traces[0]).stderr


def step(**fields) -> str:
    """A trace of one step, with other fields."""
    event = {"ph": "X", "pid": ENGINE, "tid": DEVICE, "name": "decode 1", "ts": 0, "dur": 1, **fields}
    return json.dumps({"traceEvents": [event]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        ("[]", "is no trace: there are no traceEvents"),
        (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + b"damaged" * 9, "is damaged: Error -3 "),
        (gzip.compress(b'{"traceEvents": []}')[:-9], "is damaged: Compressed file ended"),
        ("[" * 100_000, "is no JSON: "),
        ('{"traceEvents": [7]}', "traceEvents[0]: 7 is not allowed; an object is needed"),
        ('{"traceEvents": [], "otherData": null}', "otherData: None is not allowed; an object is needed"),
        (
            '{"traceEvents": [], "otherData": {"summary": {"steps": 3}}}',
            "otherData.summary.seconds: None is not allowed",
        ),
        (step(name=" "), "name: ' ' is not allowed; a text that is not empty is needed"),
        (step(dur=None), "dur: None is not allowed; a number"),
        (step(ts="now"), "ts: 'now' is not allowed; a number"),
        (step(args=[]), "args: [] is not allowed; an object is needed"),
        (step(args={"decode_rows": 1, "prompt_tokens": 0}), "args.kv_tokens: None is not allowed; a number"),
        ('{"traceEvents": []}', "there are no lanes of a host and a device in it"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(cli, tmp_path, content, said):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in (["trace", "view"], ["trace", "picture"], ["simulate", "--measured"]):
        if content == '{"traceEvents": []}' and command[-1] != "view":
            continue  # they have words of their own for it
        result = cli(*command, path)
        assert result.exit_code == 2 and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
        assert str(path) in result.stderr and said in result.stderr


def test_lanes_of_somebody_else_are_left_out(cli, tmp_path):
    path = tmp_path / "t.json"
    cli("generate", "abc", "--max-tokens", 5, "-q", "--trace", path)
    recorded = json.loads(path.read_text())
    before = to_page(recorded)
    recorded["traceEvents"] += [
        {"ph": "X", "pid": ENGINE, "tid": tid, "name": "", "ts": 0} for tid in (77, "main", [1], None)
    ]
    path.write_text(json.dumps(recorded))
    assert cli("trace", "picture", path, "-o", tmp_path / "t.svg").exit_code == 0
    assert cli("trace", "view", path).exit_code == 0 and (tmp_path / "t.html").read_text() == before


def test_where_it_can_not_be_written_is_said_before_the_model_is_loaded(cli, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "t.json", "", tmp_path / ("x" * 300), "/etc/passwd/x"):
        result = cli("generate", "abc", "--model", "driver", "--trace", path)
        assert result.exit_code == 2 and "Invalid value for '--trace'" in result.stderr


def test_a_picture_is_where_it_says(cli, tmp_path):
    path = tmp_path / "t.json"
    cli("generate", "abc", "--max-tokens", 5, "-q", "--trace", path)
    for name in ("t", "t.txt", "svg"):
        result = cli("trace", "picture", path, "-o", tmp_path / name)
        assert result.exit_code == 2 and "--output: " in result.stderr and ".svg, .png, .pdf" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["t.json"]


def test_names_may_have_bytes_that_are_no_text(cli, tmp_path):
    path = f"{tmp_path}/\udcff"
    cli("generate", "abc", "--max-tokens", 5, "-q", "--trace", f"{path}.json")
    result = cli("trace", "view", f"{path}.json")
    assert (result.exit_code, result.stdout_bytes) == (0, os.fsencode(f"{path}.html\n"))
    assert os.path.isfile(f"{path}.html")


def test_a_server_is_traced_by_the_client(cli, tmp_path):
    for name, args in (("chat", []), ("batch", ["-i", "-", "-o", "-"])):
        result = cli(name, *args, "--server", "127.0.0.1:1", "--trace", tmp_path / "t.json", stdin="")
        assert result.exit_code == 2 and "jaxoverlap client trace" in result.stderr


def test_an_interrupted_command_keeps_its_trace(start, tmp_path):
    import signal

    path = tmp_path / "t.json"
    process = start("generate", "abc", "--max-tokens", 200, "--trace", path, env={"TOY_STEP_SECONDS": "0.02"})
    assert process.stdout.read(3)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130 and json.loads(path.read_text())["otherData"]["steps"] > 0
