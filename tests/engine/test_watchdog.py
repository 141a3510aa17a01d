"""A device that hangs is noticed, and so is one that goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import watchdog
from jaxoverlap.engine.awake_clock import AwakeClock
from jaxoverlap.engine.watchdog import EXIT_CODE, Watchdog, expected_seconds
from jaxoverlap.errors import ConfigError
from tests.harness import Harness
from tests.server.rig import PATIENCE, eventually


@pytest.fixture
def hung(monkeypatch) -> Iterator[tuple[Harness, threading.Event]]:
    """An engine whose device does not answer until the event is set. Nothing is expected to take any time."""
    monkeypatch.setattr(watchdog, "FIRST_STEP_SECONDS", 0.0)
    harness, answers = Harness(), threading.Event()
    finish = harness.runner.finish
    harness.runner.finish = lambda step: answers.wait(PATIENCE) and finish(step)
    harness.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
    thread = threading.Thread(target=harness.run)
    thread.start()
    yield harness, answers
    answers.set()
    thread.join()
    assert not harness.engine.has_work


def test_a_device_that_hangs_is_reported_and_then_the_process_ends(hung, caplog):
    harness, _ = hung
    stalls, codes = [], []
    dog = Watchdog(harness.engine, seconds=0.1, exit_seconds=0.1, on_stall=stalls.append, end=codes.append)
    dog.start()
    eventually(lambda: codes, "the end of the process")
    dog.stop()
    assert codes == [EXIT_CODE] and len(stalls) == 1 and stalls[0] > 0.1
    first, last = (record.getMessage() for record in caplog.records if "watchdog" in record.getMessage())
    for text in (first, last):
        assert "the loop waits for the device; 2 steps in flight, lookahead 1" in text
        assert "step 0: prefill, 1 rows, launched" in text and "1 requests running, 0 waiting" in text
        assert "turn 0 step 0 prefill in flight" in text  # of the step log
        assert "Thread 0x" in text and "result_queue.py" in text  # where the loop is
    assert f"the process ends with exit code {EXIT_CODE}" in last


def test_a_device_that_goes_on_is_taken_back_in(hung, caplog):
    harness, answers = hung
    stalls, recoveries = [], []
    dog = Watchdog(
        harness.engine,
        seconds=0.1,
        exit_seconds=float("inf"),
        on_stall=stalls.append,
        on_recovery=lambda: recoveries.append(True),
        end=lambda code: pytest.fail("it may not end the process"),
    )
    dog.start()
    eventually(lambda: stalls, "a report")
    answers.set()
    eventually(lambda: recoveries, "the recovery")
    dog.stop()
    assert len(stalls) == 1 and "the engine goes on after" in caplog.text


def test_a_pause_of_the_whole_process_is_no_stall(monkeypatch):
    """Stopped for an hour in the middle of a step, and on again: neither a report nor an end."""
    monkeypatch.setattr(watchdog, "FIRST_STEP_SECONDS", 0.0)
    now, engine, stalls = [0.0], Harness().engine, []
    dog = Watchdog(engine, seconds=10.0, exit_seconds=30.0, on_stall=stalls.append, end=stalls.append)
    dog._awake = AwakeClock(5.0, clock=lambda: now[0])
    engine.turn_began = 1.0
    for seconds in (0.0, 0.25, 3600.0, 0.25):
        now[0] += seconds
        dog._look()
    assert not stalls
    for _ in range(2):  # it hangs after all
        now[0] += 5.0
        dog._look()
    assert len(stalls) == 1
    now[0] += 3600.0
    dog._look()
    assert len(stalls) == 1


def test_idle_is_no_stall():
    dog = Watchdog(Harness().engine, seconds=0.01, exit_seconds=0.01, end=lambda code: pytest.fail("nothing runs"))
    dog._look()
    dog.start()
    dog.stop()


def test_infinity_watches_nothing():
    dog = Watchdog(Harness().engine, seconds=float("inf"), exit_seconds=1.0)
    dog.start()
    assert not dog._thread.is_alive()
    dog.stop()


def test_expected_is_the_slowest_step_and_more_for_more_tokens():
    harness = Harness(max_batched_tokens=64)
    engine, log = harness.engine, harness.engine.loop.log
    assert expected_seconds(engine) == watchdog.FIRST_STEP_SECONDS == 60.0
    harness.submit(list(range(8)), max_tokens=9, ignore_eos=True)
    harness.turn()
    assert expected_seconds(engine) == 60.0  # it was launched, but nobody knows what it takes
    while log.last()[1:2] == [] or log.last()[1].committed is None:
        harness.turn()
    for record, seconds in zip(log.last(), (2.0, 0.5), strict=False):
        record.committed = record.launched + seconds
    assert expected_seconds(engine) == pytest.approx(2.0)  # of 8 tokens, and now there is one in flight
    harness.submit(list(range(40)), max_tokens=2)
    harness.turn()
    in_flight = sum(record.num_tokens for record in log.last() if record.committed is None)
    assert in_flight > 40 and expected_seconds(engine) == pytest.approx(2.0 * in_flight / 8)


def test_a_step_during_which_the_process_was_paused_is_not_expected_again():
    harness, now = Harness(), [9.9]
    log = harness.engine.loop.log
    harness.submit([1, 2, 3], max_tokens=9, ignore_eos=True)
    while len(log.last()) < 4:
        harness.turn()
    clock = AwakeClock(5.0, lambda: now[0])
    for moment in (10.0, 10.25, 3610.25, 3610.5):
        now[0] = moment
        clock.look()
    for record, (begin, end) in zip(log.last(), ((8.0, 9.0), (10.1, 3610.4)), strict=False):
        record.launched, record.committed = begin, end
    for record in log.last()[2:]:
        record.launched = record.committed = None
    flying = sum(record.num_tokens for record in log.last()[2:])
    slowest = expected_seconds(harness.engine, clock.paused_between)
    assert slowest == pytest.approx(1.0 * max(1.0, flying / 3))
    assert expected_seconds(harness.engine) > 3600.0


@pytest.mark.parametrize("name", ["watchdog_seconds", "watchdog_exit_seconds"])
def test_limits_are_checked(name):
    with pytest.raises(ConfigError, match=f"{name}: 0 is not allowed"):
        EngineConfig(**{name: 0})
