"""Options of a request: how its tokens are chosen, what its text must be, how a chat is put, how it is treated."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxoverlap.cli.options import given
from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.prompts import ChatPrompt, Prompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput


def _panel(name: str) -> Any:
    return functools.partial(typer.Option, rich_help_panel=name, show_default=False)


_sampling, _ids, _ending = _panel("Sampling"), _panel("Penalties and single tokens"), _panel("Where it ends")
_said, _structure, _chat, _request = _panel("Answer"), _panel("Structured output"), _panel("Chat"), _panel("Request")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Fields of `SamplingParams` but for `structured_output`; None leaves one at the command's default."""

    n: Annotated[int | None, _sampling(help="Samples of each prompt, which is computed once. Default: 1.")] = None
    best_of: Annotated[
        int | None, _sampling(help="Compute so many samples and keep the n most probable ones. Default: n.")
    ] = None
    temperature: Annotated[
        float | None,
        _sampling(
            help="0 is greedy: the most probable token, always. Default: 0 for generate, 0.7 for chat, 1 for batch."
        ),
    ] = None
    top_p: Annotated[
        float | None,
        _sampling(help="Keep the smallest set of tokens that together are this probable, in (0, 1]. Default: 1."),
    ] = None
    top_k: Annotated[int | None, _sampling(help="Keep the k most probable tokens; 0 keeps all. Default: 0.")] = None
    min_p: Annotated[
        float | None,
        _sampling(help="Drop tokens less probable than this times the most probable one, in [0, 1]. Default: 0."),
    ] = None
    repetition_penalty: Annotated[
        float | None,
        _ids(help="Divides the positive logits of tokens in prompt and answer, multiplies others. Default: 1, off."),
    ] = None
    presence_penalty: Annotated[
        float | None, _ids(help="Taken from the logits of tokens in the answer, -2 to 2. Default: 0.")
    ] = None
    frequency_penalty: Annotated[
        float | None,
        _ids(help="Taken from a token's logit once for each time it is in the answer, -2 to 2. Default: 0."),
    ] = None
    logit_bias: Annotated[
        list[str] | None,
        _ids(metavar="ID=NUMBER", help="Added to a token's logit, -100 to 100; may be given several times."),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None, _ids("--allowed-token-id", help="A token that may come; may be given several times.")
    ] = None
    banned_token_ids: Annotated[
        list[int] | None, _ids("--banned-token-id", help="A token that never comes; may be given several times.")
    ] = None
    seed: Annotated[
        int | None, _sampling(help="Makes sampling repeatable. Default: a new one for each prompt, shown in the JSON.")
    ] = None
    max_tokens: Annotated[
        int | None,
        _ending(help="Tokens to generate at most. Default: 256 for generate, 1024 for chat, all that fits for batch."),
    ] = None
    min_tokens: Annotated[
        int | None, _ending(help="Before so many tokens nothing but a limit ends the answer. Default: 0.")
    ] = None
    stop: Annotated[
        list[str] | None,
        _ending(metavar="TEXT", help="A text that ends the answer and is cut from it; may be given several times."),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        _ending("--stop-token-id", help="A token id that ends the answer; may be given several times."),
    ] = None
    ignore_eos: Annotated[
        bool | None, _ending("--ignore-eos", help="Go on through the model's end-of-sequence tokens.")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, _ending("--include-stop", help="Leave what ended the answer, text or token, in the text.")
    ] = None
    keep_special_tokens: Annotated[
        bool | None,
        _said(
            "--keep-special-tokens/--skip-special-tokens",
            help="Whether special tokens are in the text. Default: only with --tools.",
        ),
    ] = None
    logprobs: Annotated[
        int | None,
        _said(help="Of each token its log-probability and so many alternatives, 0 to 20; in JSON. Default: none."),
    ] = None
    prompt_logprobs: Annotated[
        int | None, _said(help="The same of each token of the prompt but the first. Default: none.")
    ] = None

    def values(self, **defaults: Any) -> dict[str, Any]:
        """Arguments for `SamplingParams`: what was given, else `defaults`.

        Raises:
          InvalidRequestError: a value out of range.
        """
        values = defaults | given(self)
        if "keep_special_tokens" in values:
            values["skip_special_tokens"] = not values.pop("keep_special_tokens")
        if "logit_bias" in values:
            values["logit_bias"] = dict(_bias(text) for text in values["logit_bias"])
        SamplingParams(**values)
        return values


