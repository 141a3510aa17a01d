"""Batches on the toy device: every line is answered once, in order, in bounded memory, whatever happens."""

from __future__ import annotations

import json
import os
import random

import pytest

from jaxoverlap.cli.batch import BatchRun, Tally
from jaxoverlap.cli.batch_file import Answered, open_output, read_lines
from jaxoverlap.cli.batch_format import ModelNames, read_key
from tests.cli import toy
from tests.cli.conftest import read_answers, write_lines
from tests.fakes import oracle, salt_of

SEED_TO_EOS = 3


def item(custom_id, prompt="abc", **body):
    return {"custom_id": custom_id, "body": {"prompt": prompt, "max_tokens": 5, "seed": 1} | body}


def keys_of(path):
    read = [read_key(line + b"\n") for line in path.read_bytes().splitlines()]
    return [(key, code is not None) for key, code in read]


def without_ids(path):
    """Answers by key, less what differs from run to run."""
    answers = {}
    for line in path.read_bytes().splitlines():
        answer = json.loads(line)
        del answer["id"]
        if answer["response"]:
            del answer["response"]["request_id"]
            for name in ("id", "created"):
                answer["response"]["body"].pop(name, None)
        key, _ = read_key(line + b"\n")
        assert key not in answers, f"{key} is answered twice"
        answers[key] = answer
    return answers


def test_text_and_chat_are_answered_as_the_model_would(cli, tmp_path):
    chat = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
    source = write_lines(
        tmp_path / "in",
        item("text"),
        item("ids", [1, 2, 3]),
        {
            "custom_id": "chat",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": chat, "seed": SEED_TO_EOS},
        },
    )
    result = cli("batch", "-i", source, "-o", tmp_path / "out")
    assert result.exit_code == 0
    assert "finished: 3 done, 0 failed, 0 skipped · " in result.stderr
    tokenizer = toy.make_tokenizer()
    text, ids, chat = read_answers(tmp_path / "out")

    outputs, reason = oracle(tokenizer.encode("abc"), 5, [toy.EOS_ID], salt=1)
    body = text["response"]["body"]
    assert body["choices"][0]["text"] == tokenizer.decode(outputs) and str(reason) == "length"
    assert body["choices"][0]["finish_reason"] == "length" and body["model"] == "toy"
    cached = {"prompt_tokens_details": {"cached_tokens": 0}}
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8} | cached

    outputs, _ = oracle([1, 2, 3], 5, [toy.EOS_ID], salt=1)
    assert ids["response"]["body"]["choices"][0]["text"] == tokenizer.decode(outputs)

    prompt = tokenizer.encode("system: Be.\nuser: Hi\nassistant: ")
    outputs, reason = oracle(prompt, toy.CONTEXT - len(prompt), [toy.EOS_ID], salt=SEED_TO_EOS)
    choice = chat["response"]["body"]["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": tokenizer.decode(outputs)}
    assert (str(reason), choice["finish_reason"]) == ("eos", "stop")
    assert chat["response"]["body"]["usage"]["completion_tokens"] == len(outputs)


BAD_LINES = [
    ("{", 1, "invalid_line"),
    ("[]", 2, "invalid_line"),
    (json.dumps({"body": {"prompt": "x"}}), 3, "invalid_line"),
    (item("good"), "good", None),
    (item("good"), 5, "duplicate_custom_id"),
    ("", None, None),
    (item("empty prompt", ""), "empty prompt", "invalid_request"),
    (item("id", [97]), "id", "invalid_request"),
    (item("negative id", [3, -1]), "negative id", "invalid_request"),
    (item("huge id", [2**70]), "huge id", "invalid_request"),
    (item("long", "x" * toy.CONTEXT), "long", "invalid_request"),
    (item("half a character", "\ud800"), "half a character", "invalid_request"),
    (item("zero", max_tokens=0), "zero", "invalid_request"),
    (item("top_p", top_p=0), "top_p", "invalid_request"),
    (item("stop id", stop_token_ids=[97]), "stop id", "invalid_request"),
    (item("stop", stop=["x", ""]), "stop", "invalid_request"),
    (item("echo", echo=True), "echo", "unsupported"),
    (item("special", stop="x</s>"), "special", "invalid_request"),
    (item("model", model="gpt"), "model", "invalid_request"),
    (item("also good"), "also good", None),
]


