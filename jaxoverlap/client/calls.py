"""What every call is made of, whichever way it waits: its message, the reader of its answer, and its tries.

When a call is tried again:

- the service was unavailable, and nothing of an answer had been received: nobody can have seen half of it;
- it was full, and said when to come back;
- never otherwise, never once a stream's first message is there, and never when the next try would begin after the
  call's deadline. Retries draw from that deadline, they don't extend it.

Pauses double from `FIRST_PAUSE` to `LONGEST_PAUSE`, less up to a half by chance, so that callers who failed together do
not come back together. What the service asks for comes on top.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from google.rpc import code_pb2, status_pb2

from jaxoverlap.checks import check_int
from jaxoverlap.client.config import ClientConfig
from jaxoverlap.client.methods import Unary
from jaxoverlap.errors import (
    AbortedError,
    ConfigError,
    EngineError,
    InvalidRequestError,
    JaxOverlapError,
    QueueFullError,
    ServerUnavailableError,
)
from jaxoverlap.outputs import RequestOutput
from jaxoverlap.prompts import Prompt, in_list, input_of, is_list_of_prompts, one_for_each, one_of
from jaxoverlap.request import DEFAULT_OPTIONS, RequestOptions
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.v1 import generate_service_pb2
from jaxoverlap.wire import answers, requests, statuses

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 5.0
_LONGEST_SECONDS = 27_000 * 3600.0
"""Of a deadline. gRPC itself sends no longer one, and takes those after the year 2262 for passed."""
_STATUS_KEY = "grpc-status-details-bin"
_OWN_CANCELLATIONS = ("Channel closed", "Locally cancelled")
"""What gRPC says of calls that this side has cancelled."""


@dataclass(frozen=True)
class Clock:
    """Time and chance, for tests to script."""

    now: Callable[[], float] = time.monotonic
    chance: Callable[[], float] = random.random


class Tries:
    """One call's tries and what time they have left.

    Args:
      timeout: seconds for all of them; None is no limit.
      max_retries: after the first.
      patient: those because the service is full do not count.
    """

    def __init__(self, timeout: float | None, max_retries: int, clock: Clock, *, patient: bool = False) -> None:
        self._clock = clock
        self._deadline = math.inf if timeout is None else clock.now() + timeout
        self._max_retries = max_retries
        self._patient = patient
        self._retries = 0

    @property
    def seconds_left(self) -> float | None:
        """For the next try's deadline."""
        if math.isinf(self._deadline):
            return None
        return min(max(self._deadline - self._clock.now(), 0.0), _LONGEST_SECONDS)

    def pause_after(self, error: JaxOverlapError, *, received: bool = False) -> float | None:
        """Seconds to wait before the next try; None where there is none.

        Args:
          received: some of an answer is there.
        """
        asked = 0.0
        if isinstance(error, QueueFullError) and error.retry_after is not None:
            asked, counts = error.retry_after, not self._patient
        elif isinstance(error, ServerUnavailableError):
            counts = True
        else:
            return None
        if received or (counts and self._retries >= self._max_retries):
            return None
        longest = min(FIRST_PAUSE * 2.0 ** min(self._retries, 16), LONGEST_PAUSE)
        pause = asked + longest * (1 - self._clock.chance() / 2)
        if self._clock.now() + pause >= self._deadline:
            return None
        self._retries += 1
        return pause


def error_of(failure: Any, *, received: bool = False, max_message_bytes: int = 0) -> JaxOverlapError:
    """The error that a call's failure tells of.

    Args:
      failure: a call or an error of grpc or grpc.aio, with `code()`, `details()` and `trailing_metadata()`.
      received: a stream's first message was there.
    """
    code, text = failure.code(), failure.details() or ""
    details = dict(failure.trailing_metadata() or ()).get(_STATUS_KEY)
    status = status_pb2.Status()
    if not (isinstance(details, bytes) and status.ParseFromString(details) and status.code == code.value[0]):
        status = status_pb2.Status(code=code.value[0] if code else code_pb2.UNKNOWN, message=text)
    error = statuses.error(status)
    if status.code == code_pb2.CANCELLED and not text.startswith(_OWN_CANCELLATIONS):
        return ServerUnavailableError(f"the service has stopped: {text}")  # so ends a call that comes at that moment
    if not isinstance(error, QueueFullError) or error.retry_after is not None:
        return error
    if "larger than max" in text:  # gRPC has the same code for it
        allowed = f"messages have at most {max_message_bytes} bytes here, or what the service allows; {text}"
        return InvalidRequestError("message", None, allowed)
    if "metadata size exceeds" in text:  # and for this
        return InvalidRequestError("metadata", None, f"the service takes less of it with a call; {text}")
    return AbortedError(text) if received else error  # it was let in: its reader is too slow


