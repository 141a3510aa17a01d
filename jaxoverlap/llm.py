"""The offline API: prompts in, texts out, in this process."""

from __future__ import annotations

import atexit
import dataclasses
import itertools
import math
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from os import PathLike
from typing import Any

import numpy as np

from jaxoverlap import display
from jaxoverlap.config import EngineConfig
from jaxoverlap.constraint import CompiledConstraint
from jaxoverlap.engine.build import build_engine
from jaxoverlap.engine.collector import PromptCollector
from jaxoverlap.engine.shared import SharedEngine
from jaxoverlap.engine.watchdog import Watchdog
from jaxoverlap.errors import ConfigError, EngineError, InvalidRequestError, JaxOverlapError, QueueFullError
from jaxoverlap.observe.chrome_trace import About, to_chrome
from jaxoverlap.observe.timeline import MAX_STEPS
from jaxoverlap.outputs import RequestOutput, StreamDelta
from jaxoverlap.prompts import ChatPrompt, Prompt, as_chat, is_chat, is_list_of_prompts, one_for_each
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

    Use it as a context manager, or `close` it. Calls from several threads take turns at the engine.
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
                raise ConfigError(f"{name}: {value!r} is not allowed; known settings are {', '.join(sorted(known))}")
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
          EngineError: the engine failed.
          KeyboardInterrupt: Ctrl-C; what was running is aborted and the engine can be used again.
        """
        many: Sequence[Any] = prompts if is_list_of_prompts(prompts) else [prompts]  # type: ignore[assignment]
        params = one_for_each(many, "sampling_params", sampling_params, SamplingParams, self.default_sampling_params)
        treatment = one_for_each(many, "options", options, RequestOptions, DEFAULT_OPTIONS)
        for one in params:
            self.engine.compile_constraint(one)  # all at once; each check then waits for its own
        encoded = [
            self._checked(prompt, one, f"prompts[{index}]")
            for index, (prompt, one) in enumerate(zip(many, params, strict=True))
        ]
        outputs: list[RequestOutput | None] = [None] * len(many)
        with display.generation_bar(len(many), shown=self._shows(progress)) as bar:
            inputs = map(self._input, many, encoded, params, treatment)
            for index, result in self._run(inputs, window=None, bar=bar):
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
        chats: Sequence[Any] = [messages] if is_chat(messages) or not messages else messages
        prompts = [
            ChatPrompt(
                messages=chat,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
            )
            for chat in chats
        ]
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
          inputs: prompt and parameters, and options if need be; drawn lazily. A None, which has no index, means
            "nothing now": what is in the engine goes on, and after its next step the inputs are asked again.
          window: inputs in the engine at once; None is four times `max_running`.
        """

        def encoded() -> Iterator[_Input | None]:
            for given in inputs:
                if given is None:
                    yield None
                    continue
                prompt, params, *rest = given
                ids: Any
                try:
                    ids = self._encode(prompt)
                except JaxOverlapError as error:
                    ids = error
                yield self._input(prompt, ids, params, rest[0] if rest else DEFAULT_OPTIONS)

        window = window or 4 * self.resolved.scheduler.max_running
        with (
            display.generation_bar(None, shown=self._shows(None)) as bar,
            closing(self._run(encoded(), window=window, bar=bar)) as results,
        ):
            for result in results:
                bar.hide()  # the caller may print what it gets
                yield result

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Iterator[StreamDelta]:
        """Decodes one prompt and yields pieces as they come; those of several samples in turn, by their index. Several
        streams may be drawn from in turn.

        Leaving the iterator early aborts the request. Raises as `generate`, when called; `best_of`, which knows the
        best only at the end, can't be streamed.
        """
        params = sampling_params or self.default_sampling_params
        if params.num_samples > params.n:
            allowed = "which samples are the best is not known before the end; use n, or generate"
            raise InvalidRequestError("best_of", params.best_of, allowed)
        ids = self._checked(prompt, params, "prompt")
        return self._stream(prompt, ids, params.for_prompt(prompt), options or DEFAULT_OPTIONS)

    def check(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> list[int]:
        """The token ids that the model would see; raises as `generate` if it would refuse. Needs no warm-up."""
        return self._checked(prompt, sampling_params or self.default_sampling_params, "prompt").tolist()

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
        """
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
        """The last steps of the engine, 1000 at the most, the oldest first; `last` takes so many of the newest."""
        with self._shared.lock:
            return [record.to_dict() for record in self.engine.loop.log.last(last)]

    def close(self) -> None:
        """Aborts what runs and lets go of the device's memory. Calling it twice is fine. An LLM that nobody holds any
        more, or that is open when the program ends, is closed."""
        self._let_go()
        self._watchdog.stop()

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

    def _checked(self, prompt: Prompt, params: SamplingParams, where: str) -> np.ndarray:
        """Token ids of a prompt that will be accepted; names the prompt in the error if it won't."""
        try:
            return self._shared.check(self._encode(prompt), params.for_prompt(prompt))
        except InvalidRequestError as error:
            if error.field != "prompt" and not error.field.startswith("prompt["):
                raise
            field = where + error.field.removeprefix("prompt")
            raise InvalidRequestError(field, error.value, error.allowed) from None

    def _stream(
        self, prompt: Prompt, ids: np.ndarray, params: SamplingParams, options: RequestOptions
    ) -> Iterator[StreamDelta]:
        self.warm_up()
        while True:
            try:
                collector = self._shared.add(prompt, ids, params, options, deque(), streams=True)
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
                self._shared.step()
        finally:
            self._shared.leave([collector])

    def _input(self, prompt: Prompt, ids: Any, params: SamplingParams, options: RequestOptions) -> _Input:
        params = params.for_prompt(prompt)
        return _Input(prompt, ids, params, options, self.engine.compile_constraint(params))

    def _run(
        self, inputs: Iterator[_Input | None], *, window: int | None, bar: display.GenerationBar
    ) -> Generator[tuple[int, RequestOutput | JaxOverlapError], None, None]:
        """Keeps up to `window` inputs in work and yields each one's output when it is finished.

        An input whose grammar is still being compiled waits here, and what is in the engine goes on.
        """
        self.warm_up()
        shared = self._shared
        finished: deque[PromptCollector] = deque()
        running: dict[PromptCollector, int] = {}
        entering: dict[int, _Input] = {}
        indices = itertools.count()
        exhausted = False
        try:
            while True:
                while not (exhausted or shared.queue_is_full):
                    if window is not None and len(running) + len(entering) >= window:
                        break
                    try:
                        given = next(inputs)
                    except StopIteration:
                        exhausted = True
                        break
                    if given is None:
                        break
                    entering[next(indices)] = given
                    if given.is_ready:
                        yield from self._enter(entering, running, finished)
                yield from self._enter(entering, running, finished)
                if not running and not shared.queue_is_full:
                    if entering:
                        if not any(given.is_ready for given in entering.values()):
                            compiling = [given.compiling for given in entering.values() if given.compiling is not None]
                            wait(compiling, return_when=FIRST_COMPLETED)
                    elif exhausted:
                        return
                    continue
                new_tokens = shared.step()
                bar.update(finished=len(finished), new_tokens=new_tokens)
                while finished:
                    collector = finished.popleft()
                    yield running.pop(collector), collector.output()
        finally:
            shared.leave(running)

    def _enter(
        self, entering: dict[int, _Input], running: dict[PromptCollector, int], finished: deque[PromptCollector]
    ) -> Iterator[tuple[int, JaxOverlapError]]:
        """Takes what is ready into the engine as long as its queue has room; yields what is refused."""
        for index, given in list(entering.items()):
            if not given.is_ready:
                continue
            refused = given.error
            if refused is None:
                assert not isinstance(given.ids, JaxOverlapError)
                if self._shared.queue_is_full:
                    continue
                try:
                    collector = self._shared.add(
                        given.prompt, given.ids, given.params, given.options, finished, compiled=given.compiled
                    )
                    running[collector] = index
                except QueueFullError:  # another thread was quicker
                    continue
                except EngineError:
                    raise
                except JaxOverlapError as error:
                    refused = error
            del entering[index]
            if refused is not None:
                yield index, refused


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


@dataclasses.dataclass(frozen=True, slots=True)
class _Input:
    """One prompt on its way to the engine.

    Attributes:
      ids: what the model will see, or an error if there is no such thing.
      compiling: what its text must be, if anything.
    """

    prompt: Prompt
    ids: Sequence[int] | np.ndarray | JaxOverlapError
    params: SamplingParams
    options: RequestOptions
    compiling: Future[CompiledConstraint] | None

    @property
    def is_ready(self) -> bool:
        return self.compiling is None or self.compiling.done() or isinstance(self.ids, JaxOverlapError)

    @property
    def error(self) -> JaxOverlapError | None:
        """Of one that is ready: why it can't go."""
        if isinstance(self.ids, JaxOverlapError):
            return self.ids
        return None if self.compiling is None else self.compiling.exception()  # type: ignore[return-value]

    @property
    def compiled(self) -> CompiledConstraint | None:
        """Of one that can go."""
        return None if self.compiling is None else self.compiling.result()
