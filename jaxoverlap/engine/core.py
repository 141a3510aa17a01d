"""The engine as a server: one thread owns it, and front ends talk to it over sockets.

    turn:  read what has arrived · do it (at most `MAX_COMMANDS`) · one step · hand out its news · send what can be sent

Rules: nothing here waits for a front end, however slow it is. The thread sleeps only when there is neither work nor a
message, in `select`. A front end that goes takes its requests with it; when the supervisor goes, the engine stops.
What fails in the engine itself is told to all and ends it; what fails for one request or one question, before it
touches a step, is told to whoever sent it.
"""

from __future__ import annotations

import logging
import math
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from jaxoverlap.constraint import CompiledConstraint
from jaxoverlap.engine import messages
from jaxoverlap.engine.door import Door, Entry
from jaxoverlap.engine.engine import Engine
from jaxoverlap.engine.garbage import IdleCollector
from jaxoverlap.engine.link import Link
from jaxoverlap.engine.load_meter import LoadMeter
from jaxoverlap.engine.messages import EngineFacts, EngineStatus
from jaxoverlap.engine.metrics import EngineMetrics
from jaxoverlap.engine.profiler import Profiler
from jaxoverlap.engine.questions import Questions
from jaxoverlap.engine.watchdog import Watchdog
from jaxoverlap.errors import (
    AbortedError,
    EngineError,
    JaxOverlapError,
    QueueFullError,
    ServerUnavailableError,
)
from jaxoverlap.request import Request, RequestOptions
from jaxoverlap.scheduler.plan import StepOutput

logger = logging.getLogger(__name__)

MAX_COMMANDS = 64
"""Done in one turn at most, so that a flood of requests does not hold up those that run."""

_STATUS_SECONDS = 0.5


class Owner:
    """Whose a request is.

    Attributes:
      key: of the request; call: of the first sample of the call that it belongs to, which callers know.
      has_more: besides its next token there is something to tell: that it has started, or scores.
      num_scores, num_preemptions: told of.
    """

    __slots__ = ("call", "has_more", "key", "link", "num_preemptions", "num_scores", "request")

    def __init__(self, link: Link, call: int, key: int, request: Request) -> None:
        self.link, self.call, self.key, self.request = link, call, key, request
        self.has_more = True
        self.num_scores = self.num_preemptions = 0


