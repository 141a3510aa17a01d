"""What operators ask of a running engine, by name. Asked and answered between two steps, in the engine's thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from jaxoverlap.engine.profiler import Profiler
from jaxoverlap.errors import ConflictError
from jaxoverlap.observe import trace_file
from jaxoverlap.observe.chrome_trace import About

if TYPE_CHECKING:
    from jaxoverlap.engine.core import EngineCore


class Questions:
    """See the module's rules."""

    def __init__(self, core: EngineCore, profiler: Profiler) -> None:
        self._core, self._engine = core, core.engine
        self._answers: dict[str, Callable[..., Any]] = {
            "status": lambda: vars(core.status()),
            "metrics": core.read_metrics,
            "drain": core.drain,
            "abort_requests": self._abort_requests,
            "flush_cache": self._flush_cache,
            "memory_snapshot": self._memory_snapshot,
            "start_profile": profiler.start,
            "stop_profile": profiler.stop,
            "step_log": self._step_log,
            "start_trace": self._engine.start_timeline,
            "stop_trace": self._stop_trace,
        }

    def answer(self, name: str, arguments: list[Any]) -> Any:
        """What can be sent; or something to be called for it in another thread, because it takes long.

        Raises:
          JaxOverlapError: it can't be done. Whatever else it raises is a fault of this build.
        """
        return self._answers[name](*arguments)

    def _abort_requests(self, wanted: list[tuple[int, int]] | None) -> list[tuple[int, int]]:
        """Ends calls by front end and key, or all."""
        return self._core.abort_calls(None if wanted is None else {(index, key) for index, key in wanted})

    def _flush_cache(self) -> int:
        scheduler = self._engine.loop.scheduler
        if scheduler.has_unfinished:
            raise ConflictError(f"{scheduler.num_running + scheduler.num_waiting} requests are unfinished")
        self._core.finish_steps()  # those in flight still hold pages
        return scheduler.flush_cache()

    def _memory_snapshot(self) -> Callable[[], dict[str, Any]]:
        """With the front ends' names of the requests in place of the engine's own."""
        snapshot, calls = self._engine.loop.scheduler.memory_snapshot(), self._core.calls_by_request()

        def described() -> dict[str, Any]:
            values = snapshot.to_dict()
            for page in values["pages"]:
                page["request_id"] = calls.get(page["request_id"])
            return values

        return described

    def _step_log(self, last: int) -> Callable[[], list[dict[str, Any]]]:
        records = self._engine.loop.log.last(last)
        return lambda: [record.to_dict() for record in records]

    def _stop_trace(self) -> Callable[[], bytes]:
        timeline, facts = self._engine.stop_timeline(), self._core.facts
        about = About(facts.name, facts.platform, facts.schedule, facts.lookahead)
        return lambda: trace_file.packed(timeline, about)
