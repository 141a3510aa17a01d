"""What a caller may see of one sequence, and when: text, ids and log-probabilities that leave together.

                 detokenizer              stop strings                release
    ids ──► text that is certain ──► text that is no stop ──► Piece(text, token_ids, logprobs)
            half a character waits    what may become one waits

Rules:

* Pieces, joined, are the whole; how the ids came, one by one or all at once, changes no joined piece. There are as many
  log-probabilities as ids, if they are asked for, and usage is the number of ids.
* A token leaves with the last of its text. As long as its last character is incomplete, or the end of its text could
  still become a stop string, it waits, and those after it wait too: ids leave in order. The part of its text that is
  safe does not wait for it, so a piece may have text and no id.
* A token that adds no text (a hidden special token, an id beyond the vocabulary) leaves with the text before it.
* Stop strings are looked for in the text as it is shown. The first match (see `StopStrings`) ends the sequence: the
  text is cut before it (behind it with `include_stop_str_in_output`), the last id is the one with which the match was
  certain, and what comes after that never leaves, neither text nor ids nor log-probabilities.
* They are looked for in the whole characters of a run of byte tokens too, although a bad byte could still change these:
  if the sequence ends there, none comes.
* A stop that is a special token which is hidden matches by the token's id as well. One that is the id which ended the
  sequence matches, hidden or not.
* A match that ends in the first `min_tokens` outputs is none; one that begins there may be. A character belongs to the
  token that completes it.
* The id that ended the sequence (a stop id, or the model's end) is in the ids, and its text is not shown; with
  `include_stop_str_in_output` it is, unless it is a special token that is hidden and no stop. No other stop string is
  looked for in it.
* At the end everything that waited leaves. Half a character becomes U+FFFD, as in `Tokenizer.decode`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxoverlap.outputs import PositionLogprobs, TokenScore
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.text.detokenizer import IncrementalDetokenizer
from jaxoverlap.text.logprobs import position_logprobs
from jaxoverlap.text.stop_strings import automaton, special_stops
from jaxoverlap.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Piece:
    """New text, ids, and one `PositionLogprobs` for each id if they are asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.text and not self.token_ids


class _WaitingToken(NamedTuple):
    token_id: int
    score: TokenScore | None
    text_offset: int
    """Characters of the sequence before it."""
    text_end: int
    """It may leave when so many characters of the sequence have left."""


