from __future__ import annotations

import pytest

from jaxoverlap.observe.boundaries import BOUNDARIES, costs, table
from jaxoverlap.observe.step_times import LAPS, StepTimes, Stopwatch


def times(*, wait: float, in_flight: int = 1, rows: int = 4, **laps: float) -> StepTimes:
    seconds = {"plan": 0.002, "launch": 0.001, "commit": 0.001} | laps
    return StepTimes(wait=wait, launched_rows=rows, launched_tokens=rows, in_flight=in_flight, **seconds)


def test_every_lap_of_a_cycle_has_its_boundary():
    assert {boundary.lap for boundary in BOUNDARIES} == set(LAPS)


def test_hidden_and_exposed_cycles_come_to_a_verdict():
    records = [times(wait=0.006, send=0.001)] * 3 + [times(wait=0.0, send=0.001)]
    found = {cost.boundary.lap: cost for cost in costs([*records, times(wait=1.0, rows=0)])}
    assert set(found) == {"plan", "launch", "wait", "commit", "send"}  # what took no time is left out
    assert found["plan"].mean == pytest.approx(0.002) and found["plan"].exposed == pytest.approx(0.0005)
    assert found["plan"].verdict == "25% exposed" and found["wait"].verdict == "device"
    assert found["wait"].p99 == pytest.approx(0.006) and found["wait"].exposed == 0
    assert sum(cost.share for cost in found.values()) == pytest.approx(1.0)


def test_all_of_it_hidden_or_exposed_is_said_in_a_word():
    hidden = {row["boundary"]: row["verdict"] for row in table([times(wait=0.01)])}
    exposed = {row["boundary"]: row["verdict"] for row in table([times(wait=0.01, in_flight=0)])}
    assert hidden == {"plan": "hidden", "launch": "hidden", "wait": "device", "commit": "hidden"}
    assert exposed == {"plan": "exposed", "launch": "exposed", "wait": "device", "commit": "exposed"}
    assert table([]) == []


def test_laps_are_the_first_fields_of_a_cycle():
    assert StepTimes._fields[: len(LAPS)] == LAPS


def test_a_stopwatch_leaves_no_gap_and_a_pause_is_nobodys():
    watch = Stopwatch()
    began = watch.now
    watch.end("plan")
    watch.end("wait")
    watch.end("plan")
    assert sum(watch.seconds.values()) == pytest.approx(watch.now - began) and watch.last == "plan"
    watch.skip()
    resumed = watch.now
    watch.end("send")
    laps = dict(zip(LAPS, watch.take(), strict=True))
    assert laps.pop("send") == pytest.approx(watch.now - resumed) and laps["plan"] >= 0
    assert set(watch.take()) == {0.0}
