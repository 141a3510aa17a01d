"""A timeline as a Chrome trace, which Perfetto, chrome://tracing and `jaxoverlap trace view` open.

    process 1  jaxoverlap   lanes host, device, exposed; counters
    process 2  requests     a lane for each: queued, prefill, decode, and how it ended

Times are microseconds since the recording began. The device is taken to be busy with a step from its launch, or from
the end of the step before it, until it is ready. Exposed is host work while the device had nothing to do although there
was work: what an overlap that hides everything would not have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from jaxoverlap.observe.step_log import FinishRecord, StepRecord, brief
from jaxoverlap.observe.timeline import Timeline

ENGINE, REQUESTS = 1, 2
HOST, DEVICE, EXPOSED = 1, 2, 3
MAX_REQUESTS = 2000
"""Lanes of requests; of more, the first ones."""


@dataclass(frozen=True)
class Interval:
    """Seconds of `perf_counter`."""

    name: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


def host_laps(timeline: Timeline) -> list[Interval]:
    """What the host did, in order; pauses are left out."""
    laps = []
    last = timeline.began
    for name, end in timeline.marks:
        if name:
            laps.append(Interval(name, last, end))
        last = end
    if timeline.marks.maxlen == len(timeline.marks) and laps:
        del laps[0]  # its beginning has been forgotten
    return laps


def device_steps(steps: Sequence[StepRecord]) -> list[tuple[StepRecord, Interval]]:
    """When the device was busy with each step that has been ready."""
    busy = []
    free = float("-inf")
    for step in steps:
        seen = [moment for moment in (step.ready, step.read) if moment is not None]
        if step.launched is None or not seen:
            continue
        end = max(min(seen), free)
        busy.append((step, Interval(step.kind, min(max(step.launched, free), end), end)))
        free = end
    return busy


def exposed_laps(laps: Sequence[Interval], busy: Sequence[Interval]) -> list[Interval]:
    """The parts of the host's work that lie between two steps of the device, while it was idle."""
    idle = [(one.end, following.start) for one, following in pairwise(busy)]
    exposed, index = [], 0
    for lap in laps:
        if lap.name == "wait":
            continue
        while index < len(idle) and idle[index][1] <= lap.start:
            index += 1
        later = index
        while later < len(idle) and idle[later][0] < lap.end:
            start, end = max(lap.start, idle[later][0]), min(lap.end, idle[later][1])
            if end > start:
                exposed.append(Interval(lap.name, start, end))
            later += 1
    return exposed


def summary(timeline: Timeline) -> dict[str, Any]:
    """Sums in seconds, between the first step's launch and the last step's end.

    device_busy; host: all laps but `wait`; exposed: of it, what the device waited for; hidden_share: the rest of it.
    """
    busy = [interval for _, interval in device_steps(list(timeline.steps))]
    if not busy:
        return {"steps": 0, "seconds": 0.0, "device_busy": 0.0, "host": {}, "exposed": {}, "hidden_share": None}
    first, last = busy[0].start, busy[-1].end
    laps = [lap for lap in host_laps(timeline) if lap.end > first and lap.start < last]
    host, exposed = _by_name(lap for lap in laps if lap.name != "wait"), _by_name(exposed_laps(laps, busy))
    total = sum(host.values())
    return {
        "steps": len(busy),
        "seconds": last - first,
        "device_busy": sum(interval.seconds for interval in busy),
        "host": host,
        "exposed": exposed,
        "hidden_share": 1 - sum(exposed.values()) / total if total else None,
    }


@dataclass(frozen=True)
class About:
    """What else is to be known of a timeline; kept in `otherData`."""

    model: str
    platform: str
    schedule: str
    lookahead: int


def to_chrome(timeline: Timeline, about: About | None = None) -> dict[str, Any]:
    """For JSON."""
    steps = list(timeline.steps)
    busy = device_steps(steps)
    laps = host_laps(timeline)
    exposed = exposed_laps(laps, [interval for _, interval in busy])
    events: list[dict[str, Any]] = [*_names()]
    micros = _Micros(timeline.began)
    events += (micros.span(ENGINE, HOST, "host", lap) for lap in laps)
    for step, interval in busy:
        event = micros.span(ENGINE, DEVICE, "device", interval)
        event["name"] = f"{step.kind} {step.step_id}"
        event["args"] = {"turn": step.turn, **_work(step), **brief(step.to_dict())}
        events.append(event)
    events += (micros.span(ENGINE, EXPOSED, "exposed", lap) for lap in exposed)
    for step in steps:
        if step.launched is not None:
            events += _counters(step, micros.of(step.launched))
    events += _requests(busy, timeline, micros)
    dropped = timeline.num_steps - len(steps)
    other = {"summary": summary(timeline), "steps": timeline.num_steps, "dropped_steps": dropped}
    about_it = {} if about is None else vars(about)
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {**about_it, **other}}


