"""Every error jaxoverlap raises on purpose.

    JaxOverlapError
    ├── InvalidRequestError (ValueError)   a request asks for something out of range: field, value, what is allowed
    ├── ConfigError (ValueError)           the engine can't start with these settings
    ├── ModelError                         a model folder, its weights, its config or its tokenizer can't be used
    ├── UnsupportedError                   real elsewhere, not in this build or not for this model
    ├── QueueFullError                     too many requests wait already; later it may go
    ├── DeadlineError                      a request was not finished in the time it gave itself
    ├── AbortedError                       a request was ended before it was done: by an operator, or by a shutdown
    ├── EngineError                        the engine itself failed; requests in flight are lost
    └── ServiceError                       between a client and the service, raised by `Client` alone
        ├── ServerUnavailableError         nobody answers there, or it is starting, draining or dead
        ├── AccessDeniedError              the service wants a token, or another one
        └── ConflictError                  not while the service does what it is doing; flushing while requests run

Bad input is always one of the first four, a busy engine the next two; EngineError is our own fault.
"""

from __future__ import annotations

from typing import Any

_SHOWN_CHARS = 120


class JaxOverlapError(Exception):
    """Root of the tree above."""


class InvalidRequestError(JaxOverlapError, ValueError):
    """A request was refused at the door; nothing else is disturbed.

    Attributes:
      field: path of the offending field, e.g. ``"sampling.top_p"``.
      value: what was given.
      allowed: what would have been accepted, in words.
    """

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field}: {shortened(value)} is not allowed; {allowed}")

    def __reduce__(self):
        return type(self), (self.field, self.value, self.allowed)


class ConfigError(JaxOverlapError, ValueError):
    """The engine can't start with these settings; the message says what to change."""


class ModelError(JaxOverlapError):
    """A model's files can't be used; the message names the file, tensor or field."""


class UnsupportedError(JaxOverlapError):
    """The feature exists elsewhere but not in this build or not for this model."""


class QueueFullError(JaxOverlapError):
    """As many requests wait as the engine's `max_queue` allows; nothing has changed.

    Attributes:
      retry_after: seconds after which a service thinks it may go; None where nobody can say.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(message)

    def __reduce__(self):
        return type(self), (str(self), self.retry_after)


class DeadlineError(JaxOverlapError):
    """The request's timeout ended it. In process, what it had produced is in its output."""


class AbortedError(JaxOverlapError):
    """The request was ended before it was done: by an operator, by a shutdown, or because nobody read its stream."""


class EngineError(JaxOverlapError):
    """The engine failed; the message is short and the cause is chained."""


class ServiceError(JaxOverlapError):
    """The service can't be used, or not in this way; the request itself may be fine."""


class ServerUnavailableError(ServiceError):
    """Nobody answers at the target, or the service is starting, draining or dead. Later it may go."""


class AccessDeniedError(ServiceError):
    """The service wants a token, or a token that may do more."""


class ConflictError(ServiceError):
    """What is asked does not go with what the service is doing now."""


def shortened(value: Any) -> str:
    """As errors show it, whatever it is."""
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    except Exception:  # an integer of thousands of digits, or a repr that fails
        text = f"this {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
