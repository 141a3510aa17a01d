"""What the engine's process and its front ends say to each other: msgpack arrays whose first element names the message.

    front end → engine
      add       key, prompt (int32 bytes), sampling, options, when it was called
                                                                 checked; its samples have the keys from this one on
      abort     keys                                             nothing more comes for them
      stop      key                                              the same, after a stop string in its text
      ask       question, name, arguments                        answered once

    engine → front end
      ready     facts (`EngineFacts`)                            once, after warm-up
      refused   key, error                                       an `add` that never was
      news      `News`                                           at most one a step, for all requests together
      status    `EngineStatus`                                   when work begins and ends, and twice a second between
      answer    question, value, error
      stalled   seconds                                          a step takes far too long; anything later takes it back
      failed    text                                             the last message of an engine that is dead

A key names one sequence and is the front end's own; it never uses one twice. A message is sent whole and in order, so
what is said of a key before its end arrives before its end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import numpy as np

from jaxoverlap import errors
from jaxoverlap.errors import EngineError, InvalidRequestError, JaxOverlapError, shortened
from jaxoverlap.id_arrays import TokenBiases, TokenIds
from jaxoverlap.outputs import TokenScore
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput

_MOST_BYTES = 2**31 - 1
_TEXT_ERRORS = "surrogatepass"
"""JSON has texts that UTF-8 has not, and an error may quote one."""

ABORTED = "the request was aborted by an operator"


@dataclass(frozen=True, kw_only=True)
class EngineFacts:
    """What a front end needs to know of its engine, and nothing secret.

    Attributes:
      name, architecture, dtype, kv_cache_dtype, devices, schedule, capabilities: for `AdminService`.
      platform, schedule, lookahead: for traces.
      tokenizer_source: for `Tokenizer.from_source`: a folder, or the tokenizer's part of GGUF metadata.
      max_queue: None is no limit.
      capabilities: fields of `SamplingParams` that this build serves; sampling_defaults: for those left out.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_running: int
    max_queue: int | None
    eos_token_ids: list[int]
    dtype: str
    kv_cache_dtype: str
    devices: list[str]
    platform: str
    schedule: str
    lookahead: int
    capabilities: list[str]
    sampling_defaults: dict[str, Any]
    tokenizer_source: str | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class EngineStatus:
    """How busy the engine is.

    Attributes:
      running, waiting: requests.
      kv_used: pages of running requests over all pages; cached ones that nobody reads do not count.
      tokens_per_second: over the last seconds.
      num_steps: taken since the start.
      has_work: something is unfinished; then news of the engine must come, or it hangs.
    """

    running: int = 0
    waiting: int = 0
    kv_used: float = 0.0
    tokens_per_second: float = 0.0
    num_steps: int = 0
    has_work: bool = False
    draining: bool = False


@dataclass(slots=True)
class News:
    """What became of a front end's sequences since it was told last.

    Attributes:
      started: [key, cached tokens, seed, admit time, first token's time, prompt scores], with the first token.
      keys, token_ids: new outputs; a key comes as often as it has new ones, in their order.
      scores: [key, `TokenScore`], in the order of the outputs they belong to.
      preempted: [key, count] of those whose count has changed.
      finished: [key, reason, matched id, error, finish time].
    Times are seconds of the system's monotonic clock.
    """

    started: list[Any] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    scores: list[Any] = field(default_factory=list)
    preempted: list[Any] = field(default_factory=list)
    finished: list[Any] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.keys or self.finished or self.preempted)

    def to_wire(self) -> list[Any]:
        return [self.started, self.keys, self.token_ids, self.scores, self.preempted, self.finished]


def pack(*message: Any) -> bytes:
    return msgpack.packb(message, unicode_errors=_TEXT_ERRORS)


def new_unpacker() -> msgpack.Unpacker:
    """Fed with what arrives, it yields whole messages."""
    return msgpack.Unpacker(raw=False, strict_map_key=False, max_buffer_size=_MOST_BYTES, unicode_errors=_TEXT_ERRORS)


_IDS = ("allowed_token_ids", "banned_token_ids")


def sampling_to_wire(sampling: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    values = _changed(sampling)
    for name in _IDS:
        if name in values:
            values[name] = TokenIds.of(values[name]).array.tobytes()
    if sampling.logit_bias is not None:
        biases = TokenBiases.of(sampling.logit_bias)
        values["logit_bias"] = [biases.ids.tobytes(), biases.numbers.tobytes()]
    if sampling.structured_output is not None:
        values["structured_output"] = _changed(sampling.structured_output)
    return values


def sampling_from_wire(values: Mapping[str, Any]) -> SamplingParams:
    """What `sampling_to_wire` was given. It was checked there: nothing here takes longer for more ids."""
    given = dict(values)
    for name in _IDS:
        if name in given:
            given[name] = TokenIds(np.frombuffer(given[name], dtype=np.int32))
    if "logit_bias" in given:
        ids, numbers = given["logit_bias"]
        given["logit_bias"] = TokenBiases(np.frombuffer(ids, dtype=np.int32), np.frombuffer(numbers, dtype=np.float64))
    for name in ("stop", "stop_token_ids"):
        if name in given:
            given[name] = tuple(given[name])
    if "structured_output" in given:
        given["structured_output"] = StructuredOutput(**given["structured_output"])
    return SamplingParams.of_checked(given)


def compact(sampling: SamplingParams) -> SamplingParams:
    """The same, with arrays in place of long lists, so that `sampling_to_wire` takes no time."""
    return sampling_from_wire(sampling_to_wire(sampling))


def _changed(values: Any) -> dict[str, Any]:
    return {f.name: getattr(values, f.name) for f in dataclasses.fields(values) if getattr(values, f.name) != f.default}


def score_from_wire(fields: Sequence[Any]) -> TokenScore:
    token_id, logprob, rank, top = fields
    return TokenScore(token_id, logprob, rank, tuple(map(tuple, top)))


_KNOWN = {
    kind.__name__: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, JaxOverlapError)
}


def error_to_wire(error: Exception) -> list[Any]:
    """What nobody has foreseen is told as an `EngineError` without its text, which is for the log."""
    if not isinstance(error, JaxOverlapError):
        error = EngineError("internal error; the server's log says more")
    if isinstance(error, InvalidRequestError):
        value = error.value if isinstance(error.value, bool | int | float | str | None) else shortened(error.value)
        return [type(error).__name__, error.field, value, error.allowed]
    return [type(error).__name__, str(error)]


def error_from_wire(described: list[Any]) -> JaxOverlapError:
    name, *arguments = described
    return _KNOWN[name](*arguments)
