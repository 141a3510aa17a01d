"""Whoever leaves, and whenever: the request leaves the engine at once, and nothing of it stays behind."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxoverlap.v1 import generate_service_pb2 as pb
from tests.server.rig import Caller, Rig, eventually, expected, generation, running

ROOT = Path(__file__).parents[2]
ROWS, CHUNK = 2, 16
DEADLINES = 0.8, 4.0, 15.0
PROMPT_LEN = 3 * CHUNK
_number = itertools.count()


@pytest.fixture(scope="module")
def shared_rig() -> Iterator[Rig]:
    with running({"max_running": ROWS, "page_size": 4, "num_pages": 600, "max_batched_tokens": CHUNK}) as rig:
        yield rig


# ---------------------------------------------------------------- moments


def queued(rig: Rig, victim: Any) -> bool:
    return victim.row is None


def in_prefill(rig: Rig, victim: Any) -> bool:
    return victim.row is not None and rig.scheduler.state.rows.written_len[victim.row] == 0


def between_chunks(rig: Rig, victim: Any) -> bool:
    return victim.row is not None and 0 < rig.scheduler.state.rows.written_len[victim.row] < PROMPT_LEN


def decoding(rig: Rig, victim: Any) -> bool:
    return 2 <= len(victim.output_ids) < victim.max_tokens - 1


def last_token_in_flight(rig: Rig, victim: Any) -> bool:
    return len(victim.output_ids) == victim.max_tokens - 1


MOMENTS = [queued, in_prefill, between_chunks, decoding, last_token_in_flight]


# ---------------------------------------------------------------- ways to leave


class Victim:
    """A call that is about to be left alone. `leave` returns the status that its caller saw, if there is one."""

    def __init__(self, rig: Rig, way: str, kind: str, max_tokens: int, deadline: float) -> None:
        self.rig, self.way = rig, way
        prompt = chr(ord("A") + next(_number)) * PROMPT_LEN  # of which nothing is cached
        if way == "kill -9":
            arguments = [rig.target, kind, prompt, str(max_tokens)]
            self.process = subprocess.Popen([sys.executable, "-m", "tests.server.victim", *arguments], cwd=ROOT)
            return
        self.caller = Caller(rig.target)
        given = generation(prompt, stop={"max_tokens": max_tokens})
        timeout = deadline if way == "deadline" else None
        if kind == "unary":
            self.call = self.caller.generate.Generate.future(pb.GenerateRequest(generation=given), timeout=timeout)
        else:
            self.call = self.caller.stream(given, timeout=timeout)

    def bring_to(self, moment: Callable[..., bool], num_others: int) -> Any:
        """Its request, held at that moment. None if its deadline has passed on the way there, on a busy machine."""
        rig = self.rig
        eventually(lambda: len(rig.client.calls()) > num_others or self.is_over, "the victim's call")
        rig.step_until(lambda: len(rig.requests()) > num_others or self.is_over)
        request = None if self.is_over else rig.requests()[-1]
        if request is not None:
            rig.step_until(lambda: moment(rig, request) or self.is_over)
            if not self.is_over:
                return request
        eventually(lambda: len(rig.client.calls()) == num_others, "the front end's notice")
        rig.step_until(lambda: len(rig.requests()) == num_others)
        self.caller.close()
        return None

    @property
    def is_over(self) -> bool:
        return self.way == "deadline" and self.call.done()

    def leave(self) -> grpc.StatusCode | None:
        if self.way == "kill -9":
            self.process.kill()
            self.process.wait()
            return None
        if self.way == "cancel":
            self.call.cancel()
        elif self.way == "channel close":
            self.caller.close()
        code = eventually(lambda: self.call.done() and self.call.code(), "the call's end")
        self.caller.close()
        return code


CODES = {
    "cancel": grpc.StatusCode.CANCELLED,
    "channel close": grpc.StatusCode.CANCELLED,
    "kill -9": None,
    "deadline": grpc.StatusCode.DEADLINE_EXCEEDED,
}


@pytest.mark.parametrize("kind", ["unary", "stream"])
@pytest.mark.parametrize("way", CODES)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
def test_a_caller_that_leaves_takes_its_request_along(rig, moment: Callable[..., bool], way: str, kind: str):
    rig.hold()
    others = []
    if moment is queued:
        others = [rig.caller.stream(generation(f"other {n}", stop={"max_tokens": 30})) for n in range(ROWS)]
        rig.wait_queued(ROWS)
    for deadline in DEADLINES:
        victim = Victim(rig, way, kind, 3 if moment is last_token_in_flight else 100, deadline)
        if (request := victim.bring_to(moment, len(others))) is not None:
            break
    assert request is not None
    launches = rig.device.launches.get(request.request_id, 0)

    assert victim.leave() == CODES[way]
    eventually(lambda: len(rig.client.calls()) == len(others), "the front end's notice")

    rig.device.allow(None)
    eventually(lambda: request.finish_reason is not None, "the request's end")
    assert rig.device.launches.get(request.request_id, 0) == launches
    for number, other in enumerate(others):
        ids = [i for event in other for i in event.delta.token_ids]
        assert ids == expected(generation(f"other {number}", stop={"max_tokens": 30}))


def test_a_hundred_callers_leave_after_three_tokens(rig, monkeypatch):
    monkeypatch.setattr(rig.device, "step_seconds", 0.002)  # a device that computes leaves Python to the front end
    for number in range(100):
        call = rig.caller.stream(generation(f"caller {number}", stop={"max_tokens": 900}))
        seen = 0
        for event in call:
            seen += len(event.delta.token_ids)
            if seen >= 3:
                break
        call.cancel()
        eventually(lambda: not rig.requests(), "the request's end")


def test_what_is_queued_beyond_its_deadline_is_never_launched(rig):
    rig.hold()
    others = [rig.caller.stream(generation(f"other {n}", stop={"max_tokens": 5})) for n in range(ROWS)]
    last_before = rig.wait_queued(ROWS)[-1].request_id
    late = [
        rig.caller.generate.Generate.future(pb.GenerateRequest(generation=generation(f"late {n}")), timeout=0.05)
        for n in range(20)
    ]
    for call in late:
        assert call.exception().code() == grpc.StatusCode.DEADLINE_EXCEEDED
    eventually(lambda: len(rig.client.calls()) == ROWS, "the front end's notice")
    rig.device.allow(None)
    for other in others:
        assert sum(len(event.delta.token_ids) for event in other) == 5
    eventually(lambda: not rig.requests(), "an empty queue")
    assert max(rig.device.launches) == last_before


def test_a_deadline_that_has_passed_already_queues_nothing(rig):
    before = dict(rig.device.launches)
    with pytest.raises(grpc.RpcError) as failure:
        rig.caller.answer(generation(), timeout=0)
    assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    rig.wait_idle()
    assert rig.device.launches == before
