"""A service with scripted answers and faults, on a real socket.

It answers "abc" with "<abc>", one character to a token and the character's number for an id, as many tokens as are
asked for. A prompt of ids is shown as they are, a chat by its messages' contents.

    server.faults.append(error)   the next generation ends with that error; `AfterFirst(error)` after a first delta
    server.late_with = 4          a prompt "late" ends with a DeadlineError, once so many calls are there
    server.hold()                 generations begun from now on stay open until `server.release()`, after a first delta
"""

from __future__ import annotations

import gzip
import json
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from jaxoverlap.errors import ConflictError, DeadlineError, InvalidRequestError, JaxOverlapError
from jaxoverlap.outputs import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput, TokenLogprob
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.v1 import (
    admin_service_pb2,
    admin_service_pb2_grpc,
    generate_service_pb2,
    generate_service_pb2_grpc,
)
from jaxoverlap.wire import answers, statuses
from jaxoverlap.wire.requests import Generation, prompt_of, sampling_params

PATIENCE = 60.0
"""Seconds after which what should happen at once is taken not to happen."""

NAME, MAX_MODEL_LEN, SEED = "fake", 64, 2**64 - 5
SERVICE = "jaxoverlap.v1.GenerateService"
SNAPSHOT = {
    "page_size": 16,
    "pages": [
        {"page": 0, "owner": "free", "request_id": None, "index": None, "readers": 0, "last_used": None},
        {"page": 1, "owner": "row", "request_id": 7, "index": 0, "readers": 1, "last_used": None},
    ],
    "free": 1,
    "own": 1,
    "locked": 0,
    "evictable": 0,
    "promised": 0,
}
STEP = {
    "turn": 4,
    "step_id": 3,
    "kind": "decode",
    "state": "in flight",
    "tokens": 2,
    "request_ids": [7, 8],
    "rows": [0, 2],
    "generations": [1, 0],
    "chunks": [],
    "committed_len": [5, 9],
    "allocated_len": [16, 16],
    "new_pages": [[], [3]],
    "slots": [[[5, 5]], [[57, 57]]],
    "running": 2,
    "waiting": 1,
    "pages_used": 4,
    "in_flight": 1,
    "launched": 1.5,
    "ready": None,
    "committed": None,
    "finished": {},
}


@dataclass
class AfterFirst:
    """A fault that comes after the first delta of a stream."""

    error: JaxOverlapError


@dataclass
class Call:
    """What a generation looked like from the server."""

    generation: Generation
    metadata: dict[str, str]
    seconds_left: float | None
    cancelled: threading.Event = field(default_factory=threading.Event)

    def is_cancelled(self) -> bool:
        """Waits for it."""
        return self.cancelled.wait(PATIENCE)


def abort(context: grpc.ServicerContext, error: JaxOverlapError) -> None:
    context.abort_with_status(rpc_status.to_status(statuses.status(error)))


def shown(prompt: str | list[int] | ChatPrompt) -> str:
    if isinstance(prompt, ChatPrompt):
        return "|".join(message["content"] or "" for message in prompt.messages)
    return prompt if isinstance(prompt, str) else ",".join(map(str, prompt))


def answer_to(prompt: Any, params: SamplingParams, prompt_tokens: int, request_id: str = "r-1") -> RequestOutput:
    """What the server says to a prompt."""
    text = f"<{shown(prompt)}>"[: params.max_tokens]
    ids = [ord(character) for character in text]
    scores = [_position(token_id, params.logprobs) for token_id in ids] if params.logprobs is not None else None
    by_length = len(text) == params.max_tokens
    samples = [
        CompletionOutput(
            index=index,
            text=text,
            token_ids=ids,
            finish_reason=FinishReason.LENGTH if by_length else FinishReason.EOS,
            matched_token_id=None if by_length else ids[-1],
            logprobs=scores,
            cumulative_logprob=None if scores is None else -0.5 * len(ids),
            queue_seconds=0.25,
            first_token_seconds=0.5,
            total_seconds=1.0,
        )
        for index in range(params.n)
    ]
    asked = params.prompt_logprobs
    ids_shown = prompt if isinstance(prompt, list) else [] if asked is None else list(range(prompt_tokens))
    return RequestOutput(
        prompt=prompt,
        prompt_token_ids=ids_shown,
        outputs=samples,
        seed=SEED if params.seed is None else params.seed,
        cached_tokens=1,
        prompt_logprobs=None if asked is None else [_position(i, asked) for i in range(prompt_tokens)],
        prompt_tokens=prompt_tokens,
        request_id=request_id,
    )


