"""How a command begins and ends: what is said on standard error, and the exit code:

    0    everything succeeded
    1    some of it failed
    2    nothing succeeded, or the command could not start or go on; one line "error: …" says why
    130  Ctrl-C
    141  whoever read standard output has gone (`| head`)

Standard output is for answers only.
"""

from __future__ import annotations

import functools
import io
import logging
import math
import os
import signal
import stat
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console

from jaxoverlap.cli.options import beside, expand_groups
from jaxoverlap.config import EngineConfig
from jaxoverlap.errors import JaxOverlapError, shortened

if TYPE_CHECKING:
    from jaxoverlap.llm import LLM

OK, SOME_FAILED, FAILED, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

_SHOW_CURSOR = b"\x1b[?25h"
"""A progress bar hides it."""
_NOISY = ("jax", "absl", "transformers", "huggingface_hub")


def prepare_streams() -> None:
    """To be called first. Of `<&-`, `>&-` and `2>&-` the numbers must not be those of files opened later, to which
    libraries would then write. What is said on a standard error that is closed, full, or whose reader has gone, goes
    nowhere: that is no reason to give up the work."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: this one
    encoding, errors = ("utf-8", "backslashreplace") if sys.stderr is None else (sys.stderr.encoding, sys.stderr.errors)
    file = io.BufferedWriter(_StandardError(2, "w", closefd=False))
    sys.stderr = io.TextIOWrapper(file, encoding, errors, line_buffering=True)


class _StandardError(io.FileIO):
    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except BlockingIOError:
            raise
        except OSError:
            return memoryview(data).nbytes


class CommandError(Exception):
    """Ends the command with its one line on standard error and exit code 2."""


def as_command(work: Callable[..., int]) -> Callable[..., None]:
    """Makes a typer command of a function that takes option groups and returns its exit code."""
    with_options = expand_groups(work)

    @functools.wraps(with_options)
    def run(**options: Any) -> None:
        raise typer.Exit(exit_code(functools.partial(with_options, **options)))

    return run


def standard_input() -> TextIO:
    """Raises CommandError if it is closed."""
    if sys.stdin is None:
        raise CommandError("standard input is closed")
    return sys.stdin


def standard_output() -> TextIO:
    """Raises CommandError if it is closed."""
    if sys.stdout is None:
        raise CommandError("standard output is closed")
    return sys.stdout


def say(text: str) -> None:
    """One line on standard error."""
    print(" ".join(text.splitlines()), file=sys.stderr, flush=True)


def print_path(path: str) -> None:
    """A file's name as a line of standard output, whatever its bytes are."""
    out = standard_output()
    out.flush()
    out.buffer.write(os.fsencode(path) + b"\n")
    out.buffer.flush()


def writable(path: str | None) -> str | None:
    """For options that name a file to be written when the work is done: says before it if that can't be."""
    if path is None:
        return None
    try:
        is_fine = not stat.S_ISDIR(os.stat(path).st_mode) and os.access(path, os.W_OK)
    except FileNotFoundError:
        folder = os.path.dirname(path) or "."
        is_fine = path != "" and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)
    except NotADirectoryError:
        is_fine = False
    except OSError as error:
        raise typer.BadParameter(f"{shortened(path)}: {error.strerror}") from error
    if not is_fine:
        raise typer.BadParameter(f"{shortened(path)} is not a file in a folder that is there, or can't be written to")
    return path


def finite(value: float | None) -> float | None:
    """What the bounds of an option let through besides: nan fails no comparison."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


LONGEST_SECONDS = 1e9
"""That anybody can be asked to wait: some thirty years."""


TraceFile = Annotated[
    str | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        show_default=False,
        callback=writable,
        help="Records what host and device do when, in Chrome's trace format (compressed if it ends in .gz), for "
        "`jaxoverlap trace view` or Perfetto.",
    ),
]


def check_no_trace(path: str | None) -> None:
    """Raises CommandError if a trace is asked for of an engine that is not here."""
    if path is not None:
        raise CommandError("--trace is for an engine in this process; of a server, use jaxoverlap client trace")


@contextmanager
def traced(llm: LLM, path: str | None) -> Iterator[None]:
    """Records what the engine does meanwhile, and writes it to a file; None records nothing.

    Raises:
      CommandError: it can't be written.
    """
    if path is None:
        yield
        return
    llm.start_trace()
    try:
        yield
    finally:
        save_trace(path, llm.stop_trace())


def save_trace(path: str, trace: dict[str, Any]) -> None:
    """Raises CommandError if it can't be written."""
    from jaxoverlap.observe import trace_file

    try:
        trace_file.write(path, trace)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error


