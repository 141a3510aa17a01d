"""Chat messages to prompt text, through the Jinja template that comes with a model.

The environment is the one transformers renders in (sandboxed, same whitespace rules, filters and
globals), so a template gives the same text in both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
from jaxoverlap.prompts import check_messages


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

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text.

        Raises:
          InvalidRequestError: messages of the wrong form, or refused by the template.
          UnsupportedError: the model has several templates and no default.
        """
        check_messages(messages)
        # Fields that are None are as good as absent; most templates would print them.
        present = [{key: value for key, value in message.items() if value is not None} for message in messages]
        template = self._templates.get("tool_use") if tools else None
        template = template or self._templates.get("default")
        if template is None:
            raise UnsupportedError(f"no default chat template; this model has {sorted(self._templates)}")
        context = {**self._special_tokens, **_plain(dict(variables or {}), "chat_template_kwargs")}
        context["messages"] = _plain(present, "messages")
        context["tools"] = _plain(tools, "tools")
        context["documents"] = _plain(documents, "documents")
        context["add_generation_prompt"] = add_generation_prompt
        try:
            return template.render(context)
        except Exception as error:  # a template is a program: it may fail in any way on messages it does not expect
            raise InvalidRequestError("messages", messages, f"the model's chat template refuses: {error}") from error


def _plain(value: Any, field: str) -> Any:
    """A copy made of JSON types only, so that no method of a richer object is within a template's reach."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, value, f"JSON values are needed: {error}") from error


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks what an assistant said, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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
