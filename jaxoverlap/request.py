"""What a caller asks for, and how far the engine has come with it.

A request goes ``waiting → running → finished`` and never back, except that a preempted one returns to
waiting. It is finished exactly once, with one `FinishReason`; after that nothing in it changes.

Lengths of a request, in tokens:

    |<------------ prompt ------------>|<---- outputs (committed) ---->|
    |<--------------------- committed_len ---------------------------->|

The key/value pairs of its very last token are never written: nothing is computed after it. So a request
with a prompt of L tokens that may produce m outputs needs KV room for ``L + m - 1`` positions.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from jaxoverlap.errors import InvalidRequestError, JaxOverlapError, UnsupportedError

MAX_STOP_IDS = 16
"""Stop ids (EOS ids included) the device watches for in one row; fixed because it is part of a compiled shape."""

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy (as in vLLM); dividing by it would overflow."""


class FinishReason(enum.StrEnum):
    """Why a request ended. The first three ended as asked."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    ABORTED = "aborted"
    ERROR = "error"

    @property
    def as_asked(self) -> bool:
        return self in (FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH)


class RequestStatus(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


def _check_real(name: str, value: Any, low: float, high: float, allowed: str, *, low_open: bool = False) -> None:
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    try:
        good = good and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        good = False
    if not good or not low <= value <= high or (low_open and value == low):
        raise InvalidRequestError(name, value, f"use {allowed}")


def _check_int(name: str, value: Any, low: int, high: int, allowed: str) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(name, value, f"use {allowed}")


_KNOWN_ELSEWHERE = frozenset(
    """
    n best_of min_tokens stop include_stop_str_in_output logprobs prompt_logprobs top_logprobs logit_bias
    repetition_penalty presence_penalty frequency_penalty response_format tools tool_choice bad_words allowed_token_ids
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop. Names and defaults are vLLM's.

    Attributes:
      temperature: ≥ 0. 0 (anything below 1e-5) is greedy: the highest logit, the lowest id among equals.
      top_k: keep the k highest logits (and those equal to the k-th); 0 or -1 keeps all.
      top_p: in (0, 1]. Keep the smallest set of most probable tokens whose probability reaches ``top_p``
        (Holtzman et al., 2020), taken after ``top_k``.
      min_p: in [0, 1]. Drop tokens less probable than ``min_p`` times the most probable one (Nguyen et al., 2024).
      seed: 0 … 2**64 - 1. The same seed, prompt and parameters give the same tokens, whatever else runs.
        None draws one; the outputs say which.
      max_tokens: ≥ 1, outputs at most; None fills the context. The context's end is a limit in any case.
      stop_token_ids: ids that end the request; they count as output but are left out of the text.
      ignore_eos: go on through the model's own end-of-sequence ids; ``stop_token_ids`` still stop.
      skip_special_tokens: leave special tokens out of the text.

    Raises:
      InvalidRequestError: a value of the wrong type or out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature, 0.0, math.inf, "a finite number ≥ 0")
        _check_real("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]", low_open=True)
        _check_real("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        _check_int("top_k", self.top_k, -1, 2**31 - 1, "-1 or 0 (off) or an integer from 1 to 2**31 - 1")
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1, "an integer from 0 to 2**64 - 1, or leave it out")
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, "an integer from 1 to 2**31 - 1, or leave it out")
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(name, getattr(self, name), "use true or false")
        ids = self.stop_token_ids
        if isinstance(ids, str) or not isinstance(ids, Sequence | np.ndarray | set | frozenset):
            raise InvalidRequestError("stop_token_ids", ids, "use a list of token ids")
        for index, token_id in enumerate(ids):
            _check_int(f"stop_token_ids[{index}]", token_id, 0, 2**31 - 1, "a token id: an integer from 0 to 2**31 - 1")
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(int(i) for i in ids)))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @classmethod
    def from_dict(cls, values: dict[str, Any], **defaults: Any) -> SamplingParams:
        """From decoded JSON.

        Raises:
          UnsupportedError: a field that engines like this one have, but not this build.
          InvalidRequestError: an unknown field, or a bad value. A null means "not given".
        """
        names = [f.name for f in fields(cls)]
        for name, value in values.items():
            if name in names:
                continue
            if name in _KNOWN_ELSEWHERE:
                raise UnsupportedError(f"{name} is not supported in this build; supported are {', '.join(names)}")
            raise InvalidRequestError(name, value, f"no such field; known are {', '.join(names)}")
        return cls(**(defaults | {name: value for name, value in values.items() if value is not None}))


@dataclass(frozen=True, kw_only=True)
class RequestOptions:
    """How the engine is to treat a request; nothing of it changes the tokens.

    Attributes:
      priority: the lowest value is served first, and preempted last; among equals, who came first. As in vLLM.
      timeout: seconds from the request's arrival after which it is ended with `DeadlineError`, be it waiting or
        running. None is never.
      cache_salt: a non-empty text. Cached prefixes are shared only among requests of the same salt (or of none),
        so that nobody can tell from the time to the first token what another tenant has asked.

    Raises:
      InvalidRequestError: a value of the wrong type or out of range.
    """

    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None

    def __post_init__(self) -> None:
        _check_int("priority", self.priority, -(2**31), 2**31 - 1, "an integer from -2**31 to 2**31 - 1")
        if self.timeout is not None:
            _check_real("timeout", self.timeout, 0.0, math.inf, "seconds above 0, or leave it out", low_open=True)
        if self.cache_salt is not None and (not isinstance(self.cache_salt, str) or not self.cache_salt):
            raise InvalidRequestError("cache_salt", self.cache_salt, "use a text that is not empty, or leave it out")


