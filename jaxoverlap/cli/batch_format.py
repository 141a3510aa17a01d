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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxoverlap.cli import answers
from jaxoverlap.cli.batch_body import Wish, read_body
from jaxoverlap.errors import DeadlineError, InvalidRequestError, JaxOverlapError, UnsupportedError
from jaxoverlap.prompts import Prompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxoverlap.llm import RequestOutput

LINE_START = b'{"id": "batch_req_'
"""Every line of output begins so: a half-written one can be told from somebody else's file."""

MAY_PASS = ("timeout", "server_error")
"""Codes of errors that the same line may not have another time."""

_LINE_FIELDS = ("custom_id", "method", "url", "body")


@dataclass(frozen=True)
class BatchRequest:
    """One line's request.

    Attributes:
      wish: what its body asked for, in the body's own words.
    """

    custom_id: str
    params: SamplingParams
    options: RequestOptions
    wish: Wish

    @property
    def prompt(self) -> Prompt:
        return self.wish.prompt

    @property
    def is_chat(self) -> bool:
        return self.wish.is_chat


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
    return refusal(request.custom_id, _in_words_of(request.wish, error))


def _in_words_of(wish: Wish, error: JaxOverlapError) -> JaxOverlapError:
    if not isinstance(error, InvalidRequestError):
        return error
    return InvalidRequestError(f"body.{wish.own_name(error.field)}", error.value, error.allowed)


def _to_request(line: dict[str, Any], names: ModelNames, defaults: dict[str, Any]) -> BatchRequest:
    for name, value in line.items():
        if name not in _LINE_FIELDS:
            raise InvalidRequestError(name, value, f"no such field; known are {', '.join(_LINE_FIELDS)}")
    if line.get("method") not in (None, "POST"):
        raise InvalidRequestError("method", line["method"], "use 'POST', or leave it out")
    wish = read_body(line.get("url"), line.get("body"), names.accepted)
    wanted = {name: value for name, value in defaults.items() if name not in wish.unset}
    options = {name: wanted.pop(name) for name in list(wanted) if name in RequestOptions.__dataclass_fields__}
    try:
        params = SamplingParams.from_dict(wish.sampling, **wanted)
        return BatchRequest(line["custom_id"], params, RequestOptions(**(options | wish.options)), wish)
    except JaxOverlapError as error:
        raise _in_words_of(wish, error) from error


# ---------------------------------------------------------------- output


def answer_line(request: BatchRequest, output: RequestOutput, model: str) -> bytes:
    """An OpenAI chat completion or text completion; see `answers.completion`."""
    body = answers.completion(output, is_chat=request.is_chat, model=model)
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


def read_key(line: bytes) -> tuple[str | int, str | None]:
    """The key that a line of output answers, and the code of its error, if it is one.

    Raises:
      ValueError: it is not a line of output.
    """
    try:
        item = json.loads(line.decode("utf-8"))
        error = item["error"]
        key = item["custom_id"] if error is None or "line" not in error else error["line"]
        code = None if error is None else error["code"]
    except (KeyError, TypeError, RecursionError) as problem:
        raise ValueError(f"not a line of output: {problem!r}") from None
    if not line.startswith(LINE_START) or not isinstance(key, str | int) or not isinstance(code, str | None):
        raise ValueError("not a line of output")
    return key, code


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
