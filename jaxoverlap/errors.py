"""Every error jaxoverlap raises on purpose.

    JaxOverlapError
    ├── InvalidRequestError (ValueError)   a request asks for something out of range: field, value, what is allowed
    ├── ConfigError (ValueError)           the engine can't start with these settings
    ├── ModelError                         a model folder, its weights, its config or its tokenizer can't be used
    ├── UnsupportedError                   real elsewhere, not in this build or not for this model
    ├── QueueFullError                     too many requests wait already; later it may go
    ├── DeadlineError                      a request was not finished in the time it gave itself
    └── EngineError                        the engine itself failed; requests in flight are lost

Bad input is always one of the first four, a busy engine the next two; the last one is our own fault.
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
        super().__init__(f"{field}: {_shorten(value)} is not allowed; {allowed}")

    def __reduce__(self):
        return type(self), (self.field, self.value, self.allowed)


class ConfigError(JaxOverlapError, ValueError):
    """The engine can't start with these settings; the message says what to change."""


class ModelError(JaxOverlapError):
    """A model's files can't be used; the message names the file, tensor or field."""


class UnsupportedError(JaxOverlapError):
    """The feature exists elsewhere but not in this build or not for this model."""


class QueueFullError(JaxOverlapError):
    """As many requests wait as the engine's `max_queue` allows; nothing has changed."""


class DeadlineError(JaxOverlapError):
    """The request's timeout ended it; what it had produced is in its output."""


class EngineError(JaxOverlapError):
    """The engine failed; the message is short and the cause is chained."""


def _shorten(value: Any) -> str:
    try:
        text = repr(value)
    except RecursionError:
        text = f"a deeply nested {type(value).__name__}"
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
