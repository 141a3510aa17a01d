"""Random traffic on the toy device: whatever happens, every request's tokens are the oracle's.

A failure prints its seed; ``JAXOVERLAP_SIM_SEED=<seed>`` replays it alone, ``JAXOVERLAP_SIM_STEPS`` sets the amount.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxoverlap.errors import InvalidRequestError
from tests.harness import Harness, random_harness, random_submit

STEPS = int(os.environ.get("JAXOVERLAP_SIM_STEPS", "200000"))
SEED = os.environ.get("JAXOVERLAP_SIM_SEED")


def simulate(seed: int) -> int:
    """One engine's life. Returns the turns it took."""
    rng = np.random.default_rng(seed)
    harness = random_harness(rng)
    # Integrity after every turn costs more than the turn: all of it in one life of four, at the end in the others.
    harness.check_every_turn = bool(rng.random() < 0.25)
    busy, abort_rate = float(rng.choice([0.05, 0.3, 1.0])), float(rng.choice([0.0, 0.02, 0.2]))
    # Short lives: what breaks an engine is variety, not length.
    most_requests = int(rng.integers(1, 40))
    for _ in range(int(rng.integers(20, 200))):
        while rng.random() < busy and len(harness.requests) < most_requests:
            try:
                random_submit(harness, rng)
            except InvalidRequestError:
                assert harness.max_model_len <= 2 or harness.num_pages * harness.page_size < 2 * harness.max_model_len
            if rng.random() < 0.5:
                break
        if harness.requests and rng.random() < abort_rate:
            unfinished = [request for request in harness.requests if request.finish_reason is None]
            victims = unfinished or harness.requests
            harness.engine.abort(victims[int(rng.integers(len(victims)))])
        harness.turn()
    harness.run()
    return harness.turns


def test_random_traffic_equals_the_oracle_and_leaks_nothing():
    if SEED is not None:
        simulate(int(SEED))
        return
    turns, seed = 0, 0
    while turns < STEPS:
        try:
            turns += simulate(seed)
        except Exception as error:
            raise AssertionError(f"JAXOVERLAP_SIM_SEED={seed} replays this: {error}") from error
        seed += 1
    print(f"{turns} turns, seeds 0 to {seed - 1}")


class EngineMachine(RuleBasedStateMachine):
    """The same by hypothesis, which shrinks a failure to a short script."""

    @initialize(
        page_size=st.sampled_from([1, 2, 16]),
        spare=st.integers(0, 12),
        max_model_len=st.integers(2, 60),
        max_running=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 16, 64]),
        lookahead=st.integers(0, 4),
    )
    def start(self, page_size, spare, max_model_len, max_running, budget, lookahead):
        self.harness = Harness(
            page_size=page_size,
            num_pages=-(-(max_model_len - 1) // page_size) + spare,
            max_model_len=max_model_len,
            max_running=max_running,
            max_batched_tokens=budget,
            lookahead=lookahead,
        )

    @rule(seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4))
    def submit(self, seed, count):
        rng = np.random.default_rng(seed)
        for _ in range(count):
            random_submit(self.harness, rng)

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.harness.requests[-8:]))
        self.harness.engine.abort(request)

    @rule(count=st.integers(1, 40))
    def turn(self, count):
        for _ in range(count):
            self.harness.turn()

    @invariant()
    def nothing_is_double_booked(self):
        if hasattr(self, "harness"):
            self.harness.scheduler.check_integrity()

    def teardown(self):
        if hasattr(self, "harness"):
            self.harness.run()


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = pytest.mark.filterwarnings("default")(EngineMachine.TestCase)
