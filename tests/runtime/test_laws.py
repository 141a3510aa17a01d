"""The laws of the device step (architecture, section 3), each with a test that fails when it is broken."""

from __future__ import annotations

import ast
from pathlib import Path

import jax
import numpy as np
import pytest
from jax._src.array import ArrayImpl

from jaxoverlap.runtime.runner import LaunchedDeviceStep
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.plan import RowStatus
from pallas_kernels.pages import num_bytes
from tests.tiny import CONFIG, make_engine, make_runner, random_requests, scheduler_config

PACKAGE = Path(__file__).parents[2] / "jaxoverlap"


def device_bytes(runner) -> dict[str, np.ndarray]:
    state = runner._state
    pools = {name: np.concatenate([getattr(kv, name) for kv in runner._kv]) for name in ("k", "v")}
    return pools | {name: np.array(getattr(state, name)) for name in state.__dataclass_fields__}


def changed_slots(before, after, name: str) -> set[int]:
    flat = [snapshot[name].reshape(-1, CONFIG.num_kv_heads * CONFIG.head_dim) for snapshot in (before, after)]
    return set(np.flatnonzero((flat[0] != flat[1]).any(axis=1)).tolist())


# ---------------------------------------------------------------- law 2: padding can touch nothing


def test_padded_rows_touch_no_slot_and_no_row():
    engine, runner = make_engine(lookahead=0)
    for index in range(3):
        engine.add([1, 2, 3 + index], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
    engine.step()
    before = device_bytes(runner)
    plan = engine.loop.scheduler.plan()
    assert runner.buckets.shape_of(plan).decode_rows == 4
    runner.launch(plan).read()
    after = device_bytes(runner)
    limits, table = engine.limits, engine.loop.scheduler.state.memory.page_table
    slots = {
        (layer * limits.num_pages + int(table[row, 0])) * limits.page_size + 3
        for row in plan.decode_rows
        for layer in range(CONFIG.num_layers)
    }
    assert changed_slots(before, after, "k") == changed_slots(before, after, "v") == slots
    idle = [row for row in range(runner.step.num_rows) if row not in plan.decode_rows]
    for name in ("last_token", "seq_len", "num_outputs", "finished", "page_table", "params"):
        np.testing.assert_array_equal(before[name][idle], after[name][idle], err_msg=name)


def test_padded_prompt_tokens_touch_no_slot_and_no_row():
    engine, runner = make_engine(lookahead=0)
    other = engine.add([9] * 16, SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
    engine.step()  # page 0 and row 0 are somebody else's, so that a stray write to them shows
    engine.add([7] * 19, SamplingParams(temperature=0, max_tokens=9))
    before = device_bytes(runner)
    plan = engine.loop.scheduler.plan()
    runner.launch(plan).read()
    after = device_bytes(runner)
    pages, size = plan.chunks[0].page_table, engine.limits.page_size
    slots = {
        (layer * engine.limits.num_pages + int(pages[p // size])) * size + p % size
        for p in range(19)
        for layer in range(CONFIG.num_layers)
    }
    # The same step decodes one token of the other request, in the first slot of its second page.
    assert plan.decode_rows.tolist() == [other.row]
    page = int(engine.loop.scheduler.state.memory.page_table[other.row, 1])
    slots |= {(layer * engine.limits.num_pages + page) * size for layer in range(CONFIG.num_layers)}
    assert changed_slots(before, after, "k") == slots


# ---------------------------------------------------------------- overshoot is a no-op


def test_a_step_launched_for_a_row_that_had_finished_changes_nothing():
    engine, runner = make_engine(lookahead=4)
    request = engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    outputs = []
    while not outputs:
        engine.step()
        outputs = request.output_ids
    stop = outputs[0]
    engine, runner = make_engine(lookahead=0)
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, stop_token_ids=[stop]))
    scheduler = engine.loop.scheduler
    runner.launch(scheduler.plan()).read()
    before = device_bytes(runner)
    for _ in range(3):
        result = runner.launch(scheduler.plan()).read()
        assert result.outcomes[:, 1].tolist() == [RowStatus.VOID]
    after = device_bytes(runner)
    for name, array in before.items():
        np.testing.assert_array_equal(array, after[name], err_msg=name)


# ---------------------------------------------------------------- law 6: one place waits

WAITS = {"block_until_ready", "device_get", "item", "tolist", "asarray", "array"}


def test_no_module_near_the_device_reads_a_device_value_but_the_result():
    found = []
    for path in [*(PACKAGE / "runtime").glob("*.py"), *(PACKAGE / "engine").glob("*.py")]:
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS:
                    found.append(f"{path.name}:{function.name}:{node.func.attr}")
    assert set(found) - {"collector.py:output:tolist"} == {"runner.py:read:asarray"}  # the former: a prompt's ids


def test_nothing_but_popping_a_result_waits(monkeypatch):
    engine, _ = make_engine(lookahead=1)
    reading, strays = [False], []
    read = LaunchedDeviceStep.read

    def marked_read(self):
        reading[0] = True
        try:
            with jax.transfer_guard_device_to_host("allow"):
                return read(self)
        finally:
            reading[0] = False

    monkeypatch.setattr(LaunchedDeviceStep, "read", marked_read)
    for name in ("__array__", "__bool__", "__float__", "__int__", "__index__", "item", "tolist", "block_until_ready"):
        original = getattr(ArrayImpl, name)

        def spy(self, *args, _original=original, _name=name, **kwargs):
            if not reading[0]:
                strays.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(ArrayImpl, name, spy)
    random_requests(engine, 0, 8)
    # The guard sees transfers from a GPU; on a CPU there are none, and the spies do its work.
    with jax.transfer_guard_device_to_host("disallow"):
        while engine.has_work:
            engine.step()
    assert strays == []


# ---------------------------------------------------------------- law 7: what was handed over is not written again


def test_arrays_handed_to_the_device_are_fresh_and_never_written_again():
    engine, runner = make_engine(lookahead=2)
    handed = []
    executables = runner.executables

    class Spying:
        def __getitem__(self, shape):
            def call(*arguments):
                handed.extend((array, array.copy()) for array in arguments if isinstance(array, np.ndarray))
                return executables[shape](*arguments)

            return call

    runner.executables = Spying()
    random_requests(engine, 1, 10)
    while engine.has_work:
        engine.step()
    assert len(handed) > 20
    for packed, copy in handed:
        np.testing.assert_array_equal(packed, copy)
        with pytest.raises(ValueError, match="read-only"):
            packed[0] = 1
    assert len({packed.ctypes.data for packed, _ in handed}) == len(handed)


def test_arrays_of_a_plan_are_read_only():
    engine, _ = make_engine()
    random_requests(engine, 2, 3)
    for _ in range(4):
        plan = engine.loop.scheduler.plan()
        arrays = [plan.rows, plan.generations, plan.request_ids, plan.decode_rows, plan.decode_new_pages]
        arrays += [array for chunk in plan.chunks for array in (chunk.token_ids, chunk.page_table)]
        assert not any(array.flags.writeable for array in arrays)


# ---------------------------------------------------------------- law 8: after ready, nothing compiles


WISHES = [
    {},
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    {"logit_bias": {3: 5.0}, "banned_token_ids": [7], "min_tokens": 1},
    {"logprobs": 3},
    {"prompt_logprobs": 2, "logprobs": 0},
]


@pytest.mark.parametrize(
    ("max_running", "max_batched_tokens"), [(1, 1), (3, 7), pytest.param(5, 100, marks=pytest.mark.slow)]
)
def test_nothing_compiles_after_warm_up_also_at_odd_limits(max_running, max_batched_tokens):
    engine, runner = make_engine(max_running=max_running, max_batched_tokens=max_batched_tokens, lookahead=1, warm=True)
    compiled = []

    def note(name, seconds, **_):
        if name == "/jax/core/compile/backend_compile_duration":
            compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(note)
    for seed, fixed in enumerate(WISHES):
        random_requests(engine, seed, 2 * max_running + 1, **fixed)
        while engine.has_work:
            engine.step()
    seen = len(compiled)
    jax.jit(lambda x: x * 3 + max_running)(np.float32(1))
    assert len(compiled) > seen, "the listener hears nothing"
    assert seen == 0
    assert runner.compiles_after_ready == 0


def test_a_compile_after_ready_is_counted_and_warned_about(caplog):
    engine, runner = make_engine()
    runner.executables._compiled = {}
    runner.executables.seal()
    engine.add([1, 2], SamplingParams(temperature=0, max_tokens=1))
    engine.step()
    assert runner.compiles_after_ready == 2  # both halves
    assert "compiled after warm-up" in caplog.text


def test_warm_up_covers_exactly_what_run_time_asks_for():
    for max_running in (1, 3, 5, 9, 12):
        for budget in (1, 7, 100, 2000):
            buckets = make_buckets(max_running, budget)
            shapes = set(buckets)
            for count in range(1, max_running + 1):
                assert buckets.shape_of(FakePlan(0, 0, count)) in shapes
            for tokens in range(1, budget + 1):
                for chunks in (1, min(tokens, max_running, 16)):
                    shape = buckets.shape_of(FakePlan(tokens, chunks, 0))
                    assert shape in shapes
                    assert shape.prefill_tokens >= tokens
                    assert shape.prefill_rows >= chunks
            config = scheduler_config(max_running=max_running, max_batched_tokens=budget, max_prefill_rows=16)
            for tokens in range(1, config.mixed_budget + 1):
                for count in range(1, max_running):
                    chunks = min(tokens, config.max_mixed_chunks, max_running - count)
                    shape = buckets.shape_of(FakePlan(tokens, chunks, count))
                    assert shape in shapes
                    assert shape.prefill_tokens >= tokens and shape.decode_rows >= count
                    assert shape.prefill_rows >= chunks


class FakePlan:
    def __init__(self, tokens: int, chunks: int, decodes: int) -> None:
        self.num_prefill_tokens, self.chunks, self.decode_rows = tokens, (None,) * chunks, [0] * decodes


def make_buckets(max_running: int, budget: int):
    from jaxoverlap.runtime.buckets import Buckets

    return Buckets(scheduler_config(max_running=max_running, max_batched_tokens=budget, max_prefill_rows=16))


# ---------------------------------------------------------------- law 9: donated means gone


def test_the_old_pool_and_row_state_are_gone_after_a_launch():
    engine, runner = make_engine()
    engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=3))
    old = [*jax.tree.leaves(runner._kv), runner._state.last_token, runner._state.page_table]
    engine.step()
    assert all(array.is_deleted() for array in old)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old[0])


def test_the_pool_is_aliased_and_no_step_has_a_temporary_of_its_size():
    runner = make_runner(num_pages=4000)
    pool_bytes = num_bytes(runner._kv)
    for shape in runner.buckets:
        step = runner.executables[shape]
        assert step.aliased_bytes >= pool_bytes, shape
        assert step.temporary_bytes < 0.05 * pool_bytes / len(runner._kv), shape


# ---------------------------------------------------------------- bytes per step


def test_bytes_to_and_from_the_device_per_decode_step():
    from jaxoverlap.runtime.packing import packed_size

    for rows in (1, 2, 3, 4):
        engine, runner = make_engine(lookahead=0)
        for _ in range(rows):
            engine.add([1, 2, 3], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True))
        engine.step()
        plan = engine.loop.scheduler.plan()
        shape = runner.buckets.shape_of(plan)
        assert 4 * packed_size(shape, runner.step.pages_per_row) <= 16 * rows + 64
        launched = runner.launch(plan)
        assert launched.output.nbytes == 8 * shape.sample_rows
        assert launched.scores is None and launched.prompt_scores is None
    assert scheduler_config().max_running == 4
