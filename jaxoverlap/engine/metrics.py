"""What the engine counts of its requests and steps, for Prometheus. `jaxoverlap.server.metrics` says what it means.

Rules: a request is one sequence. It is counted when it gets in and when it ends, whatever ends it, so that those that
have started are those that run, wait or have finished. Nothing is counted twice, and nothing is kept of a request that
has ended. How long a request takes says something only if it ended as asked; the others are counted, not timed.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jaxoverlap.engine.loop import OverlapLoop
from jaxoverlap.observe.histogram import Histogram
from jaxoverlap.observe.step_times import HOST_LAPS, LAPS
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import Request
from jaxoverlap.scheduler.plan import StepOutput

_STEP_SECONDS = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_FIRST_TOKEN_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 120.0)
_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.6, 1.0, 2.0, 5.0, 10.0, 20.0, 40.0, 90.0, 180.0, 600.0, 1800.0)
_TOKENS = tuple(2.0**power for power in range(18))


@dataclass(slots=True)
class _Progress:
    """When a request was called, and when its last token came."""

    called: float
    last_token: float | None = None


class EngineMetrics:
    """See the module's rules. Of the turns of `loop` it wants to hear each one. `pauses`: of `IdleCollector`."""

    def __init__(self, loop: OverlapLoop, pauses: Histogram) -> None:
        self._loop = loop
        self._requests: dict[int, _Progress] = {}
        self._started = self._steps = self._overlapped_steps = self._prompt_tokens = self._generation_tokens = 0
        self._exposed_host_seconds = 0.0
        self._boundaries = dict.fromkeys(LAPS, 0.0)
        self._exposed_boundaries = dict.fromkeys(HOST_LAPS, 0.0)
        self._finished = Counter({reason.value: 0 for reason in FinishReason})
        self._histograms = {
            "time_to_first_token_seconds": Histogram(_FIRST_TOKEN_SECONDS),
            "inter_token_latency_seconds": Histogram(_TOKEN_SECONDS),
            "e2e_request_latency_seconds": Histogram(_REQUEST_SECONDS),
            "request_queue_time_seconds": Histogram(_FIRST_TOKEN_SECONDS),
            "request_generation_tokens": Histogram(_TOKENS),
            "step_host_seconds": Histogram(_STEP_SECONDS),
            "gc_pause_seconds": pauses,
        }

    def start(self, request: Request, called: float) -> None:
        """A request is in. `called`: when the server was asked, on the clock of the scheduler."""
        self._started += 1
        self._requests[request.request_id] = _Progress(called)

    def count(self, output: StepOutput) -> None:
        """The loop has made a turn, and this has come of it."""
        times = self._loop.times.records[-1]
        if times.launched_rows:
            self._steps += 1
            self._overlapped_steps += times.in_flight > 0
            self._exposed_host_seconds += times.exposed
            self._histograms["step_host_seconds"].add(times.host)
            laps = self._boundaries
            for name in LAPS:
                laps[name] += getattr(times, name)
            if not times.is_hidden:
                for name in HOST_LAPS:
                    self._exposed_boundaries[name] += getattr(times, name)
        self._generation_tokens += len(output.token_ids)
        self._count_tokens(output)
        for request in output.finished:
            self._finish(request)

    def _count_tokens(self, output: StepOutput) -> None:
        gaps, now = [], self._loop.scheduler.now()
        for request in output.requests:
            progress = self._requests[request.request_id]
            if progress.last_token is None:
                self._count_first_token(request, progress.called)
            else:
                gaps.append(now - progress.last_token)
            progress.last_token = now
        if gaps:
            self._histograms["inter_token_latency_seconds"].add_all(gaps)

    def _count_first_token(self, request: Request, called: float) -> None:
        assert request.arrival_time is not None and request.admit_time is not None
        assert request.first_token_time is not None
        if request.leader is None:  # which computes the prompt, for the other samples too
            self._prompt_tokens += request.prompt_len
        self._histograms["request_queue_time_seconds"].add(request.admit_time - request.arrival_time)
        self._histograms["time_to_first_token_seconds"].add(request.first_token_time - called)

    def _finish(self, request: Request) -> None:
        assert request.finish_reason is not None and request.finish_time is not None
        progress = self._requests.pop(request.request_id)
        self._finished[request.finish_reason.value] += 1
        self._histograms["request_generation_tokens"].add(len(request.output_ids))
        if request.finish_reason.as_asked:
            self._histograms["e2e_request_latency_seconds"].add(request.finish_time - progress.called)

    def read(self, *, num_at_door: int) -> dict[str, Any]:
        """All of it now, by name. `num_at_door`: requests that wait before they can get in."""
        scheduler = self._loop.scheduler
        counters = scheduler.counters
        return {
            "num_requests_running": scheduler.num_running,
            "num_requests_waiting": scheduler.num_waiting + num_at_door,
            "kv_cache_usage_perc": scheduler.state.memory.share_used,
            "request_started": self._started,
            "request_success": dict(self._finished),
            "prompt_tokens": self._prompt_tokens,
            "generation_tokens": self._generation_tokens,
            "prefix_cache_queries": counters.admitted_tokens,
            "prefix_cache_hits": counters.cached_tokens,
            "num_preemptions": counters.preemptions,
            "bad_rows": counters.bad_rows,
            "steps": self._steps,
            "overlapped_steps": self._overlapped_steps,
            "exposed_host_seconds": self._exposed_host_seconds,
            "boundary_seconds": dict(self._boundaries),
            "boundary_exposed_seconds": dict(self._exposed_boundaries),
            "compiles_after_ready": self._loop.runner.compiles_after_ready,
            **{name: histogram.read() for name, histogram in self._histograms.items()},
        }
