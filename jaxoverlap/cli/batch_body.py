"""What the body of a line asks for: OpenAI's fields, vLLM's, and this engine's own, as the engine's types.

Most fields have the name of the parameter that they are. Those that have not:

    max_completion_tokens            max_tokens
    logprobs, top_logprobs (chat)    logprobs: true asks for them, the other for how many alternatives
    response_format                  structured_output
    messages, tools, …  (chat)       the prompt, a ChatPrompt; arguments of tool calls, JSON text there, are decoded
    tool_choice                      "none" leaves the tools out of the prompt, "auto" is as if it were not there

A null is a field that is left out. An error calls a field what the line calls it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any

from jaxoverlap.errors import InvalidRequestError, UnsupportedError
from jaxoverlap.prompts import ChatPrompt, Prompt, with_tool_arguments
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"

_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
_OPTION_FIELDS = tuple(f.name for f in fields(RequestOptions))
_CHAT_FIELDS = tuple(f.name for f in fields(ChatPrompt))
_CHAT_ONLY = (*_CHAT_FIELDS, "top_logprobs")
_BODY_FIELDS = (
    "model", "prompt", *_CHAT_ONLY, "max_completion_tokens", "response_format", *_SAMPLING_FIELDS, *_OPTION_FIELDS,
)  # fmt: skip

_UNSUPPORTED = frozenset(
    """
    audio bad_words chat_template detokenize echo function_call functions guided_choice guided_grammar guided_json
    guided_regex length_penalty modalities parallel_tool_calls prediction prompt_cache_key reasoning_effort
    safety_identifier service_tier store stream stream_options structured_outputs suffix tool_choice
    truncate_prompt_tokens use_beam_search verbosity web_search_options
    """.split()  # noqa: SIM905
)
_NOTHING: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "parallel_tool_calls": (True,),
    "store": (False,),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("auto", "none"),
}
"""Fields that engines like this one know, and for some the values that ask for nothing: those are taken, as null is."""

_CALLERS_OWN = {"user": str, "metadata": dict}
"""Fields that change nothing, whatever they say."""

_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


@dataclass(frozen=True)
class Wish:
    """What a body asks for.

    Attributes:
      sampling: arguments for `SamplingParams.from_dict`; options: for `RequestOptions`.
      unset: parameters that it says are not wanted, whatever the defaults are.
      names: what it calls parameters of another name, for `own_name`.
    """

    prompt: Prompt
    is_chat: bool
    sampling: dict[str, Any]
    options: dict[str, Any]
    unset: frozenset[str]
    names: dict[str, str] = field(default_factory=dict)

    def own_name(self, name: str) -> str:
        """What the body calls a field that the engine speaks of."""
        for engine_name, own in self.names.items():
            if name == engine_name or name.startswith((f"{engine_name}[", f"{engine_name}.")):
                return own + name.removeprefix(engine_name)
        return name


def read_body(url: Any, body: Any, accepted_models: tuple[str, ...]) -> Wish:
    """Understands a body; values of parameters are not checked yet.

    Raises:
      InvalidRequestError: an unknown field, or fields that contradict each other.
      UnsupportedError: a field that other engines have.
    """
    if not isinstance(body, dict):
        raise InvalidRequestError("body", body, "an object with messages or prompt is needed")
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = _is_chat(url, given)
    for name, value in given.items():
        _check_field(name, value, is_chat)
    if "model" in given and given["model"] not in accepted_models:
        raise InvalidRequestError("body.model", given["model"], f"served is {', '.join(accepted_models)}")

    names = {"prompt": "messages"} if is_chat else {}
    sampling = {name: given[name] for name in _SAMPLING_FIELDS if name in given}
    unset = set()
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise InvalidRequestError("body.max_tokens", given["max_tokens"], "max_completion_tokens is given as well")
        sampling["max_tokens"] = given["max_completion_tokens"]
        names["max_tokens"] = "max_completion_tokens"
    if is_chat:
        sampling.pop("logprobs", None)
        if _wants_logprobs(given):
            sampling["logprobs"] = given.get("top_logprobs", 0)
            names["logprobs"] = "top_logprobs"
        elif "logprobs" in given:
            unset.add("logprobs")
    if "response_format" in given:
        if "structured_output" in given:
            raise InvalidRequestError("body.structured_output", given["structured_output"], "response_format is given")
        structure = _structure(given["response_format"])
        if structure is None:
            unset.add("structured_output")
        else:
            sampling["structured_output"] = structure
        names |= {
            "structured_output.json_schema": "response_format.json_schema.schema",
            "structured_output": "response_format",
        }
    options = {name: given[name] for name in _OPTION_FIELDS if name in given}
    return Wish(_chat(given) if is_chat else _prompt(given), is_chat, sampling, options, frozenset(unset), names)


def _is_chat(url: Any, body: dict[str, Any]) -> bool:
    if url not in (None, CHAT_URL, COMPLETION_URL):
        raise InvalidRequestError("url", url, f"use {CHAT_URL!r} or {COMPLETION_URL!r}, or leave it out")
    is_chat = "messages" in body if url is None else url == CHAT_URL
    needed, other = ("messages", "prompt") if is_chat else ("prompt", "messages")
    if other in body:
        raise InvalidRequestError(f"body.{other}", body[other], f"{needed} is what this request is made of")
    if needed not in body:
        either = "messages or prompt" if url is None else needed
        raise InvalidRequestError(f"body.{needed}", None, f"{either} is needed")
    return is_chat


def _check_field(name: str, value: Any, is_chat: bool) -> None:
    if name in _CHAT_ONLY and not is_chat and value not in (False, 0, [], {}):
        raise InvalidRequestError(f"body.{name}", value, "it is a field of chats; this is a text completion")
    if name in _BODY_FIELDS:
        return
    if name in _CALLERS_OWN:
        if not isinstance(value, _CALLERS_OWN[name]):
            kind = "text" if _CALLERS_OWN[name] is str else "an object"
            raise InvalidRequestError(f"body.{name}", value, f"{kind} is needed; it changes nothing")
        return
    if name not in _UNSUPPORTED:
        raise InvalidRequestError(f"body.{name}", value, f"no such field; known are {', '.join(_BODY_FIELDS)}")
    nothing = _NOTHING.get(name, ())
    if not any(value == known and type(value) is type(known) for known in nothing):
        words = " or ".join(map(json.dumps, nothing))
        taken = f"; only {words}, which asks for nothing, is taken" if nothing else ""
        raise UnsupportedError(f"body.{name} is not supported in this build{taken}")


def _wants_logprobs(body: dict[str, Any]) -> bool:
    wanted = body.get("logprobs", False)
    if not isinstance(wanted, bool):
        raise InvalidRequestError("body.logprobs", wanted, "use true or false; top_logprobs says how many alternatives")
    if not wanted and body.get("top_logprobs", 0) != 0:
        raise InvalidRequestError("body.top_logprobs", body["top_logprobs"], "it needs logprobs: true")
    return wanted


def _structure(response_format: Any) -> dict[str, Any] | None:
    """`response_format` as fields of `StructuredOutput`; None for plain text."""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind not in ("text", "json_object", "json_schema"):
        raise InvalidRequestError(
            "body.response_format", response_format, 'use an object with type "text", "json_object" or "json_schema"'
        )
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    for name, value in response_format.items():
        if name not in known:
            raise InvalidRequestError(f"body.response_format.{name}", value, f"no such field of type {kind!r}")
    if kind != "json_schema":
        return None if kind == "text" else {"any_json": True}
    described = response_format.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict | bool):
        allowed = "an object with a schema is needed"
        raise InvalidRequestError("body.response_format.json_schema", described, allowed)
    for name, value in described.items():
        if name not in _SCHEMA_FIELDS:
            allowed = f"no such field; known are {', '.join(_SCHEMA_FIELDS)}"
            raise InvalidRequestError(f"body.response_format.json_schema.{name}", value, allowed)
    return {"json_schema": described["schema"]}


def _chat(body: dict[str, Any]) -> ChatPrompt:
    given = {name: body[name] for name in _CHAT_FIELDS if name in body}
    if body.get("tool_choice") == "none":
        given.pop("tools", None)
    if isinstance(given["messages"], list):
        given["messages"] = [with_tool_arguments(message, _decoded) for message in given["messages"]]
    try:
        return ChatPrompt(**given)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"body.{error.field}", error.value, error.allowed) from None


def _decoded(arguments: Any) -> Any:
    """OpenAI writes a tool call's arguments as JSON text; chat templates expect the object, as in vLLM."""
    try:
        found = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def _prompt(body: dict[str, Any]) -> Prompt:
    prompt = body["prompt"]
    if isinstance(prompt, list) and prompt and all(isinstance(part, str | list) for part in prompt):
        raise UnsupportedError("body.prompt: a list of prompts is not supported in this build; give each its own line")
    if not isinstance(prompt, str | list):
        raise InvalidRequestError("body.prompt", prompt, "use text or a list of token ids")
    for index, token_id in enumerate(prompt if isinstance(prompt, list) else ()):
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise InvalidRequestError(f"body.prompt[{index}]", token_id, "token ids are integers in a flat list")
    return prompt
