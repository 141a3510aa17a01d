"""From a request's structured output to its constraint, off the engine's thread and in bounded time.

    submit ── cache hit ───────────────────────────────┐
       └── a worker thread: trial process ─→ compile ──┴→ copy of the matcher, the request's own `GrammarConstraint`

Worker threads are there as long as there is something to compile. They are no executor's, which would take nothing any
more once the main thread has ended, while others go on.

A grammar is compiled once; a request gets a copy (microseconds). What the library refuses, and what it can't compile in
time, is remembered as well: the same bad schema again costs nothing.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import LifoQueue

import llguidance
import numpy as np

from jaxoverlap.constraint import CompiledConstraint
from jaxoverlap.errors import EngineError, InvalidRequestError, JaxOverlapError
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from jaxoverlap.text.grammar import GrammarConstraint, grammar_of
from jaxoverlap.text.grammar_trial import GrammarTrial, TrialError, compile_grammar
from jaxoverlap.text.grammar_vocabulary import GrammarVocabulary
from jaxoverlap.text.tokenizer import Tokenizer

COMPILE_SECONDS = 5.0
WORKERS = 2
CACHED_GRAMMARS = 128


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """A `CompiledConstraint`; safe to share between threads. `first` stays at the beginning of its text."""

    first: GrammarConstraint
    vocabulary: GrammarVocabulary
    sampling: SamplingParams

    def behind(self, prompt_ids: Sequence[int] | np.ndarray) -> CompiledGrammar:
        beginnings = self.vocabulary.beginnings(prompt_ids, self.sampling)
        if beginnings is None:
            return self
        return replace(self, first=self.first.begun_with(beginnings))

    def start(self) -> GrammarConstraint:
        return self.first.copy()


class GrammarCompiler:
    """A `ConstraintCompiler`; safe to share between threads. Starts threads and processes only when it is used.

    Args:
      tokenizer, vocab_size, eos_token_ids: see `GrammarVocabulary`.
      seconds: for one grammar; workers: how many compile at once; cached: compiled grammars that are kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        *,
        seconds: float = COMPILE_SECONDS,
        workers: int = WORKERS,
        cached: int = CACHED_GRAMMARS,
    ) -> None:
        self.seconds = seconds
        self._source = (tokenizer, vocab_size, tuple(eos_token_ids))
        self._vocabulary: GrammarVocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._trials = [GrammarTrial(self._table) for _ in range(workers)]
        self._idle: LifoQueue[GrammarTrial] = LifoQueue()  # so that a second process starts only if two are busy
        for trial in self._trials:
            self._idle.put(trial)
        self._cached = cached
        self._cache: OrderedDict[str, Future[llguidance.LLMatcher]] = OrderedDict()
        self._pending: deque[tuple[Future[llguidance.LLMatcher], str]] = deque()
        """What no worker has begun yet."""
        self._workers: set[threading.Thread] = set()
        self._lock = threading.RLock()  # a collection of garbage, which may come any time, may close this
        """For the cache, what is pending, and the workers."""
        self._closed = False

    @property
    def vocabulary(self) -> GrammarVocabulary:
        """Made at first use; takes a good part of a second."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(*self._source)
            return self._vocabulary

    def submit(self, sampling: SamplingParams) -> Future[CompiledConstraint]:
        """See `ConstraintCompiler.submit`."""
        structure = sampling.structured_output
        assert structure is not None
        result: Future[CompiledConstraint] = Future()
        result.set_running_or_notify_cancel()  # a caller who gives up must not hold up those who want the same

        waiting = [(result, structure, sampling)]  # a cached future keeps its callbacks, and should keep no more

        def resolve(compiled: Future[llguidance.LLMatcher]) -> None:
            result, structure, sampling = waiting.pop()
            try:
                result.set_result(self._checked(compiled, field, structure, sampling))
            except BaseException as error:  # the library's panics are no Exceptions
                result.set_exception(_told(error, structure))
                if isinstance(error, KeyboardInterrupt):
                    raise

        try:
            field, grammar = grammar_of(structure)
            self._compiled(grammar).add_done_callback(resolve)
        except Exception as error:
            result.set_exception(_told(error, structure))
        return result

    def close(self) -> None:
        with self._lock:
            self._closed = True
            pending = [future for future, _ in self._pending]
            self._pending.clear()
        for future in pending:
            future.cancel()
        for trial in self._trials:
            trial.close()

    def _compiled(self, grammar: str) -> Future[llguidance.LLMatcher]:
        with self._lock:
            if self._closed:
                raise EngineError("the engine is shutting down")
            if (compiled := self._cache.get(grammar)) is None or (compiled.done() and _is_fault(compiled)):
                compiled = self._cache[grammar] = self._begin(grammar)
            self._cache.move_to_end(grammar)
            if len(self._cache) > self._cached:
                self._cache.popitem(last=False)
            return compiled

    def _begin(self, grammar: str) -> Future[llguidance.LLMatcher]:
        """Hands it to a worker: a new one, if there may be one more."""
        future: Future[llguidance.LLMatcher] = Future()
        if len(self._workers) < len(self._trials):
            worker = threading.Thread(target=self._work, name="grammar")
            self._workers.add(worker)
            try:
                worker.start()
            except BaseException as error:
                self._workers.discard(worker)
                if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
                    raise EngineError(f"there is no thread to compile a grammar in: {error}") from error
                raise
        self._pending.append((future, grammar))
        return future

    def _work(self) -> None:
        """Compiles what is pending, until nothing is."""
        while True:
            with self._lock:
                if not self._pending:
                    self._workers.discard(threading.current_thread())
                    return
                future, grammar = self._pending.popleft()
                future.set_running_or_notify_cancel()
            try:
                future.set_result(self._compile(grammar))
            except BaseException as error:  # the library's panics are no Exceptions
                future.set_exception(error)
            del future, grammar  # the error's traceback holds this frame

    def _compile(self, grammar: str) -> llguidance.LLMatcher:
        trial = self._idle.get()
        try:
            trial.check(grammar, self.seconds)
        finally:
            self._idle.put(trial)
        return compile_grammar(self.vocabulary.index, grammar)

    def _table(self) -> tuple[list[bytes], list[int]]:
        return self.vocabulary.tokens, self.vocabulary.special_ids

    def _checked(
        self,
        compiled: Future[llguidance.LLMatcher],
        field: str,
        structure: StructuredOutput,
        sampling: SamplingParams,
    ) -> CompiledGrammar:
        """Tries whether there is a first token, with all that the parameters say."""
        if compiled.cancelled():
            raise EngineError("the engine is shutting down")
        # Not raised again: each time would add a traceback, which holds what was asked for, to an error that is kept.
        error = compiled.exception()
        if error is None:
            first = GrammarConstraint(compiled.result().deep_copy(), self.vocabulary, sampling)
            if not first.is_complete and first.error is None:
                return CompiledGrammar(first, self.vocabulary, sampling)
            refused = "nothing but the empty text satisfies it" if first.is_complete else str(first.error)
        elif isinstance(error, EngineError):
            raise EngineError(str(error))
        else:
            refused = str(error) if isinstance(error, TrialError) else _not_compiled(error)
        raise InvalidRequestError(f"structured_output.{field}", getattr(structure, field), refused)


def _told(error: BaseException, structure: StructuredOutput) -> JaxOverlapError:
    """What who waits gets; without the traceback, which would keep this error alive until cycles are collected."""
    if not isinstance(error, JaxOverlapError):
        error = InvalidRequestError("structured_output", structure, _not_compiled(error))
    return error.with_traceback(None)


def _not_compiled(error: BaseException) -> str:
    return f"it could not be compiled: {type(error).__name__}: {error}"


def _is_fault(compiled: Future[llguidance.LLMatcher]) -> bool:
    """It failed for a reason that is not the grammar's; to be tried again."""
    return compiled.cancelled() or not isinstance(compiled.exception(), TrialError | None)
