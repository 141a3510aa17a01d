"""Prompts on their way through a shared engine: drawn as room appears, taken in, stepped until each is finished."""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxoverlap.engine.collector import PromptCollector
from jaxoverlap.engine.compiling import Compiling
from jaxoverlap.engine.shared import SharedEngine
from jaxoverlap.errors import EngineError, JaxOverlapError, QueueFullError
from jaxoverlap.outputs import RequestOutput
from jaxoverlap.prompts import Prompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

_NOTHING_NOW_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Input:
    """One prompt on its way to the engine.

    Attributes:
      ids: what the model will see, or an error if there is no such thing.
      compiling: what its text must be, if anything.
    """

    prompt: Prompt
    ids: Sequence[int] | np.ndarray | JaxOverlapError
    params: SamplingParams
    options: RequestOptions
    compiling: Compiling | None

    @property
    def is_ready(self) -> bool:
        return self.compiling is None or self.compiling.is_done or isinstance(self.ids, JaxOverlapError)

    @property
    def error(self) -> JaxOverlapError | None:
        """Of one that is ready: why it can't go."""
        if isinstance(self.ids, JaxOverlapError):
            return self.ids
        return None if self.compiling is None else self.compiling.error()

    def enter(
        self, shared: SharedEngine, finished: deque[PromptCollector], *, streams: bool = False
    ) -> PromptCollector:
        """Of one that can go; see `SharedEngine.add`."""
        assert not isinstance(self.ids, JaxOverlapError)
        compiled = None if self.compiling is None else self.compiling.result()
        return shared.add(
            self.prompt, self.ids, self.params, self.options, finished, compiled=compiled, streams=streams
        )


class OnStep(Protocol):
    def __call__(self, *, finished: int, new_tokens: int) -> None: ...


def run(
    shared: SharedEngine, inputs: Iterator[Input | None], *, window: int | None, on_step: OnStep
) -> Generator[tuple[int, RequestOutput | JaxOverlapError], None, None]:
    """Keeps up to `window` inputs in work and yields each one's index and output when it is finished, or its error.

    An input whose grammar is still being compiled waits here, and what is in the engine goes on. A None says that there
    is no input now.

    Args:
      on_step: told of each step.
    """
    finished: deque[PromptCollector] = deque()
    running: dict[PromptCollector, int] = {}
    entering: dict[int, Input] = {}
    indices = itertools.count()
    compiled: queue.SimpleQueue[None] = queue.SimpleQueue()
    """Has something for each input whose grammar has been compiled since it was drawn."""
    exhausted = False
    try:
        while True:
            asks_again = False
            while not (exhausted or shared.queue_is_full):
                if window is not None and len(running) + len(entering) >= window:
                    break
                try:
                    given = next(inputs)
                except StopIteration:
                    exhausted = True
                    break
                if given is None:
                    asks_again = True
                    break
                entering[next(indices)] = given
                if given.is_ready:
                    yield from _enter(shared, entering, running, finished)
                elif given.compiling is not None:
                    given.compiling.when_done(lambda: compiled.put(None))
            yield from _enter(shared, entering, running, finished)
            if not running and not shared.queue_is_full:
                if entering:
                    if not any(given.is_ready for given in entering.values()):
                        with suppress(queue.Empty):
                            compiled.get(timeout=_NOTHING_NOW_SECONDS if asks_again else None)
                elif exhausted:
                    return
                else:
                    time.sleep(_NOTHING_NOW_SECONDS)
                continue
            new_tokens = shared.step(unless=finished)
            on_step(finished=len(finished), new_tokens=new_tokens)
            while finished:
                collector = finished.popleft()
                yield running.pop(collector), collector.output()
    finally:
        shared.leave(running)


def _enter(
    shared: SharedEngine,
    entering: dict[int, Input],
    running: dict[PromptCollector, int],
    finished: deque[PromptCollector],
) -> Iterator[tuple[int, JaxOverlapError]]:
    """Takes what is ready into the engine as long as its queue has room; yields what is refused."""
    for index, given in list(entering.items()):
        if not given.is_ready:
            continue
        refused = given.error
        if refused is None:
            if shared.queue_is_full:
                continue
            try:
                running[given.enter(shared, finished)] = index
            except QueueFullError:  # another thread was quicker
                continue
            except EngineError:
                raise
            except JaxOverlapError as error:
                refused = error
        del entering[index]
        if refused is not None:
            yield index, refused