def _position(token_id: int, num_top: int | None) -> PositionLogprobs:
    top = tuple(TokenLogprob(i, -0.25, i + 1, b"t") for i in range(num_top or 0))
    return PositionLogprobs(TokenLogprob(token_id, -0.5, 1, b"c"), top)


class FakeServer(generate_service_pb2_grpc.GenerateServiceServicer, admin_service_pb2_grpc.AdminServiceServicer):
    """Args: the address, a free port unless given; credentials for TLS; a token that callers must send."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        credentials: grpc.ServerCredentials | None = None,
        token: str | None = None,
        max_message_bytes: int = 1 << 20,
    ) -> None:
        self.calls: list[Call] = []
        self.faults: deque[JaxOverlapError | AfterFirst] = deque()
        self.admin_calls: list[Any] = []
        self.admin_faults: deque[JaxOverlapError] = deque()
        self.open = self.most_open = 0
        self.late_with = 0
        self.seconds = 0.0
        """What a unary generation takes at least."""
        self.token, self.ready = token, True
        self._released = threading.Event()
        self._released.set()
        self._lock = threading.Lock()
        self._health = health.HealthServicer()
        self._server = grpc.server(
            ThreadPoolExecutor(64),
            options=[("grpc.max_receive_message_length", max_message_bytes), ("grpc.so_reuseport", 0)],
        )
        generate_service_pb2_grpc.add_GenerateServiceServicer_to_server(self, self._server)
        admin_service_pb2_grpc.add_AdminServiceServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if credentials is None:
            port = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, credentials)
        self.target = address if address.startswith("unix:") else f"127.0.0.1:{port}"
        self.port = port
        self.set_ready(True)
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        self._server.start()

    def set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self._health.set(SERVICE, status.SERVING if ready else status.NOT_SERVING)

    def hold(self) -> None:
        self._released.clear()

    def release(self) -> None:
        self._released.set()

    def stop(self) -> None:
        self._server.stop(0).wait()
        self.release()

    def wait_for_calls(self, count: int) -> None:
        deadline = time.monotonic() + PATIENCE
        while len(self.calls) < count:
            assert time.monotonic() < deadline, f"{len(self.calls)} calls, not {count}"
            time.sleep(0.005)

    # ---------------------------------------------------------------- GenerateService

    def Generate(self, request, context):
        with self._generation(request.generation, context) as (output, _):
            time.sleep(self.seconds)
            self._wait(context)
            return answers.response(output)

    def GenerateStream(self, request, context):
        with self._generation(request.generation, context) as (output, fault):
            sample = output.outputs[0]
            yield answers.started(
                request_id=output.request_id,
                prompt_tokens=output.prompt_tokens,
                cached_tokens=output.cached_tokens,
                seed=output.seed,
                prompt_logprobs=output.prompt_logprobs,
            )
            for place in range(len(sample.token_ids)):
                for sample in output.outputs:
                    scores = (sample.logprobs or [])[place : place + 1]
                    yield answers.delta(sample.index, sample.text[place], sample.token_ids[place : place + 1], scores)
                if fault is not None:
                    abort(context, fault)
                self._wait(context)
            for sample in output.outputs:
                yield answers.finished(sample, prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens)

    def Tokenize(self, request, context):
        self._check_token(context)
        ids = [ord(character) for character in shown(prompt_of(request))]
        special = [1] if not request.HasField("add_special_tokens") or request.add_special_tokens else []
        return generate_service_pb2.TokenizeResponse(token_ids=special + ids, max_model_len=MAX_MODEL_LEN)

    def Detokenize(self, request, context):
        self._check_token(context)
        ids = [i for i in request.token_ids if i != 1 or not request.skip_special_tokens]
        return generate_service_pb2.DetokenizeResponse(text="".join(map(chr, ids)))

    # ---------------------------------------------------------------- AdminService

    def GetModelInfo(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.GetModelInfoResponse(
            served_name=NAME,
            architecture="llama",
            vocab_size=97,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=[96],
            has_chat_template=True,
            dtype="float32",
            capabilities=["logprobs"],
            sampling_defaults={"temperature": 0.5, "top_k": 20},
        )

    def GetServerInfo(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.GetServerInfoResponse(
            version="0.1.0", instance_id="i", uptime_seconds=1.5, page_size=16, num_pages=2, devices=["cpu:0"]
        )

    def GetLoad(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.GetLoadResponse(running=2, queued=1, kv_used_fraction=0.5, tokens_per_second=3.0)

    def AbortRequests(self, request, context):
        self._admin(request, context)
        known = ["r-1"] if request.all else [i for i in request.request_ids if i == "r-1"]
        unknown = [i for i in request.request_ids if i not in known]
        return admin_service_pb2.AbortRequestsResponse(aborted_ids=known, unknown_ids=unknown)

    def FlushCache(self, request, context):
        self._admin(request, context)
        if self.open:
            abort(context, ConflictError("2 requests run"))
        return admin_service_pb2.FlushCacheResponse(freed_pages=7)

    def Drain(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.DrainResponse(still_running=self.open)

    def StartProfile(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.StartProfileResponse(trace_dir=f"/traces/{request.steps}")

    def StopProfile(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.StopProfileResponse(trace_dir="/traces/0")

    def GetStepLog(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.GetStepLogResponse(json=json.dumps([STEP] * request.last))

    def GetMetrics(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.GetMetricsResponse(json=json.dumps(next(self.metrics)))

    def StartTrace(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.StartTraceResponse()

    def StopTrace(self, request, context):
        self._admin(request, context)
        trace = {"traceEvents": [], "otherData": {"model": NAME}}
        return admin_service_pb2.StopTraceResponse(trace=gzip.compress(json.dumps(trace).encode()))

    def GetMemorySnapshot(self, request, context):
        self._admin(request, context)
        return admin_service_pb2.GetMemorySnapshotResponse(json=json.dumps(SNAPSHOT))

    # ---------------------------------------------------------------- inside

    def _generation(self, generation: Generation, context: grpc.ServicerContext):
        return _Generation(self, generation, context)

    def _wait(self, context: grpc.ServicerContext) -> None:
        while context.is_active() and not self._released.wait(0.01):
            pass

    def _admin(self, request: Any, context: grpc.ServicerContext) -> None:
        self._check_token(context)
        self.admin_calls.append(request)
        if self.admin_faults:
            abort(context, self.admin_faults.popleft())

    def _check_token(self, context: grpc.ServicerContext) -> None:
        given = dict(context.invocation_metadata()).get("authorization")
        if self.token is not None and given != f"Bearer {self.token}":
            context.abort(grpc.StatusCode.UNAUTHENTICATED, "a bearer token is needed")


class _Generation:
    """Books a call, runs into its fault, and says what the answer is."""

    def __init__(self, server: FakeServer, generation: Generation, context: grpc.ServicerContext) -> None:
        self._server, self._generation, self._context = server, generation, context

    def __enter__(self) -> tuple[RequestOutput, JaxOverlapError | None]:
        server, generation, context = self._server, self._generation, self._context
        server._check_token(context)
        left = context.time_remaining()
        metadata = {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
        call = Call(generation, metadata, None if left is None or left > 1e6 else left)
        context.add_callback(lambda: None if call.cancelled.is_set() else self._ended(call))
        self._finished = False
        with server._lock:
            server.open += 1
            server.most_open = max(server.most_open, server.open)
            server.calls.append(call)
            number = len(server.calls)
            fault = server.faults.popleft() if server.faults else None
        try:
            if isinstance(fault, JaxOverlapError):
                abort(context, fault)
            if generation.text == "late":
                server.wait_for_calls(server.late_with)
                abort(context, DeadlineError("late"))
            if generation.model not in ("", NAME):
                abort(context, InvalidRequestError("model", generation.model, f"served is {NAME}"))
            try:
                prompt, params = prompt_of(generation), sampling_params(generation)
                prompt_tokens = len(prompt) if isinstance(prompt, list) else len(shown(prompt))
                if not 0 < prompt_tokens < MAX_MODEL_LEN:
                    raise InvalidRequestError("prompt", f"{prompt_tokens} tokens", "use 1 to 63 tokens")
            except InvalidRequestError as error:
                abort(context, error)
        except BaseException:
            self.__exit__()
            raise
        output = answer_to(prompt, params, prompt_tokens, f"r-{number}")
        return output, fault.error if isinstance(fault, AfterFirst) else None

    def __exit__(self, *exc_info: object) -> None:
        self._finished = exc_info[:1] == (None,)
        with self._server._lock:
            self._server.open -= 1

    def _ended(self, call: Call) -> None:
        if not self._finished:
            call.cancelled.set()
