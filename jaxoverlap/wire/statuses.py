"""Exceptions as statuses, and statuses as exceptions.

    InvalidRequestError      INVALID_ARGUMENT with BadRequest; NOT_FOUND for a model that is not served
    UnsupportedError         UNIMPLEMENTED
    QueueFullError           RESOURCE_EXHAUSTED, with RetryInfo where it can say when
    DeadlineError            DEADLINE_EXCEEDED
    AbortedError             ABORTED; also CANCELLED
    ServerUnavailableError   UNAVAILABLE
    AccessDeniedError        PERMISSION_DENIED; also UNAUTHENTICATED
    ConflictError            FAILED_PRECONDITION
    EngineError              INTERNAL; also every other code

A field of an `InvalidRequestError` has its Python name (`top_p`), on the wire it has the path in the message
(`generation.sampling.top_p`). Names that the table does not have stay as they are.
"""

from __future__ import annotations

import ast
from typing import Any

from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from jaxoverlap.errors import (
    AbortedError,
    AccessDeniedError,
    ConflictError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    JaxOverlapError,
    QueueFullError,
    ServerUnavailableError,
    UnsupportedError,
)

_CODE_OF: dict[type[JaxOverlapError], int] = {
    InvalidRequestError: code_pb2.INVALID_ARGUMENT,
    UnsupportedError: code_pb2.UNIMPLEMENTED,
    QueueFullError: code_pb2.RESOURCE_EXHAUSTED,
    DeadlineError: code_pb2.DEADLINE_EXCEEDED,
    AbortedError: code_pb2.ABORTED,
    ServerUnavailableError: code_pb2.UNAVAILABLE,
    AccessDeniedError: code_pb2.PERMISSION_DENIED,
    ConflictError: code_pb2.FAILED_PRECONDITION,
}
_ERROR_OF: dict[int, type[JaxOverlapError]] = {code: error for error, code in _CODE_OF.items()} | {
    code_pb2.CANCELLED: AbortedError,
    code_pb2.UNAUTHENTICATED: AccessDeniedError,
}

_OWN_NAMES = ("best_of", "priority", "cache_salt", "client_request_id", "model", "add_special_tokens")
_PATH_OF = {
    "prompt": "generation.prompt",
    "messages": "generation.chat.messages",
    "tools": "generation.chat.tools_json",
    "documents": "generation.chat.documents_json",
    "chat_template_kwargs": "generation.chat.template_variables_json",
    "add_generation_prompt": "generation.chat.add_generation_prompt",
    "continue_final_message": "generation.chat.continue_final_message",
    **{
        name: f"generation.sampling.{name}"
        for name in (
            *("temperature", "top_p", "top_k", "min_p", "seed", "logit_bias", "allowed_token_ids", "banned_token_ids"),
            *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        )
    },
    "max_tokens": "generation.stop.max_tokens",
    "min_tokens": "generation.stop.min_tokens",
    "stop": "generation.stop.strings",
    "stop_token_ids": "generation.stop.token_ids",
    "ignore_eos": "generation.stop.ignore_eos",
    "include_stop_str_in_output": "generation.stop.include_matched",
    "structured_output.grammar": "generation.constraint.lark_grammar",
    "structured_output": "generation.constraint",
    "logprobs": "generation.returns.top_logprobs",
    "prompt_logprobs": "generation.returns.prompt_logprobs",
    "skip_special_tokens": "generation.returns.skip_special_tokens",
    "n": "generation.num_sequences",
    **{name: f"generation.{name}" for name in _OWN_NAMES},
}
_NAME_OF = {path: name for name, path in _PATH_OF.items()}
_SAYS_NO = " is not allowed; "
_MESSAGE_BYTES, _DESCRIPTION_BYTES, _FIELD_BYTES = 800, 2000, 400
"""A status travels in HTTP/2 headers, and gRPC loses one of more than 8 KB. Each byte of the message may take three of
them, and it is there a second time, with the details and in base64: 7 KB at the most."""


def status(error: JaxOverlapError, *, root: str = "generation.") -> status_pb2.Status:
    """The status that tells a caller of an error, cut to what gRPC can send. `root` is where in the call's message its
    `Generation` is."""
    code = next((code for kind, code in _CODE_OF.items() if isinstance(error, kind)), code_pb2.INTERNAL)
    details: list[Any] = []
    if isinstance(error, InvalidRequestError):
        known = _renamed(error.field, _PATH_OF)
        path = known if known == error.field else root + known.removeprefix("generation.")
        description = str(error).removeprefix(f"{error.field}: ")
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=_cut(path, _FIELD_BYTES), description=_cut(description, _DESCRIPTION_BYTES)
        )
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
        if error.field == "model":
            code = code_pb2.NOT_FOUND
    if isinstance(error, QueueFullError) and error.retry_after is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after * 1e9))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    message = status_pb2.Status(code=code, message=_cut(str(error), _MESSAGE_BYTES))
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        message.details.append(packed)
    return message


def _cut(text: str, most: int) -> str:
    """At most so many bytes of UTF-8, which a string may be no text of."""
    data = text.encode(errors="replace")
    if len(data) > most:
        data = data[: most - len("…".encode())].decode(errors="ignore").encode() + "…".encode()
    return data.decode()


def error(message: status_pb2.Status) -> JaxOverlapError:
    """The error that a status tells of; the code is not OK."""
    text = message.message or code_pb2.Code.Name(message.code)
    for detail in message.details:
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(bad) and bad.field_violations:
            return _invalid(bad.field_violations[0])
        if detail.Unpack(retry) and message.code == code_pb2.RESOURCE_EXHAUSTED:
            return QueueFullError(text, retry.retry_delay.ToNanoseconds() / 1e9)
    kind = _ERROR_OF.get(message.code, EngineError)
    if kind is InvalidRequestError:
        return InvalidRequestError("request", None, text)
    if message.code == code_pb2.NOT_FOUND:
        return InvalidRequestError("model", None, text)
    return kind(text)


def _invalid(violation: error_details_pb2.BadRequest.FieldViolation) -> InvalidRequestError:
    shown, says_no, allowed = violation.description.partition(_SAYS_NO)
    if not says_no:
        shown, allowed = "None", violation.description
    try:
        value = ast.literal_eval(shown)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = _Shown(shown)
    return InvalidRequestError(_renamed(violation.field, _NAME_OF), value, allowed)


class _Shown(str):
    """A value of which only its `repr` came over the wire, perhaps shortened."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _renamed(path: str, table: dict[str, str]) -> str:
    """A path whose longest beginning that the table has, by whole steps, is replaced."""
    for old, new in sorted(table.items(), key=lambda item: -len(item[0])):
        if path == old or path.startswith((f"{old}.", f"{old}[")):
            return new + path[len(old) :]
    return path
