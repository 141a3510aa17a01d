"""What a timeline says of host, device and requests."""

from __future__ import annotations

import gzip
import json
import sys
import threading
import time
from itertools import pairwise
from types import SimpleNamespace

import pytest

from jaxoverlap.errors import ConflictError
from jaxoverlap.observe import trace_file
from jaxoverlap.observe.chrome_trace import (
    DEVICE,
    ENGINE,
    EXPOSED,
    HOST,
    REQUESTS,
    About,
    Interval,
    device_steps,
    exposed_laps,
    host_laps,
    summary,
    to_chrome,
)
from jaxoverlap.observe.step_times import Stopwatch
from jaxoverlap.observe.timeline import Timeline
from jaxoverlap.sampling_params import SamplingParams
from tests.harness import Harness
from tests.tiny import drain, make_engine


def traced(harness: Harness, **submitted) -> Timeline:
    harness.engine.start_timeline()
    for length in (3, 20, 40):
        harness.submit(list(range(1, 1 + length)), **({"max_tokens": 12, "ignore_eos": True} | submitted))
    harness.run()
    return harness.engine.stop_timeline()


def spans(trace: dict, process: int, lane: int) -> list[dict]:
    events = trace["traceEvents"]
    return [event for event in events if (event["ph"], event["pid"], event.get("tid")) == ("X", process, lane)]


def test_laps_are_without_gaps_and_steps_one_after_the_other():
    timeline = traced(harness := Harness(lookahead=1))
    laps = host_laps(timeline)
    assert {"plan", "launch", "wait", "commit"} <= {lap.name for lap in laps}
    in_turns = [lap for lap in laps if lap.name in ("plan", "launch", "wait", "commit")]
    assert all(lap.end <= after.start for lap, after in pairwise(in_turns))
    busy = device_steps(list(timeline.steps))
    assert [step.step_id for step, _ in busy] == [plan.step_id for plan in harness.plans]
    intervals = [interval for _, interval in busy]
    assert all(one.start <= one.end for one in intervals)
    assert all(one.end <= after.start for one, after in pairwise(intervals))


def test_exposed_is_what_the_host_did_while_the_device_was_idle():
    busy = [Interval("decode", 1.0, 2.0), Interval("decode", 2.0, 3.0), Interval("decode", 4.0, 5.0)]
    laps = [
        Interval("plan", 0.0, 0.5),  # before the first step
        Interval("wait", 0.5, 2.5),
        Interval("commit", 2.5, 3.2),
        Interval("plan", 3.2, 3.4),
        Interval("wait", 3.4, 3.5),
        Interval("launch", 3.5, 4.5),
        Interval("commit", 5.0, 9.0),
    ]
    found = [(one.name, one.start, one.end) for one in exposed_laps(laps, busy)]
    assert found == [("commit", 3.0, 3.2), ("plan", 3.2, 3.4), ("launch", 3.5, 4.0)]


def test_a_serial_loop_exposes_its_host_and_an_overlapped_one_hides_it():
    shares = {}
    for lookahead in (0, 1):
        harness = Harness(lookahead=lookahead, step_seconds=0.01, check_every=None)
        found = summary(traced(harness))
        shares[lookahead] = found["hidden_share"]
        assert found["device_busy"] <= found["seconds"]
    assert shares[0] < 0.5 < shares[1]


