"""Prometheus metrics over HTTP: one address for the whole server, however many processes it has.

Nothing is counted here. Each scrape asks the engine, through which every request goes, so nothing can be left over of a
front end that has died, and what a scrape tells is true at that moment. While the engine compiles, hangs or is gone
there is only `jaxoverlap_engine_up 0`: no number is better than an old one.

Times begin when a front end gets a call, and end when the engine has the token; what the answer then takes to its
reader is not in them. Names are vLLM's where it has the thing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxoverlap.errors import ConfigError, JaxOverlapError

logger = logging.getLogger(__name__)

_PREFIX = "jaxoverlap_"
_PATIENCE = 2.0
"""Seconds that the engine gets to answer; it does so between two steps."""

GAUGES = {
    "num_requests_running": "Requests that have a row.",
    "num_requests_waiting": "Requests that wait for one, or for their grammar.",
    "kv_cache_usage_perc": "Share of the KV pages that running requests use, 0 to 1.",
}
COUNTERS = {
    "request_started": "Requests (sequences) that the engine has taken.",
    "prompt_tokens": "Prompt tokens of requests that have got a first token; once for all samples of a prompt.",
    "generation_tokens": "Tokens generated.",
    "prefix_cache_queries": "Tokens of requests, looked up in the prefix cache when they are first admitted.",
    "prefix_cache_hits": "Tokens found there.",
    "num_preemptions": "Rows taken from unfinished requests.",
    "bad_rows": "Requests ended by NaN or infinite logits.",
    "steps": "Steps launched.",
    "overlapped_steps": "Steps launched while another was in flight.",
    "exposed_host_seconds": "Host time of steps during which the device may have been idle, at the most.",
    "compiles_after_ready": "Functions compiled while serving; anything but 0 is a bug.",
}
BY_REASON = {"request_success": "Requests (sequences) that have ended, by reason, aborted and error included."}
BY_BOUNDARY = {
    "boundary_seconds": "Time of steps by where it went: plan, launch, mask, wait, commit, ingest, send, other.",
    "boundary_exposed_seconds": "Of it, host work during which the device may have been idle, at the most.",
}
HISTOGRAMS = {
    "time_to_first_token_seconds": "From the call to the first token.",
    "inter_token_latency_seconds": "Between two tokens of a request.",
    "e2e_request_latency_seconds": "From the call to the last token, of requests that ended as asked.",
    "request_queue_time_seconds": "From the engine's queue to a row.",
    "request_generation_tokens": "Tokens of requests that have ended, however they did.",
    "step_host_seconds": "Host time of a step: planned, launched, committed.",
    "gc_pause_seconds": "Garbage collections of the engine's process, but for those it makes when idle.",
}


class EngineCollector(Collector):
    """Asks the engine at each scrape; it has one as soon as `connect` is called."""

    def __init__(self) -> None:
        self._ask: Callable[[], Awaitable[dict[str, Any]]] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def connect(self, ask: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """Called on the event loop on which `ask` is to run. `ask` gives `EngineMetrics.read`."""
        self._loop, self._ask = asyncio.get_running_loop(), ask

    def describe(self) -> Iterator[Metric]:
        return iter(())  # without this, registering would ask the engine

    def collect(self) -> Iterator[Metric]:
        values = self._values()
        up = "Whether the engine answers; the other metrics are there only if it does."
        yield GaugeMetricFamily(_PREFIX + "engine_up", up, value=0 if values is None else 1)
        if values is not None:
            yield from families(values)

    def _values(self) -> dict[str, Any] | None:
        """In the scrape's own thread."""
        if self._ask is None or self._loop is None or self._loop.is_closed():
            return None
        answer = asyncio.run_coroutine_threadsafe(asyncio.wait_for(self._ask(), _PATIENCE), self._loop)
        try:
            # Longer, for then the event loop has ended meanwhile.
            return answer.result(2 * _PATIENCE)
        except (TimeoutError, concurrent.futures.CancelledError, JaxOverlapError) as error:
            logger.debug("a scrape finds no engine: %r", error)
            return None


def families(values: dict[str, Any]) -> Iterator[Metric]:
    """What `EngineMetrics.read` gives, as Prometheus has it."""
    for name, text in GAUGES.items():
        yield GaugeMetricFamily(_PREFIX + name, text, value=values[name])
    for name, text in COUNTERS.items():
        yield CounterMetricFamily(_PREFIX + name, text, value=values[name])
    for names, label in ((BY_REASON, "finished_reason"), (BY_BOUNDARY, "boundary")):
        for name, text in names.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=[label])
            for labelled, value in values[name].items():
                counter.add_metric([labelled], value)
            yield counter
    for name, text in HISTOGRAMS.items():
        read = values[name]
        bounds = [*map(str, read["bounds"]), "+Inf"]
        buckets = list(zip(bounds, read["counts"], strict=True))
        yield HistogramMetricFamily(_PREFIX + name, text, buckets=buckets, sum_value=read["sum"])


@contextmanager
def serving_metrics(host: str, port: int, collector: Collector) -> Iterator[int]:
    """Answers scrapes at /metrics meanwhile, from threads. Gives the port, which is a free one for 0.

    Raises:
      ConfigError: it can't listen there.
    """
    registry = CollectorRegistry()
    registry.register(collector)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
