"""Requests as messages, and messages as requests.

- What is written and read again is equal to what it was: `sampling_params(generation(prompt, params, …)) == params`,
  but for numbers that a 32-bit float does not hold, which become the nearest one that it does, and for a JSON schema,
  which becomes its text.
- Fields are checked by the types that they end in, so that a service refuses what `LLM` refuses, in the same words.
  Their names in errors are Python's; `statuses` has the way back to a path in the message.
- A field of the message that has its default is not told from one that was left out, unless its default is not zero.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.prompts import ChatPrompt, Prompt, is_chat
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from jaxoverlap.v1 import common_pb2, generate_service_pb2

Generation = generate_service_pb2.Generation
TokenizeRequest = generate_service_pb2.TokenizeRequest


# ---------------------------------------------------------------- to messages


def generation(
    prompt: Prompt,
    params: SamplingParams | None,
    options: RequestOptions,
    *,
    model: str = "",
    client_request_id: str = "",
) -> Generation:
    """The message for a request. Text and token ids are both asked for; `options.timeout` is for the call's deadline.
    Without parameters the service takes the model's own.

    Raises:
      InvalidRequestError: something that a message can't hold, such as text that is not valid Unicode.
    """
    sampling = None if params is None else _sampling(params)
    params = params or SamplingParams()
    message = Generation(
        sampling=sampling,
        stop=common_pb2.StopOptions(
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            strings=params.stop,
            token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            include_matched=params.include_stop_str_in_output,
        ),
        constraint=None if params.structured_output is None else _constraint(params.structured_output),
        returns=common_pb2.ReturnOptions(
            text=True,
            token_ids=True,
            logprobs=params.logprobs is not None,
            # One number for both: the reader leaves out what was not asked for.
            top_logprobs=max(params.logprobs or 0, params.prompt_logprobs or 0),
            prompt_logprobs=params.prompt_logprobs is not None,
            skip_special_tokens=params.skip_special_tokens,
        ),
        num_sequences=params.n,
        best_of=params.best_of,
        priority=options.priority,
        cache_salt=_text("cache_salt", options.cache_salt or ""),
        model=_text("model", model),
        client_request_id=_text("client_request_id", client_request_id),
    )
    set_prompt(message, prompt)
    return message


def set_prompt(message: Generation | TokenizeRequest, prompt: Prompt) -> None:
    """Writes a prompt into a message that takes one.

    Raises:
      InvalidRequestError: it is none, or of a kind that the message does not take.
    """
    if isinstance(prompt, str):
        message.text = _text("prompt", prompt)
    elif isinstance(prompt, ChatPrompt):
        message.chat.CopyFrom(_chat(prompt))
    elif is_chat(prompt):
        message.chat.CopyFrom(_chat(ChatPrompt(messages=prompt)))  # type: ignore[arg-type]
    elif (
        isinstance(message, Generation) and isinstance(prompt, Sequence | np.ndarray) and not isinstance(prompt, bytes)
    ):
        message.token_ids.ids.extend(check_token_ids("prompt", prompt))
        message.token_ids.SetInParent()  # an empty list is still a prompt of this kind
    else:
        kinds = "text, token ids or messages" if isinstance(message, Generation) else "text or messages"
        raise InvalidRequestError("prompt", prompt, f"use {kinds}")


def check_token_ids(field: str, ids: Any) -> list[int]:
    """Ids that a message can hold; the vocabulary's end is the service's to check.

    Raises:
      InvalidRequestError: they are none.
    """
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):
        array = np.asarray(None)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidRequestError(field, ids, "token ids are integers in a flat list")
    wrong = (array < 0) | (array >= 2**32)
    if wrong.any():
        index = int(np.argmax(wrong))
        raise InvalidRequestError(f"{field}[{index}]", int(array[index]), "token ids go from 0 to 2**32 - 1")
    return array.tolist()


def _sampling(params: SamplingParams) -> common_pb2.SamplingOptions:
    message = common_pb2.SamplingOptions(
        top_k=max(params.top_k, 0),
        seed=params.seed,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        banned_token_ids=params.banned_token_ids,
    )
    for name in _FLOATS:
        setattr(message, name, float(getattr(params, name)))
    return message


def _constraint(structure: StructuredOutput) -> common_pb2.OutputConstraint:
    if structure.any_json:
        return common_pb2.OutputConstraint(any_json=True)
    if structure.choices is not None:
        values = [_text(f"structured_output.choices[{i}]", text) for i, text in enumerate(structure.choices)]
        return common_pb2.OutputConstraint(choices=common_pb2.Choices(values=values))
    if structure.regex is not None:
        return common_pb2.OutputConstraint(regex=_text("structured_output.regex", structure.regex))
    if structure.grammar is not None:
        return common_pb2.OutputConstraint(lark_grammar=_text("structured_output.grammar", structure.grammar))
    schema = structure.json_schema
    text = schema if isinstance(schema, str) else _json("structured_output.json_schema", schema)
    return common_pb2.OutputConstraint(json_schema=_text("structured_output.json_schema", text))


def _chat(prompt: ChatPrompt) -> common_pb2.Chat:
    message = common_pb2.Chat(
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        tools_json="" if prompt.tools is None else _json("tools", list(prompt.tools)),
        documents_json="" if prompt.documents is None else _json("documents", list(prompt.documents)),
        template_variables_json=(
            ""
            if prompt.chat_template_kwargs is None
            else _json("chat_template_kwargs", dict(prompt.chat_template_kwargs))
        ),
    )
    for index, given in enumerate(prompt.messages):
        field = f"messages[{index}]"
        content = given.get("content")
        extra = {key: value for key, value in given.items() if key not in ("role", "content") and value is not None}
        message.messages.add(
            role=_text(f"{field}.role", given["role"]),
            content=None if content is None else _text(f"{field}.content", content),
            extra_json=_json(field, extra) if extra else "",
        )
    return message


def _text(field: str, text: Any) -> str:
    if not isinstance(text, str):
        raise InvalidRequestError(field, text, "text is needed")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(field, text, f"valid Unicode is needed: {error.reason}") from None
    return text


def _json(field: str, value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(field, value, f"JSON values are needed: {error}") from None


# ---------------------------------------------------------------- from messages

_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_PENALTIES = ("presence_penalty", "frequency_penalty")
"""Off unless a message says otherwise, whatever the model."""


def prompt_of(message: Generation | TokenizeRequest) -> str | list[int] | ChatPrompt:
    """The prompt of a message; its token ids are not checked against a vocabulary.

    Raises:
      InvalidRequestError: there is none, or it is a chat of the wrong form.
    """
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return message.text
    if kind == "token_ids":
        assert isinstance(message, Generation)
        return list(message.token_ids.ids)
    if kind != "chat":
        raise InvalidRequestError("prompt", None, "a prompt is needed")
    chat = message.chat
    return ChatPrompt(
        messages=[_message_of(given, f"messages[{index}]") for index, given in enumerate(chat.messages)],
        tools=_decoded("tools", chat.tools_json, list),
        documents=_decoded("documents", chat.documents_json, list),
        chat_template_kwargs=_decoded("chat_template_kwargs", chat.template_variables_json, dict),
        add_generation_prompt=chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
        continue_final_message=chat.continue_final_message,
    )


def sampling_params(message: Generation, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
    """The parameters of a message; what it leaves out are the `defaults`, where there are any.

    Raises:
      InvalidRequestError: a value out of range.
    """
    sampling, stop, returns = message.sampling, message.stop, message.returns
    given: dict[str, Any] = dict(defaults or {})
    for name in _FLOATS:
        if name in _PENALTIES or sampling.HasField(name):
            given[name] = _shortest(getattr(sampling, name))
    if sampling.HasField("top_k"):
        given["top_k"] = sampling.top_k
    if sampling.HasField("seed"):
        given["seed"] = sampling.seed
    if sampling.logit_bias:
        biases = dict(sampling.logit_bias)
        shortest = {bias: _shortest(bias) for bias in set(biases.values())}
        given["logit_bias"] = {token_id: shortest[bias] for token_id, bias in biases.items()}
    if sampling.allowed_token_ids:
        given["allowed_token_ids"] = tuple(sampling.allowed_token_ids)
    if stop.HasField("max_tokens"):
        given["max_tokens"] = stop.max_tokens
    if message.HasField("num_sequences"):
        given["n"] = message.num_sequences
    if message.HasField("best_of"):
        given["best_of"] = message.best_of
    if returns.HasField("skip_special_tokens"):
        given["skip_special_tokens"] = returns.skip_special_tokens
    if returns.top_logprobs and not (returns.logprobs or returns.prompt_logprobs):
        allowed = "set logprobs or prompt_logprobs as well"
        raise InvalidRequestError("generation.returns.top_logprobs", returns.top_logprobs, allowed)
    return SamplingParams(
        banned_token_ids=tuple(sampling.banned_token_ids),
        min_tokens=stop.min_tokens,
        stop=tuple(stop.strings),
        stop_token_ids=tuple(stop.token_ids),
        ignore_eos=stop.ignore_eos,
        include_stop_str_in_output=stop.include_matched,
        logprobs=returns.top_logprobs if returns.logprobs else None,
        prompt_logprobs=returns.top_logprobs if returns.prompt_logprobs else None,
        structured_output=_structure_of(message.constraint) if message.HasField("constraint") else None,
        **given,
    )


def request_options(message: Generation, *, timeout: float | None = None) -> RequestOptions:
    """How a message's request is to be treated; `timeout` is what its call has left, in seconds."""
    return RequestOptions(priority=message.priority, timeout=timeout, cache_salt=message.cache_salt or None)