@pytest.mark.parametrize("order", ["--ordered", "--unordered"])
def test_bad_lines_get_errors_and_the_others_answers(cli, tmp_path, order):
    source = write_lines(tmp_path / "in", *(line for line, _, _ in BAD_LINES))
    result = cli("batch", "-i", source, "-o", tmp_path / "out", order)
    assert result.exit_code == 1
    assert "2 done, 17 failed, 0 skipped" in result.stderr
    expected = [(key, code) for _, key, code in BAD_LINES if key is not None]
    answers = without_ids(tmp_path / "out")
    assert {key: answer["error"] and answer["error"]["code"] for key, answer in answers.items()} == dict(expected)
    if order == "--ordered":
        assert list(answers) == [key for key, _ in expected]
    assert answers["long"]["error"]["message"].startswith("body.prompt: '256 tokens'")
    assert answers["id"]["error"]["message"].startswith("body.prompt[0]: 97 is not allowed")
    assert answers["stop id"]["error"]["message"].startswith("body.stop_token_ids[0]: 97 is not allowed")
    assert answers["special"]["error"]["message"].startswith("body.stop[0]: 'x</s>' is not allowed; skip_special")
    assert answers["negative id"]["response"]["body"]["error"]["param"] == "body.prompt[1]"


def test_the_engine_calls_fields_what_the_line_calls_them(cli, tmp_path):
    messages = [{"role": "user", "content": "x" * 300}]
    source = write_lines(tmp_path / "in", {"custom_id": "a", "body": {"messages": messages}})
    assert cli("batch", "-i", source, "-o", tmp_path / "out").exit_code == 2
    [answer] = read_answers(tmp_path / "out")
    assert answer["error"]["message"].startswith("body.messages: '")


def test_samples_stops_and_chats_of_every_kind(cli, tmp_path):
    tokenizer = toy.make_tokenizer()
    user, beginning = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes, "}
    texts = [tokenizer.decode(oracle(tokenizer.encode("abc"), 20, [], salt=salt_of(1, i))[0]) for i in range(3)]
    stop = next(text[5:7] for text in texts[:1] if text.find(text[5:7]) == 5)
    source = write_lines(
        tmp_path / "in",
        item("three", n=3, max_tokens=20, ignore_eos=True, stop=stop),
        {"custom_id": "on", "body": {"messages": [user, beginning], "continue_final_message": True, "max_tokens": 3}},
        {"custom_id": "off", "body": {"messages": [user], "add_generation_prompt": False, "max_tokens": 3}},
        {"custom_id": "no", "body": {"messages": [user, {"role": "assistant", "tool_calls": [1]}],
                                     "continue_final_message": True}},
    )  # fmt: skip
    assert cli("batch", "-i", source, "-o", tmp_path / "out").exit_code == 1
    three, on, off, no = (answer["response"]["body"] for answer in read_answers(tmp_path / "out"))
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    assert [choice["text"] for choice in three["choices"]] == [text.split(stop)[0] for text in texts]
    first = three["choices"][0]
    assert (first["finish_reason"], first["stop_reason"], len(first["text"])) == ("stop", stop, 5)
    assert three["usage"]["prompt_tokens"] == 3 and three["usage"]["completion_tokens"] >= 3 * 7 - 14
    assert on["usage"]["prompt_tokens"] == len("user: Hi\nassistant: Yes, ")
    assert off["usage"]["prompt_tokens"] == len("user: Hi\n")
    assert no["error"]["param"] == "body.messages[1].content"


