"""Answers as messages, and messages as answers.

A stream is `started`, deltas, and `finished` once for each sequence; `StreamReader` makes of it what `LLM.stream`
yields.
A failure is no part of an answer: it is the call's status, see `statuses`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxoverlap.errors import EngineError
from jaxoverlap.outputs import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    StreamDelta,
    TokenLogprob,
)
from jaxoverlap.prompts import ChatPrompt, Prompt, is_chat
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.v1 import common_pb2, generate_service_pb2

_PREFIX = "FINISH_REASON_"

# ---------------------------------------------------------------- to messages


def response(output: RequestOutput) -> generate_service_pb2.GenerateResponse:
    """The answer to a unary call; all its samples ended as asked."""
    return generate_service_pb2.GenerateResponse(
        request_id=output.request_id,
        sequences=[_sequence(output, sample) for sample in output.outputs],
        prompt_logprobs=map(position_message, output.prompt_logprobs or ()),
        seed=output.seed,
    )


def started(
    *,
    request_id: str,
    prompt_tokens: int,
    cached_tokens: int,
    seed: int,
    prompt_logprobs: Sequence[PositionLogprobs] | None = None,
) -> generate_service_pb2.GenerateStreamResponse:
    """The first event of a stream."""
    event = generate_service_pb2.Started(
        request_id=request_id,
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached_tokens,
        seed=seed,
        prompt_logprobs=map(position_message, prompt_logprobs or ()),
    )
    return generate_service_pb2.GenerateStreamResponse(started=event)


def delta(
    index: int, text: str, token_ids: Sequence[int], logprobs: Sequence[PositionLogprobs] = ()
) -> generate_service_pb2.GenerateStreamResponse:
    """New text and ids of one sequence."""
    event = generate_service_pb2.Delta(
        index=index, text=text, token_ids=token_ids, logprobs=map(position_message, logprobs)
    )
    return generate_service_pb2.GenerateStreamResponse(delta=event)


def finished(
    sample: CompletionOutput, *, prompt_tokens: int, cached_tokens: int
) -> generate_service_pb2.GenerateStreamResponse:
    """The end of one sequence, which ended as asked."""
    event = generate_service_pb2.Finished(
        index=sample.index,
        finish_reason=_reason_value(sample.finish_reason),
        matched_token_id=sample.matched_token_id,
        matched_string=sample.matched_string,
        usage=_usage(sample, prompt_tokens, cached_tokens),
        timings=_timings(sample),
        cumulative_logprob=sample.cumulative_logprob,
    )
    return generate_service_pb2.GenerateStreamResponse(finished=event)


def position_message(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=_token_message(position.chosen),
        top=[_token_message(token) for token in position.top],
        text_offset=position.text_offset,
    )


def _sequence(output: RequestOutput, sample: CompletionOutput) -> generate_service_pb2.Sequence:
    return generate_service_pb2.Sequence(
        index=sample.index,
        text=sample.text,
        token_ids=sample.token_ids,
        logprobs=map(position_message, sample.logprobs or ()),
        finish_reason=_reason_value(sample.finish_reason),
        matched_token_id=sample.matched_token_id,
        matched_string=sample.matched_string,
        usage=_usage(sample, output.prompt_tokens, output.cached_tokens),
        timings=_timings(sample),
        cumulative_logprob=sample.cumulative_logprob,
    )


def _reason_value(reason: FinishReason) -> common_pb2.FinishReason:
    """Raises ValueError for what is no finish reason on the wire: aborted, error."""
    return common_pb2.FinishReason.Value(_PREFIX + reason.name)


def _usage(sample: CompletionOutput, prompt_tokens: int, cached_tokens: int) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=prompt_tokens,
        cached_prompt_tokens=cached_tokens,
        completion_tokens=len(sample.token_ids),
    )


def _timings(sample: CompletionOutput) -> common_pb2.Timings:
    return common_pb2.Timings(
        queue_seconds=sample.queue_seconds,
        first_token_seconds=sample.first_token_seconds,
        total_seconds=sample.total_seconds,
        preemptions=sample.preemptions,
    )


def _token_message(token: TokenLogprob) -> common_pb2.TokenLogprob:
    return common_pb2.TokenLogprob(
        token_id=token.token_id, logprob=token.logprob, rank=token.rank, token_bytes=token.token_bytes
    )


# ---------------------------------------------------------------- from messages


def request_output(
    message: generate_service_pb2.GenerateResponse, prompt: Prompt, params: SamplingParams
) -> RequestOutput:
    """The answer to a unary call for `prompt` and `params`.

    Raises:
      EngineError: a sequence ended for a reason that this version does not know, or there is none.
    """
    samples = [
        _completion(
            sequence,
            text=sequence.text,
            token_ids=list(sequence.token_ids),
            logprobs=_positions(sequence.logprobs, params.logprobs),
        )
        for sequence in message.sequences
    ]
    if not samples:
        raise EngineError("the service answered with no sequence")
    usage = message.sequences[0].usage
    return _output(
        prompt,
        samples,
        request_id=message.request_id,
        seed=message.seed,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_prompt_tokens,
        prompt_logprobs=_positions(message.prompt_logprobs, params.prompt_logprobs),
    )


@dataclass
class _Sample:
    """What has come of one sequence."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    output: CompletionOutput | None = None


