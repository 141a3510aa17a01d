"""Errors come back from a status as what they were."""

from __future__ import annotations

from base64 import b64encode
from urllib.parse import quote

import pytest
from google.rpc import code_pb2, status_pb2

from jaxoverlap.errors import (
    AbortedError,
    AccessDeniedError,
    ConflictError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    QueueFullError,
    ServerUnavailableError,
    UnsupportedError,
)
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.v1 import generate_service_pb2
from jaxoverlap.wire import statuses


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnsupportedError("no"), code_pb2.UNIMPLEMENTED),
        (QueueFullError("later"), code_pb2.RESOURCE_EXHAUSTED),
        (QueueFullError("later", 0.25), code_pb2.RESOURCE_EXHAUSTED),
        (DeadlineError("late"), code_pb2.DEADLINE_EXCEEDED),
        (AbortedError("by an operator"), code_pb2.ABORTED),
        (ServerUnavailableError("draining"), code_pb2.UNAVAILABLE),
        (AccessDeniedError("no"), code_pb2.PERMISSION_DENIED),
        (ConflictError("busy"), code_pb2.FAILED_PRECONDITION),
        (EngineError("broken"), code_pb2.INTERNAL),
        (InvalidRequestError("top_p", 3, "use less"), code_pb2.INVALID_ARGUMENT),
        (InvalidRequestError("model", "gpt", "served is toy"), code_pb2.NOT_FOUND),
    ],
)
def test_errors_come_back(error, code):
    message = statuses.status(error)
    assert message.code == code
    read = statuses.error(status_pb2.Status.FromString(message.SerializeToString()))
    assert type(read) is type(error) and str(read) == str(error) and vars(read) == vars(error)


@pytest.mark.parametrize("text", ["x", "é", "😀", "\ud800", "%", "\n"])
def test_a_status_is_small_enough_for_headers_however_long_the_error(text):
    long = text * 100_000
    for error in (
        InvalidRequestError("stop", long, long),
        InvalidRequestError(f"structured_output.json_schema.{long}", long, long),
        QueueFullError(long, 1.5),
        EngineError(long),
    ):
        message = statuses.status(error)
        assert len(quote(message.message)) + len(b64encode(message.SerializeToString())) < 7200
        read = statuses.error(message)
        assert type(read) is type(error) and str(read).endswith("…")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (code_pb2.CANCELLED, AbortedError),
        (code_pb2.UNAUTHENTICATED, AccessDeniedError),
        (code_pb2.UNKNOWN, EngineError),
        (code_pb2.DATA_LOSS, EngineError),
        (code_pb2.OUT_OF_RANGE, EngineError),
        (code_pb2.INVALID_ARGUMENT, InvalidRequestError),
        (code_pb2.NOT_FOUND, InvalidRequestError),
    ],
)
def test_codes_without_details(code, kind):
    error = statuses.error(status_pb2.Status(code=code, message="words"))
    assert type(error) is kind and "words" in str(error)
    assert code_pb2.Code.Name(code) in str(statuses.error(status_pb2.Status(code=code)))


@pytest.mark.parametrize(
    "value", [None, 7, -0.5, "a 'quoted' text", [1, 2], "x" * 500, "is not allowed; or is it", object]
)
def test_values_look_the_same_on_both_sides(value):
    error = InvalidRequestError("prompt[3]", value, "use another; or none")
    read = statuses.error(statuses.status(error))
    assert str(read) == str(error)
    assert (read.field, read.allowed) == ("prompt[3]", "use another; or none") or "is not allowed; or" in str(value)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("top_p", "generation.sampling.top_p"),
        ("logit_bias[7]", "generation.sampling.logit_bias[7]"),
        ("stop[2]", "generation.stop.strings[2]"),
        ("stop_token_ids[0]", "generation.stop.token_ids[0]"),
        ("structured_output.regex", "generation.constraint.regex"),
        ("structured_output.grammar", "generation.constraint.lark_grammar"),
        ("prompt[5]", "generation.prompt[5]"),
        ("messages[1].role", "generation.chat.messages[1].role"),
        ("n", "generation.num_sequences"),
        ("no_such_field", "no_such_field"),
    ],
)
def test_fields_have_a_name_in_python_and_a_path_in_the_message(name, path):
    message = statuses.status(InvalidRequestError(name, 1, "use 2"))
    assert path.encode() in message.details[0].value
    assert statuses.error(message).field == name


def test_every_parameter_has_a_path_that_exists():
    for name in SamplingParams.__dataclass_fields__:
        field = generate_service_pb2.GenerateRequest.DESCRIPTOR
        for step in statuses._PATH_OF[name].split("."):
            field = (field.message_type if hasattr(field, "message_type") else field).fields_by_name[step]