class OutputAssembler:
    """Makes pieces of one sequence's outputs.

    Args:
      tokenizer: the model's.
      sampling: what is asked for: stop strings, log-probabilities, special tokens.
      prompt_ids: what the outputs follow; see `IncrementalDetokenizer`.

    Raises:
      InvalidRequestError: a stop string that could never match.

    Attributes:
      matched_string: the stop that ended the sequence; from then on nothing leaves any more.
      cumulative_logprob: the sum over the ids that have left, or None without scores.
    """

    def __init__(
        self, tokenizer: Tokenizer, sampling: SamplingParams, prompt_ids: Sequence[int] | np.ndarray = ()
    ) -> None:
        self.matched_string: str | None = None
        self.cumulative_logprob: float | None = None
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special_tokens=sampling.hides_special_tokens, prompt_ids=prompt_ids
        )
        self._special_stops = special_stops(tokenizer, sampling)
        self._hidden_stops = self._special_stops if sampling.hides_special_tokens else {}
        self._stops = automaton(tuple(sampling.stop))
        self._stop_state = 0
        self._ahead, self._ahead_state = "", 0
        """The tentative text that has been looked at, and the automaton's state after it."""
        self._text = ""  # certain, but not released
        self._tokens: deque[_WaitingToken] = deque()
        self._num_taken = 0
        self._released = 0  # characters
        self._finished = False

    def add(self, ids: Sequence[int], scores: Sequence[TokenScore] = ()) -> Piece:
        """Takes the next outputs and returns what may leave.

        Args:
          ids: in order; none of them has ended the sequence.
          scores: one for each id, or none at all.

        Raises:
          ValueError: after `finish`, or ids and scores that do not match.
        """
        if self._finished:
            raise ValueError("the sequence is finished")
        if len(scores) != len(ids) and (scores or self._sampling.logprobs is not None):
            raise ValueError(f"{len(scores)} scores for {len(ids)} ids")
        for index, token_id in enumerate(ids):
            if self.matched_string is not None:
                break
            self._take(token_id, scores[index] if scores else None)
        return self._release()

    def finish(
        self, ids: Sequence[int] = (), scores: Sequence[TokenScore] = (), *, matched_token_id: int | None = None
    ) -> Piece:
        """Takes the last outputs, if any are left, and returns the rest. Even now a stop string may be found.

        Args:
          ids, scores: as for `add`.
          matched_token_id: the last of the ids, if it ended the sequence.

        Raises:
          ValueError: as `add`, or a `matched_token_id` that is not the last id.
        """
        if matched_token_id is not None and list(ids[-1:]) != [matched_token_id]:
            raise ValueError(f"matched_token_id {matched_token_id} is not the last of {list(ids)}")
        before_end = len(ids) if matched_token_id is None else len(ids) - 1
        first = self.add(ids[:before_end], scores[:before_end])
        if self.matched_string is None:
            offset = self._text_offset
            if matched_token_id is not None and self._sampling.include_stop_str_in_output:
                self._text += self._detokenizer.add((matched_token_id,)) + self._detokenizer.finish()
            else:
                self._see(self._detokenizer.finish())
            if matched_token_id is not None and self.matched_string is None:
                self.matched_string = self._special_stops.get(matched_token_id)
                if self._sampling.include_stop_str_in_output:
                    self._text += self._hidden_stops.get(matched_token_id, "")
                self._wait(matched_token_id, scores[-1] if scores else None, offset)
        self._finished = True
        rest = self._release()
        return Piece(first.text + rest.text, first.token_ids + rest.token_ids, first.logprobs + rest.logprobs)

    def _take(self, token_id: int, score: TokenScore | None) -> None:
        offset = self._text_offset
        text = self._detokenizer.add((token_id,))
        self._num_taken += 1
        stop = self._hidden_stops.get(token_id) if self._matches_count else None
        if stop is not None:
            text += self._detokenizer.finish()
        self._see(text)
        if stop is not None and self.matched_string is None:
            self.matched_string = stop
            self._text += stop if self._sampling.include_stop_str_in_output else ""
        if self._sampling.stop and self.matched_string is None:
            self._look_ahead()
        self._wait(token_id, score, offset)

    @property
    def _text_offset(self) -> int:
        """Whole characters so far; of a run of byte tokens what it says by now."""
        return self._released + len(self._text) + len(self._detokenizer.tentative)

    @property
    def _matches_count(self) -> bool:
        return self._num_taken > self._sampling.min_tokens

    def _see(self, text: str) -> None:
        """Adds text that is certain, up to the end of the first stop in it."""
        if not text:
            return
        if not self._sampling.stop:
            self._text += text
            return
        done = 0
        if self._ahead and text.startswith(self._ahead):
            done, self._stop_state = len(self._ahead), self._ahead_state
        self._ahead = ""
        read, stop = self._read(text[done:])
        self._text += text[: done + read]
        if stop is not None:
            self._end_with(stop)

    def _look_ahead(self) -> None:
        """Looks for a stop in text that is tentative; if there is one, the sequence ends and the text is certain."""
        tentative = self._detokenizer.tentative
        if not tentative:  # a bad byte has come: what was read so far is not what will be said
            self._ahead = ""
            return
        new = tentative[len(self._ahead) :]
        certain_state = self._stop_state
        if self._ahead:
            self._stop_state = self._ahead_state
        read, stop = self._read(new)
        self._ahead += new[:read]
        self._ahead_state = self._stop_state
        if stop is None:
            self._stop_state = certain_state
        else:
            self._detokenizer.finish()
            self._text += self._ahead
            self._end_with(stop)

    def _read(self, text: str) -> tuple[int, str | None]:
        """Brings the automaton on, up to the end of the first stop that counts: characters read, and that stop."""
        if not self._matches_count:
            self._stop_state = self._stops.skip(self._stop_state, text)
            return len(text), None
        self._stop_state, read, stop = self._stops.scan(self._stop_state, text)
        return read, stop

    def _end_with(self, stop: str) -> None:
        self.matched_string = stop
        if not self._sampling.include_stop_str_in_output:
            # All of it was held back, so all of it is here.
            self._text = self._text[: -len(stop)]

    def _wait(self, token_id: int, score: TokenScore | None, text_offset: int) -> None:
        text_end = self._released + len(self._text) + self._detokenizer.is_waiting
        self._tokens.append(_WaitingToken(token_id, score, text_offset, text_end))

    def _release(self) -> Piece:
        ended = self._finished or self.matched_string is not None
        size = len(self._text) - (0 if ended else self._stops.held[self._stop_state])
        text, self._text = self._text[:size], self._text[size:]
        self._released += size
        ids: list[int] = []
        logprobs: list[PositionLogprobs] = []
        while self._tokens and (ended or self._tokens[0].text_end <= self._released):
            token_id, score, text_offset, _ = self._tokens.popleft()
            ids.append(token_id)
            if score is not None:
                self.cumulative_logprob = (self.cumulative_logprob or 0.0) + score.logprob
                if self._sampling.logprobs is not None:
                    logprobs.append(position_logprobs(self._tokenizer, score, self._sampling.logprobs, text_offset))
        return Piece(text, ids, logprobs)
