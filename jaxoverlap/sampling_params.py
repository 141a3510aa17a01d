"""How a request's tokens are chosen, and when they end. Values are checked when they are given.

Names and defaults are vLLM's, save that

    max_tokens          is None here, which fills the context; vLLM's is 16
    structured_output   is vLLM's structured_outputs, with fields of its own
    banned_token_ids    has no equal there; vLLM's bad_words are texts, and not here
    best_of             was taken out of vLLM's V1
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxoverlap.checks import SMALLEST_FLOAT32, are_ids, check_bool, check_float32, check_ids, check_int, has_only
from jaxoverlap.errors import InvalidRequestError, UnsupportedError, shortened
from jaxoverlap.prompts import ChatPrompt, Prompt

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy (as in vLLM); dividing by it would overflow."""

MAX_SAMPLES = 128
MAX_TOP_LOGPROBS = 20
"""Alternatives per token; fixed because it is part of a compiled shape."""

MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 1024

_KNOWN_ELSEWHERE = frozenset("bad_words detokenize guided_decoding response_format tools tool_choice".split())  # noqa: SIM905


@dataclass(frozen=True, kw_only=True)
class StructuredOutput:
    """What the text must be. Exactly one of these, as llguidance understands it.

    Attributes:
      json_schema: a JSON schema, as text or decoded.
      any_json: any JSON object.
      regex: the whole text matches it (Rust's syntax, no look-around).
      grammar: a Lark grammar, or llguidance's dialect of it.
      choices: one of these texts.

    Raises:
      InvalidRequestError: none of them or several, or a value of the wrong type. Whether a schema or a grammar makes
        sense is found when the request is made.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    any_json: bool = False
    regex: str | None = None
    grammar: str | None = None
    choices: Sequence[str] | None = None

    def __post_init__(self) -> None:
        check_bool("structured_output.any_json", self.any_json)
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        given = [name for name, value in values.items() if value is not None and value is not False]
        if self.json_schema is False:
            raise InvalidRequestError("structured_output.json_schema", False, "no text satisfies it; use a schema")
        if len(given) != 1:
            known = ", ".join(field.name for field in fields(self))
            raise InvalidRequestError("structured_output", ", ".join(given) or None, f"use exactly one of {known}")
        if self.json_schema is not None and not isinstance(self.json_schema, str | Mapping | bool):
            raise InvalidRequestError("structured_output.json_schema", self.json_schema, "use a JSON schema")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise InvalidRequestError(f"structured_output.{name}", value, "use a text that is not empty")
        if self.choices is not None:
            texts = self.choices
            good = isinstance(texts, Sequence) and not isinstance(texts, str) and len(texts) > 0
            if not good or not all(isinstance(text, str) and text for text in texts):
                raise InvalidRequestError("structured_output.choices", texts, "use a list of texts, none empty")
            object.__setattr__(self, "choices", tuple(texts))


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to choose tokens and when to stop.

    The order in which the logits are treated: penalties, `logit_bias`, ids that may not come, the structure that is
    asked for; then temperature, `top_k`, `top_p`, `min_p`. Log-probabilities are those of the model's own logits,
    before all of this.

    Attributes:
      n: samples of the prompt, which is computed once, but for its last part page; without a prefix cache, by each.
      best_of: computes so many samples and keeps the `n` with the highest sum of log-probabilities, the best first.
      temperature: ≥ 0. 0 (anything below 1e-5) is greedy: the highest logit, the lowest id among equals.
      top_k: keep the k highest logits (and those equal to the k-th); 0 or -1 keeps all.
      top_p: in (0, 1]. Keep the smallest set of most probable tokens whose probability reaches ``top_p``
        (Holtzman et al., 2020), and those as probable as its last one; taken after ``top_k``.
      min_p: in [0, 1]. Drop tokens less probable than ``min_p`` times the most probable one (Nguyen et al., 2024).
      repetition_penalty: above 0. Logits of ids that are in the prompt or the outputs are divided by it if positive,
        else multiplied; once for each distinct id (Keskar et al., 2019). 1 is off.
      presence_penalty: in [-2, 2], taken from the logits of ids among the outputs.
      frequency_penalty: in [-2, 2], taken from an id's logit once for each time it is among the outputs.
      logit_bias: id to a number from -100 to 100 that is added to its logit.
      allowed_token_ids: no other ids come; None allows all.
      banned_token_ids: ids that never come.
      seed: 0 … 2**64 - 1. The same seed, prompt and parameters give the same tokens, whatever else runs.
        None draws one; the outputs say which.
      max_tokens: ≥ 1, outputs at most; None fills the context. The context's end is a limit in any case.
      min_tokens: before so many outputs nothing but a limit ends the request: its stop ids and the model's
        end-of-sequence ids do not come, and a stop string that ends there is none.
      stop: a text or texts that end the request; cut from the text unless `include_stop_str_in_output`.
      stop_token_ids: ids that end the request; they count as output but are left out of the text.
      ignore_eos: go on through the model's own end-of-sequence ids; ``stop_token_ids`` still stop.
      include_stop_str_in_output: leave what ended the request, text or token, in the text.
      skip_special_tokens: leave special tokens out of the text. None does, but for a chat with tools: there a special
        token may be what tells a call from text.
      logprobs: 0 … 20. Of each output its log-probability and rank, and so many alternatives. None is off.
      prompt_logprobs: 0 … 20, the same of each prompt token but the first. None is off.
      structured_output: what the text must be.

    Where nothing is asked for by default, None says the same.

    Raises:
      InvalidRequestError: a value of the wrong type or out of range.
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    banned_token_ids: Sequence[int] = ()
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None

    def __post_init__(self) -> None:
        for name in ("banned_token_ids", "stop", "stop_token_ids"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, ())
        check_float32("temperature", self.temperature, 0.0, math.inf, "a finite number ≥ 0")
        check_float32("top_p", self.top_p, 0.0, 1.0, "a number in (0, 1]", low_open=True)
        check_float32("min_p", self.min_p, 0.0, 1.0, "a number in [0, 1]")
        check_int("top_k", self.top_k, -1, 2**31 - 1, "-1 or 0 (off) or an integer from 1 to 2**31 - 1")
        check_float32("repetition_penalty", self.repetition_penalty, 0.0, math.inf, "a number above 0", low_open=True)
        for name in ("presence_penalty", "frequency_penalty"):
            check_float32(name, getattr(self, name), -2.0, 2.0, "a number from -2 to 2")
        if self.seed is not None:
            check_int("seed", self.seed, 0, 2**64 - 1, "an integer from 0 to 2**64 - 1, or leave it out")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            check_bool(name, getattr(self, name))
        if self.skip_special_tokens is not None:
            check_bool("skip_special_tokens", self.skip_special_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                allowed = f"an integer from 0 to {MAX_TOP_LOGPROBS}, or leave it out"
                check_int(name, getattr(self, name), 0, MAX_TOP_LOGPROBS, allowed)
        self._check_counts()
        self._check_ids()
        self._check_stop()
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            raise InvalidRequestError("structured_output", self.structured_output, "use a StructuredOutput")

    def _check_counts(self) -> None:
        check_int("n", self.n, 1, MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}")
        if self.best_of is not None:
            check_int("best_of", self.best_of, self.n, MAX_SAMPLES, f"an integer from n to {MAX_SAMPLES}")
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, 2**31 - 1, "an integer from 1 to 2**31 - 1, or leave it out")
        most = 2**31 - 1 if self.max_tokens is None else self.max_tokens
        check_int("min_tokens", self.min_tokens, 0, most, "an integer from 0 to max_tokens")

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "banned_token_ids"):
            object.__setattr__(self, name, check_ids(name, getattr(self, name)))
        if self.allowed_token_ids is not None:
            allowed = check_ids("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
            if not set(allowed) - set(self.banned_token_ids):
                raise InvalidRequestError("allowed_token_ids", list(allowed), "no id is left; allow one at least")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))

    def _check_stop(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or isinstance(stops, bytes) or len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequestError("stop", stops, f"use a text or a list of at most {MAX_STOP_STRINGS} texts")
        for index, text in enumerate(stops):
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_CHARS:
                allowed = f"use a text of 1 to {MAX_STOP_CHARS} characters"
                raise InvalidRequestError(f"stop[{index}]", text, allowed)
            if any("\ud800" <= char <= "\udfff" for char in text):  # no text of a model has one
                raise InvalidRequestError(f"stop[{index}]", text, "valid Unicode is needed: half a surrogate pair")
        object.__setattr__(self, "stop", tuple(dict.fromkeys(stops)))

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def has_penalty(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def has_bias(self) -> bool:
        """Some ids are more or less likely than the model would have them, or forbidden."""
        return bool(self.logit_bias or self.banned_token_ids or self.allowed_token_ids is not None)

    @property
    def hides_special_tokens(self) -> bool:
        """They are no part of the text."""
        return self.skip_special_tokens is not False

    def for_prompt(self, prompt: Prompt) -> SamplingParams:
        """With what depends on the prompt. Where it has tools and nobody has said otherwise, special tokens are in the
        text: one of them may be what tells a call from text (Mistral's ``[TOOL_CALLS]``)."""
        has_tools = isinstance(prompt, ChatPrompt) and bool(prompt.tools)
        return replace(self, skip_special_tokens=False) if has_tools and self.skip_special_tokens is None else self

    @property
    def num_top_logprobs(self) -> int:
        """Alternatives to report for each output; 0 for the output's own log-probability only, -1 for nothing."""
        if self.logprobs is not None:
            return self.logprobs
        return 0 if self.is_ranked else -1

    @property
    def is_ranked(self) -> bool:
        """The samples come out by their log-probabilities, the best first."""
        return self.best_of is not None and self.best_of > 1

    @property
    def num_samples(self) -> int:
        """Samples to compute."""
        return self.best_of or self.n

    @classmethod
    def of_checked(cls, values: Mapping[str, Any]) -> SamplingParams:
        """From fields of parameters that have been checked; they are taken as they are. Those that
        are left out have their defaults."""
        made = object.__new__(cls)
        for field in fields(cls):
            object.__setattr__(made, field.name, values.get(field.name, field.default))
        return made

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], **defaults: Any) -> SamplingParams:
        """From decoded JSON.

        Raises:
          UnsupportedError: a field that engines like this one have, but not this build.
          InvalidRequestError: an unknown field, or a bad value. A null, within `structured_output` too, means "not
            given".
        """
        names = [field.name for field in fields(cls)]
        for name, value in values.items():
            if name in names:
                continue
            if name in _KNOWN_ELSEWHERE:
                raise UnsupportedError(f"{name} is not supported in this build; supported are {', '.join(names)}")
            raise InvalidRequestError(name, value, f"no such field; known are {', '.join(names)}")
        given = {name: value for name, value in values.items() if value is not None}
        structure = given.get("structured_output")
        if isinstance(structure, Mapping):
            known = {field.name for field in fields(StructuredOutput)}
            for name, value in structure.items():
                if name not in known:
                    allowed = f"no such field; known are {', '.join(sorted(known))}"
                    raise InvalidRequestError(f"structured_output.{name}", value, allowed)
            stated = {name: value for name, value in structure.items() if value is not None}
            given["structured_output"] = StructuredOutput(**stated)
        return cls(**(defaults | given))


def _check_bias(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        raise InvalidRequestError("logit_bias", bias, "use a mapping of token ids to numbers")
    if _is_plain_bias(bias):
        return dict(zip(bias, map(float, bias.values()), strict=True))
    checked = {}
    for key, value in bias.items():
        # JSON's keys are texts.
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 11 else key
        name = f"logit_bias[{shortened(key)}]"
        check_int(name, token_id, 0, 2**31 - 1, "a token id: an integer from 0 to 2**31 - 1")
        check_float32(name, value, -100.0, 100.0, "a number from -100 to 100")
        checked[int(token_id)] = float(value)
    return checked


def _is_plain_bias(bias: Mapping[Any, Any]) -> bool:
    """All keys and values are plain numbers in range; found without a step of Python for each. What is not has to be
    looked at one by one."""
    if not (has_only(bias, int) and has_only(bias.values(), int, float) and are_ids(bias)):
        return False
    try:
        numbers = np.abs(np.fromiter(bias.values(), dtype=np.float64, count=len(bias)))
    except OverflowError:  # an integer beyond the largest float
        return False
    return bool(np.all((numbers == 0) | ((numbers >= SMALLEST_FLOAT32) & (numbers <= 100.0))))