def engine_spans(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What is in the lanes of host, device and exposed time; other lanes, which are not ours, are left out."""
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("pid") == ENGINE and event.get("tid") in (HOST, DEVICE, EXPOSED):
            yield event


def row_counts(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The counter of rows: for each step how many it was launched with, and when."""
    return (event for event in trace["traceEvents"] if event.get("ph") == "C" and event.get("name") == "rows")


class _Micros:
    """Microseconds since the recording began."""

    def __init__(self, began: float) -> None:
        self._began = began

    def of(self, moment: float) -> float:
        return round(1e6 * (moment - self._began), 1)

    def span(self, process: int, lane: int, category: str, interval: Interval) -> dict[str, Any]:
        start = self.of(interval.start)
        duration = round(self.of(interval.end) - start, 1)
        return {
            "ph": "X",
            "pid": process,
            "tid": lane,
            "cat": category,
            "name": interval.name,
            "ts": start,
            "dur": duration,
        }


def _work(step: StepRecord) -> dict[str, int | str]:
    """What a step's time depends on."""
    decode_rows = len(step.rows) - len(step.chunks)
    work: dict[str, int | str] = {
        "decode_rows": decode_rows,
        "prompt_tokens": step.num_tokens - decode_rows,
        "kv_tokens": int(step.planned_len.sum()),
    }
    return work if step.shape is None else work | {"shape": step.shape}


def _names() -> Iterator[dict[str, Any]]:
    for process, name in ((ENGINE, "jaxoverlap"), (REQUESTS, "requests")):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
    for lane, name in ((HOST, "host"), (DEVICE, "device"), (EXPOSED, "exposed host time")):
        yield {"ph": "M", "pid": ENGINE, "tid": lane, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": ENGINE, "tid": lane, "name": "thread_sort_index", "args": {"sort_index": lane}}


def _counters(step: StepRecord, moment: float) -> Iterator[dict[str, Any]]:
    for name, value in (
        ("rows", len(step.rows)),
        ("pages used", step.pages_used),
        ("waiting requests", step.waiting),
        ("steps in flight", step.in_flight + 1),
    ):
        yield {"ph": "C", "pid": ENGINE, "name": name, "ts": moment, "args": {name: value}}


def _requests(
    busy: Sequence[tuple[StepRecord, Interval]], timeline: Timeline, micros: _Micros
) -> Iterator[dict[str, Any]]:
    prefills: dict[int, list[tuple[Interval, dict[str, Any]]]] = {}
    decodes: dict[int, Interval] = {}
    finishes: dict[int, FinishRecord] = {one.request_id: one for step in timeline.steps for one in step.finished}
    for step, interval in busy:
        ids = step.request_ids.tolist()
        for chunk in step.chunks:
            args = {"positions": [chunk.start, chunk.end], "step_id": step.step_id}
            prefills.setdefault(chunk.request_id, []).append((interval, args))
        for request_id in ids[len(step.chunks) :]:
            so_far = decodes.get(request_id)
            decodes[request_id] = Interval("decode", so_far.start if so_far else interval.start, interval.end)
    seen = sorted({*prefills, *decodes, *finishes})
    for request_id in seen[:MAX_REQUESTS]:
        lane = request_id + 1
        name = {"name": f"request {request_id}"}
        yield {"ph": "M", "pid": REQUESTS, "tid": lane, "name": "thread_name", "args": name}
        finish = finishes.get(request_id)
        if finish is not None and finish.arrival is not None:
            arrival = max(timeline.began, finish.arrival + timeline.clock_offset)
            ended = finish.admitted if finish.admitted is not None else finish.finished
            if ended is not None and (admitted := ended + timeline.clock_offset) > arrival:
                yield micros.span(REQUESTS, lane, "request", Interval("queued", arrival, admitted))
        for interval, args in prefills.get(request_id, []):
            event = micros.span(REQUESTS, lane, "request", Interval("prefill", interval.start, interval.end))
            yield {**event, "args": args}
        if request_id in decodes:
            yield micros.span(REQUESTS, lane, "request", decodes[request_id])
        if finish is not None and finish.finished is not None:
            moment = max(timeline.began, finish.finished + timeline.clock_offset)
            yield {
                "ph": "i",
                "pid": REQUESTS,
                "tid": lane,
                "cat": "request",
                "name": f"finished: {finish.reason}",
                "ts": micros.of(moment),
                "s": "t",
            }


def _by_name(intervals: Any) -> dict[str, float]:
    sums: dict[str, float] = {}
    for interval in intervals:
        sums[interval.name] = sums.get(interval.name, 0.0) + interval.seconds
    return sums
