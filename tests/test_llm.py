"""The Python API, on the toy device: what callers see, in order, with bad input, when left early, under Ctrl-C."""

from __future__ import annotations

import math
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jaxoverlap import (
    LLM,
    ConfigError,
    DeadlineError,
    EngineError,
    FinishReason,
    InvalidRequestError,
    RequestOptions,
    SamplingParams,
)
from jaxoverlap import llm as llm_module
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.build import BuiltEngine
from jaxoverlap.engine.engine import Engine
from jaxoverlap.errors import shortened
from jaxoverlap.text.tokenizer import Tokenizer
from tests.fakes import VOCAB_SIZE, ToyRunner, oracle

GREEDY = SamplingParams(temperature=0, seed=1, max_tokens=6, ignore_eos=True)


def toy_build(config: EngineConfig, *, warm_up: bool) -> BuiltEngine:
    resolved = config.resolve(
        platform="cpu", vocab_size=VOCAB_SIZE, model_len=256, page_bytes=1, kv_memory_bytes=config.num_pages or 64
    )
    runner = ToyRunner(resolved.scheduler.limits, resolved.scheduler.max_running, salted=True)
    runner.release = lambda: None
    vocab = {f"w{i}": i for i in range(VOCAB_SIZE)}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    engine = Engine(resolved.scheduler, runner, lookahead=resolved.lookahead, eos_token_ids=(5, 17))
    return BuiltEngine("toy", engine, runner, Tokenizer(backend), None, resolved)


