"""What a model is asked: text, token ids, or a chat for its template; one prompt, or a list of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from jaxoverlap.checks import check_bool
from jaxoverlap.errors import InvalidRequestError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """A chat, and what the model's template is told besides.

    A message has a role and a content. That is text, or a list of OpenAI's parts of type "text", which become one text,
    a line each, as in vLLM; an assistant's message may have none if it calls tools. All further fields of messages,
    tools and documents (``name``, ``tool_calls``, …) are for the template: which of them it writes is its own to say.

    Attributes:
      messages: in order.
      tools: JSON schemas of functions. The template shows them to the model; what it answers stays text.
      documents: what to answer from, where the template knows of that.
      add_generation_prompt: ends the prompt with the opening of the assistant's answer. None does, unless the last
        message is continued.
      continue_final_message: the last message is the beginning of the answer, which goes on from there: nothing that
        ends a message is written after it.
      chat_template_kwargs: further variables of the template, such as ``enable_thinking``.

    Raises:
      InvalidRequestError: something of the wrong form, named by its field.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", checked_messages(self.messages))
        for name in ("tools", "documents"):
            _check_mappings(name, getattr(self, name))
        check_bool("continue_final_message", self.continue_final_message)
        if self.add_generation_prompt is not None:
            check_bool("add_generation_prompt", self.add_generation_prompt)
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequestError(
                    "add_generation_prompt", True, "continue_final_message goes on with the last message instead"
                )
            if not isinstance(self.messages[-1].get("content"), str):
                raise InvalidRequestError(
                    f"messages[{len(self.messages) - 1}].content", None, "text that can be continued is needed"
                )
        self._check_kwargs()

    @property
    def opens_answer(self) -> bool:
        """`add_generation_prompt`, or what it is if nobody has said it."""
        return not self.continue_final_message if self.add_generation_prompt is None else self.add_generation_prompt

    def _check_kwargs(self) -> None:
        variables = self.chat_template_kwargs
        if variables is None:
            return
        if not isinstance(variables, Mapping) or not all(isinstance(name, str) for name in variables):
            raise InvalidRequestError("chat_template_kwargs", variables, "use a mapping of names to JSON values")
        for name in ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"):
            if name in variables:
                raise InvalidRequestError(f"chat_template_kwargs.{name}", variables[name], "it is a field of its own")


Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]] | ChatPrompt
"""Text, token ids, or a chat; a list of messages (``{"role": …, "content": …}``) is a chat with nothing besides."""


def as_chat(prompt: Prompt) -> ChatPrompt | None:
    """A prompt that is a chat, or a list of messages; None for text and ids."""
    if isinstance(prompt, ChatPrompt):
        return prompt
    return ChatPrompt(messages=prompt) if is_chat(prompt) else None  # type: ignore[arg-type]


