"""Ends that come by the clock, and a queue that is full."""

from __future__ import annotations

import pytest

from jaxoverlap.errors import DeadlineError, EngineError, QueueFullError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import RequestOptions
from tests.harness import Harness

SOON = RequestOptions(timeout=1.0)


def go_on(harness: Harness, seconds: float, *, step: float = 0.1) -> None:
    for _ in range(round(seconds / step)):
        harness.now = round(harness.now + step, 6)
        harness.turn()


# -------------------------------------------------------------------- deadlines


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_request_that_still_waits_at_its_deadline_is_ended(lookahead):
    harness = Harness(max_running=1, lookahead=lookahead)
    harness.submit([1], max_tokens=100, ignore_eos=True)
    late = harness.submit([2], options=SOON)
    go_on(harness, 0.9)
    assert late.finish_reason is None
    go_on(harness, 0.1)
    assert (late.finish_reason, late.output_ids) == (FinishReason.ERROR, [])
    with pytest.raises(DeadlineError, match="still waiting after its 1 s"):
        raise late.error
    harness.run()


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_running_request_keeps_what_it_had_at_its_deadline(lookahead):
    harness = Harness(lookahead=lookahead)
    late, other = (
        harness.submit([i], max_tokens=50, ignore_eos=True, options=o) for i, o in enumerate((SOON, RequestOptions()))
    )
    go_on(harness, 1.0)
    assert isinstance(late.error, DeadlineError) and "still running" in str(late.error)
    assert len(late.output_ids) == 9 - lookahead
    harness.run()
    assert len(other.output_ids) == 50


@pytest.mark.parametrize("lookahead", [0, 2])
def test_nothing_is_launched_for_a_request_past_its_deadline(lookahead):
    harness = Harness(lookahead=lookahead, max_running=1)
    request = harness.submit([1], max_tokens=50, ignore_eos=True, options=SOON)
    queued = harness.submit([2], max_tokens=2, options=RequestOptions(timeout=0.5))
    go_on(harness, 0.4)
    launched = len(harness.plans)
    harness.now = 5.0
    harness.turn()
    assert {request.finish_reason, queued.finish_reason} == {FinishReason.ERROR}
    assert len(harness.plans) == launched
    harness.run()


def test_a_request_that_finishes_in_time_hears_nothing_of_its_deadline():
    harness = Harness()
    request = harness.submit([1], max_tokens=3, ignore_eos=True, options=SOON)
    go_on(harness, 3.0)
    assert (request.finish_reason, request.error) == (FinishReason.LENGTH, None)


def test_a_deadline_counts_from_arrival_through_preemption():
    harness = Harness(max_running=2)
    request, *_ = (harness.submit([i], max_tokens=90, ignore_eos=True, options=SOON) for i in range(2))
    go_on(harness, 0.5)
    harness.preempt(request)
    go_on(harness, 0.5)
    assert (request.num_preemptions, type(request.error)) == (1, DeadlineError)
    harness.run()


def test_aborted_before_its_deadline_is_aborted_once():
    harness = Harness()
    request = harness.submit([1], max_tokens=90, options=SOON)
    go_on(harness, 0.3)
    harness.engine.abort(request)
    go_on(harness, 2.0)
    assert request.finish_reason == FinishReason.ABORTED


def test_many_deadlines_end_exactly_those_that_have_passed():
    harness = Harness(max_running=4, lookahead=2)
    requests = [
        harness.submit(
            [i], max_tokens=200, ignore_eos=True, options=RequestOptions(timeout=(i * 7 % 20 + 1) / 10 - 0.05)
        )
        for i in range(20)
    ]
    for tenth in range(1, 22):
        go_on(harness, 0.1)
        assert sum(request.finish_reason is not None for request in requests) == min(tenth, 20)
    harness.run()


# -------------------------------------------------------------------- a bounded queue


