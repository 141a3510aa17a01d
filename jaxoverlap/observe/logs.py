"""The log of a server's processes: lines on standard error, each naming the process it comes from.

As JSON a line is an object: `time` (ISO 8601, UTC), `level`, `process`, `logger`, `message`, `exception` if there is
one, and what is known besides, of a request its `request_id`. Code says that with `extra=about(…)`.

Prompts and outputs are never logged, nor tokens, keys or anything else of a request but its id and its numbers.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
_NOISY = ("jax", "absl", "transformers", "huggingface_hub", "grpc", "asyncio")


def about(request_id: str, **numbers: Any) -> dict[str, Any]:
    """For a record's `extra`: which request it is about, and more to find it by."""
    return {"fields": {"request_id": request_id, **numbers}}


class JsonFormatter(logging.Formatter):
    """See the module's beginning."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_to_stderr(process: str, level: str, form: str = "text") -> None:
    """Sets up the log of a process that is this package's own.

    Args:
      process: "engine", "front end 0", …
      level: one of `LEVELS`; form: one of `FORMATS`.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's; read when jax is imported
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    handler = logging.StreamHandler()
    text = logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s")
    handler.setFormatter(JsonFormatter(process) if form == "json" else text)
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    root = logging.getLogger()
    root.handlers = [handler]
    logging.getLogger("jaxoverlap").setLevel(level.upper())