def is_chat(prompt: Any) -> bool:
    """A list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_list_of_prompts(prompts: Any) -> bool:
    """A list of texts, of lists of ids or of chats; not a text, a list of ids or a chat."""
    if isinstance(prompts, str | np.ndarray) or not isinstance(prompts, Sequence):
        return False
    return not prompts or isinstance(prompts[0], str | Sequence | np.ndarray | ChatPrompt)


def one_of(name: str, given: Any, kind: type[T], default: T | None = None) -> T:
    """`given`, which is one of `kind`; None is `default`."""
    if given is None:
        return default  # type: ignore[return-value]  # None where None is meant
    if not isinstance(given, kind):
        raise InvalidRequestError(name, given, f"use a {kind.__name__}")
    return given


def one_for_each(prompts: Sequence[Any], name: str, given: Any, kind: type, default: Any = None) -> Sequence[Any]:
    """`given` for each prompt: one of `kind` is for all, None is `default`, a list has one for each."""
    if given is None or isinstance(given, kind):
        return [one_of(name, given, kind, default)] * len(prompts)
    if not isinstance(given, list | tuple):
        raise InvalidRequestError(name, given, f"use a {kind.__name__}, or a list of them")
    for index, one in enumerate(given):
        if not isinstance(one, kind):
            raise InvalidRequestError(f"{name}[{index}]", one, f"use a {kind.__name__}")
    if len(given) != len(prompts):
        raise InvalidRequestError(
            name, f"{len(given)} of them", f"use one for all, or one for each of the {len(prompts)} prompts"
        )
    return given


def input_of(given: Any) -> tuple[Any, Any, Any]:
    """Prompt, parameters and options of an input of `generate_each`; the last two None where they are left out."""
    if not isinstance(given, tuple | list) or len(given) not in (2, 3):
        raise InvalidRequestError("input", given, "use (prompt, sampling_params), with options if need be")
    prompt, params, options = (*given, None)[:3]
    return prompt, params, options


def chat_prompts(messages: Any, **settings: Any) -> ChatPrompt | list[ChatPrompt]:
    """One chat, or a list of chats, with what the model's template is told besides."""
    if is_chat(messages) or not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return ChatPrompt(messages=messages, **settings)
    prompts = []
    for index, chat in enumerate(messages):
        try:
            prompts.append(ChatPrompt(messages=chat, **settings))
        except InvalidRequestError as error:
            if not error.field.startswith("messages"):  # the rest is the same for all
                raise
            raise in_list(error, index) from None
    return prompts


def in_list(error: InvalidRequestError, index: int) -> InvalidRequestError:
    """An error of one request of a list, its field named by the prompt's place: ``prompts[2][5]`` for ``prompt[5]``,
    ``prompts[2].min_tokens`` for any other."""
    of_prompt = error.field == "prompt" or error.field.startswith("prompt[")
    path = error.field.removeprefix("prompt") if of_prompt else f".{error.field}"
    return InvalidRequestError(f"prompts[{index}]{path}", error.value, error.allowed)


def checked_messages(messages: Any) -> Sequence[Mapping[str, Any]]:
    """A non-empty list of messages, whose contents are texts; see `ChatPrompt`.

    Raises:
      InvalidRequestError: names the offending message and field.
    """
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages", messages, "a list of at least one {role, content} is needed")
    checked = []
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(field, message, "a mapping with role and content is needed")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(f"{field}.role", role, "a role such as 'system', 'user' or 'assistant' is needed")
        if isinstance(content, list | tuple):
            message = {**message, "content": _joined(f"{field}.content", content)}
        elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InvalidRequestError(f"{field}.content", content, "text is needed, or a list of parts of type 'text'")
        checked.append(message)
    return checked


def _joined(field: str, parts: Sequence[Any]) -> str:
    """The text of content parts."""
    if not parts:
        raise InvalidRequestError(field, parts, "a part of type 'text' is needed at least")
    for index, part in enumerate(parts):
        where = f"{field}[{index}]"
        if not isinstance(part, Mapping):
            raise InvalidRequestError(where, part, "an object with type 'text' and a text is needed")
        if part.get("type") != "text":
            raise InvalidRequestError(f"{where}.type", part.get("type"), "models here read text; use 'text'")
        if not isinstance(part.get("text"), str):
            raise InvalidRequestError(f"{where}.text", part.get("text"), "text is needed")
        for name, value in part.items():
            if name not in ("type", "text") and value is not None:
                raise InvalidRequestError(f"{where}.{name}", value, "no such field; known are type, text")
    return "\n".join(part["text"] for part in parts)


def with_tool_arguments(message: Any, change: Callable[[Any], Any]) -> Any:
    """A message with the arguments of its tool calls changed; as it is where it has none, or is no message."""

    def changed(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or "arguments" not in function:
            return call
        return {**call, "function": {**function, "arguments": change(function["arguments"])}}

    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return {**message, "tool_calls": [changed(call) for call in calls]} if isinstance(calls, list) else message


def _check_mappings(name: str, values: Any) -> None:
    if values is None:
        return
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise InvalidRequestError(name, values, "use a list of objects")
    for index, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise InvalidRequestError(f"{name}[{index}]", value, "use an object")
