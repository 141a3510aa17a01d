"""A bad or monstrous grammar is refused at the door, in time, and disturbs nobody."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import pytest

from jaxoverlap.errors import EngineError, InvalidRequestError
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from jaxoverlap.text import grammar_compiler
from jaxoverlap.text.grammar import MAX_GRAMMAR_CHARS, MAX_SCHEMA_DEPTH
from tests.grammar_tools import EOS_IDS, allowed_ids, constraint, make_compiler
from tests.server.rig import eventually

ROOT = Path(__file__).parents[2]

ENDLESS = "start: T0\n" + "".join(f'T{i}: T{i + 1} "x"\n' for i in range(14_000)) + 'T14000: "a"\n'
"""240 KB that take the library minutes."""

DEEP = "start: r0\n" + "".join(f'r{i}: r{i + 1} "x"\n' for i in range(5000)) + 'r5000: "a"\n'
"""80 KB that overflow a usual thread's stack."""


@pytest.fixture(scope="module")
def compiler():
    compiler = make_compiler()
    yield compiler
    compiler.close()


def nested(depth: int, width: int) -> dict:
    schema: dict = {"type": "string"}
    for _ in range(depth):
        names = [f"k{i}" for i in range(width)]
        schema = {"type": "object", "properties": dict.fromkeys(names, schema), "required": names}
    return schema


@pytest.mark.parametrize(
    ("structure", "says"),
    [
        ({"regex": "("}, "unclosed group"),
        ({"regex": "a(?=b)"}, "look-ahead"),
        ({"regex": "\\bword"}, "lookarounds"),
        ({"regex": "(?x)["}, "unclosed"),
        ({"grammar": "start: foo"}, "unknown name"),
        ({"grammar": 'rule: "a"'}, "start"),
        ({"grammar": "{}"}, "1\\(1\\)"),
        ({"json_schema": '{"type": '}, "use JSON"),
        ({"json_schema": "[1]"}, "schema must be an object or boolean"),
        ({"json_schema": {"type": "foo"}}, "Invalid type: foo"),
        ({"json_schema": {"type": "string", "nullable": True}}, 'use "type": \\[..., "null"\\]'),
        ({"json_schema": {"properties": {"a": {"anyOf": [{"nullable": True}]}}}}, "nullable is OpenAPI's"),
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
        ({"json_schema": {"uniqueItems": True}}, "Unimplemented keys"),
        ({"json_schema": {"$ref": "#/$defs/none"}}, "does not exist"),
        ({"json_schema": {"$ref": "https://example.com/schema"}}, "not present"),
        ({"json_schema": {"type": "string", "pattern": "(?!a)"}}, "look-ahead"),
        ({"json_schema": {"const": {1, 2}}}, "use JSON"),
        ({"json_schema": {"const": float("nan")}}, "use JSON"),
        ({"json_schema": {"const": "\ud800"}}, "hex escape"),
        ({"choices": ["fine", "\ud800"]}, "valid Unicode"),
        ({"regex": "\ud800"}, "valid Unicode"),
    ],
    ids=lambda value: str(value)[:40].encode("ascii", "replace").decode() if isinstance(value, dict) else "",
)
def test_what_makes_no_sense_is_refused_with_its_reason(compiler, structure, says):
    with pytest.raises(InvalidRequestError, match=says) as caught:
        constraint(compiler, **structure)
    (name,) = structure
    assert caught.value.field == f"structured_output.{name}"
    assert "no_forcing" not in str(caught.value) and "backtrace" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"nullable": True}},  # a name of the caller's
        {"const": {"nullable": True}},
        {"type": "string", "nullable": False},
        {"type": "string", "x-of": [{"nullable": True}]},
        {"type": "string", "nullable": True, "x-guidance": {"lenient": True}},
    ],
    ids=str,
)
def test_a_nullable_that_promises_nothing_is_taken(compiler, schema):
    constraint(compiler, json_schema=schema)


