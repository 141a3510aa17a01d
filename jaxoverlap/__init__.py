"""jaxoverlap: LLM inference in JAX, with the host's work hidden behind the device's.

    from jaxoverlap import LLM, SamplingParams

    with LLM() as llm:
        print(llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=16))[0].text)

The same against a server, from a program that needs no jax: `Client` and `AsyncClient`.

Importing this package imports neither jax nor grpc; `LLM` and `Client` do when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxoverlap.errors import (
    AbortedError,
    AccessDeniedError,
    ConfigError,
    ConflictError,
    DeadlineError,
    EngineError,
    InvalidRequestError,
    JaxOverlapError,
    ModelError,
    QueueFullError,
    ServerUnavailableError,
    ServiceError,
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
    from jaxoverlap.client import AsyncClient, Client
    from jaxoverlap.llm import LLM

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AbortedError",
    "AccessDeniedError",
    "AsyncClient",
    "ChatPrompt",
    "Client",
    "CompletionOutput",
    "ConfigError",
    "ConflictError",
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
    "ServerUnavailableError",
    "ServiceError",
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
    if name in ("AsyncClient", "Client"):
        from jaxoverlap import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
