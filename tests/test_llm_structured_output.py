"""Structured output in the Python API, on the toy device, whose tokens are characters."""

from __future__ import annotations

import json
import queue
import re
import signal
import threading
from concurrent.futures import Future
from functools import partial
from threading import Timer

import pytest

from jaxoverlap import LLM, EngineError, FinishReason, InvalidRequestError, SamplingParams, StructuredOutput
from jaxoverlap import llm as llm_module
from tests.cli.toy import build_engine
from tests.interrupts import SignalAtLine

LOCKED = ("/concurrent/futures/_base.py", "/threading.py")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["ann", "bob"]}, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", build_engine)
    with LLM(max_running=4, progress=False) as llm:
        yield llm


def params(max_tokens: int = 60, **given) -> SamplingParams:
    known = StructuredOutput.__dataclass_fields__
    structure = StructuredOutput(**{name: value for name, value in given.items() if name in known})
    rest = {name: value for name, value in given.items() if name not in known}
    return SamplingParams(structured_output=structure, max_tokens=max_tokens, seed=5, **rest)


def test_answers_are_what_was_asked_for(llm):
    outputs = llm.generate(
        ["a", "b", "c", "d", "e"],
        [
            params(json_schema=SCHEMA),
            params(regex="[a-f]{3}-[0-9]{2}"),
            params(choices=["yes", "no", "perhaps"]),
            params(grammar='start: pair (";" pair)~2\npair: /[a-z]/ "=" /[0-9]/'),
            SamplingParams(max_tokens=4, seed=1),
        ],
    )
    answer = json.loads(outputs[0].text)
    assert answer["name"] in ("ann", "bob") and 0 <= answer["age"] <= 130
    assert re.fullmatch("[a-f]{3}-[0-9]{2}", outputs[1].text)
    assert outputs[2].text in ("yes", "no", "perhaps")
    assert re.fullmatch("[a-z]=[0-9](;[a-z]=[0-9]){2}", outputs[3].text)
    # The answer may also be the id that ends it, where the toy chose it.
    assert {output.finish_reason for output in outputs[:4]} <= {FinishReason.GRAMMAR_COMPLETE, FinishReason.EOS}


@pytest.mark.parametrize("call", ["generate", "generate_each"])
def test_each_grammar_is_compiled_once_also_where_they_are_more_than_are_kept(llm, monkeypatch, call):
    compiler, compiled = llm.engine.constraints, []
    original = compiler._compile
    monkeypatch.setattr(compiler, "_cached", 3)
    monkeypatch.setattr(compiler, "_compile", lambda grammar: compiled.append(grammar) or original(grammar))
    asked = [params(choices=[f"answer {i}"]) for i in range(20)]
    if call == "generate":
        outputs = dict(enumerate(llm.generate(["x"] * 20, asked)))
    else:
        outputs = dict(llm.generate_each([("x", one) for one in asked]))
    assert [outputs[i].text for i in range(20)] == [f"answer {i}" for i in range(20)]
    assert len(compiled) == 20
    list(llm.stream("x", params(choices=["streamed"])))
    assert len(compiled) == 21


def test_samples_of_a_prompt_follow_the_grammar_each_for_itself(llm):
    (output,) = llm.generate("x", params(regex="[a-z]{8}", n=6))
    texts = [sample.text for sample in output.outputs]
    assert all(re.fullmatch("[a-z]{8}", text) for text in texts) and len(set(texts)) > 1


def test_streams_follow_it_too(llm):
    deltas = list(llm.stream("x", params(regex="[a-z]{8}")))
    assert re.fullmatch("[a-z]{8}", "".join(delta.text for delta in deltas))
    assert deltas[-1].output.finish_reason == FinishReason.GRAMMAR_COMPLETE


def test_a_stop_string_still_stops(llm):
    (output,) = llm.generate("x", params(choices=["one, two, three"], stop=", t"))
    assert output.text == "one" and output.finish_reason == FinishReason.STOP_STRING


def test_a_stop_string_that_completes_the_grammar_is_a_stop(llm):
    (output,) = llm.generate("x", params(choices=["one, two"], stop=", two"))
    assert output.text == "one" and output.finish_reason == FinishReason.STOP_STRING


