"""--trace, and what looks at it."""

from __future__ import annotations

import json

import pytest

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
        trace = trace_file.read(path)
        assert {"host", "device", "request"} <= lanes(path) and trace["otherData"]["model"] == "toy"
        assert trace["otherData"]["schedule"] == "overlap" and trace["otherData"]["lookahead"] == 1
        names = {event["name"] for event in trace["traceEvents"] if event.get("cat") == "host"}
        assert {"plan", "launch", "wait", "commit", "detokenize"} <= names


def test_a_trace_becomes_a_page(cli, tmp_path):
    path = tmp_path / "t.json.gz"
    cli("generate", "abc", "--max-tokens", 5, "-q", "--trace", path)
    result = cli("trace", "view", path)
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 't.html'}\n")
    assert "<canvas" in (tmp_path / "t.html").read_text()
    assert cli("trace", "view", path, "-o", tmp_path / "other.html").stdout == f"{tmp_path / 'other.html'}\n"


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
