"""Speeds that a trace was made with are found in it again."""

from __future__ import annotations

import random

import pytest

from jaxoverlap.observe.chrome_trace import DEVICE, ENGINE, HOST
from jaxoverlap.simulation.measured_speeds import speeds_of
from jaxoverlap.simulation.virtual_time import Speeds

SPEEDS = Speeds(step=4e-3, row=2e-4, prompt_token=3e-5, kv_token=1e-6, host_step=3e-4, host_row=5e-6, after=0.4)


def trace(steps: int, shapes: dict[str, float] | None = None) -> dict:
    """With shapes, a step is of one of these, and takes so many seconds and what its KV positions add."""
    rng, events, now = random.Random(1), [], 0.0

    def span(lane: int, name: str, micros: float, args: dict | None = None) -> None:
        events.append(
            {"ph": "X", "pid": ENGINE, "tid": lane, "name": name, "ts": now, "dur": micros, "args": args or {}}
        )

    for index in range(steps):
        rows, prompt, kv = rng.randint(0, 16), rng.choice([0, 0, 64, 200]), rng.randint(0, 5000)
        host = 1e6 * (SPEEDS.host_step + SPEEDS.host_row * rows)
        device = 1e6 * (SPEEDS.step + SPEEDS.row * rows + SPEEDS.prompt_token * prompt + SPEEDS.kv_token * kv)
        if index % 7 == 0:  # a turn that launches nothing
            span(HOST, "plan", 40.0)
            now += 40.0
        for name, share in (("plan", 0.25), ("launch", 0.35)):
            span(HOST, name, share * host)
            now += share * host
        events.append({"ph": "C", "pid": ENGINE, "name": "rows", "ts": now, "args": {"rows": rows}})
        args: dict = {"decode_rows": rows, "prompt_tokens": prompt, "kv_tokens": kv}
        if shapes is not None:
            args["shape"] = rng.choice(list(shapes))
            device = 1e6 * (shapes[args["shape"]] + SPEEDS.kv_token * kv)
        span(DEVICE, f"decode {index}", device, args)
        span(HOST, "wait", device)
        now += device
        span(HOST, "commit", SPEEDS.after * host)
        now += SPEEDS.after * host
    return {"traceEvents": events}


def test_speeds_are_found_again():
    found = speeds_of(trace(200))
    for name in SPEEDS.__dataclass_fields__:
        assert getattr(found, name) == pytest.approx(getattr(SPEEDS, name), rel=0.01), name


def test_compiled_steps_have_their_own_times_where_the_trace_says_which_they_were():
    shapes = {"decode 8": 5e-3, "prefill 64": 9e-3, "prefill 64 + decode 8": 8e-3}
    found = speeds_of(trace(200, shapes))
    assert found.shapes == pytest.approx(shapes, rel=0.01)
    assert found.kv_token == pytest.approx(SPEEDS.kv_token, rel=0.01)
    assert speeds_of(trace(200, shapes), trace(200)).shapes == {}, "of some steps nobody knows"


def test_a_trace_with_next_to_nothing_in_it_is_refused():
    with pytest.raises(ValueError, match="the trace has 9 steps"):
        speeds_of(trace(9))
