"""jaxoverlap: LLM inference in JAX, with the host's work hidden behind the device's.

    from jaxoverlap import LLM, SamplingParams

    with LLM() as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))[0].text)

Importing this package imports neither jax nor grpc; `LLM` does when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxoverlap.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    JaxOverlapError,
    ModelError,
    QueueFullError,
    UnsupportedError,
)
from jaxoverlap.request import FinishReason, RequestOptions, SamplingParams

if TYPE_CHECKING:
    from jaxoverlap.llm import LLM, RequestOutput, StreamDelta

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ConfigError",
    "DeadlineError",
    "EngineError",
    "FinishReason",
    "InvalidRequestError",
    "JaxOverlapError",
    "ModelError",
    "QueueFullError",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "UnsupportedError",
    "__version__",
]

_LAZY = ("LLM", "RequestOutput", "StreamDelta")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from jaxoverlap import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