@pytest.fixture
def llm(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    with LLM(max_running=4, progress=False) as llm:
        yield llm
        if not llm._shared.is_closed and not llm.engine.has_failed:
            assert not llm.engine.has_work
            assert not llm._shared.has_callers
            memory = llm.engine.loop.scheduler.state.memory
            assert memory.num_available == memory.pool.num_pages


def words(ids):
    """As they follow a prompt."""
    return "".join(f" w{i}" for i in ids)


def test_outputs_come_in_the_order_of_the_prompts(llm):
    prompts = [[i + 1] * (1 + i % 5) for i in range(20)]
    params = [SamplingParams(temperature=0, seed=1, max_tokens=1 + (7 * i) % 11, ignore_eos=True) for i in range(20)]
    outputs = llm.generate(prompts, params)
    for prompt, one, output in zip(prompts, params, outputs, strict=True):
        expected, _ = oracle(prompt, one.max_tokens, (), salt=1)
        assert output.prompt is prompt
        assert output.prompt_token_ids == prompt
        assert output.token_ids == expected
        assert output.text == words(expected)
        assert output.finish_reason == "length"
        assert 0 <= output.queue_seconds <= output.first_token_seconds <= output.total_seconds


@pytest.mark.parametrize(
    "prompts", ["w3 w4", ["w3 w4"], [3, 4], [[3, 4]], np.array([3, 4]), [np.array([3, 4])]], ids=repr
)
def test_a_prompt_may_be_text_or_ids_alone_or_in_a_list(llm, prompts):
    (output,) = llm.generate(prompts, GREEDY)
    assert output.prompt_token_ids == [3, 4]


def test_no_prompts_no_outputs(llm):
    assert llm.generate([]) == []


def test_the_id_that_ends_a_request_is_an_output_and_no_text(llm):
    outputs, _ = oracle([3], 20, (), salt=1)
    stop = outputs[4]
    needed = outputs.index(stop) + 1
    params = SamplingParams(temperature=0, seed=1, max_tokens=20, ignore_eos=True, stop_token_ids=[stop])
    (output,) = llm.generate([3], params)
    assert (output.finish_reason, output.matched_token_id) == (FinishReason.STOP_TOKEN, stop)
    assert output.token_ids == outputs[:needed]
    assert output.text == words(outputs[: needed - 1])
    deltas = list(llm.stream([3], params))
    assert "".join(delta.text for delta in deltas) == output.text
    assert [i for delta in deltas for i in delta.token_ids] == output.token_ids
    assert [delta.output is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]


def test_a_bad_prompt_is_named_and_nothing_has_run(llm):
    for prompts, field in (
        ([[1], []], r"prompts\[1\]: ''"),
        ([[1], [1, VOCAB_SIZE]], rf"prompts\[1\]\[1\]: {VOCAB_SIZE}"),
        (["w1", ""], r"prompts\[1\]"),
        ([[1], [1] * 256], r"prompts\[1\]: '256 tokens'"),
        ([[1], None], r"prompts\[1\]: None"),
    ):
        with pytest.raises(InvalidRequestError, match=field):
            llm.generate(prompts, GREEDY)
    assert llm.runner.num_launches == 0
    with pytest.raises(InvalidRequestError, match=r"2 of them.*3 prompts"):
        llm.generate([[1], [2], [3]], [GREEDY, GREEDY])
    with pytest.raises(InvalidRequestError, match="prompt"):
        llm.stream([])


def test_whatever_is_wrong_with_a_request_of_a_list_its_place_is_named(llm):
    late = SamplingParams(min_tokens=250, max_tokens=255)
    chats = [[{"role": "user", "content": "a"}], [{"role": "user", "content": 5}]]
    for prompts, params, field in (
        ([[1], [2] * 10], late, "prompts[1].min_tokens"),
        ([[1], [2]], SamplingParams(prompt_logprobs=1, stop_token_ids=list(range(17))), "prompts[0].stop_token_ids"),
        ([[1], [VOCAB_SIZE]], GREEDY, "prompts[1][0]"),
        ([[1], chats[1]], GREEDY, "prompts[1].messages[0].content"),
        ([2] * 10, late, "min_tokens"),  # no list of prompts
        ([VOCAB_SIZE], GREEDY, "prompt[0]"),
        (chats[1], GREEDY, "messages[0].content"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            llm.generate(prompts, params)
        assert caught.value.field == field
    assert llm.runner.num_launches == 0


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ([None, None], r"sampling_params\[0\]: None"),
        ([GREEDY, 5], r"sampling_params\[1\]: 5"),
        (5, "sampling_params: 5"),
        ({"temperature": 0, "top_p": 1}, "sampling_params: {"),
    ],
)
def test_wrong_parameters_are_named(llm, given, field):
    with pytest.raises(InvalidRequestError, match=field):
        llm.generate([[1], [2]], given)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda llm: llm.stream([1], {"temperature": 0}),
            "sampling_params: {'temperature': 0} .* use a SamplingParams",
        ),
        (lambda llm: llm.check([1], {"n": 1}), "sampling_params: {'n': 1}"),
        (lambda llm: llm.stream([1], GREEDY, {"priority": 1}), "options: {'priority': 1} .* use a RequestOptions"),
        (lambda llm: llm.generate_each([], window=-1), "window: -1 .* use an integer above 0"),
        (lambda llm: llm.generate_each([], window=0), "window: 0"),
        (lambda llm: llm.generate_each([], window="all"), "window: 'all'"),
        (lambda llm: llm.start_trace(-1), "max_steps: -1 .* from 1 to 10000"),
        (lambda llm: llm.step_log("all"), "last: 'all'"),
    ],
)
def test_arguments_of_a_wrong_type_or_size_are_named_when_called(llm, call, message):
    with pytest.raises(InvalidRequestError, match=f"^{message}"):
        call(llm)


class Unspeakable:
    def __repr__(self):
        raise KeyError("no words")


@pytest.mark.parametrize("value", [10**5000, [10**5000], Unspeakable()], ids=["int", "list", "object"])
def test_what_has_no_repr_is_refused_as_well(llm, value):
    kind = type(value).__name__
    for refused in (
        lambda: SamplingParams(seed=value),
        lambda: SamplingParams(temperature=value),
        lambda: SamplingParams(stop=[value]),
        lambda: RequestOptions(priority=value),
        lambda: llm.check([1], value),
    ):
        with pytest.raises(InvalidRequestError, match=f": this {kind} is not allowed"):
            refused()
    with pytest.raises(ConfigError, match=f"max_running: this {kind} is not allowed"):
        EngineConfig(max_running=value)
    with pytest.raises(InvalidRequestError, match=r"logit_bias\[this int\]"):
        SamplingParams(logit_bias={10**5000: 1.0})


