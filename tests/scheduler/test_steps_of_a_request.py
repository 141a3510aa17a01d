"""What a request costs: exactly its own steps, and at most `lookahead` more where only its tokens tell the end."""

from __future__ import annotations

import numpy as np
import pytest

from jaxoverlap.outputs import FinishReason
from tests.fakes import oracle
from tests.harness import EOS_IDS, Harness

LOOKAHEADS = [0, 1, 2, 4]
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("max_tokens", [1, 2, 5, 17])
def test_a_request_that_ends_by_length_launches_no_extra_step(lookahead, max_tokens):
    """B011: the length is known ahead."""
    harness = Harness(lookahead=lookahead)
    request = harness.submit(PROMPT, max_tokens=max_tokens, ignore_eos=True)
    harness.run()
    assert len(request.output_ids) == max_tokens
    assert request.finish_reason == FinishReason.LENGTH
    assert harness.runner.num_launches == 1 + (max_tokens - 1)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_a_request_that_ends_at_the_context_limit_launches_no_extra_step(lookahead):
    harness = Harness(lookahead=lookahead, max_model_len=20)
    request = harness.submit(PROMPT, ignore_eos=True)
    harness.run()
    assert request.committed_len == 20
    assert harness.runner.num_launches == 20 - len(PROMPT)


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
@pytest.mark.parametrize("stop_after", [1, 2, 9])
def test_a_request_that_ends_by_a_token_costs_at_most_lookahead_steps_more(lookahead, stop_after):
    outputs, _ = oracle(PROMPT, 40, (), salt=1)
    stop = outputs[stop_after - 1]
    needed = outputs.index(stop) + 1
    harness = Harness(lookahead=lookahead)
    request = harness.submit(PROMPT, max_tokens=40, ignore_eos=True, stop_token_ids=[stop])
    harness.run()
    assert request.output_ids == outputs[:needed]
    assert (request.finish_reason, request.matched_token_id) == (FinishReason.STOP_TOKEN, stop)
    assert needed <= harness.runner.num_launches <= needed + lookahead


def test_max_tokens_of_one_among_others_finishes_at_its_prefill():
    """B020."""
    harness = Harness()
    requests = [harness.submit(PROMPT[: 1 + i], max_tokens=1 + i % 3, ignore_eos=True) for i in range(8)]
    harness.run()
    assert [len(request.output_ids) for request in requests] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert harness.runner.row_steps.get(requests[0].request_id) is None


@pytest.mark.parametrize("lookahead", LOOKAHEADS)
def test_many_prefill_only_requests_do_not_stop_admission(lookahead):
    """B019."""
    harness = Harness(lookahead=lookahead)
    for i in range(64):
        harness.submit([i], max_tokens=1)
    last = harness.submit(PROMPT, max_tokens=9, ignore_eos=True)
    harness.run(max_turns=200)
    assert len(last.output_ids) == 9


@pytest.mark.parametrize(
    ("prompt_len", "outputs"), [(62, 2), (63, 1)], ids=["two outputs of room", "one output of room"]
)
def test_a_prompt_just_below_the_context_gets_what_is_left(prompt_len, outputs):
    harness = Harness(max_model_len=64)
    request = harness.submit([7] * prompt_len, max_tokens=50, ignore_eos=True)
    harness.run()
    assert (len(request.output_ids), request.finish_reason) == (outputs, FinishReason.LENGTH)
    assert max(harness.runner.seq_len) < 64


def finish_table():
    outputs, _ = oracle(PROMPT, 200, (), salt=1)
    first_eos = next(i for i, token in enumerate(outputs) if token in EOS_IDS)
    return [
        ("eos", {}, first_eos + 1, FinishReason.EOS, outputs[first_eos]),
        ("eos on the last token", {"max_tokens": first_eos + 1}, first_eos + 1, FinishReason.EOS, outputs[first_eos]),
        ("length", {"max_tokens": first_eos}, first_eos, FinishReason.LENGTH, None),
        (
            "an eos id asked for as a stop id",
            {"stop_token_ids": [outputs[first_eos]], "ignore_eos": True},
            first_eos + 1,
            FinishReason.STOP_TOKEN,
            outputs[first_eos],
        ),
        ("eos ignored", {"max_tokens": first_eos + 5, "ignore_eos": True}, first_eos + 5, FinishReason.LENGTH, None),
    ]


