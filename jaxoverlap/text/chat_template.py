"""Chat messages to prompt text, through the Jinja template that comes with a model.

The environment is the one transformers renders in (sandboxed, same whitespace rules, filters and
globals), so a template gives the same text in both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxoverlap.errors import InvalidRequestError, ModelError, UnsupportedError
from jaxoverlap.prompts import ChatPrompt, with_tool_arguments


class ChatTemplate:
    """A model's template, or its set of named templates.

    Args:
      templates: name to Jinja source. "tool_use" is taken for requests with tools where there is
        one, "default" otherwise.
      special_tokens: variables every template sees, e.g. `bos_token`.

    Raises:
      ModelError: a template does not compile.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ModelError(f"chat template {name!r} does not compile: {error}") from error

    def render(self, chat: ChatPrompt) -> str:
        """The prompt text, as transformers renders it: fields that are None are left out.

        Where the template fails on tool calls, they are spelled as other templates expect them: see `_spellings`.

        A message that is continued is found in the text by a mark that is put at its end, as in transformers. What the
        template writes after it goes; where the template trims the message, so do the spaces before it.

        Raises:
          InvalidRequestError: messages refused by the template, or that are not JSON.
          UnsupportedError: the model has several templates and no default.
        """
        # Most templates would print a field that is None.
        present = [{key: value for key, value in message.items() if value is not None} for message in chat.messages]
        for message in present:
            _alias_reasoning(message)
        if chat.continue_final_message:
            present[-1]["content"] += _END_MARK
        template = self._templates.get("tool_use") if chat.tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise UnsupportedError(f"no default chat template; this model has {sorted(self._templates)}")
        context = {**self._special_tokens, **_plain(dict(chat.chat_template_kwargs or {}), "chat_template_kwargs")}
        messages = _plain(present, "messages")
        for name in ("tools", "documents"):
            given = getattr(chat, name)
            context[name] = None if given is None else _plain(list(given), name)
        context["add_generation_prompt"] = chat.opens_answer
        text = self._render(template, context, messages, chat)
        return _cut_after_final_message(text, chat) if chat.continue_final_message else text

    @staticmethod
    def _render(template: jinja2.Template, context: dict[str, Any], messages: list[Any], chat: ChatPrompt) -> str:
        first: Exception | None = None
        for spelled in _spellings(messages):
            try:
                return template.render({**context, "messages": spelled})
            except Exception as error:  # a template is a program: it may fail in any way on what it does not expect
                first = first or error
        raise InvalidRequestError(
            "messages", list(chat.messages), f"the model's chat template refuses: {first}"
        ) from first


_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def _alias_reasoning(message: dict[str, Any]) -> None:
    """Gives the reasoning of an answer the names that templates read, whatever it came by; as transformers does."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    if reasoning is not None:
        message.setdefault("thinking", reasoning)
        message["reasoning_content"] = reasoning


def _spellings(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The messages as they are, and then as templates may expect the tool calls in them.

    A content that is not there may have to be null (DeepSeek-R1), and arguments that are an object its JSON text.
    """
    null = [{"content": None, **message} for message in messages]
    tried: list[list[dict[str, Any]]] = []
    for arguments in (lambda m: m, _with_arguments_as_text):
        for contents in (messages, null):
            spelled = [arguments(message) for message in contents]
            if spelled not in tried:
                tried.append(spelled)
                yield spelled


def _with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    def as_text(arguments: Any) -> Any:
        return _tojson(arguments) if isinstance(arguments, dict) else arguments

    return with_tool_arguments(message, as_text)


_END_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
"""What transformers marks the end with; a template could tell another one, by its letters or its length."""


def _cut_after_final_message(text: str, chat: ChatPrompt) -> str:
    content, mark = chat.messages[-1]["content"].strip(), _END_MARK.strip()
    if content not in text or mark not in text:
        field = f"messages[{len(chat.messages) - 1}].content"
        raise InvalidRequestError(field, content, "the model's chat template does not write it, so it can't go on")
    end = text.rindex(mark)
    return text[:end] if text.startswith(_END_MARK, end) else text[:end].rstrip()


def _plain(value: Any, field: str) -> Any:
    """A copy made of JSON types only, so that no method of a richer object is within a template's reach."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, value, f"JSON values are needed: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it is a scope for what is set in it."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        return [jinja2.nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)]


class _Dict:
    """`dict(...)` for templates, without the type behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` for templates, closed to Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as Jinja's own: even `self` may be a field
        self, fields = args[0], dict(*args[1:], **kwargs)
        for name in fields:
            _check_field_name(name)
        jinja2.utils.Namespace.__init__(self, fields)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_field_name(name)
        super().__setitem__(name, value)


def _check_field_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace of a chat template can't have the field {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