def test_a_byte_order_mark_carriage_returns_and_bad_bytes(cli, tmp_path):
    lines = [json.dumps(item("a")).encode(), b"\xff\xfe", json.dumps(item("b")).encode()]
    (tmp_path / "in").write_bytes(b"\xef\xbb\xbf" + b"\r\n".join(lines))
    assert cli("batch", "-i", tmp_path / "in", "-o", tmp_path / "out").exit_code == 1
    assert keys_of(tmp_path / "out") == [("a", False), (2, True), ("b", False)]


@pytest.mark.parametrize(
    ("lines", "code"),
    [([], 0), (["", " "], 0), ([item("a")], 0), ([item("a"), "{"], 1), (["{"], 2), ([item("a", top_p=7)], 2)],
)
def test_exit_codes(cli, tmp_path, lines, code):
    source = write_lines(tmp_path / "in", *lines)
    assert cli("batch", "-i", source, "-o", tmp_path / "out").exit_code == code
    # What was answered before counts: the exit code speaks of the whole output.
    assert cli("batch", "-i", source, "-o", tmp_path / "out").exit_code == code


@pytest.mark.parametrize("order", ["--ordered", "--unordered"])
def test_every_line_is_answered_once_and_ordered_means_in_order(cli, tmp_path, order):
    rng = random.Random(1)
    items = [
        item(f"id {i}", "p" * rng.randrange(1, 60), max_tokens=rng.randrange(1, 120), ignore_eos=True)
        for i in range(80)
    ]
    source = write_lines(tmp_path / "in", *items)
    assert cli("batch", "-i", source, "-o", tmp_path / "out", order, "--max-running", 4).exit_code == 0
    keys = [key for key, _ in keys_of(tmp_path / "out")]
    expected = [line["custom_id"] for line in items]
    assert sorted(keys) == sorted(expected)
    assert (keys == expected) == (order == "--ordered")


def test_defaults_from_the_command_line(cli, tmp_path):
    source = write_lines(tmp_path / "in", {"custom_id": "a", "body": {"prompt": "x"}}, item("b", max_tokens=4))
    assert cli("batch", "-i", source, "-o", tmp_path / "out", "--max-tokens", 2, "--ignore-eos").exit_code == 0
    usage = [answer["response"]["body"]["usage"]["completion_tokens"] for answer in read_answers(tmp_path / "out")]
    assert usage == [2, 4]


def test_a_line_may_have_a_priority_a_timeout_and_a_salt(cli, tmp_path):
    lines = [item("a", priority=-1, cache_salt="x"), item("b", timeout=1e-9), item("c", priority="high")]
    result = cli("batch", "-i", write_lines(tmp_path / "in", *lines), "-o", tmp_path / "out", "--timeout", 60)
    assert result.exit_code == 1
    answers = read_answers(tmp_path / "out")
    assert [answer["response"]["status_code"] for answer in answers] == [200, 408, 400]
    assert [answer["error"] and answer["error"]["code"] for answer in answers] == [None, "timeout", "invalid_request"]
    assert "body.priority: 'high'" in answers[2]["error"]["message"]


# ---------------------------------------------------------------- memory


class MemoryOutput:
    """In place of a file: knows at each moment how many lines are drawn and not yet written."""

    def __init__(self):
        self.answered = Answered()
        self.lines = []
        self.drawn = self.most_in_memory = 0

    def source(self, items):
        for number, line in enumerate(items, start=1):
            self.drawn += 1
            self.most_in_memory = max(self.most_in_memory, self.drawn - len(self.lines))
            yield number, json.dumps(line).encode()

    def write(self, line):
        self.lines.append(line)


def run_in_memory(monkeypatch, items, max_held):
    monkeypatch.setattr("jaxoverlap.llm.build_engine", toy.build_engine)
    from jaxoverlap.llm import LLM

    output = MemoryOutput()
    with LLM(max_running=2, progress=False) as llm:
        names = ModelNames.of("toy", None)
        run = BatchRun(output.source(items), output, names=names, defaults={}, max_held=max_held)
        run.run(llm)
        memory = llm.engine.loop.scheduler.state.memory
        assert memory.num_available == memory.pool.num_pages
    assert len(output.lines) == len(items) and run.tally.succeeded + run.tally.failed == len(items)
    return output


