"""The door and the queue: an accepted request finishes, everything else is refused at once, with the reason."""

from __future__ import annotations

import numpy as np
import pytest

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import MAX_STOP_IDS
from tests.fakes import VOCAB_SIZE
from tests.harness import Harness


def test_accepted_means_it_finishes_for_every_length_and_limit():
    """B023: the door and the admission count alike."""
    for max_tokens in (1, 2, 15, 16, 17, 64, 128):
        for prompt_len in range(1, 141):
            harness = Harness(num_pages=8, max_model_len=512, max_batched_tokens=64, check_every=None)
            fits = prompt_len + max_tokens - 1 <= 128
            try:
                request = harness.submit([1] * prompt_len, max_tokens=max_tokens, ignore_eos=True)
            except InvalidRequestError:
                assert not fits
                continue
            assert fits
            harness.run(max_turns=200)
            assert request.finish_reason == FinishReason.LENGTH


def test_a_prompt_that_can_never_fit_the_pool_is_refused_and_blocks_nobody():
    """B022."""
    harness = Harness(num_pages=8, max_model_len=512)
    with pytest.raises(InvalidRequestError, match=r"prompt: '200 prompt tokens.*whole pool has 8"):
        harness.submit([1] * 200)
    request = harness.submit([1, 2, 3], max_tokens=4, ignore_eos=True)
    harness.run(max_turns=20)
    assert len(request.output_ids) == 4


def test_unset_max_tokens_takes_the_room_there_is_in_context_and_pool():
    assert Harness(num_pages=4, max_model_len=512).submit([1] * 10).max_tokens == 64 - 10 + 1
    assert Harness(num_pages=64, max_model_len=32).submit([1] * 10).max_tokens == 22


def test_accepted_requests_never_end_by_shortage_at_a_nearly_full_pool():
    """B056."""
    harness = Harness(num_pages=20, max_running=16)
    rng = np.random.default_rng(3)
    requests = [
        harness.submit(rng.integers(0, 90, 30).tolist(), max_tokens=int(rng.integers(50, 100)), ignore_eos=True)
        for _ in range(20)
    ]
    harness.run()
    assert {request.finish_reason for request in requests} == {FinishReason.LENGTH}


def test_rows_that_cross_a_page_boundary_in_one_step_have_their_promised_pages():
    harness = Harness(num_pages=18, max_running=6, max_batched_tokens=96)
    for i in range(6):
        harness.submit([i] * 16, max_tokens=33, ignore_eos=True)
    harness.run()
    assert harness.scheduler.counters.preemptions == 0


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("lookahead", [0, 2])
def test_promised_pages_are_exactly_what_a_request_of_full_length_takes(page_size, lookahead):
    """B040: the forecast in pages counts KV positions, and the last token has none."""
    settings = {"headroom": 1000, "prefix_cache": False}
    for prompt_len in (*range(1, 40), 63, 64, 65):
        harness = Harness(page_size=page_size, num_pages=300, lookahead=lookahead, check_every=None, settings=settings)
        request = harness.submit([1] * prompt_len, max_tokens=34, ignore_eos=True)
        memory, freed = harness.scheduler.state.memory, []
        harness.turn()
        promised = int(memory.promised[request.row])
        free = memory.pool.free
        memory.pool.free = lambda pages, free=free, freed=freed: freed.append(len(pages)) or free(pages)
        harness.run()
        limits = harness.scheduler.config.limits
        assert freed == [promised] == [limits.pages_for(prompt_len, request.max_tokens)]
        assert promised == -(-(prompt_len + 33) // page_size)


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([], "prompt"),
        ([-1], r"prompt\[0\]"),
        ([0, VOCAB_SIZE], r"prompt\[1\]"),
        ([2**31 - 1], r"prompt\[0\]"),
        ([2**70], "prompt"),
        ([1.5], "prompt"),
        ([True, False], "prompt"),
        ([[1, 2]], "prompt"),
        ("text", "prompt"),
        (None, "prompt"),
        ([1] * 256, "prompt"),
        ([1] * 257, "prompt"),
    ],
)
def test_a_bad_prompt_is_refused_and_nothing_else_is_disturbed(prompt, field):
    harness = Harness()
    good = harness.submit([1, 2], max_tokens=5, ignore_eos=True)
    with pytest.raises(InvalidRequestError, match=field):
        harness.submit(prompt)
    assert harness.submit([0, VOCAB_SIZE - 1], max_tokens=1).max_tokens == 1
    harness.run()
    assert len(good.output_ids) == 5


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, 2**31 - 1])
def test_stop_ids_outside_the_vocabulary_are_refused(token_id):
    with pytest.raises(InvalidRequestError, match=r"stop_token_ids\[0\]"):
        Harness().submit([1], stop_token_ids=[token_id])


def test_more_stop_ids_than_the_device_watches_are_refused():
    harness = Harness()
    harness.submit([1], stop_token_ids=list(range(50, 50 + MAX_STOP_IDS)), ignore_eos=True, max_tokens=2)
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_STOP_IDS}"):
        harness.submit([1], stop_token_ids=list(range(50, 50 + MAX_STOP_IDS)))
    harness.run()


def test_first_come_first_served_even_when_a_later_one_would_fit():
    harness = Harness(num_pages=8, max_running=8)
    first = harness.submit([1] * 10, max_tokens=90, ignore_eos=True)
    large = harness.submit([1] * 10, max_tokens=100, ignore_eos=True)
    small = harness.submit([1], max_tokens=1)
    for _ in range(5):
        harness.turn()
    assert first.row is not None
    assert large.row is None
    assert small.admit_time is None
    harness.run()
    assert first.admit_time < large.admit_time <= small.admit_time
