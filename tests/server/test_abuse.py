"""Two hundred rounds of everything that callers should not do, while others are served as if nothing were."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from jaxoverlap.v1 import admin_service_pb2 as admin
from jaxoverlap.v1 import generate_service_pb2 as pb
from tests.server.fuzz import random_message
from tests.server.processes import Served
from tests.server.rig import Caller, eventually, expected, generation

ROUNDS = 200
GENERATE = "/jaxoverlap.v1.GenerateService/"
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE}
"""What no caller can bring about."""


def outcome(call: Callable[[], Any]) -> grpc.StatusCode:
    try:
        answer = call()
        if hasattr(answer, "code"):
            list(answer)
    except grpc.RpcError as error:
        return error.code()
    return grpc.StatusCode.OK


class Abuser:
    def __init__(self, target: str) -> None:
        self.caller = Caller(target)
        self.target = target
        self.rng = random.Random(7)

    def bytes_that_are_no_message(self) -> grpc.StatusCode:
        name, kind = self.rng.choice(
            [("Generate", "unary_unary"), ("GenerateStream", "unary_stream"), ("Tokenize", "unary_unary")]
        )
        call = getattr(self.caller.channel, kind)(f"{GENERATE}{name}", lambda data: data, lambda data: data)
        # A field of a length that is not there.
        code = outcome(lambda: call(b"\x0a\xff\xff\x7f" + self.rng.randbytes(self.rng.randrange(200)), timeout=5))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        return code

    def messages_of_all_kinds(self) -> grpc.StatusCode:
        given = random_message(pb.Generation(), self.rng, leave_out=frozenset({"logprobs", "prompt_logprobs"}))
        call = self.caller.answer if self.rng.random() < 0.5 else self.caller.stream
        return outcome(lambda: call(given, timeout=5))

    def a_message_that_is_too_large(self) -> grpc.StatusCode:
        code = outcome(lambda: self.caller.answer(generation("x" * (3 << 20)), timeout=5))
        assert code == grpc.StatusCode.RESOURCE_EXHAUSTED
        return code

    def ids_that_are_none(self) -> grpc.StatusCode:
        ids = [self.rng.choice([97, 2**31, 2**32 - 1]) for _ in range(self.rng.randrange(1, 50))]
        code = outcome(lambda: self.caller.answer(generation(ids), timeout=5))
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        return code

    def streams_opened_and_left(self) -> grpc.StatusCode:
        calls = [self.caller.stream(generation(f"left {n}", client_request_id="same")) for n in range(10)]
        for call in calls:
            call.cancel()
        return grpc.StatusCode.CANCELLED

    def connections_that_say_nothing_or_nonsense(self) -> grpc.StatusCode:
        host, port = self.target.rsplit(":", 1)
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
        for said in (
            b"",
            b"GET / HTTP/1.1\r\n\r\n",
            self.rng.randbytes(300),
            preface,
            preface + self.rng.randbytes(100),
        ):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as raw:
                raw.sendall(said)
                if self.rng.random() < 0.5:
                    raw.shutdown(socket.SHUT_WR)
        return grpc.StatusCode.OK

    def methods_that_do_not_exist(self) -> grpc.StatusCode:
        call = self.caller.channel.unary_unary(f"{GENERATE}{self.rng.choice(['', 'generate', 'Generate/x'])}")
        code = outcome(lambda: call(b"", timeout=5))
        assert code == grpc.StatusCode.UNIMPLEMENTED
        return code

    def operators_questions_of_all_kinds(self) -> grpc.StatusCode:
        request = random_message(admin.AbortRequestsRequest(), self.rng, leave_out=frozenset({"all"}))
        return outcome(lambda: self.caller.admin.AbortRequests(request, timeout=5))


@pytest.fixture(scope="module")
def served():
    sizes = ("--max-running", "8", "--page-size", "4", "--num-pages", "2000", "--max-message-mib", "2")
    with Served(*sizes).wait_ready() as served:
        yield served


def test_nothing_that_callers_do_harms_the_others(served):
    abuser, bystander = Abuser(served.address), served.caller()
    wrong: list[Any] = []
    stop = threading.Event()
    served_well = 0

    def be_served() -> None:
        nonlocal served_well
        number = 0
        while not stop.is_set():
            number += 1
            given = generation(f"bystander {number % 7}", stop={"max_tokens": 30})
            ids = [i for event in bystander.stream(given) for i in event.delta.token_ids]
            if ids != expected(given):
                wrong.append((number, ids))
            served_well += 1

    good = threading.Thread(target=be_served)
    good.start()
    kinds = [
        abuser.bytes_that_are_no_message,
        *[abuser.messages_of_all_kinds] * 6,
        abuser.a_message_that_is_too_large,
        abuser.ids_that_are_none,
        abuser.streams_opened_and_left,
        abuser.connections_that_say_nothing_or_nonsense,
        abuser.methods_that_do_not_exist,
        abuser.operators_questions_of_all_kinds,
    ]
    codes: Counter[str] = Counter()
    memory = []
    try:
        for number in range(ROUNDS):
            kind = kinds[number % len(kinds)]
            code = kind()
            assert code not in OURS, (number, kind.__name__, code)
            codes[code.name] += 1
            if number in (ROUNDS // 2, ROUNDS - 1):
                memory.append(sum(process.memory_info().rss for process in served.children))
    finally:
        stop.set()
        good.join()
        abuser.caller.close()
    assert not wrong and served_well > 20
    assert codes["OK"] and codes["INVALID_ARGUMENT"] > ROUNDS / 10, codes
    assert memory[1] < memory[0] * 1.05

    def is_idle() -> bool:
        load = bystander.admin.GetLoad(admin.GetLoadRequest())
        return load.running == load.queued == load.kv_used_fraction == 0

    eventually(is_idle, "an idle engine")
    assert "Traceback" not in served.log()
    given = generation("probe", stop={"max_tokens": 20})
    assert list(bystander.answer(given).sequences[0].token_ids) == expected(given)
