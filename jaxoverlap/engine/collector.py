"""From committed tokens to outputs: what has left of each sample of a prompt, and what they come to together.

The engine decides by ids, and the text may say otherwise: a stop string ends a sample where it is found, even if the
device has ended it later in the same step by an id or a limit. What callers get, whole or in pieces, is only what the
assembler lets out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from jaxoverlap.outputs import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput, StreamDelta
from jaxoverlap.prompts import Prompt
from jaxoverlap.request import Request, RequestStatus
from jaxoverlap.text.detokenizer import prompt_end
from jaxoverlap.text.logprobs import prompt_logprobs
from jaxoverlap.text.output_assembler import OutputAssembler, Piece
from jaxoverlap.text.tokenizer import Tokenizer


class SampleCollector:
    """One sample: the engine's request, and what has left of it so far. `prompt_end`: of its prompt."""

    def __init__(self, request: Request, tokenizer: Tokenizer, prompt_end: Sequence[int]) -> None:
        self.request = request
        self.is_finished = False
        self._assembler = OutputAssembler(tokenizer, request.sampling, prompt_end)
        self._num_taken = 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []

    @property
    def has_stopped(self) -> bool:
        """A stop string has been found."""
        return self._assembler.matched_string is not None

    @property
    def cumulative_logprob(self) -> float | None:
        return self._assembler.cumulative_logprob

    def take(self) -> Piece:
        """What may leave of what has been committed since the last call. It finishes when its request has."""
        request, assembler = self.request, self._assembler
        ids, scores = request.output_ids[self._num_taken :], request.scores[self._num_taken :]
        self._num_taken += len(ids)
        if request.status == RequestStatus.FINISHED:
            self.is_finished = True
            piece = assembler.finish(ids, scores, matched_token_id=request.matched_token_id)
        else:
            piece = assembler.add(ids, scores)
        self._texts.append(piece.text)
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        return piece

    def output(self) -> CompletionOutput:
        """Of a finished sample."""
        request = self.request
        assert self.is_finished and request.finish_reason is not None and request.arrival_time is not None
        reason = FinishReason.STOP_STRING if self.has_stopped else request.finish_reason
        start = request.arrival_time
        return CompletionOutput(
            index=request.sample_index,
            text="".join(self._texts),
            token_ids=list(self._token_ids),
            finish_reason=reason,
            matched_token_id=None if self.has_stopped else request.matched_token_id,
            matched_string=self._assembler.matched_string,
            error=None if self.has_stopped else request.error,
            logprobs=None if request.sampling.logprobs is None else list(self._logprobs),
            cumulative_logprob=self.cumulative_logprob,
            preemptions=request.num_preemptions,
            queue_seconds=_since(start, request.admit_time),
            first_token_seconds=_since(start, request.first_token_time),
            total_seconds=_since(start, request.finish_time),
        )


class PromptCollector:
    """All samples of one prompt.

    Args:
      prompt: as it was given.
      requests: its samples, in order.
      streams: collect pieces as well.

    Attributes:
      deltas: pieces that nobody has taken yet, for who streams; the last of them has the output.
    """

    def __init__(self, prompt: Prompt, requests: Sequence[Request], tokenizer: Tokenizer, *, streams: bool) -> None:
        first = requests[0]
        end = prompt_end(tokenizer, first.prompt_ids, first.sampling.hides_special_tokens)
        self.samples = [SampleCollector(request, tokenizer, end) for request in requests]
        self.deltas: deque[StreamDelta] = deque()
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._streams = streams
        self._num_unfinished = len(self.samples)

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    def take(self, request: Request) -> SampleCollector:
        """Collects what is new of one of the samples."""
        sample = self.samples[request.sample_index]
        if sample.is_finished:
            return sample
        piece = sample.take()
        self._num_unfinished -= sample.is_finished
        if self._streams and (not piece.is_empty or self.is_finished):
            output = self.output() if self.is_finished else None
            self.deltas.append(
                StreamDelta(
                    index=request.sample_index,
                    text=piece.text,
                    token_ids=piece.token_ids,
                    logprobs=piece.logprobs,
                    output=output,
                )
            )
        return sample

    def output(self) -> RequestOutput:
        """When all samples are finished: all of them in order, or with `best_of` the best ones, the best first."""
        first, sampling = self.samples[0].request, self.samples[0].request.sampling
        outputs = [sample.output() for sample in self.samples]
        if sampling.is_ranked:
            outputs = sorted(outputs, key=_worst_last)[: sampling.n]
        scored = None
        if sampling.prompt_logprobs is not None and len(first.prompt_scores) == first.prompt_len - 1:
            scored = prompt_logprobs(
                self._tokenizer, first.prompt_ids.tolist(), first.prompt_scores, sampling.prompt_logprobs
            )
        return RequestOutput(
            prompt=self._prompt,
            prompt_token_ids=first.prompt_ids.tolist(),
            outputs=outputs,
            seed=first.seed,
            cached_tokens=first.cached_tokens,
            prompt_logprobs=scored,
        )


def _worst_last(output: CompletionOutput) -> tuple[bool, float]:
    """By the sum of log-probabilities; what did not end as asked comes after all that did."""
    return not output.finish_reason.as_asked, -(output.cumulative_logprob or 0.0)


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start
