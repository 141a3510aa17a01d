"""OpenAI's batch file format, line by line: what a line of input asks for, and what a line of output says.

    bytes ── parse_line ──► fields with a custom_id ── to_request ──► BatchRequest ── answer_line ──► bytes
                  └──────────── BadLine ◄──────────────────┴───────── error_line ──► bytes

A line of output answers the input line with the same custom_id. An input line that can't be told by its custom_id
(it has none, or another line has the same) is told by its number instead, in ``error.line``. That is the *key*
by which a later run finds out what has been answered.
"""

from __future__ import annotations

import json
import secrets
import time
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from jaxoverlap.errors import DeadlineError, InvalidRequestError, JaxOverlapError, UnsupportedError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.prompts import check_messages
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxoverlap.llm import Prompt, RequestOutput

CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
LINE_START = b'{"id": "batch_req_'
"""Every line of output begins so: a half-written one can be told from somebody else's file."""

_LINE_FIELDS = ("custom_id", "method", "url", "body")
_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))
_OPTION_FIELDS = tuple(f.name for f in fields(RequestOptions))
_BODY_FIELDS = ("model", "messages", "prompt", "max_completion_tokens", *_SAMPLING_FIELDS, *_OPTION_FIELDS)

_UNSUPPORTED = frozenset(
    """
    allowed_token_ids audio bad_words best_of chat_template chat_template_kwargs detokenize documents echo
    frequency_penalty function_call functions guided_choice guided_grammar guided_json guided_regex
    include_stop_str_in_output length_penalty logit_bias logprobs metadata min_tokens modalities n parallel_tool_calls
    prediction presence_penalty prompt_cache_key prompt_logprobs reasoning_effort repetition_penalty
    response_format safety_identifier service_tier stop store stream stream_options structured_outputs suffix
    tool_choice tools top_logprobs truncate_prompt_tokens use_beam_search user verbosity web_search_options
    """.split()  # noqa: SIM905
)
_NOTHING: dict[str, Any] = {
    "best_of": 1,
    "echo": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_tokens": 0,
    "n": 1,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "stop": [],
    "stream": False,
    "tool_choice": "none",
    "tools": [],
}
"""Fields that engines like this one know, and for some a value that asks for nothing: that is taken, as null is."""

_FINISH = {FinishReason.EOS: "stop", FinishReason.STOP_TOKEN: "stop", FinishReason.LENGTH: "length"}


@dataclass(frozen=True)
class BatchRequest:
    """One line's request.

    Attributes:
      is_chat: it wants a chat completion, not a text completion.
      renamed: what the line calls a field that the engine knows by another name.
    """

    custom_id: str
    prompt: Prompt
    params: SamplingParams
    options: RequestOptions
    is_chat: bool
    renamed: dict[str, str] = field(default_factory=dict)


class BadLine(Exception):
    """Why a line gets an error for an answer.

    Attributes:
      code: "invalid_line", "duplicate_custom_id", "invalid_request", "unsupported", "timeout" or
        "server_error".
      custom_id: None where it has none.
      line: its number, from 1, where the custom_id does not tell it.
      status: the HTTP status a server would have given; None where there was no request to answer.
      param: path of the offending field.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        custom_id: str | None = None,
        line: int | None = None,
        status: int | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.code, self.custom_id, self.line, self.status, self.param = code, custom_id, line, status, param


@dataclass(frozen=True)
class ModelNames:
    """`shown` stands in the answers; a line may name any of `accepted`, or none."""

    shown: str
    accepted: tuple[str, ...]

    @classmethod
    def of(cls, name: str, source: str | None) -> ModelNames:
        """Args: the loaded model's own name, and what it was loaded from."""
        return cls(name, tuple(dict.fromkeys([name, *([source] if source else []), "default"])))


# ---------------------------------------------------------------- input


