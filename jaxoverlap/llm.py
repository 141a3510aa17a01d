"""The offline API: prompts in, texts out, in this process."""

from __future__ import annotations

import atexit
import dataclasses
import math
import os
import sys
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from os import PathLike
from typing import Any

import numpy as np

from jaxoverlap import display
from jaxoverlap.checks import check_int
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.build import build_engine
from jaxoverlap.engine.compiling import Compiling
from jaxoverlap.engine.inputs import Input, run
from jaxoverlap.engine.shared import SharedEngine
from jaxoverlap.engine.watchdog import Watchdog
from jaxoverlap.errors import (
    ConfigError,
    InvalidRequestError,
    JaxOverlapError,
    QueueFullError,
    shortened,
)
from jaxoverlap.interrupt import interrupt_deferred
from jaxoverlap.observe.chrome_trace import About, to_chrome
from jaxoverlap.observe.timeline import MAX_STEPS
from jaxoverlap.outputs import RequestOutput, StreamDelta
from jaxoverlap.prompts import (
    Prompt,
    as_chat,
    chat_prompts,
    in_list,
    input_of,
    is_list_of_prompts,
    one_for_each,
    one_of,
)
from jaxoverlap.request import DEFAULT_OPTIONS, RequestOptions
from jaxoverlap.runtime.runner import DeviceRunner
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.snapshot import MemorySnapshot


