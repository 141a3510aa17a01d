"""`jaxoverlap batch`: a file of requests in, a file of answers out, in bounded memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from jaxoverlap.cli import command
from jaxoverlap.cli.batch_file import STANDARD, BatchOutput, open_input, open_output, read_lines
from jaxoverlap.cli.batch_format import (
    BadLine,
    BatchRequest,
    ModelNames,
    answer_line,
    duplicate,
    error_line,
    parse_line,
    refusal_by_engine,
    to_request,
)
from jaxoverlap.cli.connection import Answering, ConnectionOptions, server_model
from jaxoverlap.cli.generate import Quiet
from jaxoverlap.cli.options import EngineOptions
from jaxoverlap.cli.request_options import SamplingOptions, StructureOptions, TreatmentOptions
from jaxoverlap.errors import AccessDeniedError, EngineError, JaxOverlapError, UnsupportedError
from jaxoverlap.prompts import Prompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

if TYPE_CHECKING:
    pass

logger = logging.getLogger(__name__)

MAX_HELD = 1024
MAX_RETRIES = 10
"""A server that restarts is back within their half a minute, more or less."""


InputFile = Annotated[
    str, typer.Option("--input", "-i", metavar="FILE", help="Requests, one in a line; '-' is standard input.")
]
OutputFile = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE", help="Where answers go; '-' is standard output.")
]
Ordered = Annotated[
    bool,
    typer.Option(
        "--ordered/--unordered",
        help="Answers in the order of the input, or as they are finished. To keep the order, answers wait for "
        f"slower ones before them; when {MAX_HELD} wait, no more requests are read until the slow one is done.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Start anew; the output's content is lost.")]
RetryErrors = Annotated[
    bool,
    typer.Option(
        "--retry-errors",
        help="Do lines again whose answer in the output is an error. The new answer is appended: of two lines "
        "with one custom_id, the later counts.",
    ),
]
Server = Annotated[
    str | None,
    typer.Option(
        metavar="TARGET",
        show_default=False,
        rich_help_panel="Connection",
        help="HOST:PORT or unix:PATH of a server that answers. Default: the model runs in this process.",
    ),
]


def batch(
    source: InputFile,
    target: OutputFile,
    ordered: Ordered = True,
    overwrite: Overwrite = False,
    retry_errors: RetryErrors = False,
    quiet: Quiet = False,
    server: Server = None,
    trace: command.TraceFile = None,
    *,
    connection: ConnectionOptions,
    engine: EngineOptions,
    sampling: SamplingOptions,
    structure: StructureOptions,
    treatment: TreatmentOptions,
) -> int:
    """Answer a file of requests, in OpenAI's batch format.

    A line of input:

        {"custom_id": "1", "url": "/v1/chat/completions", "body": {"messages": […]}}

        {"custom_id": "2", "url": "/v1/completions", "body": {"prompt": "…", "max_tokens": 9}}

    A prompt is text or a list of token ids; the url may be left out. Bodies have OpenAI's fields (n, stop, logprobs,
    logit_bias, response_format, tools, …), vLLM's and those of the options below, and answers OpenAI's shape. Options
    given here are for lines that leave them out. Fields of messages that are not known here are the template's.

    A line that can't be answered gets an error for an answer, and the others go on.

    With --server a server answers: --model is then the name it serves, and the engine's other options are its own. A
    server that is full is waited for.

    Run the same command again after a crash or Ctrl-C: a half-written last line of the output is cut off, and what
    is answered (errors as well) is not done again. Nothing is resumed on standard output.

    Memory does not grow with the file, except for some 100 bytes a line to know its custom_id again.

    Exit codes, over the whole output: 0 all succeeded, 1 some failed, 2 none succeeded or it could not start or go
    on, 130 Ctrl-C.
    """
    defaults = sampling.values() | structure.values() | treatment.values()
    # A progress bar and the answers would write over each other on a terminal.
    progress = False if target == STANDARD or quiet else None
    answering: AbstractContextManager[Answerer]
    if server is None:
        connection.check_unused()
        # Nobody waits for a single token: prompts enter as fast as they can.
        answering = _in_process(engine.settings(max_mixed_tokens=1 << 20), progress, quiet, trace)
    else:
        command.check_no_trace(trace)
        answering = at_server(connection, server, server_model(engine), progress)
    return answer_file(
        source,
        target,
        answering,
        defaults,
        ordered=ordered,
        overwrite=overwrite,
        retry_errors=retry_errors,
        quiet=quiet,
    )


def answer_file(
    source: str,
    target: str,
    answering: AbstractContextManager[Answerer],
    defaults: dict[str, Any],
    *,
    ordered: bool,
    overwrite: bool,
    retry_errors: bool,
    quiet: bool,
) -> int:
    """Answers a file and returns the exit code; `answering` is entered when the files are open.

    Raises:
      CommandError: options that contradict each other, or a file that can't be used.
    """
    if overwrite and retry_errors:
        raise command.CommandError("--retry-errors goes by the output's content, --overwrite forgets it; use one")
    with (
        open_input(source) as file,
        open_output(target, file, overwrite=overwrite, retry_errors=retry_errors) as output,
        answering as answerer,
    ):
        output.begin()
        run = BatchRun(
            read_lines(file, source),
            output,
            names=answerer.names,
            defaults={**answerer.sampling_defaults, **defaults},
            max_held=MAX_HELD if ordered else None,
        )
        ending = "stopped"
        try:
            run.run(answerer.engine)
            ending = "finished"
        except KeyboardInterrupt:
            ending = "interrupted, the same command goes on from here"
            raise
        finally:
            if not quiet:
                command.say(f"{ending}: {run.tally.describe()}")
    return run.tally.exit_code


class Answerer(NamedTuple):
    """Who answers.

    Attributes:
      names: what its model is called.
      sampling_defaults: parameters for lines that leave them out, as the model recommends them.
    """

    engine: Answering
    names: ModelNames
    sampling_defaults: Mapping[str, Any]


@contextmanager
def _in_process(settings: dict[str, Any], progress: bool | None, quiet: bool, trace: str | None) -> Iterator[Answerer]:
    with command.load_llm(settings, progress=progress, quiet=quiet) as llm, command.traced(llm, trace):
        yield Answerer(llm, ModelNames.of(llm.model_name, settings.get("model")), llm.sampling_defaults)


@contextmanager
def at_server(
    connection: ConnectionOptions, target: str, model: str | None, progress: bool | None
) -> Iterator[Answerer]:
    """A server that answers; of its model it may say nothing, where its admin service is closed to us."""
    with connection.client(target, progress=progress, model=model, max_retries=MAX_RETRIES) as client:
        name, sampling_defaults = client.config.model, {}
        try:
            info = client.model_info()
            name, sampling_defaults = name or info.served_name, info.sampling_defaults
        except (AccessDeniedError, UnsupportedError):
            logger.warning("the server does not say what its model recommends: lines get the usual sampling parameters")
        yield Answerer(client, ModelNames.of(name or "default", None), sampling_defaults)


@dataclass
class Tally:
    """What became of the lines. `…_before`: the output held their answers when it was opened."""

    succeeded: int = 0
    failed: int = 0
    succeeded_before: int = 0
    failed_before: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    started: float = 0.0

    @property
    def exit_code(self) -> int:
        if self.failed + self.failed_before == 0:
            return command.OK
        return command.SOME_FAILED if self.succeeded + self.succeeded_before else command.FAILED

    def describe(self) -> str:
        seconds = time.perf_counter() - self.started
        skipped = self.succeeded_before + self.failed_before
        errors = f" ({self.failed_before} of them errors)" if self.failed_before else ""
        return (
            f"{self.succeeded} done, {self.failed} failed, {skipped} skipped{errors} · {self.prompt_tokens} prompt "
            f"tokens ({self.cached_tokens} of them cached), {self.output_tokens} output tokens · "
            f"{self.output_tokens / max(seconds, 1e-9):.1f} tokens/s · {seconds:.1f} s"
        )


class Outbox:
    """Writes lines in the order of their places, and holds back what comes too early.

    Args:
      output: where to.
      max_held: `is_full` once so many are held back; None holds back nothing and gives up the order.
    """

    def __init__(self, output: BatchOutput, max_held: int | None) -> None:
        self._output = output
        self._max_held = max_held
        self._held: dict[int, bytes] = {}
        self._places = 0
        self._next = 0

    @property
    def is_full(self) -> bool:
        return self._max_held is not None and len(self._held) >= self._max_held

    def new_place(self) -> int:
        self._places += 1
        return self._places - 1

    def put(self, place: int, line: bytes) -> None:
        if self._max_held is None:
            self._output.write(line)
            return
        self._held[place] = line
        while self._next in self._held:
            self._output.write(self._held.pop(self._next))
            self._next += 1


class BatchRun:
    """Takes lines to the engine and its answers to the output.

    At most window + max_held + 1 requests are in memory: the engine draws lines as its window has room, and while
    the outbox is full it is told that there is nothing now. The answer that a full outbox waits for is never behind
    that: its line came before those that are held, so it is in the engine.
    """

    def __init__(
        self,
        lines: Iterable[tuple[int, bytes | BadLine]],
        output: BatchOutput,
        *,
        names: ModelNames,
        defaults: dict[str, Any],
        max_held: int | None,
    ) -> None:
        self.tally = Tally(started=time.perf_counter())
        self._lines = lines
        self._answered = output.answered
        self._outbox = Outbox(output, max_held)
        self._names = names
        self._defaults = defaults
        self._seen: set[int] = set()
        self._in_engine: dict[int, tuple[int, BatchRequest]] = {}

    def run(self, engine: Answering) -> None:
        """Answers every line.

        Raises:
          EngineError: the engine failed.
          ServiceError: the server can't be used.
          CommandError, BrokenPipeError: a file did.
        """
        for index, result in engine.generate_each(self._requests()):
            place, request = self._in_engine.pop(index)
            if isinstance(result, JaxOverlapError):
                self._fail(place, refusal_by_engine(request, result))
                continue
            broken = next((one for one in result.outputs if not one.finish_reason.as_asked), None)
            if broken is not None:
                problem = broken.error or EngineError(f"the request ended as {broken.finish_reason}")
                self._fail(place, refusal_by_engine(request, problem))
            else:
                self._outbox.put(place, answer_line(request, result, self._names.shown))
                self.tally.succeeded += 1
                self.tally.prompt_tokens += result.prompt_tokens
                self.tally.cached_tokens += result.cached_tokens
                self.tally.output_tokens += sum(len(one.token_ids) for one in result.outputs)

    def _requests(self) -> Iterator[tuple[Prompt, SamplingParams, RequestOptions] | None]:
        """What the engine draws from; places go by the order of lines, indices by that of requests."""
        index = 0
        for number, line in self._lines:
            while self._outbox.is_full:
                yield None
            try:
                request = self._take(number, line)
            except BadLine as bad:
                if bad.line is None or not self._is_answered(bad.line):
                    self._fail(self._outbox.new_place(), bad)
                continue
            if request is not None:
                self._in_engine[index] = (self._outbox.new_place(), request)
                index += 1
                yield request.prompt, request.params, request.options

    def _take(self, number: int, line: bytes | BadLine) -> BatchRequest | None:
        """A line's request, or None if it was answered before; raises BadLine."""
        if isinstance(line, BadLine):
            raise line
        fields = parse_line(line, number)
        custom_id = fields["custom_id"]
        if hash(custom_id) in self._seen:
            raise duplicate(custom_id, number)
        self._seen.add(hash(custom_id))
        return None if self._is_answered(custom_id) else to_request(fields, self._names, self._defaults)

    def _is_answered(self, key: str | int) -> bool:
        """Whether an earlier run answered a line, which is then counted as skipped."""
        if hash(key) in self._answered.succeeded:
            self.tally.succeeded_before += 1
        elif hash(key) in self._answered.failed:
            self.tally.failed_before += 1
        else:
            return False
        return True

    def _fail(self, place: int, bad: BadLine) -> None:
        self._outbox.put(place, error_line(bad))
        self.tally.failed += 1