def test_each_input_of_a_wrong_form_yields_its_error_and_none_is_the_default(llm):
    short = RequestOptions(timeout=100.0)
    inputs = ["hello", ([1], GREEDY), ([1], {"n": 1}), 5, ([1],), ([1], GREEDY, 3), ([1], GREEDY, short, 4)]
    results = dict(llm.generate_each([*inputs, ([1], None), [[1], GREEDY, None]]))
    fields = {index: result.field for index, result in results.items() if isinstance(result, InvalidRequestError)}
    assert fields == {0: "input", 2: "sampling_params", 3: "input", 4: "input", 5: "options", 6: "input"}
    assert results[1].token_ids == results[8].token_ids == oracle([1], 6, (), salt=1)[0]
    assert results[7].finish_reason is not None


def test_each_asks_now_and_then_while_there_is_nothing(llm):
    asked = 0

    def inputs():
        nonlocal asked
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            asked += 1
            yield None
        yield [1], GREEDY

    assert len(list(llm.generate_each(inputs()))) == 1
    assert 2 <= asked < 100


def test_each_yields_errors_for_bad_inputs_and_goes_on(llm):
    inputs = [([1], GREEDY), ([], GREEDY), ([2], GREEDY), ([VOCAB_SIZE], GREEDY)]
    results = dict(llm.generate_each(iter(inputs)))
    assert sorted(results) == [0, 1, 2, 3]
    assert [isinstance(results[i], InvalidRequestError) for i in range(4)] == [False, True, False, True]


def test_each_draws_no_more_inputs_than_its_window(llm):
    drawn = 0

    def inputs():
        nonlocal drawn
        for _ in range(200):
            drawn += 1
            yield [1, 2], GREEDY

    finished = 0
    for _ in llm.generate_each(inputs(), window=7):
        finished += 1
        assert drawn <= finished + 7
    assert finished == 200


def test_each_left_early_aborts_the_rest(llm):
    for index, _ in llm.generate_each(((([1], GREEDY)) for _ in range(50)), window=10):
        if index > 3:
            break


def test_streams_left_early_are_aborted_also_beside_others(llm):
    long = SamplingParams(temperature=0, seed=1, max_tokens=60, ignore_eos=True)
    first, second = llm.stream([1], long), llm.stream([2], long)
    next(first), next(second)
    first.close()
    got = [i for delta in second for i in delta.token_ids]
    assert got == oracle([2], 60, (), salt=1)[0][-len(got) :]
    unstarted = llm.stream([3], long)
    del unstarted


def test_calls_from_threads_take_turns(llm):
    results: dict[int, list[int]] = {}

    def work(index):
        results[index] = [output.token_ids for output in llm.generate([[index]] * 3, GREEDY)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: [oracle([i], 6, (), salt=1)[0]] * 3 for i in range(8)}


def test_ctrl_c_aborts_cleanly_and_the_engine_goes_on(llm):
    launch = llm.runner.launch

    def interrupted_launch(plan):
        if plan.step_id == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return launch(plan)

    llm.runner.launch = interrupted_launch
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[i] for i in range(30)], GREEDY)
    assert not llm.engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate([1], GREEDY)[0].token_ids == oracle([1], 6, (), salt=1)[0]


def test_a_failing_device_raises_and_stays_down(llm):
    def broken(plan):
        raise RuntimeError("no such luck")

    llm.runner.launch = broken
    with pytest.raises(EngineError, match="no such luck"):
        llm.generate([1], GREEDY)
    with pytest.raises(EngineError, match="restarted"):
        llm.generate([1], GREEDY)


