"""`jaxoverlap chat`: what is said, what is remembered, what stops what."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import time
from collections.abc import Iterator

import pytest

from jaxoverlap.errors import EngineError, ServerUnavailableError
from jaxoverlap.wire.requests import prompt_of, sampling_params
from tests.cli import toy
from tests.client.fake_server import MAX_MODEL_LEN, AfterFirst, FakeServer
from tests.fakes import oracle


@pytest.fixture
def server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def chat(cli, server):
    return lambda script, *args: cli("chat", "--server", server.target, *args, stdin=script)


def said(server) -> list[list[str]]:
    """What each question came with."""
    return [
        [f"{message['role']}: {message['content']}" for message in prompt_of(call.generation).messages]
        for call in server.calls
    ]


def test_turns_go_out_with_all_that_was_said(chat, server):
    result = chat("Hi\n\nMore?\n", "-q")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "<Hi>\n<Hi|<Hi>|More?>\n", "")
    assert said(server) == [["user: Hi"], ["user: Hi", "assistant: <Hi>", "user: More?"]]
    params = sampling_params(server.calls[0].generation)
    assert (params.temperature, params.max_tokens) == (0.7, 1024)


def test_commands(chat, server):
    script = "/system Be brief.\nA\n/reset\nB\n/system\n/reset\nC\n//path\n/nope\n/help\n/exit\nD\n"
    result = chat(script, "--system", "Be.", "-q")
    assert result.exit_code == 0
    assert said(server) == [
        ["system: Be brief.", "user: A"],
        ["system: Be brief.", "user: B"],
        ["user: C"],
        ["user: C", "assistant: <C>", "user: /path"],
    ]
    unknown, known = result.stderr.splitlines()
    assert unknown.startswith("no such command: /nope · /reset forgets") and known.startswith("/reset forgets")


def test_what_an_answer_took_is_told(chat):
    result = chat("Hi\n", "--max-tokens", 2)
    assert result.stdout == "<H\n"
    assert result.stderr.startswith("2 prompt tokens (1 of them cached) · 2 output tokens · ")
    assert result.stderr.endswith(" tokens/s · length\n")


def test_a_question_that_fails_is_forgotten(chat, server):
    result = chat("A\n" + "x" * MAX_MODEL_LEN + "\nB\n", "-q")
    assert (result.exit_code, result.stdout) == (1, "<A>\n<A|<A>|B>\n")
    assert result.stderr.startswith("error: prompt: '70 tokens' is not allowed") and result.stderr.count("\n") == 1
    assert said(server)[-1] == ["user: A", "assistant: <A>", "user: B"]


@pytest.mark.parametrize("error", [EngineError("broken"), ServerUnavailableError("draining")])
def test_nobody_to_chat_with_ends_it(chat, server, error):
    server.faults.append(AfterFirst(error))
    result = chat("A\nB\n", "-q")
    assert (result.exit_code, result.stdout, result.stderr) == (2, "<\n", f"error: {error}\n")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--n", 2], "error: --n and --best-of: "),
        (["--temperature", -1], "error: temperature: -1.0"),
        (["--logprobs", 0], "error: logprobs: 0 is not allowed; a chat does not show them"),
        (["--prompt-logprobs", 2], "error: prompt_logprobs: 2 is not allowed; a chat does not show them"),
    ],
)
def test_errors_before_it_starts(chat, args, problem):
    result = chat("A\n", *args)
    assert result.exit_code == 2 and result.stderr.startswith(problem)


def test_a_model_in_this_process_knows_what_was_said(cli):
    result = cli("chat", "--seed", 7, "--max-tokens", 20, "--page-size", 4, stdin="Hi\nMore\n")
    tokenizer = toy.make_tokenizer()
    first = tokenizer.decode(oracle(tokenizer.encode("user: Hi\nassistant: "), 20, [toy.EOS_ID], salt=7)[0])
    prompt = tokenizer.encode(f"user: Hi\nassistant: {first}\nuser: More\nassistant: ")
    second = tokenizer.decode(oracle(prompt, 20, [toy.EOS_ID], salt=7)[0])
    assert result.exit_code == 0
    assert result.stdout == "".join(text if text.endswith("\n") else text + "\n" for text in (first, second))
    told = result.stderr.splitlines()[-1]
    assert told.startswith(f"{len(prompt)} prompt tokens (")
    assert int(told.split("(")[1].split()[0]) > 0, "the second question finds the first in the cache"


def test_a_request_that_the_engine_ends_is_an_error(cli):
    result = cli("chat", "-q", "--timeout", "1e-9", stdin="Hi\n")
    assert result.exit_code == 1 and "timeout" in result.stderr


class Terminal:
    """A process that believes to be on one."""

    def __init__(self, start, *args, **options) -> None:
        self.ours, theirs = pty.openpty()
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        self.process = start(*args, **(streams | options), start_new_session=True)
        os.close(theirs)
        self.seen = ""

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """Returns what came before it, which is not looked at again."""
        end = time.monotonic() + seconds
        while text not in self.seen:
            assert select.select([self.ours], [], [], max(end - time.monotonic(), 0))[0], f"no {text!r}: {self.seen!r}"
            self.seen += os.read(self.ours, 4096).decode().replace("\r\n", "\n")
        before, self.seen = self.seen.split(text, 1)
        return before

    def interrupt_the_line(self) -> None:
        """Ctrl-C while a line is typed, and a new prompt. Python's line editor does not see one that comes just before
        it begins to wait for keys; then another is needed."""
        for _ in range(60):
            self.process.send_signal(signal.SIGINT)
            if select.select([self.ours], [], [], 1.0)[0]:
                break
        self.wait_for("> ")

    def type(self, text: str) -> None:
        os.write(self.ours, text.encode())


def test_ctrl_c_stops_the_answer_and_not_the_chat(start, server):
    server.hold()
    terminal = Terminal(start, "chat", "--server", server.target)
    terminal.wait_for("/exit or Ctrl-D leaves")
    terminal.wait_for("> ")
    terminal.type("Hi\n")
    terminal.wait_for("<")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("> ")
    assert server.calls[0].is_cancelled()
    terminal.type("half a li")
    terminal.wait_for("half a li")
    terminal.interrupt_the_line()
    server.release()
    terminal.type("More\n")
    terminal.wait_for("<Hi|<|More>")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    assert said(server)[1] == ["user: Hi", "assistant: <", "user: More"]


def test_answers_in_a_file_are_all_that_is_there(start, server, tmp_path):
    with open(tmp_path / "answers", "wb") as file:
        terminal = Terminal(start, "chat", "--server", server.target, stdout=file)
    terminal.wait_for("> ")
    terminal.type("Hi\n")
    terminal.wait_for("output tokens")
    terminal.wait_for("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0
    assert (tmp_path / "answers").read_text() == "<Hi>\n"


def test_ctrl_c_stops_an_answer_of_the_model_here(start):
    terminal = Terminal(
        start, "chat", "--seed", "7", "--ignore-eos", "-q", env={"TOY_STEP_SECONDS": "0.05", "TERM": "dumb"}
    )
    terminal.wait_for("> ")
    terminal.type("Hi\n")
    terminal.wait_for("\n")
    while len(terminal.seen) < 3:
        terminal.seen += os.read(terminal.ours, 64).decode()
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("> ")
    terminal.type("/exit\n")
    assert terminal.process.wait(60) == 0


def test_ctrl_c_ends_a_chat_that_nobody_types(start, server):
    process = start("chat", "--server", server.target, "-q", stdin=subprocess.PIPE)
    process.stdin.write(b"Hi\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"<Hi>\n"
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert (process.returncode, stderr) == (130, b"")
