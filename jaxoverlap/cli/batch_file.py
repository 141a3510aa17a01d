"""The files of a batch: an input read line by line, an output that a crash leaves good enough to go on with.

The output is appended to, one whole line at a time. After a crash its last line may be half there:

    {"id": "batch_req_…}⏎ {"id": "batch_req_…}⏎ {"id": "batch_re
    |<──────────── kept, and not done again ──>|<─ cut off ─────>|

It is locked as long as a batch writes to it, for two would do every line twice.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from jaxoverlap.cli.batch_format import LINE_START, MAY_PASS, BadLine, read_key, too_long
from jaxoverlap.cli.command import CommandError, standard_input, standard_output

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

MAX_LINE_BYTES = 16 << 20
SYNC_SECONDS = 5.0
STANDARD = "-"


def open_input(name: str) -> BinaryIO:
    """Raises CommandError when it can't be read, or is standard input and closed."""
    if name == STANDARD:
        return standard_input().buffer
    try:
        return open(name, "rb")
    except OSError as error:
        raise _failed(name, error) from error


def read_lines(file: BinaryIO, name: str, limit: int = MAX_LINE_BYTES) -> Iterator[tuple[int, bytes | BadLine]]:
    """Lines that are not blank with their numbers from 1, one in memory at a time; `BadLine` for a longer one."""
    number = 0
    while True:
        try:
            line = file.readline(limit + 1)
            is_long = len(line) > limit and not line.endswith(b"\n")
            rest = line
            while is_long and rest and not rest.endswith(b"\n"):
                rest = file.readline(limit)
        except OSError as error:
            raise _failed(name, error) from error
        if not line:
            return
        number += 1
        if is_long:
            yield number, too_long(number, limit)
        elif line.strip():
            yield number, line


@dataclass
class Answered:
    """Which lines an output holds the answers to, as hashes of their keys: some 100 bytes each."""

    succeeded: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)

    def add(self, key: str | int, is_error: bool) -> None:
        if is_error:
            self.failed.add(hash(key))
        else:
            self.succeeded.add(hash(key))
            self.failed.discard(hash(key))


class BatchOutput:
    """Takes whole lines, and writes them through.

    Nothing is lost, and nothing left behind, if it ends before `begin`.

    Args:
      name: for error messages.
      file: where to, unbuffered.
      overwrite: `begin` forgets what it holds.
      is_new: the file was not there before.

    Attributes:
      answered: what it held when it was opened.
    """

    def __init__(
        self, name: str, file: FileIO, answered: Answered, *, overwrite: bool = False, is_new: bool = False
    ) -> None:
        self.name = name
        self.answered = answered
        self._file = file
        self._overwrite, self._is_new = overwrite, is_new
        self._has_begun = False
        self._is_on_disk = stat.S_ISREG(os.fstat(file.fileno()).st_mode)
        self._synced = time.monotonic()

    def begin(self) -> None:
        """To be called when lines can be answered; `write` does it as well. Raises CommandError if it can't be
        written."""
        if self._overwrite and not self._has_begun:
            try:
                self._file.truncate(0)
            except OSError as error:
                raise _failed(self.name, error) from error
        self._has_begun = True

    def write(self, line: bytes) -> None:
        """Raises BrokenPipeError when the reader of a pipe has gone, CommandError for what else can happen."""
        self.begin()
        try:
            rest = memoryview(line)
            while rest:
                rest = rest[self._file.write(rest) :]
            if time.monotonic() - self._synced > SYNC_SECONDS:
                self.sync()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise _failed(self.name, error) from error

    def sync(self) -> None:
        """Returns when what was written would survive a power cut."""
        if self._is_on_disk:
            os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *exc_info: object) -> None:
        try:
            self.sync()
        except OSError as error:
            raise _failed(self.name, error) from error
        finally:
            if self._is_new and not self._has_begun:
                with suppress(OSError):
                    os.unlink(self.name)
            self._file.close()


def open_output(name: str, source: BinaryIO, *, overwrite: bool, retry_errors: bool) -> BatchOutput:
    """Opens an output to go on with, or a new one.

    Args:
      source: the input, which must not be the same file.
      overwrite: forget what it holds, once it begins.
      retry_errors: count errors in it that may pass as not answered.

    Raises:
      CommandError: it can't be written, another batch writes to it, or it holds something else than the output of one.
    """
    answered = Answered()
    # Unbuffered: a line goes to the system at once, and nothing is left over to fail again when Python exits.
    try:
        if name == STANDARD:
            stdout = standard_output().fileno()
            _refuse_same_file(name, os.fstat(stdout), source)
            return BatchOutput("standard output", open(stdout, "wb", buffering=0, closefd=False), answered)
        was_there = os.path.lexists(name)
        file = open(name, "ab", buffering=0)  # noqa: SIM115
        try:
            found = os.fstat(file.fileno())
            _refuse_same_file(name, found, source)
            if stat.S_ISREG(found.st_mode):
                _lock(name, file)
                if not overwrite:
                    _recover(Path(name), answered, retry_errors)
        except BaseException:
            file.close()
            raise
        is_file = stat.S_ISREG(found.st_mode)
        return BatchOutput(name, file, answered, overwrite=overwrite and is_file, is_new=is_file and not was_there)
    except OSError as error:
        raise _failed(name, error) from error


def _lock(name: str, file: FileIO) -> None:
    """Until the file is closed, or the process ends in whatever way. File systems without locks have none."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise CommandError(f"{name}: another batch is writing to it") from None
    except OSError as error:
        logger.debug("%s can't be locked: %s", name, error)


def _recover(path: Path, answered: Answered, retry_errors: bool) -> None:
    """Learns what is answered, and cuts off a half-written last line."""
    with path.open("r+b") as file:
        end = 0
        for number, line in enumerate(file, start=1):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("half a line")
                key, code = read_key(line)
            except ValueError:
                ours = end > 0 or line.startswith(LINE_START) or LINE_START.startswith(line)
                if not ours or file.read(1):
                    raise CommandError(
                        f"{path}: line {number} is not the output of a batch; name another file, or use --overwrite"
                    ) from None
                break
            if not (retry_errors and code in MAY_PASS):
                answered.add(key, code is not None)
            end += len(line)
        file.truncate(end)


def _refuse_same_file(name: str, output: os.stat_result, source: BinaryIO) -> None:
    if stat.S_ISREG(output.st_mode) and os.path.samestat(output, os.fstat(source.fileno())):
        raise CommandError(f"{name}: the output is the same file as the input")


def _failed(name: str, error: OSError) -> CommandError:
    return CommandError(f"{name}: {error.strerror or error}")