def write_text(path: str, text: str) -> None:
    """Raises CommandError if it can't be written."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise CommandError(f"{path}: {error.strerror or error}") from error


def watchdog_defaults() -> dict[str, float]:
    """Settings of an engine that has a process of its own, which may end if it hangs."""
    return {"watchdog_exit_seconds": 30.0}


def load_llm(settings: dict[str, Any], *, progress: bool | None, quiet: bool, warm_up: bool = True) -> LLM:
    """Loads the model and compiles, with the engine's log on standard error and without JAX's.

    Args:
      settings: arguments for `LLM`.
      progress: as for `LLM`; `quiet` turns it off, and leaves only warnings of the log.
      warm_up: False leaves compiling to `warm_up_llm`.

    Raises:
      CommandError, JaxOverlapError: it can't start.
    """
    _set_up_log(quiet)
    with _starting():
        from jaxoverlap.llm import LLM
        from jaxoverlap.runtime.memory import let_jax_take

        let_jax_take(settings.get("gpu_memory_fraction", EngineConfig.gpu_memory_fraction))
        return LLM(progress=False if quiet else progress, warm_up=warm_up, **beside(watchdog_defaults(), settings))


def warm_up_llm(llm: LLM) -> None:
    """Compiles; raises as `load_llm`."""
    with _starting():
        llm.warm_up()


@contextmanager
def _starting() -> Iterator[None]:
    try:
        with _interrupt_ends_all():
            yield
    except (OSError, RuntimeError, MemoryError) as error:  # a cache folder, a driver, the memory
        raise CommandError(f"cannot start: {type(error).__name__}: {error}") from error


@contextmanager
def _interrupt_ends_all() -> Iterator[None]:
    """While nothing is there to be cleaned up, Ctrl-C ends the process. A KeyboardInterrupt could get lost: jax, and
    what it imports, runs callbacks in which exceptions are ignored."""
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def end(signum: int, frame: Any) -> None:
        if sys.stderr.isatty():
            os.write(2, _SHOW_CURSOR + b"\n")
        os._exit(INTERRUPTED)

    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def exit_code(work: Callable[[], int]) -> int:
    """Does it, and says how it has ended, after what it has printed has left."""
    try:
        code = work()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except (CommandError, JaxOverlapError) as error:
        say(f"error: {error}")
        return FAILED
    except (KeyboardInterrupt, typer.Abort):  # the second is what typer makes of the first
        if sys.stderr.isatty():  # the terminal has just echoed ^C
            print(file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return PIPE_CLOSED
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # rich and typer make it of that
            raise
        _forget_stdout()
        return PIPE_CLOSED
    except OSError as error:  # standard output's disk is full, say; files and start-up have their own messages
        _forget_stdout()
        say(f"error: {error.strerror or error}")
        return FAILED


def _forget_stdout() -> None:
    """What is still in its buffer goes nowhere, instead of failing once more when Python exits."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _set_up_log(quiet: bool) -> None:
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # XLA's; read when jax is imported
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    if quiet:
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    log = logging.getLogger("jaxoverlap")
    log.setLevel(logging.WARNING if quiet else logging.INFO)
    log.handlers = [_ConsoleHandler()]
    log.propagate = False


class _ConsoleHandler(logging.Handler):
    """Writes whole lines through the console that also draws the progress bars, so that neither cuts the other."""

    def emit(self, record: logging.LogRecord) -> None:
        from jaxoverlap import display

        console: Console = display.console
        style = "yellow" if record.levelno >= logging.WARNING else None
        console.print(record.getMessage(), style=style, soft_wrap=True, markup=False, highlight=False)