@pytest.mark.parametrize(
    ("sampling", "length", "reason", "matched"), [c[1:] for c in finish_table()], ids=[c[0] for c in finish_table()]
)
@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_finish_reason_and_what_matched(sampling, length, reason, matched, lookahead):
    harness = Harness(lookahead=lookahead)
    request = harness.submit(PROMPT, **sampling)
    harness.run()
    assert (len(request.output_ids), request.finish_reason, request.matched_token_id) == (length, reason, matched)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("ending", ["length", "eos", "stop_token", "aborted", "length after preemption"])
def test_every_ending_returns_every_page(page_size, lookahead, ending, prefix_cache):
    """B035: there is one function that frees, whatever ended the request."""
    harness = Harness(
        page_size=page_size,
        num_pages=-(-96 // page_size),
        lookahead=lookahead,
        settings={"prefix_cache": prefix_cache},
    )
    outputs, _ = oracle(PROMPT, 60, (), salt=1)
    sampling = {
        "eos": {"max_tokens": 80},
        "stop_token": {"max_tokens": 80, "ignore_eos": True, "stop_token_ids": [outputs[12]]},
        "aborted": {"max_tokens": 80, "ignore_eos": True},
    }.get(ending, {"max_tokens": 20, "ignore_eos": True})
    request = harness.submit(PROMPT, **sampling)
    for _ in range(10):
        harness.turn()
    if ending == "aborted":
        harness.engine.abort(request)
    elif ending == "length after preemption":
        harness.preempt(request)
    harness.run()
    assert request.finish_reason == ending.split()[0]
    assert request.num_preemptions == ending.count("preemption")
    cached = (request.committed_len - 1) // page_size if prefix_cache else 0
    assert harness.scheduler.state.memory.cache.num_pages == cached


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
@pytest.mark.parametrize("prompt_len", [15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 111, 112, 113])
def test_a_prompt_in_chunks_gives_one_first_token_after_the_last_chunk(lookahead, prompt_len):
    """B016."""
    harness = Harness(max_batched_tokens=16, lookahead=lookahead)
    request = harness.submit([i % 90 for i in range(prompt_len)], max_tokens=3, ignore_eos=True)
    while not harness.delivered[request.request_id]:
        harness.turn()
    assert harness.scheduler.state.rows.planned_len[request.row] >= prompt_len
    harness.run()
    assert harness.runner.num_launches == -(-prompt_len // 16) + 2


def test_no_step_is_wasted_on_the_tail_of_a_prompt():
    harness = Harness(max_batched_tokens=64, lookahead=0)
    for first in (0, 50):
        harness.submit([(first + i) % 90 for i in range(100)], max_tokens=1)
    plans = []
    launch = harness.runner.launch
    harness.runner.launch = lambda plan: plans.append([len(c.token_ids) for c in plan.chunks]) or launch(plan)
    harness.run()
    assert plans == [[64], [36, 28], [64], [8]]


def test_long_prompts_in_chunks_do_not_disturb_first_tokens_of_others():
    """B002: a chunk in the middle publishes nothing."""
    harness = Harness(max_batched_tokens=16, max_model_len=700, num_pages=200, lookahead=2)
    for length in (640, 640, 3, 5, 7, 9, 11, 13):
        harness.submit(list(np.arange(length) % 90), max_tokens=6, ignore_eos=True)
    harness.run()


def test_decoding_rows_wait_for_a_bounded_number_of_prefill_steps():
    settings = {"mixed_steps": False, "max_prefill_streak": 4}
    harness = Harness(max_batched_tokens=16, max_model_len=700, num_pages=200, lookahead=1, settings=settings)
    decoding = harness.submit(PROMPT, max_tokens=40, ignore_eos=True)
    harness.turn()
    for first in range(3):
        harness.submit([first] * 600, max_tokens=2)
    longest = gap = 0
    while decoding.finish_reason is None:
        output = harness.turn()
        gap = 0 if decoding in output.requests else gap + 1
        longest = max(longest, gap)
    assert longest == 4
    harness.run()
