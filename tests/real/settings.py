"""One set of settings for all tests of the embedded model, whose steps take minutes to compile: the first one does it,
and the others find them in the compilation cache."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

SETTINGS = {
    "max_running": 4,
    "max_batched_tokens": 64,
    "min_prefill_tokens": 64,
    "max_mixed_tokens": 8,
    "max_model_len": 1024,
    "kv_memory_gib": 1.0,
}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@contextmanager
def one_compiles() -> Iterator[None]:
    """Processes that run tests side by side start the model one after the other."""
    with FileLock(Path(tempfile.gettempdir()) / "jaxoverlap-tests-real-model.lock"):
        yield
