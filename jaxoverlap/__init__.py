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
from jaxoverlap.outputs import (
    CompletionOutput,
    FinishReason,
    PositionLogprobs,
    RequestOutput,
    StreamDelta,
    TokenLogprob,
)
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput

if TYPE_CHECKING:
    from jaxoverlap.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ChatPrompt",
    "CompletionOutput",
    "ConfigError",
    "DeadlineError",
    "EngineError",
    "FinishReason",
    "InvalidRequestError",
    "JaxOverlapError",
    "ModelError",
    "PositionLogprobs",
    "QueueFullError",
    "RequestOptions",
    "RequestOutput",
    "SamplingParams",
    "StreamDelta",
    "StructuredOutput",
    "TokenLogprob",
    "UnsupportedError",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from jaxoverlap.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
