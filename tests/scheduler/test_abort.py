"""Abort at any moment: one terminal event, no token after it, everything returned, the next owner undisturbed."""

from __future__ import annotations

import numpy as np
import pytest

from jaxoverlap.errors import EngineError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import Request
from tests.harness import Harness

PROMPT = list(range(40))


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("turns", range(12))
def test_abort_after_any_number_of_turns(lookahead, turns):
    harness = Harness(lookahead=lookahead, max_batched_tokens=16)
    request = harness.submit(PROMPT, max_tokens=8, ignore_eos=True)
    neighbour = harness.submit([1, 2, 3], max_tokens=12, ignore_eos=True)
    for _ in range(turns):
        harness.turn()
    was_done = request.finish_reason is not None
    assert harness.engine.abort(request) is not was_done
    assert harness.engine.abort(request) is False
    harness.run()
    assert request.finish_reason == (FinishReason.LENGTH if was_done else FinishReason.ABORTED)
    assert neighbour.finish_reason == FinishReason.LENGTH


def test_abort_between_the_launch_of_the_last_chunk_and_its_commit_delivers_nothing():
    """B014: nothing is delivered, nothing is cached."""
    harness = Harness(lookahead=1, max_batched_tokens=64)
    request = harness.submit(PROMPT, max_tokens=8)
    harness.turn()
    assert len(harness.engine.loop.in_flight) == 1
    harness.engine.abort(request)
    harness.run()
    assert request.output_ids == []
    assert harness.scheduler.state.memory.cache.num_pages == 0


def test_abort_while_the_last_token_is_in_flight_is_an_abort():
    harness = Harness(lookahead=1)
    request = harness.submit([1], max_tokens=2, ignore_eos=True)
    harness.turn()
    harness.turn()
    assert len(request.output_ids) == 1
    harness.engine.abort(request)
    harness.run()
    assert (request.finish_reason, len(request.output_ids)) == (FinishReason.ABORTED, 1)


def test_pages_and_row_of_an_aborted_request_come_back_only_when_no_step_names_them():
    harness = Harness(lookahead=2)
    request = harness.submit(PROMPT[:20], max_tokens=30, ignore_eos=True)
    for _ in range(4):
        harness.turn()
    row = request.row
    harness.engine.abort(request)
    assert harness.steps_in_flight(row) == 2 and harness.scheduler.state.rows.in_flight[row]
    assert harness.scheduler.state.memory.pool.num_free < harness.scheduler.state.memory.pool.num_pages
    harness.scheduler.retire()
    assert harness.scheduler.state.rows.requests[row] is request
    harness.run()
    assert request.row is None


def test_the_next_owner_of_a_row_gets_no_token_of_the_one_before():
    """B031."""
    harness = Harness(max_running=1, lookahead=2)
    rng = np.random.default_rng(0)
    for _ in range(300):
        harness.submit(rng.integers(0, 90, 5).tolist(), max_tokens=40, ignore_eos=True)
        for _ in range(int(rng.integers(0, 6))):
            harness.turn()
        harness.engine.abort(harness.requests[-1])
        request = harness.submit(rng.integers(0, 90, 3).tolist(), max_tokens=8, ignore_eos=True)
        harness.run()
        assert len(request.output_ids) == 8


def test_abort_storm_over_chunked_prompts():
    """B017."""
    harness = Harness(max_batched_tokens=16, max_model_len=600, num_pages=300, max_running=12, lookahead=1)
    requests = [harness.submit([i] * 480, max_tokens=4, ignore_eos=True) for i in range(12)]
    for victim in (0, 1, 2):
        for _ in range(3):
            harness.turn()
        harness.engine.abort(requests[victim])
    harness.run()
    assert [r.finish_reason for r in requests[3:]] == [FinishReason.LENGTH] * 9
    after = harness.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
    harness.run(max_turns=6)
    assert len(after.output_ids) == 4


def test_abort_in_the_queue_needs_no_step():
    harness = Harness(max_running=1)
    harness.submit([1], max_tokens=50, ignore_eos=True)
    queued = harness.submit([2])
    harness.turn()
    harness.engine.abort(queued)
    output = harness.turn()
    assert queued in output.finished
    harness.run()


