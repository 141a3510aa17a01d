"""--trace, and what looks at it."""

from __future__ import annotations

import json

import pytest

from jaxoverlap.cli import trace
from jaxoverlap.observe import trace_file
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
        assert recorded["otherData"]["schedule"] == "overlap" and recorded["otherData"]["lookahead"] == 1
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
    assert "Format 'xyz' is not supported" in cli("trace", "picture", traces[0], "-o", tmp_path / "one.xyz").stderr
    monkeypatch.setattr(trace, "can_plot", lambda: False)
    assert "pip install 'jaxoverlap[plots]'" in cli("trace", "picture", traces[0]).stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "No such file or directory"),
        ("[]", "is no trace: there are no traceEvents"),
        ('{"traceEvents": []}', "there are no lanes of a host and a device in it"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(cli, tmp_path, content, said):
    path = tmp_path / "t.json"
    if content is not None:
        path.write_text(content)
    result = cli("trace", "view", path)
    assert result.exit_code == 2 and result.stderr.startswith(f"error: {path}") and result.stderr.endswith(f"{said}\n")


def test_where_it_can_not_be_written_is_said_before_the_model_is_loaded(cli, tmp_path):
    for path in (tmp_path, tmp_path / "nowhere" / "t.json"):
        result = cli("generate", "abc", "--model", "driver", "--trace", path)
        assert result.exit_code == 2 and "is not a file in a folder that is there" in result.stderr


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