@dataclass(frozen=True)
class Ask:
    """One prompt on its way: what was asked, its message, and its time."""

    prompt: Prompt
    params: SamplingParams
    message: generate_service_pb2.Generation
    timeout: float | None

    def unary(self) -> Unary[RequestOutput]:
        request = generate_service_pb2.GenerateRequest(generation=self.message)
        return Unary(
            lambda stubs: stubs.generate.Generate,
            request,
            lambda reply: answers.request_output(reply, self.prompt, self.params),
        )

    def stream_reader(self) -> answers.StreamReader:
        return answers.StreamReader(self.prompt, self.params)


def placed(error: JaxOverlapError, index: int, prompts: Any) -> JaxOverlapError:
    """The error of one of these prompts, which names its place if they are a list. The model is everybody's."""
    if not isinstance(error, InvalidRequestError) or error.field == "model" or not is_list_of_prompts(prompts):
        return error
    return in_list(error, index)


class ClientBase:
    """What both clients have.

    Raises:
      ConfigError: settings that can't be.
    """

    def __init__(self, target: str, progress: bool | None, config: dict[str, Any]) -> None:
        known = {field.name for field in fields(ClientConfig)}
        for name, value in config.items():
            if name not in known:
                raise ConfigError(f"{name}: {value!r} is not allowed; known settings are {', '.join(sorted(known))}")
        self.config = ClientConfig(target=target, **config)
        self._progress = progress
        self._clock = Clock()
        self._closed = False

    def __reduce__(self) -> Any:
        name = type(self).__name__
        raise TypeError(f"{name} has a connection, and can be neither copied nor pickled: open one where it is used")

    def _ask(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        options: RequestOptions | None = None,
        client_request_id: str = "",
    ) -> Ask:
        """Raises InvalidRequestError for something that no message can hold; nothing has been sent."""
        params = one_of("sampling_params", params, SamplingParams)
        options = one_of("options", options, RequestOptions, DEFAULT_OPTIONS)
        timeout = self.config.timeout if options.timeout is None else options.timeout
        message = requests.generation(
            prompt, params, options, model=self.config.model, client_request_id=client_request_id
        )
        return Ask(prompt, params or SamplingParams(), message, timeout)

    def _asks(self, prompts: Any, sampling_params: Any, options: Any, client_request_id: str) -> list[Ask]:
        """One for each prompt; raises InvalidRequestError with the prompt's place in the list."""
        many: Sequence[Any] = prompts if is_list_of_prompts(prompts) else [prompts]
        params = one_for_each(many, "sampling_params", sampling_params, SamplingParams)
        treatment = one_for_each(many, "options", options, RequestOptions, DEFAULT_OPTIONS)
        asks = []
        for index, given in enumerate(zip(many, params, treatment, strict=True)):
            try:
                asks.append(self._ask(*given, client_request_id))
            except InvalidRequestError as error:
                raise placed(error, index, prompts) from None
        return asks

    def _window(self, window: int | None) -> int:
        """How many inputs of `generate_each` may be under way."""
        if window is None:
            return self.config.concurrency
        check_int("window", window, 1, 2**31 - 1, "an integer from 1 on, or leave it out")
        return window

    def _each(self, inputs: Iterable[tuple[Any, ...] | None]) -> Iterator[tuple[int, Ask | JaxOverlapError] | None]:
        """Asks for the inputs of `generate_each`, with their indices, as they are drawn."""
        indices = itertools.count()
        for given in inputs:
            if given is None:
                yield None
                continue
            index = next(indices)
            try:
                yield index, self._ask(*input_of(given))
            except JaxOverlapError as error:
                yield index, error

    def _tries(self, timeout: float | None, *, retried: bool = True, patient: bool = False) -> Tries:
        return Tries(timeout, self.config.max_retries if retried else 0, self._clock, patient=patient)

    def _begin(self, method: Any, request: Any, tries: Tries) -> Any:
        """Starts a try of a stub's method, or of its `future`."""
        if self._closed:
            raise EngineError("this client is closed")
        return method(request, timeout=tries.seconds_left, metadata=self.config.call_metadata())

    def _error_of(self, call: Any, *, received: bool = False) -> JaxOverlapError:
        """The error that the failure of a call tells of."""
        return error_of(call, received=received, max_message_bytes=self.config.max_message_bytes)


def num_tokens(result: RequestOutput | JaxOverlapError) -> int:
    """Tokens that a result brings, for the progress bar."""
    return 0 if isinstance(result, JaxOverlapError) else sum(len(sample.token_ids) for sample in result.outputs)