def move_to(harness: Harness, request: Request, state: str) -> None:
    """Turns until the request is where the name says."""
    rows = harness.scheduler.state.rows
    if state == "queued":
        return
    if state == "admitted, nothing launched":
        harness.scheduler.state.take_row(request, harness.now)
        return
    harness.turn()
    if state == "prompt in flight":
        return
    while len(request.output_ids) < 3:
        harness.turn()
    if state == "decoding":
        return
    if state in ("last token in flight", "finished"):
        while request.row is not None and rows.planned_len[request.row] < request.max_len:
            harness.turn()
        if state == "finished":
            harness.run()
        return
    harness.preempt(request)
    if state == "preempted, waiting":
        harness.drain()
        assert request.row is None
    elif state == "preempted, running again":
        while request.num_preemptions == 0 or request.row is None:
            harness.turn()


@pytest.mark.parametrize("lookahead", [0, 1, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    "state",
    [
        "queued",
        "admitted, nothing launched",
        "prompt in flight",
        "decoding",
        "preempted, tokens in flight",
        "preempted, waiting",
        "preempted, running again",
        "last token in flight",
        "finished",
    ],
)
def test_abort_in_every_state_is_one_end_and_leaves_nothing_behind(state, prefix_cache, lookahead):
    """B058, B034: never an exception, a second end, or a page or row lost; and once more is of no effect."""
    harness = Harness(lookahead=lookahead, page_size=4, settings={"prefix_cache": prefix_cache})
    request = harness.submit(PROMPT[:11], max_tokens=8, ignore_eos=True)
    move_to(harness, request, state)
    outputs, finished = list(request.output_ids), request.finish_reason is not None
    assert finished == (state == "finished" or (state == "last token in flight" and lookahead == 0))
    assert harness.engine.abort(request) is not finished
    assert harness.engine.abort(request) is False
    harness.run()
    assert request.finish_reason == (FinishReason.LENGTH if finished else FinishReason.ABORTED)
    assert request.output_ids == outputs
    written = request.committed_len - 1 if outputs else 0
    assert harness.scheduler.state.memory.cache.num_pages == (written // 4 if prefix_cache else 0)
    probe = harness.submit(PROMPT[:11], max_tokens=8, ignore_eos=True)
    harness.run()
    assert probe.finish_reason == FinishReason.LENGTH


def test_two_aborts_in_the_queue_before_a_turn_are_two_ends():
    harness = Harness()
    requests = [harness.submit([i]) for i in range(3)]
    for request in (requests[1], requests[0], requests[1]):
        harness.engine.abort(request)
    output = harness.turn()
    assert list(output.finished) == [requests[1], requests[0]]
    harness.run()


@pytest.mark.parametrize("lookahead", [0, 2])
def test_abort_of_one_of_two_that_share_pages_leaves_the_other(lookahead):
    harness = Harness(lookahead=lookahead, page_size=4)
    twins = [harness.submit(PROMPT, max_tokens=12, ignore_eos=True) for _ in range(2)]
    while not twins[0].output_ids:
        harness.turn()
    harness.engine.abort(twins[0])
    harness.scheduler.flush_cache()
    harness.run()
    assert len(twins[1].output_ids) == 12


def test_a_result_that_was_launched_for_an_earlier_owner_is_dropped():
    harness = Harness(lookahead=1)
    request = harness.submit([1], max_tokens=5, ignore_eos=True)
    harness.turn()
    harness.scheduler.state.rows.generation[request.row] += 1
    plan, result = harness.engine.loop.in_flight.pop()
    output = harness.scheduler.commit(plan, result)
    assert list(output.requests) == []
    assert request.output_ids == []


def test_a_step_is_committed_once_and_in_order():
    harness = Harness(lookahead=4)
    harness.submit([1], max_tokens=9, ignore_eos=True)
    for _ in range(3):
        harness.turn()
    (first, result), (second, later) = (harness.engine.loop.in_flight.pop() for _ in range(2))
    with pytest.raises(EngineError, match="oldest"):
        harness.scheduler.commit(second, later)
    harness.scheduler.commit(first, result)
    with pytest.raises(EngineError, match="oldest"):
        harness.scheduler.commit(first, result)


def test_a_failed_request_carries_its_error():
    harness = Harness()
    request = harness.submit([1], max_tokens=9, ignore_eos=True)
    harness.scheduler.fail(request.request_id, EngineError("why"))
    output = harness.engine.step()
    assert output.finished == [request]
    assert (request.finish_reason, str(request.error)) == (FinishReason.ERROR, "why")


def test_an_engine_whose_device_fails_says_so_and_stays_down():
    harness = Harness()
    harness.submit([1])

    def broken(plan):
        raise RuntimeError("out of order")

    harness.runner.launch = broken
    with pytest.raises(EngineError, match="out of order"):
        harness.engine.step()
    with pytest.raises(EngineError, match="restarted"):
        harness.submit([1])
    with pytest.raises(EngineError, match="restarted"):
        harness.engine.step()
