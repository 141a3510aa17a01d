"""OpenTelemetry traces: a span for each request that has got to the engine. Needs the extra `otel`.

A span is made when its request has ended, of the times that were taken anyway, so a request that runs pays nothing. Its
parent is the caller's, from the call's metadata (`traceparent`); whether it is sampled is the caller's choice, or
OTEL_TRACES_SAMPLER's. Attributes have the names of OpenTelemetry's conventions for generative AI; none is a prompt or
an answer.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterable

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from jaxoverlap import __version__
from jaxoverlap.server.calls import Call

_LAST_EXPORT_SECONDS = 0.5


class Tracing:
    """Sends spans to a collector by OTLP over HTTP, from a thread of its own.

    Args:
      endpoint: URL, with its path; usually http://HOST:4318/v1/traces.
    """

    def __init__(self, endpoint: str) -> None:
        service = Resource.create({SERVICE_NAME: os.environ.get("OTEL_SERVICE_NAME", "jaxoverlap")})
        self._provider = TracerProvider(resource=service, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer("jaxoverlap", __version__)

    def record(self, call: Call, method: str, model: str, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """A call has ended. `metadata` came with it."""
        to_wall = time.time_ns() - time.monotonic_ns()

        def wall(moment: float) -> int:
            return int(moment * 1e9) + to_wall

        span = self._tracer.start_span(
            method,
            context=extract({key: value for key, value in metadata if isinstance(value, str)}),
            kind=SpanKind.SERVER,
            start_time=wall(call.arrival),
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.request.model": model,
                "gen_ai.response.id": call.request_id,
                "gen_ai.usage.input_tokens": len(call.prompt_ids),
                "gen_ai.usage.output_tokens": sum(sample.num_ids for sample in call.samples),
                "gen_ai.response.finish_reasons": [
                    sample.finish_reason.value for sample in call.samples if sample.finish_reason is not None
                ],
            },
        )
        events = (
            ("queued", [call.queued_time]),
            ("admitted", [sample.admit_time for sample in call.samples]),
            ("first token", [sample.first_token_time for sample in call.samples]),
        )
        for name, moments in events:
            known = [moment for moment in moments if moment is not None]
            if known:
                span.add_event(name, timestamp=wall(min(known)))
        if call.error is not None or not call.is_finished:
            error = "cancelled" if call.error is None else type(call.error).__name__
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        span.end(wall(time.monotonic()))

    async def close(self) -> None:
        """Sends what is left, unless that takes long."""
        thread = threading.Thread(target=self._provider.shutdown, daemon=True)
        thread.start()
        await asyncio.to_thread(thread.join, _LAST_EXPORT_SECONDS)
