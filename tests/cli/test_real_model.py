"""The whole way, on the default model: what a newcomer types first."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import read_answers, write_lines
from tests.cli.test_batch import item
from tests.real.settings import FLAGS, one_compiles

pytestmark = pytest.mark.real_model
REAL = "jaxoverlap.cli.main"
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 12}},
    "required": ["capital"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


def test_the_first_question(start):
    with one_compiles():
        process = start("generate", "--chat", "What is the capital of France?", module=REAL)
        stdout, stderr = process.communicate(timeout=900)
    assert process.returncode == 0, stderr
    assert b"Paris" in stdout
    log, summary = stderr.decode().splitlines()
    assert "KV pool: " in log and summary.endswith("finished by eos")


def test_a_batch(start, tmp_path):
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    lines = [
        item("text", "The capital of France is", temperature=0, max_tokens=8),
        {"custom_id": "chat", "body": {"messages": chat, "temperature": 0}},
        item(
            "best",
            "The capital of France is",
            n=2,
            best_of=3,
            logprobs=1,
            prompt_logprobs=0,
            stop=".",
            max_tokens=8,
            ignore_eos=True,
        ),
        {"custom_id": "json", "body": {"messages": chat, "response_format": FORMAT, "temperature": 0}},
        item("bad", top_p=3),
        item("vocabulary", [10**6]),
        item("long", "one " * 9000),
    ]
    source, out = write_lines(tmp_path / "in", *lines), tmp_path / "out"
    with one_compiles():
        process = start("batch", "-i", source, "-o", out, *FLAGS, module=REAL)
        _, stderr = process.communicate(timeout=900)
    assert process.returncode == 1, stderr
    assert len(stderr.splitlines()) == 2 and b"finished: 4 done, 3 failed, 0 skipped" in stderr
    text, chat, best, structured, *errors = read_answers(out)
    assert "Paris" in text["response"]["body"]["choices"][0]["text"]
    assert text["response"]["body"]["model"] == "SmolLM2-135M-Instruct"
    choice = chat["response"]["body"]["choices"][0]
    assert "Paris" in choice["message"]["content"] and choice["finish_reason"] == "stop"
    first, second = best["response"]["body"]["choices"]
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in (first, second)]
    assert sums[0] >= sums[1] and first["prompt_logprobs"][0] is None and len(first["prompt_logprobs"]) == 5
    for choice in (first, second):
        assert "." not in choice["text"]
        stopped = "." in choice["logprobs"]["tokens"][-1]
        assert (choice["stop_reason"], choice["finish_reason"]) == ((".", "stop") if stopped else (None, "length"))
    answer = json.loads(structured["response"]["body"]["choices"][0]["message"]["content"])
    assert set(answer) == {"capital"} and len(answer["capital"]) <= 12
    params = [error["response"]["body"]["error"]["param"] for error in errors]
    assert params == ["body.top_p", "body.prompt[0]", "body.prompt"]


@pytest.mark.slow
def test_json_lines(start):
    args = ["generate", "The capital of France is", "Water boils at", "--json", "--max-tokens", "6", "-q", *FLAGS]
    with one_compiles():
        stdout, stderr = start(*args, module=REAL).communicate(timeout=900)
    first, second = map(json.loads, stdout.splitlines())
    assert stderr == b"" and "Paris" in first["text"] and len(second["token_ids"]) == 6


def test_a_model_that_is_not_there(start):
    process = start("generate", "Hi", "--model", "no/such.gguf", module=REAL)
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout) == (2, b"")
    assert stderr == b"error: no/such.gguf: no such file or folder\n"
