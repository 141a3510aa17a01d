"""One engine for several callers in this process, who take turns at it.

Whoever waits for a token steps the engine, and steps it for all: what a step commits goes to the collectors of all
callers, wherever they are. A caller that finds its own progress made by somebody else's steps does not step at all.

Nothing here is ever half done. Ctrl-C waits until an engine is between two steps. Who leaves in the middle of one (a
stream that the garbage collector finds) is let go at its end. What stops a step half way all the same, ends the engine:
what it had committed is lost, and who waits for it would wait forever.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager

import numpy as np

from jaxoverlap.constraint import CompiledConstraint
from jaxoverlap.engine.collector import PromptCollector
from jaxoverlap.engine.compiling import Compiling
from jaxoverlap.engine.engine import Engine
from jaxoverlap.errors import EngineError
from jaxoverlap.interrupt import interrupt_deferred
from jaxoverlap.prompts import Prompt
from jaxoverlap.request import Request, RequestOptions
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.text.stop_strings import special_stops
from jaxoverlap.text.tokenizer import Tokenizer

_LET_OTHERS_SECONDS = 20e-6
"""Enough for a thread that waits for a lock to wake up and take it."""


class SharedEngine:
    """Adds the text side to an engine.

    Attributes:
      lock: held by whoever is at the engine.
      is_closed: nothing is taken any more.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.lock = threading.RLock()
        self.is_closed = False
        self._closed_because = "this LLM is closed"
        self._tokenizer = tokenizer
        self._stopped_by: BaseException | None = None
        self._waiting: set[int] = set()
        """Threads that want the lock for a step or a prompt."""
        self._is_busy = False
        self._leaving: deque[PromptCollector] = deque()
        """To be let go when the engine is not busy."""
        self._callers: dict[int, tuple[PromptCollector, deque[PromptCollector]]] = {}
        """By request id: who collects it, and where that goes when it is finished."""

    @property
    def has_callers(self) -> bool:
        return bool(self._callers)

    @property
    def queue_is_full(self) -> bool:
        return self.engine.queue_is_full

    def compile_constraint(self, sampling: SamplingParams) -> Compiling | None:
        """As `Engine.compile_constraint`."""
        with interrupt_deferred():
            future = self.engine.compile_constraint(sampling)
        return None if future is None else Compiling(future)

    def check(
        self, prompt_ids: Sequence[int] | np.ndarray, sampling: SamplingParams, compiling: Compiling | None
    ) -> np.ndarray:
        """The prompt as int32 [prompt_len] if `add` would take it; raises as `add` does.

        Args:
          compiling: what `compile_constraint` gave for these parameters; it is waited for.
        """
        special_stops(self._tokenizer, sampling)
        prompt = self.engine.check(prompt_ids, sampling)
        if compiling is not None:
            compiling.result()
        return prompt

    def add(
        self,
        prompt: Prompt,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        options: RequestOptions,
        finished: deque[PromptCollector],
        *,
        compiled: CompiledConstraint | None = None,
        streams: bool = False,
    ) -> PromptCollector:
        """Queues a prompt's samples; when the last of them is finished, their collector goes to `finished`.

        Without `compiled` it waits for `compile_constraint`, and holds up nobody else meanwhile.

        Raises:
          InvalidRequestError, QueueFullError: as `Engine.add_samples`.
          EngineError: it is closed, or the engine has failed.
          KeyboardInterrupt: Ctrl-C; nothing is queued.
        """
        special_stops(self._tokenizer, sampling)
        if compiled is None and (compiling := self.compile_constraint(sampling)) is not None:
            compiled = compiling.result()
        collector = None
        try:
            with self._turn(), interrupt_deferred():
                self.check_open()
                with self._busy():
                    requests = self.engine.add_samples(prompt_ids, sampling, options, compiled)
                    collector = PromptCollector(prompt, requests, self._tokenizer, streams=streams)
                    for request in requests:
                        self._callers[request.request_id] = (collector, finished)
        except KeyboardInterrupt:
            if collector is not None:
                self.leave([collector])
            raise
        return collector

    def step(self, unless: Sized = ()) -> int:
        """One step of the engine, for all callers. Returns the number of new tokens.

        Args:
          unless: nothing is done if it has something in it when it is this caller's turn: others' steps brought it.

        Raises:
          EngineError: it is closed, or the engine has failed, now or before.
          KeyboardInterrupt: Ctrl-C; the step is done.
        """
        with self._turn(), interrupt_deferred():
            self.check_open()
            return 0 if unless else self._step()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the lock. It is nobody's who waits longest, so who has had it lets others go first."""
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            with self.lock:
                self._waiting.discard(me)
                yield
        finally:
            self._waiting.discard(me)
            if self._waiting:
                time.sleep(_LET_OTHERS_SECONDS)

    def _step(self) -> int:
        try:
            with self._busy():
                output = self.engine.step()
                for request in (*output.requests, *output.finished):
                    self._collect(request)
                self.engine.loop.watch.end("detokenize")
        except EngineError:
            raise
        except BaseException as error:
            self._stopped_by = error
            if isinstance(error, Exception):
                self.check_open()
            raise
        return len(output.token_ids)

    @contextmanager
    def _busy(self) -> Iterator[None]:
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False
        if self._leaving:
            self._let_go()

    def _collect(self, request: Request) -> None:
        if request.request_id not in self._callers:
            return
        collector, finished = self._callers[request.request_id]
        sample = collector.take(request)
        if sample.has_stopped and self.engine.stop(request):
            sample = collector.take(request)
        if sample.is_finished:
            del self._callers[request.request_id]
            if collector.is_finished:
                finished.append(collector)

    def leave(self, collectors: Iterable[PromptCollector]) -> None:
        """Aborts what is unfinished of a call that ends, and brings home what nobody else would."""
        with interrupt_deferred(), self.lock:
            self._leaving.extend(collectors)
            if self._is_busy or self.is_closed or self._stopped_by is not None or self.engine.has_failed:
                return
            self._let_go()
            # Steps in flight still hold rows and pages; if others are waiting, they will read them.
            while self.engine.has_work and not self._callers:
                self._step()

    def _let_go(self) -> None:
        while self._leaving:
            for sample in self._leaving.popleft().samples:
                self._callers.pop(sample.request.request_id, None)
                self.engine.abort(sample.request)

    def close(self, seconds: float | None = None) -> bool:
        """Ends all calls with the step under way. False if that takes longer than so many seconds; None is no limit.

        Raises:
          KeyboardInterrupt: Ctrl-C; nothing new begins all the same.
        """
        self.is_closed = True
        if seconds is not None:
            if not self.lock.acquire(timeout=seconds):
                return False
            self.lock.release()
        with self.lock:
            self._callers.clear()
        return True

    def leave_behind(self) -> None:
        """In a fork of the process: whoever had the lock is not here, nor are the device's threads."""
        self.lock = threading.RLock()
        self.is_closed = True
        self._closed_because = (
            "this LLM belongs to the process that this one is a fork of, and can't be used here: open one in each "
            "process, and start processes by 'spawn', not by 'fork'"
        )

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineError(self._closed_because)
        if (error := self._stopped_by) is not None:
            text = f"a step was left half done, and the engine must be restarted: {type(error).__name__}: {error}"
            raise EngineError(text) from error