class LLM:
    """A model, loaded and compiled, and the engine that decodes with it.

    Args:
      model: see `EngineConfig.model`; None is the embedded SmolLM2-135M-Instruct.
      progress: show progress on standard error; None shows it on a terminal only.
      warm_up: compile every step now; False leaves it to `warm_up`, or to the first call that decodes. Prompts can be
        checked before.
      **config: fields of `EngineConfig`.

    Raises:
      ConfigError, ModelError, UnsupportedError: it can't start; the message says what to change.

    Use it as a context manager, or `close` it. Calls from several threads take turns at the engine. It belongs to its
    process: in a fork it raises EngineError, and it can be neither copied nor pickled.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        progress: bool | None = None,
        warm_up: bool = True,
        **config: Any,
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        for name, value in config.items():
            if name not in known:
                raise ConfigError(
                    f"{name}: {shortened(value)} is not allowed; known settings are {', '.join(sorted(known))}"
                )
        self._progress = progress
        self.config = EngineConfig(model=model, **config)
        built = build_engine(self.config, warm_up=False)
        self.model_name = built.name
        self.resolved = built.resolved
        self.model_config = built.model_config
        self.sampling_defaults = built.sampling_defaults
        self.default_sampling_params = SamplingParams(**built.sampling_defaults)
        self.tokenizer = built.tokenizer
        self.runner = built.runner
        self.engine = built.engine
        self._shared = SharedEngine(built.engine, built.tokenizer)
        self._is_warm = False
        exit_seconds = math.inf if self.config.watchdog_exit_seconds is None else self.config.watchdog_exit_seconds
        self._watchdog = Watchdog(built.engine, seconds=self.config.watchdog_seconds, exit_seconds=exit_seconds)
        self._let_go = weakref.finalize(self, _let_go, self._shared, self._watchdog, built.runner)
        self._let_go.atexit = False  # see `_close_all`
        _open.add(self)
        if warm_up:
            self.warm_up()

    # ---------------------------------------------------------------- public

    def warm_up(self) -> None:
        """Compiles every step, unless that is done. After it nothing compiles any more."""
        with self._shared.lock:
            self._shared.check_open()
            if not self._is_warm:
                self.runner.warm_up(**({"progress": display.track_warm_up} if self._shows(None) else {}))
                self._is_warm = True
                self._watchdog.start()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """Decodes prompts together, and returns their outputs in the order of the prompts.

        Args:
          prompts: one prompt or a list of them.
          sampling_params: for all, or one for each; None is `default_sampling_params`.
          options: priority, timeout and cache salt, for all, or one for each.
          progress: overrides the constructor's.

        Raises:
          InvalidRequestError: a prompt or its parameters can't be served; nothing has been decoded.
          EngineError: the engine failed, or the LLM is closed.
          KeyboardInterrupt: Ctrl-C; what was running is aborted and the engine can be used again.
        """
        is_list = is_list_of_prompts(prompts)
        many: Sequence[Any] = prompts if is_list else [prompts]  # type: ignore[assignment]
        params = one_for_each(many, "sampling_params", sampling_params, SamplingParams, self.default_sampling_params)
        params = [one.for_prompt(prompt) for prompt, one in zip(many, params, strict=True)]
        treatment = one_for_each(many, "options", options, RequestOptions, DEFAULT_OPTIONS)
        compiling = [self._shared.compile_constraint(one) for one in params]  # all at once; each then waits for its own
        inputs = []
        for index, (prompt, *given) in enumerate(zip(many, params, treatment, compiling, strict=True)):
            try:
                inputs.append(self._checked(prompt, *given))
            except InvalidRequestError as error:
                if not is_list:
                    raise
                raise in_list(error, index) from None
        outputs: list[RequestOutput | None] = [None] * len(many)
        self.warm_up()
        with display.generation_bar(len(many), shown=self._shows(progress)) as bar:
            for index, result in run(self._shared, iter(inputs), window=None, on_step=bar.update):
                if isinstance(result, JaxOverlapError):
                    raise result
                outputs[index] = result
        return [output for output in outputs if output is not None]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        options: RequestOptions | Sequence[RequestOptions] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]:
        """As `generate`, for the messages of a chat or of several, put through the model's template.

        Args:
          messages: of one chat, or a list of chats.
          tools, documents, add_generation_prompt, continue_final_message, chat_template_kwargs: see `ChatPrompt`; a
            list of `ChatPrompt` is also a list of prompts for `generate`, each with its own.

        Raises: as `generate`.
        """
        prompts = chat_prompts(
            messages,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self.generate(prompts, sampling_params, options, progress=progress)

    def generate_each(
        self,
        inputs: Iterable[tuple[Prompt, SamplingParams] | tuple[Prompt, SamplingParams, RequestOptions] | None],
        *,
        window: int | None = None,
    ) -> Iterator[tuple[int, RequestOutput | JaxOverlapError]]:
        """Decodes any number of prompts with bounded memory: inputs are drawn as room appears, and outputs come as
        they finish, with the input's index. An input that can't be served yields its error and disturbs nothing.

        Args:
          inputs: prompt and parameters, and options if need be, each None for the defaults; drawn lazily. A None in
            place of an input has no index and means "nothing now": what is in the engine goes on, and after its next
            step, or a moment, the inputs are asked again.
          window: inputs in the engine at once; None is four times `max_running`.

        Raises:
          InvalidRequestError: the window is none.
          EngineError, KeyboardInterrupt: as `generate`.
        """
        if window is None:
            window = 4 * self.resolved.scheduler.max_running
        check_int("window", window, 1, sys.maxsize, "an integer above 0, or leave it out")
        return self._each(inputs, window)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Iterator[StreamDelta]:
        """Decodes one prompt and yields pieces as they come; those of several samples in turn, by their index. Several
        streams may be drawn from in turn.

        Leaving the iterator early aborts the request. Raises as `generate`, when called; `best_of`, which knows the
        best only at the end, can't be streamed.
        """
        params = self._params(prompt, sampling_params)
        treatment = one_of("options", options, RequestOptions, DEFAULT_OPTIONS)
        if params.num_samples > params.n:
            allowed = "which samples are the best is not known before the end; use n, or generate"
            raise InvalidRequestError("best_of", params.best_of, allowed)
        return self._stream(self._checked(prompt, params, treatment, self._shared.compile_constraint(params)))

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The token ids that the model would see; raises as `generate` if it would refuse. Needs no warm-up."""
        params = self._params(prompt, sampling_params)
        checked = self._checked(prompt, params, DEFAULT_OPTIONS, self._shared.compile_constraint(params))
        assert isinstance(checked.ids, np.ndarray)
        return checked.ids.tolist()

    def flush_cache(self) -> int:
        """Forgets all cached prefixes that no running request reads; returns the number of pages."""
        with self._shared.lock:
            self._shared.check_open()
            return self.engine.loop.scheduler.flush_cache()

    def memory_snapshot(self) -> MemorySnapshot:
        """Who has which KV page now; `to_dict` is for JSON, `to_svg` a picture."""
        with self._shared.lock:
            self._shared.check_open()
            return self.engine.loop.scheduler.memory_snapshot()

    def start_trace(self, max_steps: int = MAX_STEPS) -> None:
        """Records from now on what host and device do when; the last `max_steps` steps are kept.

        Raises:
          ConflictError: that is being done already.
          InvalidRequestError: `max_steps` is no integer from 1 to 10000.
        """
        check_int("max_steps", max_steps, 1, MAX_STEPS, f"an integer from 1 to {MAX_STEPS}")
        with self._shared.lock:
            self._shared.check_open()
            self.engine.start_timeline(max_steps)

    def stop_trace(self) -> dict[str, Any]:
        """What was recorded, in Chrome's trace event format, for JSON.

        Raises:
          ConflictError: nothing is being recorded.
        """
        with self._shared.lock:
            timeline = self.engine.stop_timeline()
        resolved = self.resolved
        about = About(self.model_name, resolved.platform, resolved.schedule, resolved.lookahead)
        return to_chrome(timeline, about)

    def step_log(self, last: int | None = None) -> list[dict[str, Any]]:
        """The last steps of the engine, 1000 at the most, the oldest first; `last` takes so many of the newest.

        Raises:
          InvalidRequestError: `last` is below 0, or no integer.
        """
        if last is not None:
            check_int("last", last, 0, sys.maxsize, "an integer from 0 on, or leave it out")
        with self._shared.lock:
            return [record.to_dict() for record in self.engine.loop.log.last(last)]

    def close(self) -> None:
        """Aborts what runs and lets go of the device's memory. Calling it twice is fine. An LLM that nobody holds any
        more, or that is open when the program ends, is closed.

        Raises:
          KeyboardInterrupt: Ctrl-C; what was not done yet is done by the next call.
        """
        self._shared.close()
        with interrupt_deferred():
            self._let_go()
        self._watchdog.stop()

    def __reduce__(self) -> Any:
        raise TypeError(
            "an LLM belongs to its process, and can be neither copied nor pickled: open one where it is used"
        )

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    def _shows(self, progress: bool | None) -> bool:
        return display.is_wanted(self._progress if progress is None else progress)

    def _encode(self, prompt: Prompt) -> Sequence[int] | np.ndarray:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        chat = as_chat(prompt)
        return prompt if chat is None else self.tokenizer.apply_chat_template(chat)  # type: ignore[return-value]

    def _params(self, prompt: Prompt, given: SamplingParams | None) -> SamplingParams:
        return one_of("sampling_params", given, SamplingParams, self.default_sampling_params).for_prompt(prompt)

    def _checked(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions, compiling: Compiling | None
    ) -> Input:
        """What will be accepted; raises as `generate` if it won't."""
        self._shared.check_open()
        ids = self._shared.check(self._encode(prompt), params, compiling)
        return Input(prompt, ids, params, options, compiling)

    def _each(self, inputs: Iterable[Any], window: int) -> Iterator[tuple[int, RequestOutput | JaxOverlapError]]:
        self.warm_up()
        drawn = (None if given is None else self._drawn(given) for given in inputs)
        with (
            display.generation_bar(None, shown=self._shows(None)) as bar,
            closing(run(self._shared, drawn, window=window, on_step=bar.update)) as results,
        ):
            for result in results:
                bar.hide()  # the caller may print what it gets
                yield result

    def _drawn(self, given: Any) -> Input:
        """An input of `generate_each`; its error, if it can't be served, is found when it enters."""
        try:
            prompt, params, options = input_of(given)
            params = self._params(prompt, params)
            options = one_of("options", options, RequestOptions, DEFAULT_OPTIONS)
            return Input(prompt, self._encode(prompt), params, options, self._shared.compile_constraint(params))
        except JaxOverlapError as error:
            return Input(given, error, SamplingParams(), DEFAULT_OPTIONS, None)

    def _stream(self, given: Input) -> Iterator[StreamDelta]:
        self.warm_up()
        while True:
            try:
                collector = given.enter(self._shared, deque(), streams=True)
                break
            except QueueFullError:
                self._shared.step()
        try:
            while True:  # looks before it steps: another stream's steps may have brought this one on, or to its end
                while collector.deltas:
                    delta = collector.deltas.popleft()
                    yield delta
                    if delta.output is not None:
                        return
                self._shared.step(unless=collector.deltas)
        finally:
            self._shared.leave([collector])


def _let_go(shared: SharedEngine, watchdog: Watchdog, runner: DeviceRunner) -> None:
    """The end of an LLM that is closed, or that nobody holds any more: once, and in any thread."""
    shared.close()
    watchdog.stop(wait=False)
    runner.release()
    shared.engine.close()


_open: weakref.WeakSet[LLM] = weakref.WeakSet()
_EXIT_SECONDS = 10.0


@atexit.register  # later than jax's own, so called before it
def _close_all() -> None:
    """A thread that is in the device's code when the interpreter ends would abort the process."""
    for llm in list(_open):
        if llm._shared.close(_EXIT_SECONDS):
            llm.close()


def _leave_all_behind() -> None:
    """In a fork, whose end must not let go of what is the device's."""
    for llm in list(_open):
        llm._let_go.detach()
        llm._shared.leave_behind()
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_all_behind)
