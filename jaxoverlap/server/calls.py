"""Calls that wait for the engine, from the first token to the last.

A `Call` makes pieces of what the engine says as soon as it comes, so that a stop string is noticed however slowly its
reader takes them. Pieces that nobody has taken yet are joined: a reader that is behind gets fewer and larger ones, up
to a bound. `fail` ends a call from the outside, whatever it is doing; the first failure counts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxoverlap.engine.messages import score_from_wire
from jaxoverlap.errors import JaxOverlapError
from jaxoverlap.outputs import CompletionOutput, FinishReason, PositionLogprobs, TokenScore
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.server.statuses import SlowReaderError
from jaxoverlap.text.detokenizer import prompt_end
from jaxoverlap.text.logprobs import prompt_logprobs
from jaxoverlap.text.output_assembler import OutputAssembler, Piece
from jaxoverlap.text.tokenizer import Tokenizer

_ID_BYTES, _LOGPROB_BYTES = 4, 24
"""About what they take on their way, for the bound."""


@dataclass(frozen=True, kw_only=True)
class CallStart:
    """What is known of a call when its first token is there.

    Attributes:
      prompt_scores: as they came over the socket.
    """

    cached_tokens: int
    seed: int
    prompt_scores: Sequence[Any]


class Pending:
    """Pieces that nobody has taken yet."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []

    def add(self, piece: Piece) -> None:
        self._texts.append(piece.text)
        self._token_ids += piece.token_ids
        self._logprobs += piece.logprobs
        self.num_bytes += len(piece.text.encode()) + _ID_BYTES * len(piece.token_ids)
        self.num_bytes += sum(_LOGPROB_BYTES * (1 + len(position.top)) for position in piece.logprobs)

    def take(self) -> Piece:
        piece = Piece("".join(self._texts), self._token_ids, self._logprobs)
        self.__init__()  # type: ignore[misc]
        return piece


class Sample:
    """One sequence of a call.

    Attributes:
      key: its name between front end and engine.
      pending: for its reader.
      num_ids: released so far.
      admit_time, first_token_time: seconds of the system's monotonic clock, known with the first token.
      finish_reason: set at its end.
    """

    def __init__(
        self,
        index: int,
        key: int,
        tokenizer: Tokenizer,
        sampling: SamplingParams,
        prompt_end: Sequence[int],
        arrival: float,
    ) -> None:
        self.index, self.key = index, key
        self.pending = Pending()
        self.num_ids = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self._matched_token_id: int | None = None
        self._arrival = arrival
        self._assembler = OutputAssembler(tokenizer, sampling, prompt_end)
        self.admit_time: float | None = None
        self.first_token_time: float | None = None
        self._finish_time: float | None = None

    def start(self, admit_time: float | None, first_token_time: float | None) -> None:
        self.admit_time, self.first_token_time = admit_time, first_token_time

    def add(self, ids: Sequence[int], scores: Sequence[TokenScore]) -> None:
        """Takes outputs; a stop string among them finishes it."""
        self._keep(self._assembler.add(ids, scores))
        if self._assembler.matched_string is not None:
            self._end(FinishReason.STOP_STRING, None, time.monotonic())

    def finish(
        self,
        ids: Sequence[int],
        scores: Sequence[TokenScore],
        reason: FinishReason,
        matched_token_id: int | None,
        finish_time: float,
    ) -> None:
        """Takes the last outputs."""
        self._keep(self._assembler.finish(ids, scores, matched_token_id=matched_token_id))
        if self._assembler.matched_string is not None:
            reason, matched_token_id = FinishReason.STOP_STRING, None
        self._end(reason, matched_token_id, finish_time)

    def completion(self, whole: Piece | None) -> CompletionOutput:
        """The finished sequence: with all of its text and ids, or for the end of a stream without."""
        assert self.finish_reason is not None
        return CompletionOutput(
            index=self.index,
            text="" if whole is None else whole.text,
            token_ids=[] if whole is None else whole.token_ids,
            finish_reason=self.finish_reason,
            matched_token_id=self._matched_token_id,
            matched_string=self._assembler.matched_string,
            logprobs=None if whole is None else whole.logprobs,
            cumulative_logprob=self._assembler.cumulative_logprob,
            preemptions=self.num_preemptions,
            queue_seconds=self._since_arrival(self.admit_time),
            first_token_seconds=self._since_arrival(self.first_token_time),
            total_seconds=self._since_arrival(self._finish_time),
        )

    def _keep(self, piece: Piece) -> None:
        self.num_ids += len(piece.token_ids)
        if not piece.is_empty:
            self.pending.add(piece)

    def _end(self, reason: FinishReason, matched_token_id: int | None, finish_time: float) -> None:
        self.finish_reason, self._matched_token_id, self._finish_time = reason, matched_token_id, finish_time

    def _since_arrival(self, moment: float | None) -> float | None:
        return None if moment is None else moment - self._arrival