WINDOW = 4 * 2


@pytest.mark.parametrize("max_held", [1, 10, 10_000, None])
def test_memory_is_bounded_though_the_first_line_is_slow(monkeypatch, max_held):
    slow, others = item("slow", max_tokens=200, ignore_eos=True), [item(f"id {i}", max_tokens=1) for i in range(600)]
    others[5::7] = [item(f"bad {i}", top_p=9) for i in range(len(others[5::7]))]
    output = run_in_memory(monkeypatch, [slow, *others], max_held)
    if max_held == 10_000:  # without the limit it would not be: the test can fail
        assert output.most_in_memory > 100
    else:
        assert output.most_in_memory <= WINDOW + (max_held or 0) + 1
    keys = [read_key(line)[0] for line in output.lines]
    expected = [line["custom_id"] for line in [slow, *others]]
    assert sorted(keys) == sorted(expected)
    assert (keys == expected) == (max_held is not None)


def test_nothing_but_errors_is_bounded_too(monkeypatch):
    output = run_in_memory(monkeypatch, [item(f"id {i}", top_p=9) for i in range(500)], 10)
    assert output.most_in_memory == 1


# ---------------------------------------------------------------- resuming


def test_resuming_from_a_crash_at_any_byte(monkeypatch, tmp_path):
    """Cut anywhere in its last two lines, the output of the second run is that of one run."""
    monkeypatch.setattr("jaxoverlap.llm.build_engine", toy.build_engine)
    from jaxoverlap.llm import LLM

    lines = [item("a"), "{", item("b", top_p=0), item("a"), item("c"), "[]"]
    source, out = write_lines(tmp_path / "in", *lines), tmp_path / "out"
    with LLM(max_running=2, progress=False) as llm:

        def run() -> Tally:
            with source.open("rb") as file, open_output(str(out), file, overwrite=False, retry_errors=False) as output:
                names = ModelNames.of("toy", None)
                batch_run = BatchRun(read_lines(file, ""), output, names=names, defaults={}, max_held=9)
                batch_run.run(llm)
            return batch_run.tally

        run()
        whole, expected = out.read_bytes(), without_ids(out)
        assert list(expected) == ["a", 2, "b", 4, "c", 6]
        last = whole.rindex(b"\n", 0, -1) + 1
        for size in range(whole.rindex(b"\n", 0, last - 1) + 1, len(whole) + 1):
            out.write_bytes(whole[:size])
            tally = run()
            assert list(without_ids(out).items()) == list(expected.items()), size
            assert tally.succeeded == (size < last) and tally.failed == (size < len(whole))


def test_what_is_answered_is_skipped_and_new_lines_are_done(cli, tmp_path):
    source, out = write_lines(tmp_path / "in", item("a"), item("b", top_p=0)), tmp_path / "out"
    cli("batch", "-i", source, "-o", out)
    before = out.read_bytes()
    result = cli("batch", "-i", source, "-o", out)
    assert "0 done, 0 failed, 2 skipped (1 of them errors)" in result.stderr
    assert out.read_bytes() == before
    write_lines(source, item("a"), item("b", top_p=0), item("c"))
    assert "1 done, 0 failed, 2 skipped" in cli("batch", "-i", source, "-o", out).stderr
    assert out.read_bytes().startswith(before) and [key for key, _ in keys_of(out)] == ["a", "b", "c"]


def test_overwrite_starts_anew(cli, tmp_path):
    source, out = write_lines(tmp_path / "in", item("a")), tmp_path / "out"
    out.write_text("something else\n")
    assert cli("batch", "-i", source, "-o", out).exit_code == 2
    assert out.read_text() == "something else\n"
    assert cli("batch", "-i", source, "-o", out, "--overwrite").exit_code == 0
    assert keys_of(out) == [("a", False)]


