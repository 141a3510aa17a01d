"""What the step log says of steps is what the device saw of them."""

from __future__ import annotations

import json

import pytest

from jaxoverlap.errors import EngineError
from jaxoverlap.observe.step_log import CAPACITY, StepLog
from tests.harness import Harness


def watched(harness: Harness) -> dict[int, list[list[int]]]:
    """By step, the slots that the device writes for each row of the plan, in its order."""
    runner, size, written = harness.runner, harness.page_size, {}
    run, write = runner._run, runner._write
    slots: dict[int, list[int]] = {}

    def note(row, position, token):
        write(row, position, token)
        slots.setdefault(row, []).append(runner.page_table[row][position // size] * size + position % size)

    def run_step(step):
        slots.clear()
        result = run(step)
        written[step.plan.step_id] = [slots.get(row, []) for row in step.plan.rows.tolist()]
        return result

    runner._run, runner._write = run_step, note
    return written


@pytest.mark.parametrize("lookahead", [0, 1, 3])
def test_slots_pages_and_lengths_are_those_that_the_device_wrote(lookahead):
    harness = Harness(page_size=4, num_pages=40, lookahead=lookahead, max_batched_tokens=16)
    written = watched(harness)
    for length in (1, 3, 4, 5, 17, 30, 9):
        harness.submit(list(range(1, 1 + length)), max_tokens=20, ignore_eos=True)
    harness.submit(list(range(1, 18)), max_tokens=20)  # of which the cache knows the beginning
    harness.run()
    records = harness.engine.loop.log.last()
    assert [record.step_id for record in records] == [plan.step_id for plan in harness.plans]
    seen_pages: dict[tuple[int, int], int] = {}
    for record in records:
        assert record.state == "committed"
        planned = record.planned_len.tolist()
        for row, slots, actual in zip(record.rows.tolist(), record.slots(), written[record.step_id], strict=True):
            assert actual in (slots, []), (record.describe(), row)  # the device knew that the row had finished
        for ids, pages, allocated, length in zip(
            record.request_ids.tolist(), record.pages(), record.num_pages.tolist(), planned, strict=True
        ):
            before = seen_pages.get((ids, 0), allocated - len(pages))
            assert allocated == before + len(pages) and allocated * 4 >= length
            seen_pages[ids, 0] = allocated
        assert (record.committed_len < record.planned_len).all()
    finished = {one.request_id: one.reason for record in records for one in record.finished}
    assert finished == {request.request_id: request.finish_reason for request in harness.requests}


def test_a_record_says_who_is_where_and_is_json():
    harness = Harness(page_size=4, max_running=2)
    for _ in range(3):
        harness.submit([1, 2, 3, 4, 5], max_tokens=3, ignore_eos=True)
    harness.turn()
    [record] = harness.engine.loop.log.last()
    found = json.loads(json.dumps(record.to_dict()))
    assert (found["turn"], found["step_id"], found["kind"], found["state"]) == (0, 0, "prefill", "in flight")
    assert (found["request_ids"], found["rows"], found["generations"]) == ([0, 1], [0, 1], [0, 0])
    assert (found["committed_len"], found["allocated_len"]) == ([0, 0], [8, 8])
    assert (found["running"], found["waiting"], found["in_flight"]) == (2, 1, 0)
    assert [len(pages) for pages in found["new_pages"]] == [2, 2] and found["chunks"] == [[0, 5], [0, 5]]
    assert "step 0 prefill in flight · tokens 10 of 2 rows · requests 0,1 " in record.describe()
    harness.run()
    assert harness.engine.loop.log.last(1)[0].to_dict()["finished"] == {"2": "length"}


def test_an_abort_is_in_the_log_though_no_step_brings_it():
    harness = Harness(max_running=1)
    harness.submit([1, 2, 3], max_tokens=9)
    waiting = harness.submit([1, 2, 3], max_tokens=9)
    harness.turn()
    harness.engine.abort(waiting)
    harness.run()
    assert (waiting.request_id, "aborted") in {
        (one.request_id, one.reason) for record in harness.engine.loop.log.last() for one in record.finished
    }


def test_it_keeps_the_last_thousand_steps_and_no_request():
    harness = Harness(max_running=1, check_every=None)
    for _ in range(8):
        harness.submit([1, 2, 3], max_tokens=200, ignore_eos=True)
    harness.run()
    log = harness.engine.loop.log
    assert len(log) == CAPACITY and log.newest.step_id == harness.plans[-1].step_id
    assert log.find(log.newest.step_id) is log.newest and log.find(log.newest.step_id - CAPACITY) is None
    assert log.find(log.newest.step_id + 1) is None and StepLog().find(0) is None
    assert len(log.last(5)) == 5 and log.describe(5).count("\n") == 4


def test_what_kills_the_engine_has_a_note_of_the_last_steps():
    harness = Harness()
    harness.submit([1, 2, 3], max_tokens=9)
    harness.turn()
    harness.runner.launch = None
    with pytest.raises(EngineError) as failure:
        harness.turn()
    [note] = failure.value.__notes__
    assert note.startswith("last steps:\nturn 0 step 0 prefill in flight") and "turn 1 step 1 decode planned" in note
