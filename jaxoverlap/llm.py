"""The offline API: prompts in, texts out, in this process."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import numpy as np

from jaxoverlap import display
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.build import build_engine
from jaxoverlap.engine.interrupt import interrupt_deferred
from jaxoverlap.errors import ConfigError, EngineError, InvalidRequestError, JaxOverlapError
from jaxoverlap.outputs import CompletionOutput, Prompt, RequestOutput, StreamDelta
from jaxoverlap.prompts import is_chat, is_list_of_prompts, one_for_each
from jaxoverlap.request import DEFAULT_OPTIONS, Request, RequestOptions, RequestStatus
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.snapshot import MemorySnapshot
from jaxoverlap.text.detokenizer import IncrementalDetokenizer


class LLM:
    """A model, loaded and compiled, and the engine that decodes with it.

    Args:
      model: see `EngineConfig.model`; None is the embedded SmolLM2-135M-Instruct.
      progress: show progress on standard error; None shows it on a terminal only.
      **config: fields of `EngineConfig`.

    Raises:
      ConfigError, ModelError, UnsupportedError: it can't start; the message says what to change.

    Use it as a context manager, or `close` it. Calls from several threads take turns at the engine.
    """

    def __init__(
        self, model: str | PathLike[str] | None = None, *, progress: bool | None = None, **config: Any
    ) -> None:
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        for name, value in config.items():
            if name not in known:
                raise ConfigError(f"{name}: {value!r} is not allowed; known settings are {', '.join(sorted(known))}")
        self._progress = progress
        self.config = EngineConfig(model=model, **config)
        warm_up = {"progress": display.track_warm_up} if display.is_wanted(progress) else {}
        built = build_engine(self.config, **warm_up)
        self.model_name = built.name
        self.resolved = built.resolved
        self.model_config = built.model_config
        self.tokenizer = built.tokenizer
        self.runner = built.runner
        self.engine = built.engine
        self._lock = threading.RLock()
        self._waiters: dict[int, deque[Request]] = {}
        self._closed = False

    # ---------------------------------------------------------------- public

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
          sampling_params: for all, or one for each; None is `SamplingParams()`.
          options: priority, timeout and cache salt, for all, or one for each.
          progress: overrides the constructor's.

        Raises:
          InvalidRequestError: a prompt or its parameters can't be served; nothing has been decoded.
          EngineError: the engine failed.
          KeyboardInterrupt: Ctrl-C; what was running is aborted and the engine can be used again.
        """
        many: Sequence[Any] = prompts if is_list_of_prompts(prompts) else [prompts]  # type: ignore[assignment]
        params = one_for_each(many, "sampling_params", sampling_params, SamplingParams)
        treatment = one_for_each(many, "options", options, RequestOptions)
        inputs = list(zip(many, params, strict=True))
        encoded = [self._checked(prompt, one, f"prompts[{index}]") for index, (prompt, one) in enumerate(inputs)]
        outputs: list[RequestOutput | None] = [None] * len(inputs)
        shown = display.is_wanted(self._progress if progress is None else progress)
        with display.generation_bar(len(inputs), shown=shown) as bar:
            requests = zip(range(len(inputs)), encoded, params, treatment, strict=True)
            for index, result in self._run(requests, window=None, bar=bar):
                if isinstance(result, JaxOverlapError):
                    raise result
                outputs[index] = self._output(result, many[index])
        return [output for output in outputs if output is not None]

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
        prompts: dict[int, Prompt] = {}

        def encoded() -> Iterator[tuple[int, Any, SamplingParams, RequestOptions] | None]:
            indices = itertools.count()
            for given in inputs:
                if given is None:
                    yield None
                    continue
                index, (prompt, params, *rest) = next(indices), given
                options = rest[0] if rest else DEFAULT_OPTIONS
                prompts[index] = prompt
                try:
                    yield index, self._encode(prompt), params, options
                except JaxOverlapError as error:
                    yield index, error, params, options

        window = window or 4 * self.resolved.scheduler.max_running
        with display.generation_bar(None, shown=display.is_wanted(self._progress)) as bar:
            for index, result in self._run(encoded(), window=window, bar=bar):
                prompt = prompts.pop(index)
                yield index, result if isinstance(result, JaxOverlapError) else self._output(result, prompt)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, options: RequestOptions | None = None
    ) -> Iterator[StreamDelta]:
        """Decodes one prompt and yields pieces as they come. Several streams may be drawn from in turn.

        Leaving the iterator early aborts the request. Raises as `generate`, when called.
        """
        params = sampling_params or SamplingParams()
        ids = self._checked(prompt, params, "prompt")
        return self._stream(prompt, ids, params, options or DEFAULT_OPTIONS)

    def flush_cache(self) -> int:
        """Forgets all cached prefixes that no running request reads; returns the number of pages."""
        with self._lock:
            self._check_open()
            return self.engine.loop.scheduler.flush_cache()

    def memory_snapshot(self) -> MemorySnapshot:
        """Who has which KV page now; `to_dict` is for JSON, `to_svg` a picture."""
        with self._lock:
            self._check_open()
            return self.engine.loop.scheduler.memory_snapshot()

    def close(self) -> None:
        """Aborts what runs and lets go of the device's memory. Calling it twice is fine."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waiters.clear()
            self.runner.release()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ---------------------------------------------------------------- inside

    def _encode(self, prompt: Prompt) -> Sequence[int] | np.ndarray:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if is_chat(prompt):
            return self.tokenizer.apply_chat_template(list(prompt))  # type: ignore[arg-type]
        return prompt  # type: ignore[return-value]

    def _checked(self, prompt: Prompt, params: SamplingParams, where: str) -> np.ndarray:
        """Token ids of a prompt that will be accepted; names the prompt in the error if it won't."""
        try:
            return self.engine.check(self._encode(prompt), params)
        except InvalidRequestError as error:
            field = where + error.field.removeprefix("prompt") if error.field.startswith("prompt") else error.field
            raise InvalidRequestError(field, error.value, error.allowed) from None

    def _stream(
        self, prompt: Prompt, ids: np.ndarray, params: SamplingParams, options: RequestOptions
    ) -> Iterator[StreamDelta]:
        mine: deque[Request] = deque()
        request = self._add(ids, params, options, mine)
        detokenizer = IncrementalDetokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
        seen = 0
        try:
            while True:  # looks before it steps: another stream's steps may have brought this one on, or to its end
                new = request.output_ids[seen:]
                seen += len(new)
                if request.status == RequestStatus.FINISHED:
                    text = detokenizer.add(new[:-1] if request.matched_token_id is not None else new)
                    yield StreamDelta(
                        text=text + detokenizer.finish(), token_ids=new, output=self._output(request, prompt)
                    )
                    return
                if new:
                    yield StreamDelta(text=detokenizer.add(new), token_ids=new)
                else:
                    self._step()
        finally:
            self._leave([request])

    def _run(
        self,
        inputs: Iterator[tuple[int, Any, SamplingParams, RequestOptions] | None],
        *,
        window: int | None,
        bar: display.GenerationBar,
    ) -> Iterator[tuple[int, Request | JaxOverlapError]]:
        """Keeps up to `window` inputs in the engine and yields each one's request when it has finished."""
        done: deque[Request] = deque()
        indices: dict[int, tuple[int, Request]] = {}
        exhausted = False
        try:
            while True:
                while not (exhausted or self.engine.queue_is_full or (window is not None and len(indices) >= window)):
                    try:
                        item = next(inputs)
                    except StopIteration:
                        exhausted = True
                        break
                    if item is None:
                        break
                    index, ids, params, options = item
                    try:
                        if isinstance(ids, JaxOverlapError):
                            raise ids
                        request = self._add(ids, params, options, done)
                    except EngineError:
                        raise
                    except JaxOverlapError as error:
                        yield index, error
                        continue
                    indices[request.request_id] = (index, request)
                if not indices:
                    if exhausted:
                        return
                    if not self.engine.queue_is_full:
                        continue
                new_tokens = self._step()
                bar.update(finished=len(done), new_tokens=new_tokens)
                while done:
                    request = done.popleft()
                    index, _ = indices.pop(request.request_id)
                    yield index, request
        finally:
            self._leave([request for _, request in indices.values()])

    def _add(self, ids: Any, params: SamplingParams, options: RequestOptions, waiter: deque[Request]) -> Request:
        with self._lock:
            self._check_open()
            request = self.engine.add(ids, params, options)
            self._waiters[request.request_id] = waiter
            return request

    def _step(self) -> int:
        """One step of the engine; finished requests go to who waits for them. Returns the number of new tokens."""
        with self._lock:
            self._check_open()
            with interrupt_deferred():
                output = self.engine.step()
                for request in output.finished:
                    waiter = self._waiters.pop(request.request_id, None)
                    if waiter is not None:
                        waiter.append(request)
            return len(output.token_ids)

    def _leave(self, requests: Iterable[Request]) -> None:
        """Aborts what is unfinished of a call that ends, and brings home what nobody else would."""
        with self._lock:
            if self._closed or self.engine.has_failed:
                return
            for request in requests:
                self._waiters.pop(request.request_id, None)
                self.engine.abort(request)
            # Steps in flight still hold rows and pages; if others are waiting, they will read them.
            while self.engine.has_work and not self._waiters:
                self.engine.step()

    def _check_open(self) -> None:
        if self._closed:
            raise EngineError("this LLM is closed")

    def _output(self, request: Request, prompt: Prompt) -> RequestOutput:
        shown = request.output_ids[:-1] if request.matched_token_id is not None else request.output_ids
        assert request.finish_reason is not None and request.arrival_time is not None
        start = request.arrival_time
        completion = CompletionOutput(
            text=self.tokenizer.decode(shown, skip_special_tokens=request.sampling.skip_special_tokens),
            token_ids=list(request.output_ids),
            finish_reason=request.finish_reason,
            matched_token_id=request.matched_token_id,
            error=request.error,
            preemptions=request.num_preemptions,
            queue_seconds=_since(start, request.admit_time),
            first_token_seconds=_since(start, request.first_token_time),
            total_seconds=_since(start, request.finish_time),
        )
        return RequestOutput(
            prompt=prompt,
            prompt_token_ids=request.prompt_ids.tolist(),
            outputs=[completion],
            seed=request.seed,
            cached_tokens=request.cached_tokens,
        )


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start