def test_a_full_queue_refuses_at_once_and_takes_again_when_some_have_started():
    harness = Harness(max_running=1, settings={"max_queue": 2})
    first, _ = (harness.submit([i], max_tokens=4, ignore_eos=True) for i in range(2))
    with pytest.raises(QueueFullError, match="max_queue: 2"):
        harness.submit([3])
    assert len(harness.requests) == harness.scheduler.num_waiting == 2
    harness.turn()
    assert first.row is not None and not harness.engine.queue_is_full
    harness.submit([3], max_tokens=2)
    with pytest.raises(QueueFullError):
        harness.submit([4])
    harness.engine.abort(harness.requests[-1])
    harness.submit([4], max_tokens=2)
    harness.run()


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_a_preempted_request_returns_to_a_full_queue(lookahead):
    """B028: the limit is for those who come, not for those who come back; and they take no place of newcomers."""
    harness = Harness(max_running=2, lookahead=lookahead, settings={"max_queue": 4})
    for i in range(2):
        harness.submit([i] * 20, max_tokens=40, ignore_eos=True)
    harness.turn()
    for i in range(4):
        harness.submit([i], max_tokens=9, ignore_eos=True)
    assert harness.engine.queue_is_full
    victim = harness.requests[1]
    for _ in range(3):
        while victim.row is None:
            harness.turn()
        harness.preempt(victim)
        harness.drain()
        assert (harness.scheduler.num_waiting, harness.scheduler.state.waiting.num_fresh) == (5, 4)
    harness.run()
    assert (victim.finish_reason, victim.num_preemptions) == (FinishReason.LENGTH, 3)


def test_a_queue_of_preempted_requests_alone_still_takes_newcomers():
    harness = Harness(max_running=3, settings={"max_queue": 1})
    for i in range(3):
        harness.submit([i], max_tokens=40, ignore_eos=True)
        harness.turn()
    for request in harness.requests:
        harness.preempt(request)
    harness.drain()
    assert harness.scheduler.num_waiting == 3
    newcomer = harness.submit([9], max_tokens=1)
    harness.turn()
    assert newcomer.row is None
    harness.run()


def test_deadlines_of_finished_requests_are_not_kept_for_ever():
    harness = Harness(check_every=None)
    for i in range(3000):
        harness.submit([i % 90], max_tokens=1, options=RequestOptions(timeout=1e9))
        if i % 8 == 0:
            harness.run()
            harness.requests.clear()
    assert len(harness.scheduler.state.deadlines) < 1100
    last = harness.submit([1], max_tokens=30, ignore_eos=True, options=RequestOptions(timeout=0.5))
    harness.run()
    assert last.finish_reason == FinishReason.LENGTH


# -------------------------------------------------------------------- the scan for requests that hang


@pytest.fixture
def no_oracle(monkeypatch):
    """These requests end by an error that must never happen."""
    monkeypatch.setattr(Harness, "check_outcome", lambda self, request: None)


def test_a_running_request_that_is_never_planned_is_ended_with_an_error(no_oracle):
    harness = Harness(lookahead=1, settings={"stuck_after": 2.0})
    hung, fine = (harness.submit([i], max_tokens=100, ignore_eos=True) for i in range(2))
    go_on(harness, 0.5)
    harness.scheduler.state.rows.decoding[hung.row] = False
    go_on(harness, 1.8)
    assert hung.finish_reason is None
    go_on(harness, 0.8)
    assert hung.finish_reason == FinishReason.ERROR
    with pytest.raises(EngineError, match=r"request 0 made no progress for 2 s \(running, 5 outputs; .* this is a bug"):
        raise hung.error
    harness.run()
    assert fine.finish_reason == FinishReason.LENGTH


def test_a_queue_that_nobody_serves_is_ended_one_by_one(no_oracle):
    harness = Harness(settings={"stuck_after": 2.0})
    requests = [harness.submit([i], max_tokens=4, ignore_eos=True) for i in range(2)]
    take_row = harness.scheduler.state.take_row
    harness.scheduler.state.take_row = lambda request, now: request is not requests[0] and take_row(request, now)
    go_on(harness, 4.0)
    assert requests[0].finish_reason == FinishReason.ERROR
    assert "no progress" in str(requests[0].error)
    assert requests[1].finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize("away", [1.5, 100.0])
def test_nobody_is_stuck_because_the_caller_was_away(away):
    harness = Harness(lookahead=1, max_running=2, settings={"stuck_after": 2.0})
    for i in range(4):
        harness.submit([i], max_tokens=30, ignore_eos=True)
    for _ in range(20):
        go_on(harness, 0.2)
        harness.now += away
        harness.turn()
    harness.run()
    assert {request.finish_reason for request in harness.requests} == {FinishReason.LENGTH}


