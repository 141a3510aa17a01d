"""Compiles grammars in a process of its own, which can be killed.

A grammar comes from a caller, and compiling it is foreign code without a time limit: a few kilobytes can take minutes,
or overflow the stack, which would end the server. So each grammar is tried here first. What passes is compiled again
in the engine's process, because a compiled grammar can't be sent; that takes as long as the trial did.

This module is both sides: `GrammarTrial` is what the engine's process holds, and run as a program it is the other
end. The parent sends the token table once and then grammars, each with its seconds; each answer is the
library's error, or "".
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection

import llguidance

from jaxoverlap.errors import EngineError

START_SECONDS = 60.0
"""For the process to come up: imports, and the index over the token table."""

_STACK_BYTES = 256 << 20
"""The library recurses along chains of rules; a thread's usual 8 MiB end after 3,000 of them (48 KB of Lark)."""

_MEMORY_BYTES = 4 << 30
_NOT_STARTED = "the process that compiles grammars did not start"

LIMITS = llguidance.LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
"""The library's own limits but one: a state takes 1 to 2 KB in each request, and its limit is 250,000."""


class TrialError(Exception):
    """The grammar can't be used; the message says why."""


def token_index(tokens: Sequence[bytes], special_ids: Sequence[int]) -> llguidance.LLTokenizer:
    """The library's view of a vocabulary: bytes of each id; special ids come only where a grammar names them.

    Its end-of-sequence id is one of our own, after the last: which of the model's ids end a text, and when, is
    `GrammarConstraint`'s to say.
    """
    end = len(tokens)
    return llguidance.LLTokenizer(_TokenTable([*tokens, b""], [*special_ids, end], end), n_vocab=end + 1, eos_token=end)


class _TokenTable(llguidance.TokenizerWrapper):
    def __init__(self, tokens: list[bytes], special_ids: list[int], end: int) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = end
        self.bos_token_id = None
        self.is_tokenizer_wrapper = True

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("needed for forced tokens only, which every grammar turns off")


def compile_grammar(index: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """A matcher at the beginning of its text, its first mask computed.

    Raises:
      TrialError: the library's words.
    """
    matcher: llguidance.LLMatcher | None = None

    def run() -> None:
        nonlocal matcher
        matcher = llguidance.LLMatcher(index, grammar, log_level=0, limits=LIMITS)
        if not matcher.is_error():
            matcher.compute_bitmask()

    _run_on_deep_stack(run)
    if matcher is None:
        raise TrialError("it could not be compiled")
    if error := matcher_error(matcher):
        raise TrialError(error)
    return matcher


def matcher_error(matcher: llguidance.LLMatcher) -> str:
    """Why a matcher can't go on, or ""."""
    if not matcher.is_error():
        return ""
    text = _APPENDIX.split(matcher.get_error(), maxsplit=1)[0].strip()
    return text.replace("NoExtensionBias", DEAD_END) or "unknown error"


DEAD_END = "a dead end: nothing that may come here leads on to a text that satisfies it"


_APPENDIX = re.compile(r"\n *\d+ \| |\n<")
"""A picture of the source, which has lines of our own in it, or a backtrace."""


_stack_lock = threading.Lock()


def _run_on_deep_stack(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function, name="grammar", daemon=True)
    with _stack_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()


class GrammarTrial:
    """A process that compiles one grammar at a time; started when first needed and again after it was killed.

    Not for two threads at once, except `close`.

    Args:
      vocabulary: gives the arguments of `token_index`.
    """

    def __init__(self, vocabulary: Callable[[], tuple[Sequence[bytes], Sequence[int]]]) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.RLock()  # a collection of garbage, which may come any time, may close this
        self._closed = False

    def check(self, grammar: str, seconds: float) -> None:
        """Tries a grammar.

        Raises:
          TrialError: it can't be compiled, or not in time.
          EngineError: there is no process to try it in.
        """
        connection = self._start()
        try:
            connection.send((grammar, seconds))
            if not connection.poll(seconds):
                self._stop()
                raise TrialError(f"it is too complex: it could not be compiled in {seconds:g} seconds")
            error = connection.recv()
        except (EOFError, OSError) as broken:
            self._stop()
            if self._closed:
                raise EngineError("the engine is shutting down") from broken
            raise TrialError("it is too complex: compiling it took too much memory") from broken
        if error:
            raise TrialError(error)

    def close(self) -> None:
        """Kills the process; a `check` that is waiting fails."""
        with self._lock:
            self._closed = True
            process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def _start(self) -> Connection:
        with self._lock:
            if self._closed:
                raise EngineError("the engine is shutting down")
            if self._connection is not None:
                return self._connection
            ours, theirs = socket.socketpair()
            path = os.pathsep.join(entry or os.curdir for entry in sys.path)
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    # One thread: where there are many cores, numpy's threads alone would reserve the memory allowed.
                    env=os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"},
                    start_new_session=True,  # a terminal's Ctrl-C is for the engine to handle
                )
            except OSError as error:
                ours.close()
                raise EngineError(f"{_NOT_STARTED}: {error}") from error
            finally:
                theirs.close()
            self._connection = connection = Connection(ours.detach())
        try:
            connection.send(self._vocabulary())
            ready = connection.poll(START_SECONDS) and connection.recv() == ""
        except (EOFError, OSError):
            ready = False
        if not ready:
            self._stop()
            raise EngineError(_NOT_STARTED)
        return connection

    def _stop(self) -> None:
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is not None:
            process.kill()
            process.wait()
        if connection is not None:
            connection.close()


def _serve(connection: Connection) -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    index = token_index(*connection.recv())
    connection.send("")
    while True:
        try:
            grammar, seconds = connection.recv()
        except EOFError:
            return
        signal.alarm(math.ceil(seconds) + 1)  # ends this process if the parent, which should, is not there any more
        try:
            compile_grammar(index, grammar)
            connection.send("")
        except TrialError as error:
            connection.send(str(error))
        signal.alarm(0)


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
