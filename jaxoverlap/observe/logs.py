"""The log of a server's processes: lines on standard error, each naming the process it comes from.

Prompts and outputs are never logged, nor tokens, keys or anything else of a request but its id and its numbers.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

LEVELS = ("debug", "info", "warning", "error")
_NOISY = ("jax", "absl", "transformers", "huggingface_hub", "grpc", "asyncio")


def log_to_stderr(process: str, level: str) -> None:
    """Sets up the log of a process that is this package's own.

    Args:
      process: "engine", "front end 0", …
      level: one of `LEVELS`.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's; read when jax is imported
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {process}: %(message)s"))
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    root = logging.getLogger()
    root.handlers = [handler]
    logging.getLogger("jaxoverlap").setLevel(level.upper())