DEFAULT_OPTIONS = RequestOptions()


@dataclass(frozen=True)
class RequestLimits:
    """What the engine can take, checked before a request gets in.

    A request that passes `resolve_max_tokens` needs at most ``num_pages`` pages, so alone it always finishes; the
    scheduler sees to it that together they do too.

    Attributes:
      vocab_size: rows of the embedding table; ids are below it.
      max_model_len: prompt and outputs together, in tokens.
      page_size: tokens in a page.
      num_pages: pages of the whole KV pool (of one layer).
    """

    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int

    def pages_for(self, prompt_len: int, max_tokens: int) -> int:
        """Pages that a request may need at the most: its last token's KV is never written."""
        return -(-(prompt_len + max_tokens - 1) // self.page_size)

    def check_prompt(self, prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """The prompt as int32 [prompt_len]; refuses an empty one, ids outside the vocabulary, one too long."""
        if isinstance(prompt_ids, str | bytes) or not isinstance(prompt_ids, Sequence | np.ndarray):
            raise InvalidRequestError("prompt", prompt_ids, "use text, a list of token ids or a list of messages")
        if len(prompt_ids) == 0:
            raise InvalidRequestError("prompt", "", "it has no tokens; at least one is needed")
        if len(prompt_ids) >= self.max_model_len:
            raise InvalidRequestError(
                "prompt",
                f"{len(prompt_ids)} tokens",
                f"at most {self.max_model_len - 1} tokens leave room for one output in a context of "
                f"{self.max_model_len}",
            )
        return self._check_ids("prompt", prompt_ids)

    def resolve_max_tokens(self, prompt_len: int, max_tokens: int | None) -> int:
        """The output limit: what was asked, cut at the context's end; None takes all the room there is."""
        context_room = self.max_model_len - prompt_len
        pool_room = self.num_pages * self.page_size - prompt_len + 1
        wanted = min(context_room, pool_room) if max_tokens is None else min(max_tokens, context_room)
        if wanted < 1 or wanted > pool_room:
            raise InvalidRequestError(
                "prompt" if pool_room < 1 else "max_tokens",
                f"{prompt_len} prompt tokens and {max(wanted, 1)} outputs",
                f"they need {self.pages_for(prompt_len, max(wanted, 1))} KV pages of {self.page_size} tokens, "
                f"the whole pool has {self.num_pages}",
            )
        return wanted

    def check_stop_ids(self, stop_ids: Sequence[int]) -> tuple[int, ...]:
        self._check_ids("stop_token_ids", stop_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise InvalidRequestError(
                "stop_token_ids", f"{len(stop_ids)} ids with the model's own", f"at most {MAX_STOP_IDS} are allowed"
            )
        return tuple(stop_ids)

    def _check_ids(self, name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        try:
            array = np.asarray(ids)
        except (ValueError, OverflowError):
            array = np.asarray(None)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise InvalidRequestError(name, ids, "token ids are integers in a flat list")
        wrong = (array < 0) | (array >= self.vocab_size)
        if wrong.any():
            index = int(np.argmax(wrong))
            allowed = f"token ids go from 0 to {self.vocab_size - 1}"
            raise InvalidRequestError(f"{name}[{index}]", int(array[index]), allowed)
        return array.astype(np.int32)


@dataclass(eq=False, slots=True)
class Request:
    """One request inside the engine; only the scheduler changes it.

    Attributes:
      request_id: unique for the life of the engine, never reused.
      prompt_ids: int32 [prompt_len].
      max_tokens: the resolved output limit, ≥ 1.
      stop_ids: ids that end it on the device, EOS ids included unless ignored.
      seed: the resolved seed; sample_index tells samples of one prompt apart.
      priority: the lowest value is served first; among equals, who came first.
      timeout: seconds from its arrival after which it is ended; None is never.
      cache_salt: requests share cached prefixes only with those of the same salt.
      output_ids: committed outputs.
      row: its line in the row table while it runs, else None.
      extend_ids: int32, the tokens known when it got its row, whose KV is to be there before it decodes.
      cached_tokens: prompt tokens found in the prefix cache when it was first admitted.
      num_preemptions: how often it had to give its row back.
      arrival_time … finish_time: seconds on the scheduler's clock; None until they happen.
      waiting_since, running_since: of the current or last stay in the queue, or in a row.
    """

    request_id: int
    prompt_ids: np.ndarray
    sampling: SamplingParams
    max_tokens: int
    stop_ids: tuple[int, ...]
    seed: int
    sample_index: int = 0
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    row: int | None = None
    extend_ids: np.ndarray | None = None
    cached_tokens: int = 0
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    matched_token_id: int | None = None
    error: JaxOverlapError | None = None
    arrival_time: float | None = None
    admit_time: float | None = None
    first_token_time: float | None = None
    finish_time: float | None = None
    waiting_since: float = 0.0
    running_since: float | None = None

    @property
    def deadline(self) -> float | None:
        """Seconds on the scheduler's clock."""
        return None if self.timeout is None or self.arrival_time is None else self.arrival_time + self.timeout

    def known_ids(self) -> np.ndarray:
        """Prompt and committed outputs, int32 [committed_len]; not to be written to."""
        if not self.output_ids:
            return self.prompt_ids
        return np.concatenate([self.prompt_ids, np.array(self.output_ids, dtype=np.int32)])

    @property
    def prompt_len(self) -> int:
        return len(self.prompt_ids)

    @property
    def max_len(self) -> int:
        """KV positions that it needs at the most: its last token's are never written."""
        return len(self.prompt_ids) + self.max_tokens - 1

    @property
    def committed_len(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)