def test_nothing_is_decoded_when_one_structure_is_bad(llm):
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        llm.generate(["a", "b"], [SamplingParams(max_tokens=2), params(regex="(")])
    with pytest.raises(InvalidRequestError, match="Invalid type"):
        llm.stream("a", params(json_schema={"type": "foo"}))
    assert llm.runner.num_launches == 0


def test_a_bad_structure_in_a_long_run_is_that_inputs_error_only(llm):
    inputs = [("a", params(regex="[0-9]{3}")), ("b", params(regex="(")), ("c", SamplingParams(max_tokens=3, seed=1))]
    deep = [('{"items":' * depth + "{}" + "}" * depth) for depth in range(900, 1000)]
    inputs += [("d", params(json_schema=schema)) for schema in deep]
    results = dict(llm.generate_each(inputs))
    assert isinstance(results[1], InvalidRequestError) and re.fullmatch("[0-9]{3}", results[0].text)
    assert all(isinstance(results[index], InvalidRequestError) for index in range(3, len(inputs)))
    assert len(results) == len(inputs)


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self, inner) -> None:
        self.inner, self.waiting = inner, []

    def submit(self, sampling):
        future: Future = Future()
        self.waiting.append((future, sampling))
        return future

    def finish(self) -> None:
        for future, sampling in self.waiting:
            future.set_result(self.inner.submit(sampling).result())
        self.waiting.clear()

    def close(self) -> None:
        self.inner.close()


def test_others_go_on_while_a_grammar_is_compiled(llm):
    llm.engine.constraints = slow = SlowCompiler(llm.engine.constraints)
    free = SamplingParams(max_tokens=3, seed=1)
    inputs = iter([("a", params(regex="[0-9]{3}")), *[("b", free)] * 20])
    results = llm.generate_each(inputs, window=5)
    first = [next(results) for _ in range(20)]
    assert sorted(index for index, _ in first) == list(range(1, 21))
    timer = Timer(0.2, slow.finish)  # now it is all there is to wait for
    timer.start()
    (index, output), *rest = results
    assert (index, rest) == (0, []) and re.fullmatch("[0-9]{3}", output.text)


def test_inputs_that_come_while_a_grammar_is_compiled_are_not_held_up(llm):
    """Though there was none for a moment, and the engine has nothing else to do."""
    llm.engine.constraints = slow = SlowCompiler(llm.engine.constraints)

    def inputs():
        yield "a", params(regex="[0-9]{3}")
        yield None
        yield "b", SamplingParams(max_tokens=3, seed=1)

    timer = Timer(3.0, slow.finish)
    timer.start()
    results = llm.generate_each(inputs())
    index, _ = next(results)
    assert index == 1
    timer.cancel()
    slow.finish()
    assert [index for index, _ in results] == [0]


def test_a_closed_one_compiles_nothing(llm):
    constraints = llm.engine.constraints
    llm.generate("x", params(regex="a"))
    processes = [trial._process for trial in constraints._trials if trial._process is not None]
    assert processes
    llm.close()
    assert all(process.poll() is not None for process in processes)
    with pytest.raises(EngineError):
        llm.generate("x", params(regex="b"))


@pytest.mark.parametrize("call", ["generate", "generate_each", "stream"])
def test_ctrl_c_at_any_line_of_a_future_holds_up_nobody(llm, call):
    """Other threads compile, and this one goes on."""
    calls = {
        "generate": lambda one: llm.generate(["a", "b"], one),
        "generate_each": lambda one: list(llm.generate_each([("a", one), ("b", one)])),
        "stream": lambda one: list(llm.stream("a", one)),
    }

    def answer_of_another_thread(line):
        answers = queue.SimpleQueue()
        ask = partial(llm.generate, "a", params(regex=f"[a-c]{{3}}d{{{line + 1}}}"))
        threading.Thread(target=lambda: answers.put(ask()), daemon=True).start()
        return answers.get(timeout=20)

    line, interrupted = 0, 0
    while True:
        with SignalAtLine(signal.SIGINT, line, LOCKED) as ctrl_c:
            try:
                calls[call](params(regex=f"[a-c]{{2}}d{{{line + 1}}}"))
            except KeyboardInterrupt:
                interrupted += 1
        if ctrl_c.lines_left > 0:
            break
        assert answer_of_another_thread(line), line
        line += 10
    assert interrupted > 3
