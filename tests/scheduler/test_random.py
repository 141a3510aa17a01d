"""Random traffic on the toy device: whatever happens, every request's tokens are the oracle's.

``JAXOVERLAP_SIM_STEPS`` sets the amount; ``python -m tests.simulator --seed N`` replays a failure and shrinks it.
"""

from __future__ import annotations

import contextlib
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jaxoverlap.errors import InvalidRequestError, QueueFullError
from jaxoverlap.request import RequestOptions
from jaxoverlap.scheduler.state import SchedulerState
from tests import simulator, simulator_record
from tests.fakes import VOCAB_SIZE
from tests.harness import Harness
from tests.simulator import Script, fails, run, script_of, shrink, simulate, simulate_until
from tests.simulator_record import Record, Share

STEPS = int(os.environ.get("JAXOVERLAP_SIM_STEPS", "2000000"))


def test_random_traffic_equals_the_oracle_and_leaks_nothing():
    steps, lives = simulate_until(STEPS, workers=os.cpu_count() or 1)
    print(f"{steps} steps, {lives} lives")
    assert steps >= STEPS


def test_a_seed_is_always_the_same_life():
    assert script_of(7) == script_of(7)
    assert run(script_of(7)) == run(script_of(7))
    assert simulate(range(7, 8)).steps == run(script_of(7))


def test_a_recorded_run_goes_on_where_it_was_interrupted(tmp_path):
    def live(steps: int, name: str) -> tuple[int, int]:
        return simulate_until(steps, first_seed=3, workers=2, record=Record(tmp_path / name), share=5)

    def lived(name: str) -> list[tuple]:
        return [(code, share._replace(cpu_seconds=0)) for code, share in Record(tmp_path / name).shares]

    whole = live(4_000, "whole")
    assert live(1, "part")[0] < whole[0]
    assert live(4_000, "part") == whole
    assert lived("part") == lived("whole")
    assert live(1, "part") == whole  # nothing is run again


def test_a_record_counts_by_code_and_repeats_no_seed(tmp_path, monkeypatch):
    path = tmp_path / "record"
    steps, lives = simulate_until(1, record=Record(path), share=5)
    monkeypatch.setattr(simulator, "fingerprint", lambda: "ab" * 32)
    assert simulate_until(1, record=Record(path), share=5) != (steps, lives)
    (_, first), (code, second) = Record(path).shares
    assert (code, second.first_seed) == ("ab" * 32, first.next_seed)
    summary = Record(path).summary()
    assert f"{simulator_record.fingerprint()[:16]} (the code as it is now)\n  {steps:,} steps, 5 lives" in summary
    assert "abababababababab\n" in summary and summary.count("0 failures") == 2


def test_a_failure_is_on_record_with_its_seed(tmp_path, monkeypatch):
    failed = Share(10, 5, 700, [(12, "AssertionError('two terminal events')")], 0.1)
    monkeypatch.setattr(simulator, "shares", lambda *given: iter([failed]))
    with pytest.raises(AssertionError, match=r"--seed 12 replays this: .*two terminal events"):
        simulate_until(10_000, record=Record(tmp_path / "record"))
    assert "1 failures: seeds [12]" in Record(tmp_path / "record").summary()


def test_a_failure_is_shrunk_to_what_it_needs(monkeypatch):
    """A device that forgets one write: a short script is left, and it still fails."""
    from tests.fakes import ToyRunner

    write = ToyRunner._write

    def forgetful(self, row, position, token):
        if position != 9:
            write(self, row, position, token)

    monkeypatch.setattr(ToyRunner, "_write", forgetful)
    seed = next(seed for seed in range(200) if fails(script_of(seed)))
    short = shrink(script_of(seed))
    assert isinstance(short, Script) and fails(short)
    assert sum(event[0] == "submit" for event in short.events) == 1
    assert "submit" in str(short)


def leaving_beside_a_copy() -> Script:
    """B computes what A has cached meanwhile, and is aborted when C has been promised the pages of A."""
    settings = {
        "page_size": 1,
        "num_pages": 48,  # 24 for B; for C the 20 of A and 4 more
        "max_model_len": 64,
        "max_batched_tokens": 64,
        "settings": {"max_mixed_tokens": 8},
    }
    turn = ("turn", 0.001, False)
    a, b, c = (
        ("submit", list(prompt), {"max_tokens": most, "ignore_eos": True}, {}, None)
        for prompt, most in [(range(20), 1), (range(20), 5), (range(50, 74), 1)]
    )
    return Script(0, settings, (a, b, turn, turn, c, turn, ("abort", 1), turn))


def test_a_row_that_leaves_takes_no_page_from_a_promise(monkeypatch):
    """Found after a million steps: a leaving row locked cached copies of its own pages before it gave those back."""
    script = leaving_beside_a_copy()
    assert fails(script) is None
    leave = SchedulerState.leave

    def hasty(self, request):
        leave(self, request)
        written = int(self.rows.written_len[request.row])
        self.memory._cache_pages(request.row, request.known_ids()[:written], past_copies=True)

    monkeypatch.setattr(SchedulerState, "leave", hasty)
    assert "evictable" in str(fails(script))


class EngineMachine(RuleBasedStateMachine):
    """The same by hypothesis, which shrinks a failure in its own way."""

    @initialize(
        page_size=st.sampled_from([1, 2, 16]),
        spare=st.integers(0, 12),
        max_model_len=st.integers(2, 60),
        max_running=st.integers(1, 5),
        budget=st.sampled_from([1, 3, 16, 64]),
        lookahead=st.integers(0, 4),
        mixed=st.booleans(),
        cache=st.booleans(),
        headroom=st.sampled_from([1, 8]),
        patience=st.sampled_from([0.01, 1.0]),
    )
    def start(self, page_size, spare, max_model_len, max_running, budget, lookahead, mixed, cache, headroom, patience):
        self.harness = Harness(
            page_size=page_size,
            num_pages=-(-(max_model_len - 1) // page_size) + spare,
            max_model_len=max_model_len,
            max_running=max_running,
            max_batched_tokens=budget,
            lookahead=lookahead,
            settings={
                "mixed_steps": mixed,
                "prefix_cache": cache,
                "headroom": headroom,
                "max_prompt_wait": patience,
                "max_queue": 6,
            },
        )

    @rule(
        seed=st.integers(0, 2**32 - 1), count=st.integers(1, 4), like_others=st.booleans(), priority=st.integers(0, 2)
    )
    def submit(self, seed, count, like_others, priority):
        rng = np.random.default_rng(3 if like_others else seed)
        for _ in range(count):
            limit = self.harness.max_model_len - 1
            with contextlib.suppress(QueueFullError, InvalidRequestError):
                self.harness.submit(
                    rng.integers(0, VOCAB_SIZE, int(rng.integers(1, limit + 1))).tolist(),
                    max_tokens=int(rng.integers(1, self.harness.max_model_len + 10)),
                    seed=int(rng.integers(1 << 62)),
                    options=RequestOptions(priority=priority, timeout=0.2 if seed % 5 == 0 else None),
                )

    @precondition(lambda self: self.harness.requests)
    @rule(data=st.data())
    def abort(self, data):
        request = data.draw(st.sampled_from(self.harness.requests[-8:]))
        self.harness.engine.abort(request)

    @rule()
    def flush(self):
        self.harness.scheduler.flush_cache()

    @rule(count=st.integers(1, 40), early=st.booleans())
    def turn(self, count, early):
        for _ in range(count):
            self.harness.now += 0.003
            if early:
                self.harness.runner.catch_up()
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