class StreamReader:
    """Takes the events of one stream and gives the pieces of the answer.

    Args:
      prompt, params: what was asked.
    """

    def __init__(self, prompt: Prompt, params: SamplingParams) -> None:
        self._prompt, self._params = prompt, params
        self._started: generate_service_pb2.Started | None = None
        self._samples = [_Sample() for _ in range(params.n)]

    def take(self, event: generate_service_pb2.GenerateStreamResponse) -> StreamDelta | None:
        """The piece that an event brings, if any.

        Raises:
          EngineError: events in an order that makes no sense, or of a kind that this version does not know.
        """
        kind = event.WhichOneof("event")
        if kind == "started" and self._started is None:
            self._started = event.started
            return None
        if kind == "delta" and (sample := self._unfinished(event.delta.index)):
            return self._add(sample, event.delta)
        if kind == "finished" and (sample := self._unfinished(event.finished.index)):
            sample.output = _completion(
                event.finished,
                text="".join(sample.texts),
                token_ids=sample.token_ids,
                logprobs=None if self._params.logprobs is None else sample.logprobs,
            )
            return None
        raise EngineError(f"the service sent an event that nobody expects there: {kind}")

    def finish(self) -> StreamDelta:
        """The last piece, which brings the whole; to be called when the stream's status was OK.

        Raises:
          EngineError: the stream ended too early.
        """
        outputs = [sample.output for sample in self._samples if sample.output is not None]
        last = outputs[-1:]
        if self._params.is_ranked:
            outputs.sort(key=lambda one: -(one.cumulative_logprob or 0.0))
        if self._started is None or len(outputs) < len(self._samples):
            raise EngineError("the service ended the stream before the answer was finished")
        output = _output(
            self._prompt,
            outputs,
            request_id=self._started.request_id,
            seed=self._started.seed,
            prompt_tokens=self._started.prompt_tokens,
            cached_tokens=self._started.cached_prompt_tokens,
            prompt_logprobs=_positions(self._started.prompt_logprobs, self._params.prompt_logprobs),
        )
        return StreamDelta(index=last[0].index, text="", token_ids=[], output=output)

    def _unfinished(self, index: int) -> _Sample | None:
        if self._started is None or index >= len(self._samples) or self._samples[index].output is not None:
            return None
        return self._samples[index]

    def _add(self, sample: _Sample, message: generate_service_pb2.Delta) -> StreamDelta:
        token_ids, logprobs = list(message.token_ids), _positions(message.logprobs, self._params.logprobs) or []
        sample.texts.append(message.text)
        sample.token_ids += token_ids
        sample.logprobs += logprobs
        return StreamDelta(index=message.index, text=message.text, token_ids=token_ids, logprobs=logprobs)


def _completion(
    message: generate_service_pb2.Sequence | generate_service_pb2.Finished,
    *,
    text: str,
    token_ids: list[int],
    logprobs: list[PositionLogprobs] | None,
) -> CompletionOutput:
    matched = message.WhichOneof("matched")
    timings = message.timings
    return CompletionOutput(
        index=message.index,
        text=text,
        token_ids=token_ids,
        finish_reason=_reason(message.finish_reason),
        matched_token_id=message.matched_token_id if matched == "matched_token_id" else None,
        matched_string=message.matched_string if matched == "matched_string" else None,
        logprobs=logprobs,
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
        preemptions=timings.preemptions,
        queue_seconds=timings.queue_seconds,
        first_token_seconds=timings.first_token_seconds,
        total_seconds=timings.total_seconds,
    )


def _output(
    prompt: Prompt,
    samples: list[CompletionOutput],
    *,
    request_id: str,
    seed: int,
    prompt_tokens: int,
    cached_tokens: int,
    prompt_logprobs: list[PositionLogprobs] | None,
) -> RequestOutput:
    is_ids = not isinstance(prompt, str | ChatPrompt) and not is_chat(prompt)
    ids: list[int] = np.asarray(prompt).tolist() if is_ids else []
    if prompt_logprobs is not None:
        ids = [position.chosen.token_id for position in prompt_logprobs]
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=ids,
        outputs=samples,
        seed=seed,
        cached_tokens=cached_tokens,
        prompt_logprobs=prompt_logprobs,
        prompt_tokens=prompt_tokens,
        request_id=request_id,
    )


def _reason(value: int) -> FinishReason:
    try:
        return FinishReason(common_pb2.FinishReason.Name(value).removeprefix(_PREFIX).lower())
    except ValueError:
        raise EngineError(f"the service gave a finish reason that this version does not know: {value}") from None


def _positions(messages: Sequence[common_pb2.PositionLogprobs], num_top: int | None) -> list[PositionLogprobs] | None:
    """Of each position at most `num_top` alternatives; None if log-probabilities were not asked for."""
    if num_top is None:
        return None
    return [
        PositionLogprobs(
            _token(one.chosen),
            tuple(_token(token) for token in one.top[:num_top]),
            one.text_offset if one.HasField("text_offset") else None,
        )
        for one in messages
    ]


def _token(message: common_pb2.TokenLogprob) -> TokenLogprob:
    logprob = message.logprob if message.HasField("logprob") else None
    return TokenLogprob(message.token_id, logprob, message.rank, message.token_bytes)