class Call:
    """One request on its way.

    Args:
      request_id: for callers, operators and the log.
      keys: of its samples, one after the other.
      arrival: seconds of the system's monotonic clock.
      prompt_ids: int32.
      max_pending: bytes that may wait for its reader; None is no bound, for a call that is read at the end.

    Attributes:
      started: set with its first token.
      error: what ended it early.
      queued_time: when it was handed to the engine, on the clock of `arrival`.
      writing_since: when the message was handed over that its reader has not taken yet.
    """

    def __init__(
        self,
        request_id: str,
        keys: range,
        prompt_ids: np.ndarray,
        sampling: SamplingParams,
        tokenizer: Tokenizer,
        *,
        arrival: float,
        max_pending: int | None,
    ) -> None:
        self.request_id = request_id
        self.prompt_ids = prompt_ids
        self.arrival = arrival
        self.queued_time: float | None = None
        self.sampling = sampling
        end = prompt_end(tokenizer, prompt_ids, sampling.hides_special_tokens)
        self.samples = [
            Sample(index, key, tokenizer, sampling, end, arrival) for index, key in enumerate(keys)
        ]  # raises for a stop string that could never match
        self.started: CallStart | None = None
        self.error: JaxOverlapError | None = None
        self.max_pending = max_pending
        self._tokenizer = tokenizer
        self._news = asyncio.Event()
        self.writing_since: float | None = None
        self._writer: asyncio.Task[Any] | None = None
        self._late_write: float | None = None
        """The write behind which too much was pending at the last look, by when it began."""

    @property
    def is_finished(self) -> bool:
        return all(sample.finish_reason is not None for sample in self.samples)

    @property
    def pending_bytes(self) -> int:
        return sum(sample.pending.num_bytes for sample in self.samples)

    def start(self, cached_tokens: int, seed: int, prompt_scores: Sequence[Any]) -> None:
        self.started = CallStart(cached_tokens=cached_tokens, seed=seed, prompt_scores=prompt_scores)

    def prompt_logprobs(self) -> list[PositionLogprobs] | None:
        """Of a call that has started. Takes time for a long prompt: not for an event loop."""
        num_top = self.sampling.prompt_logprobs
        if num_top is None:
            return None
        assert self.started is not None
        scores = [score_from_wire(score) for score in self.started.prompt_scores]
        return prompt_logprobs(self._tokenizer, self.prompt_ids.tolist(), scores, num_top)

    def judge_reader(self, seconds: float) -> None:
        """Ends the call if its reader is to blame: for a message that has been on its way for longer than `seconds`,
        or for more than `max_pending` bytes behind one.

        To be called from time to time. What waits because this process is late is not held against the reader: only a
        message that is still on its way a look later.
        """
        late, self._late_write = self._late_write, None
        if self.writing_since is None:
            return
        waited = time.monotonic() - self.writing_since
        if waited > seconds:
            self.fail(SlowReaderError(f"the stream's reader took nothing for {waited:.0f} s"))
        elif self.max_pending is not None and self.pending_bytes > self.max_pending:
            if late == self.writing_since:
                self.fail(SlowReaderError(f"the stream's reader is {self.pending_bytes} bytes behind"))
            self._late_write = self.writing_since

    def wake(self) -> None:
        """Something has changed."""
        self._news.set()

    async def changed(self) -> None:
        """Returns when something has changed since the last time.

        Raises:
          JaxOverlapError: the call has failed.
        """
        if self.error is None:
            await self._news.wait()
        self._news.clear()
        if self.error is not None:
            raise self.error

    def fail(self, error: JaxOverlapError) -> None:
        """Ends it, also if it is waiting for its reader."""
        if self.error is not None or (self.is_finished and self._writer is None):
            return
        self.error = error
        self._news.set()
        if self._writer is not None:
            self._writer.cancel()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A block in which the current task waits for the reader; `fail` cancels the task there."""
        self._writer, self.writing_since = asyncio.current_task(), time.monotonic()
        try:
            yield
        finally:
            self._writer, self.writing_since = None, None
