"""What lets an engine's process do without full collections under load: it makes no cycles."""

from __future__ import annotations

import gc
import random

import pytest

from jaxoverlap.engine.garbage import IdleCollector, full_collections_only_when_idle
from tests.harness import Harness


def lives(harness: Harness, count: int, rng: random.Random) -> None:
    """Requests that share prefixes, are preempted, aborted and late; nothing is remembered of them."""
    for turn in range(count):
        prompt = [rng.randrange(97) for _ in range(rng.randint(1, 40))]
        request = harness.submit([1] * rng.choice([0, 32]) + prompt, max_tokens=rng.randint(1, 40))
        for _ in range(rng.randrange(6)):
            harness.turn()
        if rng.random() < 0.2:
            harness.engine.abort(request)
        if turn % 20 == 0:
            for running in list(harness.scheduler.state.running.values())[:1]:
                if not harness.scheduler.state.rows.leaving[running.row]:
                    harness.preempt(running)
    del request
    while harness.engine.has_work:
        harness.turn()
    for memory in (harness.requests, harness.delivered, harness.terminal, harness.plans):
        memory.clear()


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_an_engine_makes_no_cycles(lookahead):
    harness = Harness(num_pages=40, lookahead=lookahead, check_every=None)
    rng = random.Random(lookahead)
    lives(harness, 30, rng)
    gc.collect()
    gc.disable()
    try:
        lives(harness, 100, rng)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found = [type(thing).__name__ for thing in gc.garbage]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert found == []


def test_full_collections_are_for_idle_times():
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    collected = []
    gc.callbacks.append(lambda phase, info: collected.append(info["generation"]) if phase == "start" else None)
    try:
        full_collections_only_when_idle()
        assert gc.get_threshold()[:2] == before[:2] and gc.get_freeze_count() > frozen
        collected.clear()
        kept = [[] for _ in range(200_000)]
        assert collected and 2 not in collected
        collector = IdleCollector()
        collector.start()
        assert collector.timeout is None
        collector.slept()
        assert 2 not in collected
        collector.worked()
        assert collector.timeout > 0
        collector.slept()
        assert collected[-1] == 2 and collector.timeout is None
        assert collector.pauses.read()["counts"][-1] == 0, "idle collections are not pauses"
        gc.collect(0)
        collector.stop()
        gc.collect(0)
        read = collector.pauses.read()
        assert read["counts"][-1] == 1 and 0 < read["sum"] < 1
        del kept
    finally:
        gc.callbacks.pop()
        gc.set_threshold(*before)
        gc.unfreeze()
