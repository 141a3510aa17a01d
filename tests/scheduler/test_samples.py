"""Several samples of one prompt: it is computed once, and the others read its pages."""

from __future__ import annotations

import numpy as np
import pytest

from jaxoverlap.errors import QueueFullError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import DEFAULT_OPTIONS, RequestOptions, RequestStatus
from tests.harness import Harness

PROMPT = list(range(1, 41))


def submit(harness: Harness, prompt=PROMPT, options=DEFAULT_OPTIONS, **sampling):
    wanted = {"n": 4, "max_tokens": 5, "ignore_eos": True} | sampling
    return harness.submit_samples(prompt, options=options, **wanted)


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_the_prompt_is_computed_once(lookahead):
    harness = Harness(page_size=8, lookahead=lookahead)
    requests = submit(harness)
    harness.run()
    # Of 40 tokens 39 may come from the cache: 4 whole pages, and the last is computed by each.
    assert [request.cached_tokens for request in requests] == [0, 32, 32, 32]
    assert harness.scheduler.counters.computed_tokens == 40 + 3 * 8
    assert len({request.seed for request in requests}) == 1
    assert [request.sample_index for request in requests] == [0, 1, 2, 3]


def test_without_a_prefix_cache_nobody_waits():
    harness = Harness(settings={"prefix_cache": False}, max_batched_tokens=200)
    requests = submit(harness)
    harness.turn()
    assert all(request.status == RequestStatus.RUNNING for request in requests)
    harness.run()


def test_samples_keep_their_place_before_those_who_came_later():
    harness = Harness(page_size=8, max_running=2, max_batched_tokens=16, settings={"mixed_steps": False})
    requests = submit(harness, n=2)
    later = harness.submit([1, 2, 3], max_tokens=30, ignore_eos=True)
    last = harness.submit([1, 2, 4], max_tokens=30, ignore_eos=True)
    harness.run()
    assert requests[1].admit_time <= last.admit_time
    assert later.admit_time < requests[1].admit_time  # it was not kept from a free row


@pytest.mark.parametrize("moment", ["queued", "prefill", "decode"])
def test_a_leader_that_is_aborted_frees_its_followers(moment):
    harness = Harness(page_size=8, max_batched_tokens=16)
    requests = submit(harness)
    for _ in range({"queued": 0, "prefill": 2, "decode": 6}[moment]):
        harness.turn()
    harness.engine.abort(requests[0])
    harness.run()
    assert requests[0].finish_reason == FinishReason.ABORTED
    assert all(request.finish_reason == FinishReason.LENGTH for request in requests[1:])


def test_a_held_sample_can_be_aborted_and_its_deadline_holds():
    harness = Harness(page_size=8, max_batched_tokens=4)
    requests = submit(harness)
    assert harness.engine.abort(requests[2])
    assert not harness.engine.abort(requests[2])
    timed = submit(harness, [7] * 30, RequestOptions(timeout=0.002), n=3)
    harness.run()
    assert requests[2].finish_reason == FinishReason.ABORTED and requests[2].output_ids == []
    assert [request.finish_reason for request in timed] == [FinishReason.ERROR] * 3


def test_a_preempted_leader_still_holds_its_followers_until_its_prompt_is_there():
    harness = Harness(page_size=8, max_batched_tokens=8)
    requests = submit(harness)
    harness.turn()
    harness.turn()
    harness.preempt(requests[0])
    harness.run()
    assert requests[0].num_preemptions == 1
    assert all(request.cached_tokens == 32 for request in requests[1:])


def test_held_samples_count_as_waiting():
    harness = Harness(settings={"max_queue": 3})
    submit(harness, n=4)
    with pytest.raises(QueueFullError):
        harness.submit([1])
    harness.run()


def test_random_lives_with_samples_stops_aborts_and_preemption():
    for seed in range(60):
        rng = np.random.default_rng(seed)
        harness = Harness(
            page_size=int(rng.choice([1, 4, 16])),
            num_pages=int(rng.choice([300, 600])),
            max_running=int(rng.integers(1, 6)),
            max_batched_tokens=int(rng.choice([3, 16, 64])),
            lookahead=int(rng.integers(0, 4)),
        )
        requests = []
        for _ in range(40):
            if rng.random() < 0.3 and len(requests) < 30:
                prompt = PROMPT[: int(rng.integers(1, 41))]
                requests += submit(harness, prompt, n=int(rng.integers(1, 5)), max_tokens=int(rng.integers(1, 20)))
            if requests and rng.random() < 0.2:
                one = requests[int(rng.integers(len(requests)))]
                (harness.engine.abort if rng.random() < 0.5 else harness.engine.stop)(one)
            rows = harness.scheduler.state.rows
            running = [r for r in harness.scheduler.state.running.values() if not rows.leaving[r.row]]
            if running and rng.random() < 0.1:
                harness.preempt(running[int(rng.integers(len(running)))])
            harness.now += 0.001
            harness.turn()
        harness.run()
