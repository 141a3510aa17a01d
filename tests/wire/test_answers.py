"""Answers over the wire are what `LLM` gives, unary and streamed alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jaxoverlap.errors import EngineError
from jaxoverlap.outputs import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    StreamDelta,
    TokenLogprob,
)
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.v1 import generate_service_pb2
from jaxoverlap.wire import answers

PARAMS = SamplingParams(n=2, logprobs=1, prompt_logprobs=2)
WIRE_REASONS = [reason for reason in FinishReason if reason.as_asked]


def position(
    token_id: int, logprob: float | None = -0.5, num_top: int = 1, text_offset: int | None = None
) -> PositionLogprobs:
    top = tuple(TokenLogprob(i, -0.25 * (i + 1), i + 1, b"\xf0\x9f") for i in range(num_top))
    return PositionLogprobs(TokenLogprob(token_id, logprob, 3, b"x"), top, text_offset)


def sample(index: int, reason: FinishReason = FinishReason.LENGTH, **fields) -> CompletionOutput:
    ids = [4 + index, 5, 6]
    return CompletionOutput(
        index=index,
        text=f"né{index}",
        token_ids=ids,
        finish_reason=reason,
        logprobs=[position(i, text_offset=place) for place, i in enumerate(ids)],
        cumulative_logprob=-1.5,
        preemptions=1,
        queue_seconds=0.25,
        first_token_seconds=0.5,
        total_seconds=2.0,
        **fields,
    )


OUTPUT = RequestOutput(
    prompt=[8, 9],
    prompt_token_ids=[8, 9],
    outputs=[sample(0), sample(1, FinishReason.STOP_STRING, matched_string="é")],
    seed=2**64 - 1,
    cached_tokens=1,
    prompt_logprobs=[position(8, None, num_top=0), position(9, num_top=2)],
    request_id="r-1",
)


def events(output: RequestOutput):
    """A stream of an answer, a token at a time, its samples in turn."""
    yield answers.started(
        request_id=output.request_id,
        prompt_tokens=output.prompt_tokens,
        cached_tokens=output.cached_tokens,
        seed=output.seed,
        prompt_logprobs=output.prompt_logprobs,
    )
    for place in range(3):
        for one in output.outputs:
            scores = one.logprobs[place : place + 1] if one.logprobs else []
            yield answers.delta(one.index, one.text[place : place + 1], one.token_ids[place : place + 1], scores)
    for one in output.outputs:
        yield answers.finished(one, prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens)


def read(some) -> StreamDelta:
    reader = answers.StreamReader([8, 9], PARAMS)
    for event in some:
        reader.take(event)
    return reader.finish()


def test_a_unary_answer_comes_back():
    message = generate_service_pb2.GenerateResponse.FromString(answers.response(OUTPUT).SerializeToString())
    assert answers.request_output(message, [8, 9], PARAMS) == OUTPUT


def test_a_streamed_answer_comes_back():
    reader = answers.StreamReader([8, 9], PARAMS)
    pieces = [piece for event in events(OUTPUT) if (piece := reader.take(event)) is not None]
    assert [piece.index for piece in pieces] == [0, 1] * 3 and not any(piece.output for piece in pieces)
    last = reader.finish()
    assert last.output == OUTPUT and (last.text, last.token_ids) == ("", [])
    for one in OUTPUT.outputs:
        mine = [piece for piece in pieces if piece.index == one.index]
        assert "".join(piece.text for piece in mine) == one.text
        assert [i for piece in mine for i in piece.token_ids] == one.token_ids
        assert [score for piece in mine for score in piece.logprobs] == one.logprobs


@pytest.mark.parametrize("total", [None, -1.5, 0.0])
def test_the_sum_of_log_probabilities_does_not_depend_on_them(total):
    """`best_of` ranks by it, whether they are asked for or not."""
    ranked = SamplingParams(n=2, best_of=2)
    bare = [replace(one, logprobs=None, cumulative_logprob=total) for one in OUTPUT.outputs]
    output = replace(OUTPUT, outputs=bare, prompt_logprobs=None)
    assert answers.request_output(answers.response(output), [8, 9], ranked) == output
    reader = answers.StreamReader([8, 9], ranked)
    for event in events(output):
        reader.take(event)
    assert reader.finish().output == output


def test_a_stream_s_samples_are_ranked_in_the_end():
    worst_first = replace(OUTPUT, outputs=[replace(OUTPUT.outputs[0], cumulative_logprob=-9.0), OUTPUT.outputs[1]])
    reader = answers.StreamReader([8, 9], replace(PARAMS, best_of=2))
    for event in events(worst_first):
        reader.take(event)
    last = reader.finish()
    assert [one.index for one in last.output.outputs] == [1, 0] and last.index == 1


@pytest.mark.parametrize("reason", WIRE_REASONS)
def test_every_finish_reason_comes_back(reason):
    matched = {"matched_token_id": 0} if reason in ("eos", "stop_token") else {}
    output = replace(OUTPUT, outputs=[sample(0, reason, **matched)])
    again = answers.request_output(answers.response(output), [8, 9], PARAMS)
    assert again.outputs == output.outputs
    assert again.matched_token_id == (0 if matched else None) and again.matched_string is None


@pytest.mark.parametrize("reason", [FinishReason.ABORTED, FinishReason.ERROR])
def test_a_failure_is_no_answer(reason):
    with pytest.raises(ValueError, match="FINISH_REASON"):
        answers.response(replace(OUTPUT, outputs=[sample(0, reason)]))


def test_only_what_was_asked_for_is_there():
    message = answers.response(OUTPUT)
    bare = answers.request_output(message, [8, 9], SamplingParams(n=2))
    assert bare.logprobs is None and bare.prompt_logprobs is None
    fewer = answers.request_output(message, [8, 9], SamplingParams(n=2, logprobs=0, prompt_logprobs=1))
    assert fewer.logprobs[0].top == () and len(fewer.prompt_logprobs[1].top) == 1


def test_prompt_ids_are_there_where_they_are_known():
    message = answers.response(OUTPUT)
    unknown = answers.request_output(message, "text", SamplingParams(n=2))
    assert (unknown.prompt_token_ids, unknown.prompt_tokens, unknown.prompt) == ([], 2, "text")
    assert answers.request_output(message, "text", PARAMS).prompt_token_ids == [8, 9]
    chat = ChatPrompt(messages=[{"role": "user", "content": "x"}])
    assert answers.request_output(message, chat, SamplingParams(n=2)).prompt is chat


@pytest.mark.parametrize("missing", [0, 7, 8])
def test_a_stream_that_lacks_an_event_is_not_finished(missing):
    some = list(events(OUTPUT))
    del some[missing]
    with pytest.raises(EngineError):
        read(some)


def test_a_stream_out_of_order_is_an_error():
    some = list(events(OUTPUT))
    unknown = answers.delta(2, "x", [1])
    for wrong in ([some[0]] * 2, [some[0], unknown], [*some, some[1]], [some[0], type(some[0])()]):
        with pytest.raises(EngineError, match="nobody expects"):
            read(wrong)


def test_a_reason_of_a_later_version_is_an_error():
    message = answers.response(OUTPUT)
    message.sequences[0].finish_reason = 99
    with pytest.raises(EngineError, match="99"):
        answers.request_output(message, [8, 9], PARAMS)
    with pytest.raises(EngineError, match="no sequence"):
        answers.request_output(generate_service_pb2.GenerateResponse(), [8, 9], PARAMS)