def parse_line(raw: bytes, number: int) -> dict[str, Any]:
    """The fields of a line, with a custom_id.

    Raises:
      BadLine: it can't even be told by its custom_id.
    """
    try:
        line = json.loads(raw.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise _not_a_request(number, f"not valid UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise _not_a_request(number, f"not JSON: {error}") from None
    if not isinstance(line, dict):
        raise _not_a_request(number, f"not a JSON object but {type(line).__name__}")
    custom_id = line.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        problem = InvalidRequestError("custom_id", custom_id, "a text that no other line has is needed")
        raise _not_a_request(number, str(problem))
    return line


def duplicate(custom_id: str, number: int) -> BadLine:
    message = f"line {number}: custom_id: {custom_id!r} is not allowed; an earlier line has it"
    # Not under its custom_id: a reader for whom the later line counts would lose the answer.
    return BadLine("duplicate_custom_id", message, line=number)


def too_long(number: int, limit: int) -> BadLine:
    return _not_a_request(number, f"longer than {limit} bytes")


def _not_a_request(number: int, problem: str) -> BadLine:
    return BadLine("invalid_line", f"line {number}: {problem}", line=number)


def to_request(line: dict[str, Any], names: ModelNames, defaults: dict[str, Any]) -> BatchRequest:
    """The request of a parsed line.

    Args:
      line: as `parse_line` returns it.
      names: of the model that is served.
      defaults: sampling parameters and request options for a body that leaves them out.

    Raises:
      BadLine: it asks for something that can't be done, or in a way that can't be understood.
    """
    try:
        return _to_request(line, names, defaults)
    except JaxOverlapError as error:
        raise refusal(line["custom_id"], error) from error


def refusal(custom_id: str, error: JaxOverlapError) -> BadLine:
    """The answer to a request that was refused, or that the engine could not finish."""
    if isinstance(error, InvalidRequestError):
        return BadLine("invalid_request", str(error), custom_id=custom_id, status=400, param=error.field)
    if isinstance(error, UnsupportedError):
        return BadLine("unsupported", str(error), custom_id=custom_id, status=400)
    if isinstance(error, DeadlineError):
        return BadLine("timeout", str(error), custom_id=custom_id, status=408)
    return BadLine("server_error", str(error), custom_id=custom_id, status=500)


def refusal_by_engine(request: BatchRequest, error: JaxOverlapError) -> BadLine:
    """As `refusal`, with the field called what the line calls it."""
    if isinstance(error, InvalidRequestError):
        name = error.field
        for engine_name, own_name in request.renamed.items():
            if name == engine_name or name.startswith(f"{engine_name}["):
                name = own_name + name.removeprefix(engine_name)
        error = InvalidRequestError(f"body.{name}", error.value, error.allowed)
    return refusal(request.custom_id, error)


def _to_request(line: dict[str, Any], names: ModelNames, defaults: dict[str, Any]) -> BatchRequest:
    for name, value in line.items():
        if name not in _LINE_FIELDS:
            raise InvalidRequestError(name, value, f"no such field; known are {', '.join(_LINE_FIELDS)}")
    if line.get("method") not in (None, "POST"):
        raise InvalidRequestError("method", line["method"], "use 'POST', or leave it out")
    body = line.get("body")
    if not isinstance(body, dict):
        raise InvalidRequestError("body", body, "an object with messages or prompt is needed")
    given = {name: value for name, value in body.items() if value is not None}
    is_chat = _is_chat(line.get("url"), given)
    for name, value in given.items():
        _check_field(name, value)
    if "model" in given and given["model"] not in names.accepted:
        raise InvalidRequestError("body.model", given["model"], f"served is {', '.join(names.accepted)}")

    renamed = {"prompt": "messages"} if is_chat else {}
    sampling = {name: given[name] for name in _SAMPLING_FIELDS if name in given}
    if "max_completion_tokens" in given:
        if "max_tokens" in given:
            raise InvalidRequestError("body.max_tokens", given["max_tokens"], "max_completion_tokens is given as well")
        renamed["max_tokens"] = "max_completion_tokens"
        sampling["max_tokens"] = given["max_completion_tokens"]
    prompt = _messages(given) if is_chat else _prompt(given)
    request = BatchRequest(line["custom_id"], prompt, SamplingParams(), RequestOptions(), is_chat, renamed)
    sampling_defaults = {name: value for name, value in defaults.items() if name in _SAMPLING_FIELDS}
    treatment = {name: (defaults | given)[name] for name in _OPTION_FIELDS if name in defaults | given}
    try:
        params = SamplingParams.from_dict(sampling, **sampling_defaults)
        options = RequestOptions(**treatment)
    except JaxOverlapError as error:
        raise refusal_by_engine(request, error) from error
    return replace(request, params=params, options=options)


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


def _check_field(name: str, value: Any) -> None:
    if name in _BODY_FIELDS:
        return
    if name not in _UNSUPPORTED:
        raise InvalidRequestError(f"body.{name}", value, f"no such field; known are {', '.join(_BODY_FIELDS)}")
    nothing = _NOTHING.get(name)
    if nothing is None or value != nothing or isinstance(value, bool) != isinstance(nothing, bool):
        taken = "" if nothing is None else f"; only {json.dumps(nothing)}, which asks for nothing, is taken"
        raise UnsupportedError(f"body.{name} is not supported in this build{taken}")


def _messages(body: dict[str, Any]) -> Prompt:
    try:
        check_messages(body["messages"])
    except InvalidRequestError as error:
        raise InvalidRequestError(f"body.{error.field}", error.value, error.allowed) from None
    return body["messages"]


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


# ---------------------------------------------------------------- output


def answer_line(request: BatchRequest, output: RequestOutput, model: str) -> bytes:
    """An OpenAI chat completion or text completion, and the seed, with which it comes out again."""
    content = {"message": {"role": "assistant", "content": output.text}} if request.is_chat else {"text": output.text}
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": _FINISH[output.finish_reason]}
    prompt_tokens, completion_tokens = output.prompt_tokens, len(output.token_ids)
    body = {
        "id": ("chatcmpl-" if request.is_chat else "cmpl-") + secrets.token_hex(12),
        "object": "chat.completion" if request.is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
        },
        "seed": output.seed,
    }
    return _line(request.custom_id, _response(200, body), None)


def error_line(bad: BadLine) -> bytes:
    error: dict[str, Any] = {"code": bad.code, "message": str(bad)}
    response = None
    if bad.status is not None:
        kind = "server_error" if bad.status >= 500 else "invalid_request_error"
        details = {"message": str(bad), "type": kind, "param": bad.param, "code": bad.code}
        response = _response(bad.status, {"error": details})
    if bad.line is not None:
        error["line"] = bad.line
    return _line(bad.custom_id, response, error)


def read_key(line: bytes) -> tuple[str | int, bool]:
    """The key that a line of output answers, and whether it is an error.

    Raises:
      ValueError: it is not a line of output.
    """
    try:
        item = json.loads(line.decode("utf-8"))
        error = item["error"]
        key = item["custom_id"] if error is None or "line" not in error else error["line"]
    except (KeyError, TypeError, RecursionError) as problem:
        raise ValueError(f"not a line of output: {problem!r}") from None
    if not line.startswith(LINE_START) or not isinstance(key, str | int):
        raise ValueError("not a line of output")
    return key, error is not None


def _response(status: int, body: dict[str, Any]) -> dict[str, Any]:
    return {"status_code": status, "request_id": "req_" + secrets.token_hex(12), "body": body}


def _line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    item = {
        "id": "batch_req_" + secrets.token_hex(12),
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    try:
        return json.dumps(item, ensure_ascii=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # half a surrogate pair in a custom_id, which JSON can write and UTF-8 can't
        return json.dumps(item).encode("ascii") + b"\n"
