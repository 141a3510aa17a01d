"""What kind of prompt it is, and whether chat messages have the form that templates expect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxoverlap.errors import InvalidRequestError


def is_chat(prompt: Any) -> bool:
    """A list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def is_list_of_prompts(prompts: Any) -> bool:
    """A list of texts, of lists of ids or of chats; not a text, a list of ids or a chat."""
    if isinstance(prompts, str | np.ndarray) or not isinstance(prompts, Sequence):
        return False
    return not prompts or isinstance(prompts[0], str | Sequence | np.ndarray)


def one_for_each(prompts: Sequence[Any], name: str, given: Any, kind: type) -> Sequence[Any]:
    """`given` for each prompt: one of `kind` is for all, None is `kind()`, a list has one for each."""
    if given is None or isinstance(given, kind):
        return [kind() if given is None else given] * len(prompts)
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


def check_messages(messages: Any) -> None:
    """Refuses what is not a non-empty list of `{"role": str, "content": str, …}`.

    An assistant's message may leave its content out if it calls tools.

    Raises:
      InvalidRequestError: names the offending message and field.
    """
    if not isinstance(messages, list) or not messages:
        raise InvalidRequestError("messages", messages, "a list of at least one {role, content} is needed")
    for index, message in enumerate(messages):
        field = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(field, message, "a mapping with role and content is needed")
        role, content = message.get("role"), message.get("content")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(f"{field}.role", role, "a role such as 'system', 'user' or 'assistant' is needed")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise InvalidRequestError(f"{field}.content", content, "text is needed")