def test_closed_is_closed(llm):
    llm.close()
    llm.close()
    with pytest.raises(EngineError, match="closed"):
        llm.generate([1], GREEDY)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dtype", "float16"),
        ("max_running", 0),
        ("max_running", "many"),
        ("max_model_len", 1),
        ("max_model_len", 257),
        ("page_size", 0),
        ("num_pages", -1),
        ("lookahead", -1),
        ("lookahead", True),
        ("gpu_memory_fraction", 1.5),
        ("kv_memory_gib", 0),
        ("attention", "flash"),
        ("max_runing", 3),
        ("model", 5),
        ("model", ""),
        ("compile_cache", 5),
        ("prefix_cache", 0),
        ("deterministic", 1),
        ("decode_wait_ms", 10**400),
    ],
)
def test_a_bad_setting_names_itself(monkeypatch, setting, value):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    with pytest.raises(ConfigError, match=f"^{setting}: {re.escape(shortened(value))} is not allowed"):
        LLM(**{setting: value})


@pytest.mark.parametrize(
    ("settings", "idle"),
    [
        ({"max_prefill_streak": 2}, "max_prefill_streak"),
        ({"decode_wait_ms": 9.0}, "decode_wait_ms"),
        ({"max_prefill_streak": 2, "mixed_steps": False}, None),
        ({"max_mixed_tokens": 9, "schedule": "serial"}, "max_mixed_tokens"),
        ({"max_mixed_tokens": 9, "schedule": "serial", "mixed_steps": True}, None),
        ({"min_prefill_tokens": 64, "deterministic": True}, "min_prefill_tokens"),
        ({"schedule": "timeslice", "deterministic": True}, None),
        ({"gpu_memory_fraction": 0.5}, "gpu_memory_fraction"),
        ({"watchdog_seconds": math.inf, "watchdog_exit_seconds": 9.0}, "watchdog_exit_seconds"),
        ({"watchdog_seconds": math.inf, "watchdog_exit_seconds": math.inf}, None),
    ],
)
def test_settings_without_effect_beside_the_others_are_known(settings, idle):
    assert list(EngineConfig(**settings).without_effect("cpu")) == ([] if idle is None else [idle])


def test_an_order_by_the_cache_needs_a_cache():
    with pytest.raises(ConfigError, match="cache_aware_order: True is not allowed with prefix_cache False"):
        EngineConfig(cache_aware_order=True, prefix_cache=False)


def test_kernels_that_are_not_here_are_not_offered():
    with pytest.raises(ConfigError, match=r"use one of auto, xla, triton, mosaic$"):
        EngineConfig(attention="flash")


def test_a_pool_too_small_for_one_long_request_says_what_to_change():
    config = EngineConfig(num_pages=3)
    resolved = config.resolve(platform="cpu", vocab_size=9, model_len=256, page_bytes=1, kv_memory_bytes=10**6)
    assert "Raise kv_memory_gib" in resolved.shortfall
    enough = EngineConfig(num_pages=16)
    assert (
        enough.resolve(platform="cpu", vocab_size=9, model_len=256, page_bytes=1, kv_memory_bytes=1).shortfall is None
    )


# ---------------------------------------------------------------- how requests are treated


def test_cached_tokens_are_reported_until_the_cache_is_flushed(llm):
    prompt = list(range(40))
    assert [llm.generate(prompt, GREEDY)[0].cached_tokens for _ in range(2)] == [0, 32]
    salted = RequestOptions(cache_salt="tenant")
    assert llm.generate(prompt, GREEDY, salted)[0].cached_tokens == 0
    assert llm.flush_cache() == 4
    assert llm.generate(prompt, GREEDY)[0].cached_tokens == 0


def test_a_timeout_ends_one_request_and_disturbs_no_other(llm):
    options = [RequestOptions(), RequestOptions(timeout=1e-9), RequestOptions()]
    first, late, last = llm.generate([[1], [2], [3]], GREEDY, options)
    assert (late.finish_reason, late.token_ids) == (FinishReason.ERROR, [])
    assert isinstance(late.error, DeadlineError) and "timeout" in str(late.error)
    assert first.finish_reason == last.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"priority": 1.5}, "priority: 1.5"),
        ({"priority": 2**31}, "priority"),
        ({"timeout": 0}, "timeout: 0"),
        ({"timeout": float("inf")}, "timeout"),
        ({"cache_salt": ""}, "cache_salt: ''"),
        ({"cache_salt": 3}, "cache_salt: 3"),
    ],
)
def test_bad_options_are_named(bad, message):
    with pytest.raises(InvalidRequestError, match=message):
        RequestOptions(**bad)


