"""What comes of a prompt: the same types from `LLM` in this process and from `Client` over the network."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

from jaxoverlap.errors import JaxOverlapError
from jaxoverlap.prompts import Prompt


class FinishReason(enum.StrEnum):
    """Why a sequence ended. All but the last two: as asked."""

    EOS = "eos"
    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    GRAMMAR_COMPLETE = "grammar_complete"
    ABORTED = "aborted"
    ERROR = "error"

    @property
    def as_asked(self) -> bool:
        return self not in (FinishReason.ABORTED, FinishReason.ERROR)


class TokenScore(NamedTuple):
    """What the device says of one token; the text side adds bytes.

    Attributes:
      token_id: the token.
      logprob: natural logarithm of its probability by the model's own logits.
      rank: 1 is the most probable token.
      top: id and logprob of the most probable tokens, from the top; as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token and how probable it was.

    Attributes:
      token_id, logprob, rank: as in `TokenScore`; logprob is None for a prompt's first token, which nothing predicts.
      token_bytes: what it stands for in the text; part of a character, perhaps.
    """

    token_id: int
    logprob: float | None
    rank: int
    token_bytes: bytes


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at one position, and the most probable ones in its place, from the top.

    Attributes:
      text_offset: of an output, how many characters of the text there are before it. The text may be shorter, if it was
        cut where a stop string begins. None in a prompt.
    """

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    text_offset: int | None = None


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One sample of a prompt.

    Attributes:
      index: among the prompt's samples.
      text: the outputs as text, without the id or the string that ended them (unless they were to be included).
      token_ids: all outputs, up to and with the id that ended them or completed the string that did.
      finish_reason: why it ended; "aborted" and "error" are not as asked.
      matched_token_id: the id that ended it, for "eos" and "stop_token"; matched_string: the text, for "stop_string".
      error: set when finish_reason is "error".
      logprobs: one for each of `token_ids`, if asked for; cumulative_logprob is their sum.
      preemptions: how often it had to make room for others.
      queue_seconds, first_token_seconds, total_seconds: from arrival to admission, to the first token, to the end;
        None for what did not happen.
    """

    index: int = 0
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    matched_token_id: int | None = None
    matched_string: str | None = None
    error: JaxOverlapError | None = None
    logprobs: list[PositionLogprobs] | None = None
    cumulative_logprob: float | None = None
    preemptions: int = 0
    queue_seconds: float | None = None
    first_token_seconds: float | None = None
    total_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """What became of one prompt. What is asked of it directly is said of its first sample.

    Attributes:
      prompt: as it was given; from `chat`, a `ChatPrompt`.
      prompt_token_ids: what the model saw. A service does not send them: from `Client` they are there if the prompt
        was given as ids or its log-probabilities were asked for, and empty otherwise.
      prompt_tokens: how many they are, in any case; 0, which no prompt has, stands for `len(prompt_token_ids)`.
      outputs: the samples; with `best_of` the best first.
      seed: the seed in effect; with it, the prompt and the parameters the outputs come out again.
      cached_tokens: tokens of the prompt whose KV was in the prefix cache when it was admitted.
      prompt_logprobs: one for each prompt token, if asked for.
      request_id: a service's own name for it, in its logs and for `Client.abort`; empty in this process.
    """

    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    seed: int
    cached_tokens: int = 0
    prompt_logprobs: list[PositionLogprobs] | None = None
    prompt_tokens: int = 0
    request_id: str = ""

    def __post_init__(self) -> None:
        if not self.prompt_tokens:
            object.__setattr__(self, "prompt_tokens", len(self.prompt_token_ids))

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.outputs[0].finish_reason

    @property
    def matched_token_id(self) -> int | None:
        return self.outputs[0].matched_token_id

    @property
    def matched_string(self) -> str | None:
        return self.outputs[0].matched_string

    @property
    def error(self) -> JaxOverlapError | None:
        return self.outputs[0].error

    @property
    def logprobs(self) -> list[PositionLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def preemptions(self) -> int:
        return self.outputs[0].preemptions

    @property
    def queue_seconds(self) -> float | None:
        return self.outputs[0].queue_seconds

    @property
    def first_token_seconds(self) -> float | None:
        return self.outputs[0].first_token_seconds

    @property
    def total_seconds(self) -> float | None:
        return self.outputs[0].total_seconds


@dataclass(frozen=True, kw_only=True)
class StreamDelta:
    """A piece of a streamed answer. A sample's pieces, joined, are its `CompletionOutput`.

    Attributes:
      index: of the sample.
      text: new text; may be empty while a character is incomplete or a stop string may be coming.
      token_ids: new outputs; logprobs: one for each of them, if asked for.
      output: the whole, with the last piece of the last sample only.
    """

    index: int = 0
    text: str
    token_ids: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    output: RequestOutput | None = None