def _structure_of(message: common_pb2.OutputConstraint) -> StructuredOutput:
    kind = message.WhichOneof("kind")
    if kind is None:
        raise InvalidRequestError("structured_output", None, "one kind of constraint is needed")
    if kind == "choices":
        return StructuredOutput(choices=tuple(message.choices.values))
    return StructuredOutput(**{"grammar" if kind == "lark_grammar" else kind: getattr(message, kind)})


def _message_of(message: common_pb2.ChatMessage, field: str) -> dict[str, Any]:
    extra = _decoded(f"{field}.extra_json", message.extra_json, dict) or {}
    taken = {"role", "content"} & set(extra)
    if taken:
        raise InvalidRequestError(f"{field}.extra_json", sorted(taken), "role and content have fields of their own")
    content = message.content if message.HasField("content") or not extra.get("tool_calls") else None
    return {"role": message.role, "content": content, **extra}


def _decoded(field: str, text: str, kind: type[list[Any]] | type[dict[str, Any]]) -> Any:
    """A JSON list or object; None for no text."""
    if not text:
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, kind):
        raise InvalidRequestError(field, text, f"use a JSON {'list' if kind is list else 'object'}")
    return value


def _shortest(value: float) -> float:
    """The number with the fewest digits that is this 32-bit float: 0.1, not 0.10000000149."""
    return float(str(np.float32(value)))
