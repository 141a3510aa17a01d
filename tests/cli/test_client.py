"""Commands that speak with a server, against a scripted one."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from dataclasses import fields

import pytest

from jaxoverlap.cli.connection import DEFAULT_TARGET, ConnectionOptions
from jaxoverlap.client import Client, ClientConfig
from jaxoverlap.client.config import DEFAULT_TARGET as CLIENT_TARGET
from jaxoverlap.errors import (
    AccessDeniedError,
    ConflictError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    ServerUnavailableError,
)
from jaxoverlap.wire.requests import prompt_of, request_options, sampling_params
from tests.cli.conftest import read_answers, write_lines
from tests.cli.test_batch import item, keys_of
from tests.client.fake_server import MAX_MODEL_LEN, FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def client(cli, server):
    return lambda name, *args, **options: cli("client", name, "--target", server.target, *args, **options)


def test_options_are_those_of_the_client():
    names = {field.name for field in fields(ClientConfig)} - {"target", "model", "metadata", "timeout", "token"}
    assert {field.name for field in fields(ConnectionOptions)} == names | {"token_file"}
    assert DEFAULT_TARGET == CLIENT_TARGET


COMMANDS = "generate chat batch info load health flush snapshot abort steps trace profile drain".split()  # noqa: SIM905


@pytest.mark.parametrize("name", COMMANDS)
def test_help(cli, name, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    result = cli("client", name, "--help")
    assert result.exit_code == 0 and "--target" in result.stdout and "--root-certificates" in result.stdout
    assert f" {name} " in cli("client", "--help").stdout


def test_prompts_are_answered(client, server):
    result = client("generate", "abc", "--max-tokens", 3, "--priority", -2, "--model", "fake", "--timeout", 30)
    assert (result.exit_code, result.stdout) == (0, "<ab\n")
    assert result.stderr.startswith("3 prompt tokens · 3 output tokens · ") and "finished by length" in result.stderr
    [call] = server.calls
    assert sampling_params(call.generation).temperature == 0.0 and 20 < call.seconds_left <= 30.1
    assert request_options(call.generation).priority == -2
    several = client("generate", "a", "b", "-q")
    assert several.stdout == "==> 1/2: a <==\n<a>\n\n==> 2/2: b <==\n<b>\n" and several.stderr == ""
    best = client("generate", "a", "--best-of", 2, "--json", "-q")
    assert json.loads(best.stdout)["text"] == "<a>"


def test_chats_are_put_to_the_servers_template(client, server):
    assert client("generate", "--chat", "--system", "Be.", "Hi", "-q").stdout == "<Be.|Hi>\n"
    assert prompt_of(server.calls[0].generation).messages[0] == {"role": "system", "content": "Be."}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (InvalidRequestError("top_p", 3, "use less"), "error: top_p: 3 is not allowed; use less\n"),
        (EngineError("not a number"), "error: not a number\n"),
        (AccessDeniedError("another token is needed"), "error: another token is needed\n"),
    ],
)
def test_failures_are_one_line(client, server, error, said):
    server.faults.append(error)
    result = client("generate", "abc", "-q")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", said)


def test_nobody_there(cli):
    for args in (["generate", "abc"], ["info"], ["health"]):
        result = cli("client", *args, "--target", "127.0.0.1:1", "--max-retries", 0)
        assert result.exit_code == 2 and result.stdout == ""
        assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1


def test_the_target_may_come_from_the_environment(cli, server, monkeypatch):
    monkeypatch.setenv("JAXOVERLAP_TARGET", server.target)
    assert cli("client", "generate", "abc", "-q").stdout == "<abc>\n"


def test_tokens_come_from_a_file(cli, tmp_path, monkeypatch):
    server = FakeServer(token="secret")
    path = tmp_path / "token"
    where = ["client", "generate", "abc", "-q", "--target", server.target]
    path.write_text("\nsecret\n")
    assert cli(*where, "--token-file", path).stdout == "<abc>\n"
    assert cli(*where).stderr == "error: a bearer token is needed\n"
    monkeypatch.setenv("JAXOVERLAP_TOKEN_FILE", str(path))
    assert cli(*where).stdout == "<abc>\n"
    assert cli(*where[:-1], "llm.example:1").stderr.startswith("error: token: without TLS")
    path.write_text("one\ntwo\n")
    assert cli(*where).stderr == f"error: token_file: {path}: one line with a token is needed, there are 2\n"
    path.unlink()
    assert cli(*where).stderr == f"error: token_file: {path}: No such file or directory\n"
    server.stop()


def test_settings_that_can_not_be(client):
    result = client("load", "--root-certificates", "no.pem")
    assert (result.exit_code, result.stderr) == (2, "error: root_certificates: no.pem: No such file or directory\n")
    assert client("load", "--client-key", "x").stderr == "error: client_certificate and client_key go together\n"


def test_what_operators_see(client, server):
    told = json.loads(client("info", "--json").stdout)
    assert told["model"]["served_name"] == "fake" and told["server"]["page_size"] == 16
    shown = client("info").stdout.splitlines()
    assert shown[:2] == ["model", "  served_name: fake"] and "  capabilities: logprobs" in shown
    assert json.loads(client("load", "--json").stdout)["running"] == 2
    assert "kv_used_fraction: 0.5\n" in client("load").stdout
    assert json.loads(client("snapshot").stdout)["pages"][1]["request_id"] == 7
    assert client("snapshot", "--svg").stdout.startswith("<svg")
    ready = client("health")
    assert (ready.exit_code, ready.stdout) == (0, "ready\n")
    server.set_ready(False)
    waiting = client("health")
    assert (waiting.exit_code, waiting.stdout) == (1, "live, not ready\n")


def test_what_operators_do(client, server):
    assert client("flush").stdout == "7 pages freed\n"
    server.admin_faults.append(ConflictError("2 requests run"))
    refused = client("flush")
    assert (refused.exit_code, refused.stderr) == (2, "error: 2 requests run\n")
    ended = client("abort", "r-1", "r-9")
    assert (ended.exit_code, ended.stdout, ended.stderr) == (1, "r-1\n", "no such request: r-9\n")
    assert client("abort", "--all").stdout == "r-1\n"
    for args in ([], ["r-1", "--all"]):
        assert client("abort", *args).stderr == "error: name requests, or use --all\n"
    drained = client("drain", "--timeout", 2.5)
    assert (drained.exit_code, drained.stdout) == (0, "0 still running\n")
    assert server.admin_calls[-1].timeout_seconds == 2.5


# ---------------------------------------------------------------- batches


@pytest.mark.parametrize("how", ["batch --server", "client batch --target"])
def test_a_batch_is_answered_by_a_server(cli, server, tmp_path, how):
    lines = [item(f"id {i}", f"p{i}") for i in range(30)]
    lines.insert(3, item("long", "x" * MAX_MODEL_LEN, max_tokens=None))
    lines.insert(7, {"custom_id": "chat", "body": {"messages": [{"role": "user", "content": "Hi"}]}})
    source = write_lines(tmp_path / "in", *lines)
    server.faults.extend([QueueFullError("full", 0.001)] * 5)
    result = cli(*how.split(), server.target, "-i", source, "-o", tmp_path / "out", "--concurrency", 8)
    assert result.exit_code == 1 and "31 done, 1 failed, 0 skipped" in result.stderr
    assert [key for key, _ in keys_of(tmp_path / "out")] == [line["custom_id"] for line in lines]
    answers = {answer["custom_id"]: answer["response"]["body"] for answer in read_answers(tmp_path / "out")}
    assert answers["id 5"]["choices"][0]["text"] == "<p5>" and answers["id 5"]["model"] == "fake"
    assert answers["id 5"]["usage"]["prompt_tokens"] == 2 and answers["id 5"]["usage"]["completion_tokens"] == 4
    assert answers["chat"]["choices"][0]["message"]["content"] == "<Hi>"
    assert answers["long"]["error"]["param"] == "body.prompt"
    assert server.most_open <= 8
    recommended = server.calls[-1].generation.sampling
    assert (recommended.temperature, recommended.top_k) == (0.5, 20)


def test_a_batch_goes_on_when_the_server_is_back(cli, server, tmp_path):
    source = write_lines(tmp_path / "in", *(item(f"id {i}") for i in range(9)))
    args = ["batch", "--server", server.target, "-i", source, "-o", tmp_path / "out", "--max-retries", 0]
    server.faults.extend([EngineError("x")] + [ServerUnavailableError("draining")] * 8)
    result = cli(*args, "--concurrency", 1)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == "error: draining" and "stopped: 0 done, 1 failed" in result.stderr
    server.faults.clear()
    result = cli(*args)
    assert result.exit_code == 1 and "8 done, 0 failed, 1 skipped" in result.stderr


def test_a_model_without_an_admin_service_has_no_name(cli, server, tmp_path):
    source = write_lines(tmp_path / "in", item("a"))
    server.admin_faults.append(AccessDeniedError("operators only"))
    assert cli("batch", "--server", server.target, "-i", source, "-o", tmp_path / "out").exit_code == 0
    assert read_answers(tmp_path / "out")[0]["response"]["body"]["model"] == "default"
    assert cli("batch", "--server", server.target, "-i", source, "-o", tmp_path / "b", "--model", "fake").exit_code == 0
    assert read_answers(tmp_path / "b")[0]["response"]["body"]["model"] == "fake"
    assert server.calls[-1].generation.model == "fake"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--server", "127.0.0.1:1", "--max-running", 3], "error: --max-running is for an engine in this process"),
        (["--token-file", "x"], "error: --token-file is for a server; name it with --server"),
        (["--tls"], "error: --tls is for a server"),
    ],
)
@pytest.mark.parametrize("command", [["batch", "-i", "in", "-o", "out"], ["chat"]])
def test_options_of_the_one_do_not_go_with_the_other(cli, tmp_path, monkeypatch, command, args, said):
    monkeypatch.chdir(tmp_path)
    result = cli(*command, *args)
    assert result.exit_code == 2 and result.stderr.startswith(said) and result.stderr.count("\n") == 1


def test_ctrl_c_ends_a_batch_and_its_calls(start, server, tmp_path):
    server.hold()
    source = write_lines(tmp_path / "in", *(item(f"id {i}") for i in range(9)))
    process = start("client", "batch", "-t", server.target, "-i", source, "-o", tmp_path / "out", "--concurrency", 4)
    server.wait_for_calls(4)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.startswith(b"interrupted, the same command goes on from here: 0 done") and stderr.count(b"\n") == 1
    assert len(server.calls) == 4 and all(call.is_cancelled() for call in server.calls)


def test_ctrl_c_ends_an_answer_and_its_call(start, server):
    server.hold()
    process = start("client", "generate", "abc", "-t", server.target)
    assert process.stdout.read(1) == b"<"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"") and server.calls[0].is_cancelled()


def test_steps_of_the_engine(client):
    result = client("steps", "--last", 2)
    line = (
        "turn 4 step 3 decode in flight · tokens 2 of 2 rows · requests 7,8 · rows 0,2 · committed 5,9 · "
        "allocated 16,16 · pages 1 new, 4 used · queue 2 running, 1 waiting, 1 in flight\n"
    )
    assert (result.exit_code, result.stdout) == (0, 2 * line)
    assert json.loads(client("steps", "--last", 1, "--json").stdout)["slots"] == [[[5, 5]], [[57, 57]]]


def test_a_trace_of_the_server(client, tmp_path):
    result = client("trace", "-o", tmp_path / "t.json", "--seconds", 0, "--max-steps", 7)
    assert result.exit_code == 0 and result.stderr == "model fake\n"
    assert json.loads((tmp_path / "t.json").read_text())["otherData"] == {"model": "fake"}


def test_a_profile_of_the_server(client):
    assert client("profile", "--steps", 3).stdout == "/traces/3\n"
    assert client("profile", "--stop").stdout == "/traces/0\n"


def test_a_map_of_the_memory_over_time(client, tmp_path):
    path = tmp_path / "map.html"
    assert client("snapshot", "--html", path, "--count", 3, "--every", 0).exit_code == 0
    data = json.loads(re.search(r'type="application/json">(.*?)</script>', path.read_text())[1])
    assert len(data["moments"]) == 3 and [page["owner"] for page in data["moments"][2]["pages"]] == ["free", "row"]
    assert data["moments"][0]["facts"]["free runs"] == "1, longest 1"


@pytest.mark.parametrize(
    "args",
    [
        *(["steps", "--last", last] for last in (-1, 0, 5_000_000_000)),
        *(["profile", "--steps", steps] for steps in (-1, 0, 5_000_000_000)),
        *(["trace", "-o", "/tmp/none.json", "--max-steps", steps] for steps in (-1, 0, 5_000_000_000)),
        *(["trace", "-o", "/tmp/none.json", "--seconds", seconds] for seconds in (-1, "nan", "inf", 1e30)),
        *(["snapshot", "--html", "/tmp/none.html", "--every", seconds] for seconds in (-1, "nan", "inf", 1e30)),
        ["snapshot", "--html", "/tmp/none.html", "--count", 0],
        *(["drain", "--timeout", seconds] for seconds in (-1, "nan")),
    ],
    ids=lambda args: " ".join(map(str, args)),
)
def test_numbers_that_make_no_sense_are_refused_by_their_names(client, args):
    result = client(*args)
    name = next(arg for arg in reversed(args) if str(arg).startswith("--")).removeprefix("--")
    assert result.exit_code == 2 and name.partition("=")[0] in result.stderr.replace("_", "-")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["snapshot", "--count", 3], "--count is for a map over time; it needs --html"),
        (["snapshot", "--svg", "--every", 1], "--every is for a map over time; it needs --html"),
        (["snapshot", "--svg", "--html", "/tmp/none.html"], "--svg is one moment and --html a map over time"),
        (["profile", "--stop", "--steps", 3], "--steps is for a profile that begins, --stop ends one"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(map(str, value)),
)
def test_options_that_contradict_each_other_are_refused(client, server, args, said):
    result = client(*args)
    assert (result.exit_code, result.stdout) == (2, "") and f"error: {said}" in result.stderr


def test_a_trace_is_stopped_whatever_happens_meanwhile(client, monkeypatch, tmp_path):
    def fails(seconds: float) -> None:
        raise EngineError("no clock")

    stopped = []
    stop = Client.stop_trace
    monkeypatch.setattr(Client, "stop_trace", lambda client: stopped.append(1) or stop(client))
    monkeypatch.setattr("jaxoverlap.cli.client.time.sleep", fails)
    assert client("trace", "-o", tmp_path / "t.json").exit_code == 2
    assert stopped == [1]
