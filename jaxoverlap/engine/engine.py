"""The engine: the door where requests are checked, and the loop that runs them. One thread uses it at a time."""

from __future__ import annotations

import dataclasses
import itertools
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import numpy as np

from jaxoverlap.constraint import CompiledConstraint, ConstraintCompiler
from jaxoverlap.engine.loop import OverlapLoop
from jaxoverlap.errors import ConflictError, EngineError, InvalidRequestError, UnsupportedError
from jaxoverlap.observe.timeline import MAX_STEPS, Timeline
from jaxoverlap.request import DEFAULT_OPTIONS, Request, RequestOptions
from jaxoverlap.runtime.result_queue import Runner
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.config import SchedulerConfig
from jaxoverlap.scheduler.plan import StepOutput
from jaxoverlap.scheduler.scheduler import Scheduler


class Engine:
    """Token ids in, token ids out.

    Attributes:
      limits: what a request may be.
      eos_token_ids: the model's own end-of-sequence ids.
      constraints: compiles what texts must be; without it, requests for structured output are refused.
      turn_began: seconds of `time.monotonic`, None between two steps; for the watchdog, from any thread.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        runner: Runner,
        *,
        lookahead: int,
        eos_token_ids: Sequence[int] = (),
        constraints: ConstraintCompiler | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = config.limits
        self.eos_token_ids = tuple(eos_token_ids)
        self.constraints = constraints
        self.loop = OverlapLoop(Scheduler(config, clock), runner, lookahead)
        self._request_ids = itertools.count()
        self._failure: EngineError | None = None
        self.turn_began: float | None = None

    @property
    def has_work(self) -> bool:
        return self.loop.has_work

    @property
    def queue_is_full(self) -> bool:
        """`add` would raise `QueueFullError` now."""
        return self.loop.scheduler.queue_is_full

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def supported_parameters(self) -> list[str]:
        """Fields of `SamplingParams` that are not refused."""
        names = [field.name for field in dataclasses.fields(SamplingParams)]
        return names if self.constraints is not None else [name for name in names if name != "structured_output"]

    def check(self, prompt_ids: Sequence[int] | np.ndarray, sampling: SamplingParams) -> np.ndarray:
        """The prompt as int32 [prompt_len] if `add` would take it; raises as `add` does, but for what
        `compile_constraint` finds."""
        return self._resolve(prompt_ids, sampling)[0]

    def compile_constraint(self, sampling: SamplingParams) -> Future[CompiledConstraint] | None:
        """Starts to compile what the text must be, for `add`; None if it may be anything. May be called from any
        thread, does not block, and raises nothing: the future does, as `ConstraintCompiler.submit` says, or
        `UnsupportedError` if this engine has no compiler."""
        if sampling.structured_output is None:
            return None
        if self.constraints is not None:
            return self.constraints.submit(sampling)
        refused: Future[CompiledConstraint] = Future()
        refused.set_exception(UnsupportedError("structured_output is not supported by this engine"))
        return refused

    def add(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        compiled: CompiledConstraint | None = None,
    ) -> Request:
        """As `add_samples`, for parameters that ask for one sample.

        Raises:
          ValueError: they ask for several.
        """
        if sampling.num_samples != 1:
            raise ValueError(f"{sampling.num_samples} samples are asked for; use add_samples")
        return self.add_samples(prompt_ids, sampling, options, compiled)[0]

    def add_samples(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        sampling: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        compiled: CompiledConstraint | None = None,
    ) -> list[Request]:
        """Checks a request and queues its samples, all or none. From here on they will finish.

        They have one seed and differ by their index, so the set comes out again with the seed; the first is the leader
        of the others.

        Args:
          compiled: what `compile_constraint` gave for these parameters. Without it, this waits for it.

        Raises:
          InvalidRequestError: it can't be served; nothing has changed.
          QueueFullError: as many wait as may.
          EngineError: the engine has failed before.
        """
        self._check_alive()
        prompt, max_tokens, stop_ids = self._resolve(prompt_ids, sampling)
        if compiled is None and (compiling := self.compile_constraint(sampling)) is not None:
            compiled = compiling.result()
        if compiled is not None:
            compiled = compiled.behind(prompt)
        seed = secrets.randbits(64) if sampling.seed is None else int(sampling.seed)
        samples: list[Request] = []
        for sample_index in range(sampling.num_samples):
            request = Request(
                request_id=next(self._request_ids),
                prompt_ids=prompt,
                sampling=sampling,
                max_tokens=max_tokens,
                stop_ids=stop_ids,
                seed=seed,
                sample_index=sample_index,
                leader=samples[0] if samples else None,
                constraint=None if compiled is None else compiled.start(),
                priority=options.priority,
                timeout=options.timeout,
                cache_salt=options.cache_salt,
            )
            self.loop.scheduler.add(request)
            samples.append(request)
        return samples

    def _resolve(
        self, prompt_ids: Sequence[int] | np.ndarray, sampling: SamplingParams
    ) -> tuple[np.ndarray, int, tuple[int, ...]]:
        prompt = self.limits.check_prompt(prompt_ids)
        stop_ids = self.limits.check_rules(sampling, self.eos_token_ids)
        max_tokens = self.limits.resolve_max_tokens(len(prompt), sampling.max_tokens)
        if sampling.min_tokens > max_tokens:
            allowed = f"after {len(prompt)} prompt tokens there is room for {max_tokens} outputs"
            raise InvalidRequestError("min_tokens", sampling.min_tokens, allowed)
        return prompt, max_tokens, stop_ids

    def stop(self, request: Request) -> bool:
        """Ends a request whose text has come to a stop string: at most the tokens in flight were computed too many,
        and they are dropped. Its terminal event comes with the next `step`. False when it had finished."""
        return self.loop.scheduler.stop(request.request_id)

    def abort(self, request: Request) -> bool:
        """Ends a request; its terminal event comes with the next `step`. False when it had finished."""
        return self.loop.scheduler.abort(request.request_id)

    def step(self) -> StepOutput:
        """One turn of the loop.

        Raises:
          EngineError: the device or the engine failed. Everything in flight is lost and the engine is dead. A note of
            the error, which a traceback shows, has the last steps.
        """
        self._check_alive()
        self.turn_began = time.monotonic()
        try:
            return self.loop.turn()
        except BaseException as error:
            self._failure = EngineError(f"the engine failed and must be restarted: {type(error).__name__}: {error}")
            self._failure.add_note(f"last steps:\n{self.loop.log.describe()}")
            if isinstance(error, Exception):
                raise self._failure from error
            raise
        finally:
            self.turn_began = None

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise EngineError(str(self._failure)) from self._failure  # a new one: each raise adds to a traceback

    def start_timeline(self, max_steps: int = MAX_STEPS) -> None:
        """Records from now on what happens when; the last `max_steps` steps are kept.

        Raises:
          ConflictError: that is being done already.
        """
        if self.loop.timeline is not None:
            raise ConflictError("a timeline is being recorded already")
        self.loop.timeline = Timeline(max_steps)
        self.loop.timeline.start(self.loop.watch, self.loop.scheduler.now())

    def stop_timeline(self) -> Timeline:
        """What was recorded; `chrome_trace.to_chrome` makes a file of it.

        Raises:
          ConflictError: nothing is being recorded.
        """
        timeline, self.loop.timeline = self.loop.timeline, None
        if timeline is None:
            raise ConflictError("no timeline is being recorded")
        timeline.stop(self.loop.watch)
        return timeline

    def close(self) -> None:
        """Lets go of what compiles constraints, and of a recording that nobody has stopped."""
        if self.loop.timeline is not None:
            self.stop_timeline()
        if self.constraints is not None:
            self.constraints.close()