def test_options_are_one_for_all_or_one_for_each(llm):
    with pytest.raises(InvalidRequestError, match="options: '1 of them'"):
        llm.generate([[1], [2]], GREEDY, [RequestOptions()])
    with pytest.raises(InvalidRequestError, match=r"options\[0\]"):
        llm.generate([[1]], GREEDY, [{"priority": 1}])


def test_a_bounded_queue_holds_callers_back_instead_of_refusing_them(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    with LLM(max_running=2, max_queue=3, progress=False) as llm:
        assert len(llm.generate([[i] for i in range(30)], GREEDY)) == 30
        assert sum(1 for _ in llm.generate_each(([i], GREEDY) for i in range(30))) == 30


def test_a_bounded_queue_holds_back_callers_in_threads_too(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    results: list[object] = []
    with LLM(max_running=2, max_queue=1, progress=False) as llm:
        llm.runner.step_seconds = 0.0003

        def work(index):
            try:
                for _ in range(5):
                    results.append([output.token_ids for output in llm.generate([[index]] * 3, GREEDY)])
                    each = dict(llm.generate_each([([index], GREEDY)] * 3))
                    results.append([each[i].token_ids for i in range(3)])
                    streams = [llm.stream([index], GREEDY) for _ in range(3)]
                    results.append([[i for delta in stream for i in delta.token_ids] for stream in streams])
            except Exception as error:
                results.append(error)

        threads = [threading.Thread(target=work, args=(1,)) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert results == [[oracle([1], 6, (), salt=1)[0]] * 3] * (6 * 5 * 3)


def test_a_stream_waits_for_room_in_the_queue(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    with LLM(max_running=2, max_queue=1, progress=False) as llm:
        streams = [llm.stream([i], GREEDY) for i in range(8)]
        deltas = [[next(stream)] for stream in streams]
        for stream, first in zip(streams, deltas, strict=True):
            first += stream
        ids = [[i for delta in several for i in delta.token_ids] for several in deltas]
        assert ids == [oracle([i], 6, (), salt=1)[0] for i in range(8)]


def test_a_snapshot_can_be_taken_while_a_stream_runs(llm):
    stream = llm.stream([1] * 20, GREEDY)
    next(stream)
    snapshot = llm.memory_snapshot()
    assert snapshot.free + snapshot.own + snapshot.locked + snapshot.evictable == len(snapshot.pages)
    assert {page.owner for page in snapshot.pages} == {"free", "row", "cache"}
    assert snapshot.to_svg().startswith("<svg") and snapshot.to_dict()["page_size"] == 16
    stream.close()


@pytest.mark.parametrize(
    ("schedule", "expected"), [("overlap", (1, True)), ("timeslice", (0, False)), ("serial", (0, False))]
)
def test_schedules_are_presets_that_single_settings_override(schedule, expected):
    sizes = {"platform": "cpu", "vocab_size": 9, "model_len": 64, "page_bytes": 1, "kv_memory_bytes": 99}
    resolved = EngineConfig(schedule=schedule).resolve(**sizes)
    assert (resolved.lookahead, resolved.scheduler.mixed_steps) == expected
    changed = EngineConfig(schedule=schedule, lookahead=3, mixed_steps=not expected[1], max_prefill_streak=5)
    resolved = changed.resolve(**sizes)
    assert (resolved.lookahead, resolved.scheduler.mixed_steps) == (3, not expected[1])
    assert resolved.scheduler.max_prefill_streak == 5


def test_a_model_of_windows_frees_pages_instead_of_caching_them():
    sizes = {"platform": "cpu", "vocab_size": 9, "model_len": 64, "page_bytes": 1, "kv_memory_bytes": 99, "window": 16}
    assert EngineConfig().resolve(**sizes).scheduler.frees_window
    assert not EngineConfig(prefix_cache=True).resolve(**sizes).scheduler.frees_window
