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
from dataclasses import dataclass, field

import numpy as np

from jaxoverlap.checks import check_int, check_real
from jaxoverlap.constraint import TokenConstraint
from jaxoverlap.errors import InvalidRequestError, JaxOverlapError
from jaxoverlap.id_arrays import TokenBiases
from jaxoverlap.outputs import FinishReason, TokenScore
from jaxoverlap.sampling_params import SamplingParams

MAX_STOP_IDS = 16
"""Stop ids (EOS ids included) the device watches for in one row; fixed because it is part of a compiled shape."""


class RequestStatus(enum.StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


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
        check_int("priority", self.priority, -(2**31), 2**31 - 1, "an integer from -2**31 to 2**31 - 1")
        if self.timeout is not None:
            check_real("timeout", self.timeout, 0.0, math.inf, "seconds above 0, or leave it out", low_open=True)
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
        return self.check_ids("prompt", prompt_ids)

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

    def check_rules(self, sampling: SamplingParams, eos_token_ids: Sequence[int]) -> tuple[int, ...]:
        """The ids that end a request: its own, and the model's unless it ignores them. Refuses ids outside the
        vocabulary, too many ends, and rules that leave nothing to choose."""
        banned = self.check_ids("banned_token_ids", sampling.banned_token_ids)
        if sampling.logit_bias:
            self.check_ids("logit_bias", TokenBiases.of(sampling.logit_bias).ids)
        stop_ids = tuple(dict.fromkeys((*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids))))
        ends = self.check_ids("stop_token_ids", stop_ids)
        if len(stop_ids) > MAX_STOP_IDS:
            raise InvalidRequestError(
                "stop_token_ids", f"{len(stop_ids)} ids with the model's own", f"at most {MAX_STOP_IDS} are allowed"
            )
        allowed = sampling.allowed_token_ids
        if allowed is not None or len(banned) + len(ends) >= self.vocab_size:
            left = np.full(self.vocab_size, allowed is None)
            if allowed is not None:
                left[self.check_ids("allowed_token_ids", allowed)] = True
            left[banned] = False
            if not np.count_nonzero(left):
                raise InvalidRequestError("allowed_token_ids", allowed, "no id is left to choose")
            if sampling.min_tokens:
                left[ends] = False
            if not np.count_nonzero(left):
                rules = "banned_token_ids and min_tokens leave no id to choose"
                raise InvalidRequestError("allowed_token_ids", allowed, rules)
        return stop_ids

    def check_ids(self, name: str, ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """Some ids as int32; refuses those outside the vocabulary."""
        try:
            array = np.asarray(ids)
        except (ValueError, OverflowError):
            array = np.asarray(None)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise InvalidRequestError(name, ids, "token ids are integers in a flat list")
        wrong = (array < 0) | (array >= self.vocab_size)
        if np.count_nonzero(wrong):
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
      leader: the prompt's first sample, if this is another; it waits until the leader has computed the prompt.
      constraint: what its text must follow, or None.
      priority: the lowest value is served first; among equals, who came first.
      timeout: seconds from its arrival after which it is ended; None is never.
      cache_salt: requests share cached prefixes only with those of the same salt.
      output_ids: committed outputs; scores: one for each of them, if log-probabilities are asked for.
      prompt_scores: one for each prompt token but the first, if asked for.
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
    leader: Request | None = None
    constraint: TokenConstraint | None = None
    priority: int = 0
    timeout: float | None = None
    cache_salt: str | None = None
    status: RequestStatus = RequestStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    scores: list[TokenScore] = field(default_factory=list)
    prompt_scores: list[TokenScore] = field(default_factory=list)
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

    @property
    def needs_prompt_scores(self) -> bool:
        """Log-probabilities of the prompt are asked for and not all there: no part of it may come from the cache."""
        asked = self.sampling.prompt_logprobs is not None and self.leader is None
        return asked and len(self.prompt_scores) < len(self.prompt_ids) - 1

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