@dataclass(frozen=True, kw_only=True)
class StructureOptions:
    """Fields of `StructuredOutput`."""

    json_schema: Annotated[str | None, _structure(metavar="FILE|JSON", help="The answer is JSON of this schema.")] = (
        None
    )
    any_json: Annotated[bool | None, _structure("--any-json", help="The answer is any JSON object.")] = None
    regex: Annotated[str | None, _structure(help="The whole answer matches it (Rust's syntax).")] = None
    grammar: Annotated[str | None, _structure(metavar="FILE|TEXT", help="The answer follows a Lark grammar.")] = None
    choices: Annotated[
        list[str] | None,
        _structure("--choice", metavar="TEXT", help="The answer is one of these; may be given several times."),
    ] = None

    def values(self) -> dict[str, Any]:
        """Arguments for `SamplingParams`: `structured_output`, or nothing.

        Raises:
          InvalidRequestError: several kinds at once, or a file that can't be read.
        """
        fields = given(self)
        if not fields:
            return {}
        if "json_schema" in fields:
            fields["json_schema"] = _json("json_schema", fields["json_schema"])
        if "grammar" in fields and _names_file(fields["grammar"]):
            fields["grammar"] = _read("grammar", fields["grammar"])
        return {"structured_output": StructuredOutput(**fields)}


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """Fields of `ChatPrompt`, for a chat of one question."""

    chat: Annotated[
        bool, _chat("--chat", help="Put each prompt as a user's message, through the model's chat template.")
    ] = False
    system: Annotated[str | None, _chat(metavar="TEXT", help="The system's message.")] = None
    answer_start: Annotated[
        str | None, _chat(metavar="TEXT", help="How the answer begins; the model goes on from there.")
    ] = None
    tools: Annotated[
        str | None, _chat(metavar="FILE|JSON", help="A list of functions for the template to show to the model.")
    ] = None
    documents: Annotated[
        str | None, _chat(metavar="FILE|JSON", help="A list of documents for the template to show to the model.")
    ] = None
    no_generation_prompt: Annotated[
        bool, _chat("--no-generation-prompt", help="Do not open the assistant's answer after the prompt.")
    ] = False
    chat_template_kwargs: Annotated[
        str | None, _chat(metavar="FILE|JSON", help="An object with further variables of the template.")
    ] = None

    def prompts(self, texts: Sequence[str]) -> list[Prompt]:
        """The texts themselves, or a chat of each.

        Raises:
          InvalidRequestError: an option that needs --chat, or JSON of the wrong form.
        """
        fields = given(self)
        if not self.chat:
            for name, value in fields.items():
                if value is not False:
                    raise InvalidRequestError(name, value, "it needs --chat")
            return list(texts)
        told = {
            name: _json(name, fields[name]) for name in ("tools", "documents", "chat_template_kwargs") if name in fields
        }
        before = [] if self.system is None else [{"role": "system", "content": self.system}]
        after = [] if self.answer_start is None else [{"role": "assistant", "content": self.answer_start}]
        return [
            ChatPrompt(
                messages=[*before, {"role": "user", "content": text}, *after],
                add_generation_prompt=False if self.no_generation_prompt else None,
                continue_final_message=bool(after),
                **told,
            )
            for text in texts
        ]


@dataclass(frozen=True, kw_only=True)
class TreatmentOptions:
    """Fields of `RequestOptions`; None leaves one at its default."""

    priority: Annotated[int | None, _request(help="The lowest value is served first. Default: 0.")] = None
    timeout: Annotated[
        float | None, _request(help="Seconds after which a request is ended with an error. Default: never.")
    ] = None
    cache_salt: Annotated[str | None, _request(help="Share cached prefixes only with requests of the same salt.")] = (
        None
    )

    def values(self) -> dict[str, Any]:
        """Arguments for `RequestOptions`.

        Raises:
          InvalidRequestError: a value out of range.
        """
        RequestOptions(**given(self))
        return given(self)


_TOLD = ("tools", "documents", "chat_template_kwargs")
"""What a template is told in JSON."""


def _bias(text: str) -> tuple[str, float]:
    token_id, _, number = text.partition("=")
    try:
        return token_id.strip(), float(number)
    except ValueError:
        raise InvalidRequestError("logit_bias", text, "use ID=NUMBER") from None


def _json(name: str, value: str) -> Any:
    """Of JSON, or of a file with it."""
    is_file = not value.lstrip().startswith(("{", "[")) and value.strip() not in ("true", "false")
    text = _read(name, value) if is_file else value
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(name, value, f"it is not JSON: {error}") from None


def _names_file(grammar: str) -> bool:
    """What is there, also if it is a pipe, or can be no grammar: each has a rule, and that a colon."""
    return os.path.exists(grammar) or (grammar != "" and ":" not in grammar)


def _read(name: str, path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise InvalidRequestError(name, path, f"use a file or the text itself: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequestError(name, path, "the file is not UTF-8") from None