def test_lanes_counters_and_requests_in_chromes_format():
    harness = Harness(max_running=2)
    harness.now = time.perf_counter()
    trace = json.loads(json.dumps(to_chrome(traced(harness), About("toy", "cpu", "serial", 0))))
    assert trace["otherData"]["model"] == "toy" and trace["otherData"]["dropped_steps"] == 0
    steps = spans(trace, ENGINE, DEVICE)
    assert len(steps) == trace["otherData"]["steps"] == len(harness.plans)
    assert steps[0]["name"] == "prefill 0" and steps[0]["args"]["requests"] == "0,1"
    assert {event["name"] for event in spans(trace, ENGINE, HOST)} >= {"plan", "launch", "wait", "commit"}
    assert all(event["dur"] >= 0 for event in spans(trace, ENGINE, EXPOSED))
    counters = {event["name"] for event in trace["traceEvents"] if event["ph"] == "C"}
    assert counters == {"rows", "pages used", "waiting requests", "steps in flight"}
    for request in harness.requests:
        lane = [event["name"] for event in spans(trace, REQUESTS, request.request_id + 1)]
        assert "prefill" in lane and lane[-1] == "decode"
    assert "queued" in [event["name"] for event in spans(trace, REQUESTS, 3)]  # there were two rows
    chunks = [event["args"]["positions"] for event in spans(trace, REQUESTS, 3) if event["name"] == "prefill"]
    assert chunks[0][0] == harness.requests[2].cached_tokens and chunks[-1][1] == 40
    assert all(one[1] == after[0] for one, after in pairwise(chunks))
    ends = [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"]
    assert ends == ["finished: length"] * 3


def test_a_trace_says_which_compiled_steps_ran():
    engine, _ = make_engine()
    engine.add(list(range(1, 20)), SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
    engine.start_timeline()
    drain(engine)
    trace = to_chrome(engine.stop_timeline())
    shapes = [event["args"]["shape"] for event in spans(trace, ENGINE, DEVICE)]
    assert shapes == ["prefill 32", "decode 1", "decode 1"]
    assert ", compiled for prefill 32" in spans(trace, ENGINE, DEVICE)[0]["args"]["tokens"]


def test_ready_is_seen_by_a_thread_that_waits_for_the_step():
    timeline, harness, watch = Timeline(), Harness(), Stopwatch()
    harness.submit([1, 2, 3], max_tokens=9)
    harness.turn()
    [record] = harness.engine.loop.log.last()
    answers, waits = threading.Event(), threading.Event()

    def block():
        waits.set()
        answers.wait()

    timeline.start(watch, 0.0)
    timeline.follow(record, SimpleNamespace(output=SimpleNamespace(block_until_ready=block)))
    waits.wait()
    assert record.ready is None
    before = time.perf_counter()
    answers.set()
    timeline.stop(watch)
    timeline._waiter.join()
    assert record.ready >= before and list(timeline.steps) == [record]


def test_only_the_last_steps_are_kept():
    harness = Harness()
    harness.engine.start_timeline(max_steps=5)
    harness.submit([1, 2, 3], max_tokens=50, ignore_eos=True)
    harness.run()
    timeline = harness.engine.stop_timeline()
    assert [step.step_id for step in timeline.steps] == [plan.step_id for plan in harness.plans[-5:]]
    assert len(timeline.marks) <= 60
    assert to_chrome(timeline)["otherData"]["dropped_steps"] == len(harness.plans) - 5


def test_off_it_is_not_there():
    harness = Harness()
    with pytest.raises(ConflictError, match="no timeline"):
        harness.engine.stop_timeline()
    harness.engine.start_timeline()
    with pytest.raises(ConflictError, match="already"):
        harness.engine.start_timeline()
    harness.engine.stop_timeline()
    assert harness.engine.loop.timeline is None and harness.engine.loop.watch.marks is None
    assert to_chrome(Timeline())["otherData"]["summary"]["steps"] == 0


def test_files_may_be_compressed(tmp_path):
    timeline = traced(Harness())
    trace = json.loads(json.dumps(to_chrome(timeline)))
    for name in ("t.json", "t.json.gz"):
        trace_file.write(tmp_path / name, trace)
        assert trace_file.read(tmp_path / name) == trace
        trace_file.save(tmp_path / name, trace_file.packed(timeline))
        assert trace_file.read(tmp_path / name) == trace
    assert gzip.decompress((tmp_path / "t.json.gz").read_bytes()) == (tmp_path / "t.json").read_bytes()
    for bad in (b"", b"[]", b"\x1f\x8bgarbage", b'{"traceEvents": 1}'):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(ValueError, match=r"bad is (no|damaged)"):
            trace_file.read(tmp_path / "bad")


def test_threads_switch_sooner_as_long_as_any_recording_lasts():
    usual = sys.getswitchinterval()
    first, second = Harness().engine, Harness().engine
    first.start_timeline()
    second.start_timeline()
    first.stop_timeline()
    assert sys.getswitchinterval() < usual / 10
    second.stop_timeline()
    assert sys.getswitchinterval() == usual