@pytest.mark.parametrize(
    "unusable", [["--model", "missing"], ["--server", "unix:nobody", "--max-retries", "0"], ["--retry-errors"]]
)
def test_a_batch_that_can_not_start_costs_no_answers_and_leaves_no_file(cli, tmp_path, monkeypatch, unusable):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "in", item("a"))
    assert cli("batch", "-i", "in", "-o", "out").exit_code == 0
    answers = (tmp_path / "out").read_bytes()
    for output in ("out", "new"):
        assert cli("batch", "-i", "in", "-o", output, "--overwrite", *unusable).exit_code == 2
    assert (tmp_path / "out").read_bytes() == answers
    assert sorted(os.listdir()) == ["in", "out"]


def test_errors_that_may_pass_are_done_again_when_asked(cli, tmp_path):
    lines = [item("a"), item("late", timeout=1e-9), item("refused", top_p=0), "{"]
    source, out = write_lines(tmp_path / "in", *lines), tmp_path / "out"
    assert cli("batch", "-i", source, "-o", out).exit_code == 1
    write_lines(source, item("a"), item("late"), item("refused"), "{", item("c"))
    result = cli("batch", "-i", source, "-o", out, "--retry-errors")
    assert result.exit_code == 1
    assert "2 done, 0 failed, 3 skipped (2 of them errors)" in result.stderr
    first = [("a", False), ("late", True), ("refused", True), (4, True)]
    assert keys_of(out) == [*first, ("late", False), ("c", False)]
    result = cli("batch", "-i", source, "-o", out, "--retry-errors")
    assert "0 done, 0 failed, 5 skipped (2 of them errors)" in result.stderr


# ---------------------------------------------------------------- what stops a batch


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["-i", "none", "-o", "out"], "error: none: No such file or directory\n"),
        (["-i", ".", "-o", "out"], "error: .: Is a directory\n"),
        (["-i", "in", "-o", "no/out"], "error: no/out: No such file or directory\n"),
        (["-i", "in", "-o", "."], "error: .: Is a directory\n"),
        (["-i", "in", "-o", "in"], "error: in: the output is the same file as the input\n"),
        (["-i", "in", "-o", "./in", "--overwrite"], "error: ./in: the output is the same file as the input\n"),
        (["-i", "in", "-o", "out", "--top-p", "0"], "error: top_p: 0.0 is not allowed; use a number in (0, 1]\n"),
        (["-i", "in", "-o", "out", "--max-running", "0"], "error: max_running: 0 is not allowed; use an integer "),
        (["-i", "in", "-o", "out", "--attention", "flash"], "error: attention: 'flash' is not allowed; use one"),
        (["-i", "in", "-o", "out", "--max-model-len", "999"], "error: max_model_len: 999 is not allowed; the model's"),
        (["-i", "in", "-o", "out", "--model", "missing"], "error: missing: no such file or folder\n"),
        (["-i", "in", "-o", "out", "--model", "driver"], "error: cannot start: RuntimeError: no driver\n"),
    ],
)
def test_what_keeps_a_batch_from_starting(cli, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(tmp_path)
    source = write_lines(tmp_path / "in", item("a"))
    before = source.read_bytes()
    result = cli("batch", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith(said) and result.stderr.count("\n") == 1
    assert source.read_bytes() == before


def test_an_engine_that_fails_stops_the_batch_which_can_go_on_later(cli, tmp_path):
    source, out = write_lines(tmp_path / "in", item("a"), item("b", toy.BROKEN), item("c")), tmp_path / "out"
    result = cli("batch", "-i", source, "-o", out, "--max-running", "1")
    assert result.exit_code == 2
    stopped, error = result.stderr.splitlines()[-2:]
    assert stopped.startswith("stopped: 1 done, 0 failed")
    assert error == "error: the engine failed and must be restarted: RuntimeError: out of toys"
    assert keys_of(out) == [("a", False)]