def test_waiting_behind_a_long_request_is_not_being_stuck():
    harness = Harness(max_running=1, lookahead=1, settings={"stuck_after": 2.0})
    for i in range(3):
        harness.submit([i], max_tokens=60, ignore_eos=True)
    while harness.engine.has_work:
        go_on(harness, 0.1)
    assert {request.finish_reason for request in harness.requests} == {FinishReason.LENGTH}


def test_sitting_out_for_want_of_a_page_is_not_being_stuck():
    """B056: the old row is beyond its promise and the young one has not had its turn, which takes its time; no
    accepted request ends by our shortage of memory."""
    settings = {"stuck_after": 2.0, "headroom": 32}
    harness = Harness(num_pages=6, max_running=2, lookahead=1, settings=settings)
    harness.submit([1] * 16, max_tokens=60, ignore_eos=True)
    go_on(harness, 3.0)
    harness.submit([2] * 16, max_tokens=60, ignore_eos=True)
    while harness.engine.has_work:
        go_on(harness, 0.1)
    assert {request.finish_reason for request in harness.requests} == {FinishReason.LENGTH}


@pytest.mark.parametrize("idle", [2.2, 2.3, 2.5, 10.0])
def test_a_request_after_a_long_idle_time_is_served(idle):
    """Turns without work are no reason to think that the request which comes next hangs."""
    harness = Harness(lookahead=1, settings={"stuck_after": 2.0})
    for i in range(5):
        harness.submit([i], max_tokens=4, ignore_eos=True)
        while harness.engine.has_work:
            go_on(harness, 0.1)
        go_on(harness, idle + i / 20, step=0.05)
    assert {request.finish_reason for request in harness.requests} == {FinishReason.LENGTH}


def test_a_request_behind_slow_steps_that_end_all_others_is_served():
    """What is read while there is nothing to launch is progress too (found by the simulator, seed 102200)."""
    harness = Harness(lookahead=4, settings={"stuck_after": 3.0})
    harness.submit([1], max_tokens=10, ignore_eos=True)
    while harness.engine.has_work:
        go_on(harness, 0.9, step=0.9)
    late = harness.submit([2], max_tokens=4, ignore_eos=True)
    go_on(harness, 0.9, step=0.9)
    harness.run()
    assert late.finish_reason == FinishReason.LENGTH


def test_a_prompt_set_aside_for_more_urgent_ones_is_not_stuck():
    settings = {"stuck_after": 2.0, "max_mixed_tokens": 16}
    harness = Harness(max_batched_tokens=16, num_pages=200, max_running=8, lookahead=1, settings=settings)
    harness.submit([1] * 100, max_tokens=4, options=RequestOptions(priority=1))
    go_on(harness, 0.2)
    for i in range(10):
        harness.submit([2 + i] * 90, max_tokens=4)
    while harness.engine.has_work:
        go_on(harness, 0.1)
    assert all(request.finish_reason.as_asked for request in harness.requests)


@pytest.mark.parametrize("mixed_steps", [True, False])
def test_nobody_set_aside_is_stuck_because_the_process_was_stopped_with_a_step_in_flight(mixed_steps):
    settings = {"mixed_steps": mixed_steps}
    harness = Harness(max_batched_tokens=32, num_pages=200, lookahead=1, settings=settings)
    harness.submit([1] * 30, max_tokens=40, ignore_eos=True, options=RequestOptions(priority=1))
    harness.submit([3] * 200, max_tokens=4, options=RequestOptions(priority=1))
    go_on(harness, 0.2, step=0.02)
    harness.submit([2] * 200, max_tokens=4)
    go_on(harness, 0.06, step=0.02)
    assert harness.engine.loop.in_flight
    harness.now += 61.0
    harness.run()
    assert all(request.finish_reason.as_asked for request in harness.requests)


def test_rows_that_wait_for_many_prompts_are_not_stuck():
    settings = {"mixed_steps": False, "max_decode_wait": 1e9, "stuck_after": 2.0}
    harness = Harness(max_batched_tokens=32, num_pages=500, max_running=20, lookahead=0, settings=settings)
    for i in range(20):
        harness.submit([i] * 200, max_tokens=4, ignore_eos=True)
    while harness.engine.has_work:
        go_on(harness, 0.1)
    assert {request.finish_reason for request in harness.requests} == {FinishReason.LENGTH}