class EngineCore:
    """See the module's rules.

    Args:
      supervisor: may ask as front ends do; the engine runs until it goes.
      frontends: in the order of their indices.
      watchdog_seconds, watchdog_exit_seconds: see `Watchdog`.
    """

    def __init__(
        self,
        engine: Engine,
        facts: EngineFacts,
        profiler: Profiler,
        supervisor: Link,
        frontends: Sequence[Link],
        *,
        watchdog_seconds: float = math.inf,
        watchdog_exit_seconds: float = math.inf,
    ) -> None:
        self.engine = engine
        self.facts = facts
        self.draining = False
        self._profiler = profiler
        self._supervisor = supervisor
        self._links = [supervisor, *frontends]
        self._inbox: deque[tuple[Link, list[Any]]] = deque()
        self._owners: dict[int, Owner] = {}
        """By request id."""
        self._by_key: dict[tuple[int, int], Owner] = {}
        """By front end and key."""
        self._load = LoadMeter()
        self._garbage = IdleCollector()
        self._metrics = EngineMetrics(engine.loop, self._garbage.pauses)
        self._num_preemptions = 0
        self._next_status = 0.0
        self._had_work = False
        self._selector = selectors.DefaultSelector()
        self._door = Door(engine)
        self._questions = Questions(self, profiler)
        self._watchdog = Watchdog(
            engine, seconds=watchdog_seconds, exit_seconds=watchdog_exit_seconds, on_stall=self._tell_stall
        )
        self._selector.register(self._door.bell, selectors.EVENT_READ)
        for link in self._links:
            self._selector.register(link.socket, selectors.EVENT_READ, link)

    def run(self) -> None:
        """Returns when the supervisor has gone.

        Raises:
          Exception: whatever broke the engine; the front ends have been told.
        """
        self._broadcast("ready", vars(self.facts))
        self._watchdog.start()
        self._garbage.start()
        try:
            while self._supervisor.is_open:
                self._turn()
        except Exception as error:
            text = str(error) if isinstance(error, JaxOverlapError) else f"{type(error).__name__}: {error}"
            logger.error("the engine has failed", exc_info=error)
            self._broadcast("failed", text)
            raise
        finally:
            self._garbage.stop()
            self._watchdog.stop()
            for link in self._links:
                link.close()
            self._selector.close()
            self._door.close()
            self.engine.close()

    # ---------------------------------------------------------------- a turn

    def _turn(self) -> None:
        watch = self.engine.loop.watch
        is_idle = not (self.engine.has_work or self._inbox or self._door.has_compiled)
        self._read(wait=is_idle)
        if is_idle:
            watch.skip()
        for _ in range(min(len(self._inbox), MAX_COMMANDS)):
            self._do(*self._inbox.popleft())
        for entry, compiled in self._door.take_compiled():
            self._enter(entry, compiled)
        watch.end("ingest")
        if self.engine.has_work:
            self._step()
        self._report()
        for link in self._links:
            link.flush()
        watch.end("send")

    def _read(self, *, wait: bool) -> None:
        blocked = [link for link in self._links if wait and link.has_unsent]
        for link in blocked:
            self._selector.modify(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)
        timeout = _STATUS_SECONDS if self._door.waiting else self._garbage.timeout
        found = self._selector.select(timeout if wait else 0)
        if wait and not found and not self._door.waiting:
            self._garbage.slept()
        for key, events in found:
            if key.data is None:
                self._door.hear_bell()
            elif events & selectors.EVENT_READ:
                self._inbox.extend((key.data, message) for message in key.data.receive())
        for link in blocked:
            self._selector.modify(link.socket, selectors.EVENT_READ, link)
        for link in [link for link in self._links if not link.is_open]:
            self._forget(link)

    def _step(self) -> None:
        self._garbage.worked()
        output = self.engine.step()
        self._load.add(len(output.token_ids))
        self._metrics.count(output)
        self._profiler.count_step()
        self._tell(output)

    def _tell(self, output: StepOutput) -> None:
        owners = self._owners
        for request, token_id in zip(output.requests, output.token_ids, strict=True):
            owner = owners.get(request.request_id)
            if owner is None:  # its front end does not want it any more
                continue
            if owner.has_more:
                self._tell_more(owner)
            news = owner.link.news
            news.keys.append(owner.key)
            news.token_ids.append(token_id)
        if self.engine.loop.scheduler.counters.preemptions != self._num_preemptions:
            self._tell_preemptions()
        for request in output.finished:
            owner = owners.pop(request.request_id, None)
            if owner is None:
                continue
            del self._by_key[owner.link.index, owner.key]
            error = None if request.error is None else messages.error_to_wire(request.error)
            assert request.finish_reason is not None
            owner.link.news.finished.append(
                [owner.key, request.finish_reason.value, request.matched_token_id, error, request.finish_time]
            )

    def _tell_more(self, owner: Owner) -> None:
        request, news = owner.request, owner.link.news
        if owner.num_scores == 0:  # its first token
            news.started.append(
                [
                    owner.key,
                    request.cached_tokens,
                    request.seed,
                    request.admit_time,
                    request.first_token_time,
                    request.prompt_scores,
                ]
            )
        news.scores += [[owner.key, score] for score in request.scores[owner.num_scores :]]
        owner.num_scores = len(request.scores)
        owner.has_more = owner.num_scores > 0

    def _tell_preemptions(self) -> None:
        self._num_preemptions = self.engine.loop.scheduler.counters.preemptions
        for owner in self._owners.values():
            if owner.request.num_preemptions != owner.num_preemptions:
                owner.num_preemptions = owner.request.num_preemptions
                owner.link.news.preempted.append([owner.key, owner.num_preemptions])

    def _report(self) -> None:
        """The status, when work begins or ends and from time to time while there is some."""
        has_work = self.has_work
        now = time.monotonic()
        if has_work != self._had_work or (has_work and now >= self._next_status):
            self._broadcast_status()

    def _broadcast_status(self) -> None:
        self._had_work = self.has_work
        self._next_status = time.monotonic() + _STATUS_SECONDS
        self._broadcast("status", vars(self.status()))

    def _tell_stall(self, seconds: float) -> None:
        """In the watchdog's thread."""
        for link in list(self._links):
            link.post_from_aside("stalled", seconds)

    def _broadcast(self, *message: Any) -> None:
        for link in self._links:
            link.post(*message)

    @property
    def has_work(self) -> bool:
        """Somebody waits for it."""
        return self.engine.has_work or bool(self._door.waiting)

    def status(self) -> EngineStatus:
        scheduler = self.engine.loop.scheduler
        memory = scheduler.state.memory
        return EngineStatus(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + self._door.num_sequences,
            kv_used=memory.share_used,
            tokens_per_second=self._load.tokens_per_second(),
            num_steps=self._load.num_steps,
            has_work=self.has_work,
            draining=self.draining,
        )

    # ---------------------------------------------------------------- what front ends want

    def _do(self, link: Link, message: list[Any]) -> None:
        if not link.is_open:
            return
        match message:
            case ["add", key, prompt, sampling, options, called]:
                self._add(link, key, prompt, sampling, options, called)
            case ["abort", keys]:
                for key in keys:
                    self._end(link, key, self.engine.abort)
            case ["stop", key]:
                self._end(link, key, self.engine.stop)
            case ["ask", question, name, arguments]:
                self._answer(link, question, name, arguments)
            case _:
                raise EngineError(f"front end {link.index} sent {message[:1]}, which is no message of this build")

    def _add(
        self, link: Link, key: int, prompt: bytes, sampling: dict[str, Any], options: dict[str, Any], called: float
    ) -> None:
        try:
            if self.draining:
                raise ServerUnavailableError("the server is about to stop and takes no more requests")
            if self._door.is_full:
                raise QueueFullError(
                    f"max_queue: {self.facts.max_queue} requests are waiting already; try again when some have started"
                )
            entry = Entry(
                link,
                key,
                np.frombuffer(prompt, dtype=np.int32),
                messages.sampling_from_wire(sampling),
                RequestOptions(**options),
                called,
                time.monotonic(),
            )
        except Exception as error:
            self._refuse(link, key, error)
            return
        if not self._door.keep_waiting(entry):
            self._enter(entry, None)

    def _enter(self, entry: Entry, compiling: Future[CompiledConstraint] | None) -> None:
        link, key = entry.link, entry.key
        try:
            compiled = None if compiling is None else compiling.result()
        except Exception as error:
            self._refuse(link, key, error)
            return
        try:
            samples = self.engine.add_samples(entry.prompt, entry.sampling, entry.options_left(), compiled)
        except JaxOverlapError as error:
            self._refuse(link, key, error)
            return
        for index, request in enumerate(samples):
            owner = Owner(link, key, key + index, request)
            self._owners[request.request_id] = self._by_key[link.index, owner.key] = owner
            self._metrics.start(request, entry.called)

    def _refuse(self, link: Link, key: int, error: Exception) -> None:
        if not isinstance(error, JaxOverlapError):
            logger.error("a request could not be taken", exc_info=error)
        link.post("refused", key, messages.error_to_wire(error))

    def _end(self, link: Link, key: int, end: Callable[[Request], bool]) -> None:
        """Ends a request of which its front end wants nothing more."""
        self._door.waiting.pop((link.index, key), None)
        owner = self._by_key.pop((link.index, key), None)
        if owner is not None:  # else it has just finished
            del self._owners[owner.request.request_id]
            end(owner.request)

    def _forget(self, link: Link) -> None:
        self._links.remove(link)
        self._selector.unregister(link.socket)
        link.close()
        for index, key in [*self._by_key, *self._door.waiting]:
            if index == link.index:
                self._end(link, key, self.engine.abort)

    # ---------------------------------------------------------------- what operators want

    def drain(self) -> None:
        """Nothing new is taken any more."""
        self.draining = True
        self._broadcast_status()

    def abort_calls(self, wanted: Collection[tuple[int, int]] | None) -> list[tuple[int, int]]:
        """Ends calls by front end and key, or all; their front ends hear of it as of any other end. Returns those that
        were there."""
        calls: dict[tuple[int, int], list[Request]] = {name: [] for name in self._door.waiting}
        for owner in self._owners.values():
            calls.setdefault((owner.link.index, owner.call), []).append(owner.request)
        found = [name for name in calls if wanted is None or name in wanted]
        for name in found:
            for request in calls[name]:
                self.engine.abort(request)
            if name in self._door.waiting:
                entry, _ = self._door.waiting.pop(name)
                self._refuse(entry.link, entry.key, AbortedError(messages.ABORTED))
        return found

    def calls_by_request(self) -> dict[int, tuple[int, int]]:
        """Front end and key of each request's call, by the engine's own name for the request; without those that nobody
        wants any more."""
        return {request_id: (owner.link.index, owner.call) for request_id, owner in self._owners.items()}

    def finish_steps(self) -> None:
        """Steps in flight come to their end."""
        while self.engine.has_work:
            self._step()

    def read_metrics(self) -> dict[str, Any]:
        return self._metrics.read(num_at_door=self._door.num_sequences)

    def _answer(self, link: Link, question: int, name: str, arguments: list[Any]) -> None:
        try:
            answer, error = self._questions.answer(name, arguments), None
        except Exception as failure:
            if self.engine.has_failed:
                raise
            answer, error = None, self._why_not(failure)
        if callable(answer):
            threading.Thread(target=self._answer_later, args=(link, question, answer), daemon=True).start()
        else:
            link.post("answer", question, answer, error)

    def _answer_later(self, link: Link, question: int, work: Callable[[], Any]) -> None:
        """What takes long, in a thread of its own. The engine's thread sends what the socket does not take at once."""
        try:
            link.post_from_aside("answer", question, work(), None)
        except Exception as failure:
            link.post_from_aside("answer", question, None, self._why_not(failure))
        self._door.ring()

    @staticmethod
    def _why_not(failure: Exception) -> list[Any]:
        if not isinstance(failure, JaxOverlapError):
            logger.error("a question could not be answered", exc_info=failure)
        return messages.error_to_wire(failure)