@pytest.mark.parametrize(
    "structure",
    [
        {"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}},
        {"json_schema": {"allOf": [{"type": "string"}, {"type": "number"}]}},
        {"json_schema": {"type": "array", "items": False, "minItems": 1}},
        {"json_schema": "false"},
        {"json_schema": {"enum": []}},
        {"json_schema": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
        {"grammar": 'start: x\nx: x "a"'},
        {"regex": "a{0}"},
        {"grammar": 'start: ""'},
        {"regex": "[^\\s\\S]"},
    ],
    ids=str,
)
def test_what_no_text_satisfies_is_refused(compiler, structure):
    with pytest.raises(InvalidRequestError):
        constraint(compiler, **structure)


def test_what_the_parameters_leave_nothing_of_is_refused(compiler):
    for sampling in ({"allowed_token_ids": EOS_IDS}, {"allowed_token_ids": [1]}):
        with pytest.raises(InvalidRequestError, match="dead end"):
            constraint(compiler, sampling, regex="a+")


@pytest.mark.parametrize(("depth", "width"), [(8, 1), (14, 1), (20, 1), (8, 2), (14, 2), (20, 2), (8, 4), (1000, 1)])
def test_nesting_is_compiled_or_refused_in_time(compiler, depth, width):
    if width**depth > 10**5:  # spelled out it would not fit into memory, but references say the same
        below = [{"$ref": f"#/$defs/d{i + 1}"} for i in range(depth - 1)] + [{"type": "string"}]
        levels = {f"d{i}": {"type": "object", "properties": dict.fromkeys("ab", below[i])} for i in range(depth)}
        schema = {"$defs": levels, "$ref": "#/$defs/d0"}
    else:
        schema = nested(depth, width)
    started = time.monotonic()
    refused = None
    try:
        constraint(compiler, json_schema=schema)
    except InvalidRequestError as error:
        refused = str(error)
    assert time.monotonic() - started < 5
    assert (refused is None) == ((depth, width) in {(8, 1), (14, 1), (20, 1), (8, 2), (20, 2)}), refused


@pytest.mark.parametrize(
    "structure",
    [
        {"regex": "((a{1,100}){1,100}){1,100}"},
        {"regex": "(.*a.{1000}){1000}"},
        {"json_schema": {"type": "array", "items": {"type": "string", "maxLength": 10**8}, "maxItems": 10**6}},
        {"grammar": "start: b{1000}\nb: c{1000}\nc: d{1000}\nd: /.*x.{50}/"},
    ],
    ids=str,
)
def test_huge_repetition_does_not_block(compiler, structure):
    started = time.monotonic()
    with contextlib.suppress(InvalidRequestError):
        constraint(compiler, **structure)
    assert time.monotonic() - started < 5


def test_what_takes_too_long_is_refused_and_its_worker_serves_the_next():
    compiler = make_compiler(seconds=1.0, workers=1)
    try:
        assert len(ENDLESS) < MAX_GRAMMAR_CHARS
        constraint(compiler, regex="a")
        endless = compiler.submit(SamplingParams(structured_output=StructuredOutput(grammar=ENDLESS)))
        behind = compiler.submit(SamplingParams(structured_output=StructuredOutput(regex="ab")))
        started = time.monotonic()
        with pytest.raises(InvalidRequestError, match="too complex: it could not be compiled in 1 seconds"):
            endless.result()
        behind.result()
        assert time.monotonic() - started < 10  # the process starts again in between

        started = time.monotonic()
        with pytest.raises(InvalidRequestError, match="too complex"):
            constraint(compiler, grammar=ENDLESS)
        assert time.monotonic() - started < 0.9  # remembered
    finally:
        compiler.close()


def test_chains_that_would_overflow_the_stack_are_compiled(compiler):
    made = constraint(compiler, grammar=DEEP)
    assert len(allowed_ids(made)) == 1


def items(depth: int, as_text: bool) -> str | dict:
    if as_text:
        return '{"items":' * (depth - 1) + "{}" + "}" * (depth - 1)
    schema: dict = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("as_text", [True, False])
def test_a_schema_nested_too_deeply_is_refused_whatever_its_depth(compiler, as_text):
    constraint(compiler, json_schema=items(MAX_SCHEMA_DEPTH, as_text))
    limit = sys.getrecursionlimit()
    for depth in (MAX_SCHEMA_DEPTH + 1, 500, *range(limit - 120, limit + 20), 20_000):
        with pytest.raises(InvalidRequestError, match="lists and objects within each other"):
            constraint(compiler, json_schema=items(depth, as_text))
    with pytest.raises(InvalidRequestError, match="lists and objects within each other"):
        constraint(compiler, json_schema={"enum": [json.loads("[" * 300 + "]" * 300)]})


def test_a_schema_is_compiled_or_refused_however_little_stack_is_left(compiler):
    errors = set()

    def deeper():
        sampling = SamplingParams(structured_output=StructuredOutput(json_schema=items(MAX_SCHEMA_DEPTH, True)))
        try:
            deeper()
        except RecursionError:
            return
        errors.add(type(compiler.submit(sampling).exception()))

    deeper()
    assert errors <= {type(None), InvalidRequestError}


def test_any_exception_while_compiling_refuses_the_request(monkeypatch):
    class Panic(BaseException):  # as the library's are
        pass

    def fails(kind):
        def fail(*arguments):
            raise kind("no luck")

        return fail

    compiler = make_compiler()
    try:
        for name, kind in (("grammar_of", KeyError), ("compile_grammar", Panic), ("GrammarConstraint", Panic)):
            monkeypatch.setattr(grammar_compiler, name, fails(kind))
            with pytest.raises(InvalidRequestError, match=f"it could not be compiled: {kind.__name__}"):
                constraint(compiler, regex=name)
            monkeypatch.undo()
            constraint(compiler, regex=name)
    finally:
        compiler.close()


def test_a_schema_refused_again_and_again_keeps_nothing_alive(compiler):
    class Tracked(dict):
        pass

    def submit() -> weakref.ref:
        schema = Tracked({"type": "no such type"})
        sampling = SamplingParams(structured_output=StructuredOutput(json_schema=schema))
        assert isinstance(compiler.submit(sampling).exception(timeout=30), InvalidRequestError)
        return weakref.ref(schema)

    gc.disable()  # it has to go without a search for cycles
    try:
        kept = [submit() for _ in range(20)]
        for _ in range(100):  # the first was answered by another thread, which may be about to let go of it
            if not any(ref() for ref in kept):
                break
            time.sleep(0.01)
        assert [ref() for ref in kept] == [None] * 20
    finally:
        gc.enable()


def test_too_long_is_refused_before_anything_is_done(compiler):
    long = "a" * (MAX_GRAMMAR_CHARS + 1)
    many = [f"choice {i}" for i in range(100_000)]
    for structure in ({"regex": long}, {"grammar": long}, {"json_schema": f'"{long}"'}, {"choices": many}):
        with pytest.raises(InvalidRequestError, match="at most 262144 characters"):
            constraint(compiler, **structure)


def test_thousands_of_choices_compile(compiler):
    texts = [f"choice {i}" for i in range(5000)]
    assert allowed_ids(constraint(compiler, choices=texts))


def test_a_grammar_is_compiled_once_and_its_copies_know_nothing_of_each_other(monkeypatch):
    compiler = make_compiler(cached=2)
    compiled = []
    original = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda grammar: compiled.append(grammar) or original(grammar))
    try:
        first, second = constraint(compiler, regex="ab"), constraint(compiler, regex="ab")
        before = allowed_ids(second)
        first.advance(before[0])
        assert allowed_ids(second) == before != allowed_ids(first)
        assert len(compiled) == 1
        with pytest.raises(InvalidRequestError):
            constraint(compiler, regex="(")
        with pytest.raises(InvalidRequestError):
            constraint(compiler, regex="(")
        assert len(compiled) == 2
        constraint(compiler, regex="c")  # pushes out the first
        constraint(compiler, regex="ab")
        assert len(compiled) == 4
    finally:
        compiler.close()


def test_many_threads_share_a_compiler(compiler):
    regexes = [f"a{{{1 + i % 7}}}" for i in range(40)]
    made = [compiler.submit(SamplingParams(structured_output=StructuredOutput(regex=regex))) for regex in regexes]
    seen: list[int] = []

    def use(index: int) -> None:
        one = made[index].result().start()
        while not one.is_complete:
            one.advance(next(i for i in allowed_ids(one) if i not in EOS_IDS))
        seen.append(index)

    threads = [threading.Thread(target=use, args=(index,)) for index in range(len(made))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == list(range(40))


def test_a_compiling_process_that_was_killed_is_started_again():
    compiler = make_compiler(workers=1)
    try:
        constraint(compiler, regex="a")
        os.kill(compiler._trials[-1]._process.pid, signal.SIGKILL)
        with pytest.raises(InvalidRequestError, match="too complex"):
            constraint(compiler, regex="b")
        constraint(compiler, regex="c")
    finally:
        compiler.close()


def test_close_ends_the_processes_and_what_waits_for_them():
    compiler = make_compiler(workers=1)
    constraint(compiler, regex="a")
    process = compiler._trials[-1]._process
    pending = [
        compiler.submit(SamplingParams(structured_output=StructuredOutput(grammar=grammar)))
        for grammar in (ENDLESS, 'start: "a"')
    ]
    time.sleep(0.1)
    compiler.close()
    for future in pending:
        with pytest.raises(EngineError, match="shutting down"):
            future.result(timeout=10)
    assert process.poll() is not None
    with pytest.raises(EngineError):
        constraint(compiler, regex="b")
    compiler.close()


def test_without_a_process_the_engine_is_at_fault_and_it_is_tried_again(monkeypatch):
    compiler = make_compiler(workers=1)
    try:
        for executable in ("/no/such/python", shutil.which("false")):
            monkeypatch.setattr("sys.executable", executable)
            with pytest.raises(EngineError, match="did not start"):
                constraint(compiler, regex="a")
        monkeypatch.undo()
        constraint(compiler, regex="a")
    finally:
        compiler.close()


def test_a_process_whose_parent_has_gone_ends_by_itself():
    compiler = make_compiler(workers=1, seconds=0.5)
    constraint(compiler, regex="a")
    (trial,) = compiler._trials
    process = trial._process
    trial._connection.send((ENDLESS, 0.5))
    trial._connection.close()
    assert process.wait(timeout=10) == -signal.SIGALRM
    compiler.close()


THREAD_THAT_OUTLIVES_MAIN = """
import threading
from tests.grammar_tools import constraint, make_compiler

compiler = make_compiler(workers=1)

def work():
    threading.main_thread().join()
    constraint(compiler, regex="a")
    print("compiled")
    compiler.close()

threading.Thread(target=work).start()
"""


def test_a_thread_that_outlives_the_main_thread_may_compile():
    run = subprocess.run(
        [sys.executable, "-c", THREAD_THAT_OUTLIVES_MAIN], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (run.returncode, run.stdout) == (0, "compiled\n"), run.stderr


def test_without_a_thread_the_engine_is_at_fault_and_it_is_tried_again(monkeypatch):
    def fails(thread):
        raise RuntimeError("can't start new thread")

    compiler = make_compiler(workers=1)
    try:
        monkeypatch.setattr(threading.Thread, "start", fails)
        with pytest.raises(EngineError, match="no thread to compile a grammar in: can't start"):
            constraint(compiler, regex="a")
        monkeypatch.undo()
        constraint(compiler, regex="a")
    finally:
        compiler.close()


def test_threads_are_there_as_long_as_there_is_something_to_compile():
    compiler = make_compiler(workers=2)
    try:
        made = [
            compiler.submit(SamplingParams(structured_output=StructuredOutput(regex=f"a{{{1 + i}}}"))) for i in range(9)
        ]
        assert len(compiler._workers) == 2
        for one in made:
            one.result()
        eventually(lambda: not compiler._workers, "the end of the workers")
    finally:
        compiler.close()


def test_an_unused_compiler_starts_nothing():
    before = threading.active_count()
    compiler = make_compiler()
    assert threading.active_count() == before and compiler._trials[-1]._process is None
    compiler.close()
