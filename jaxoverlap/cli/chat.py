"""`jaxoverlap chat`: question and answer in turns, with a model in this process or behind a server.

Each question goes out with all that was said before. The engine's prefix cache knows most of it, so only what is new
is computed. Lines that begin with "/" are commands; "//" sends a question that begins with one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Annotated

import typer

from jaxoverlap.cli import command
from jaxoverlap.cli.connection import Answering, ConnectionOptions, server_model
from jaxoverlap.cli.options import EngineOptions
from jaxoverlap.cli.request_options import SamplingOptions, TreatmentOptions
from jaxoverlap.errors import EngineError, InvalidRequestError, JaxOverlapError, ServiceError
from jaxoverlap.outputs import RequestOutput
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

DEFAULTS = {"temperature": 0.7, "max_tokens": 1024}
MIN_PREFILL_TOKENS = 64
"""A line in its template has some 40; smaller steps would only make the start longer."""
HELP = (
    "/reset forgets what was said · /system TEXT sets what the model is told first · /exit or Ctrl-D leaves · Ctrl-C "
    "stops an answer"
)


def chat(
    server: Annotated[
        str | None,
        typer.Option(
            metavar="TARGET",
            show_default=False,
            rich_help_panel="Connection",
            help="HOST:PORT or unix:PATH of a server. Default: the model runs in this process.",
        ),
    ] = None,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", show_default=False, help="What the model is told first.")
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Nothing on standard error but warnings and errors.")
    ] = False,
    trace: command.TraceFile = None,
    *,
    connection: ConnectionOptions,
    engine: EngineOptions,
    sampling: SamplingOptions,
    treatment: TreatmentOptions,
) -> int:
    """Chat with a model.

    A question is a line; the answer is streamed, and Ctrl-C stops it. Commands: /reset forgets what was said, /system
    TEXT sets what the model is told first (and nothing without a TEXT), /help, /exit. Ctrl-D leaves as well.

    Standard input need not be a terminal: then each of its lines is a question or a command.

    Exit codes: 0 done, 1 an answer broke off, 2 an error, 130 Ctrl-C where there is no answer to stop and no terminal.
    """
    params = check_chat(SamplingParams(**sampling.values(**DEFAULTS)))
    options = RequestOptions(**treatment.values())
    if server is None:
        connection.check_unused()
        settings = engine.settings(max_running=1, min_prefill_tokens=MIN_PREFILL_TOKENS)
        with command.load_llm(settings, progress=None, quiet=quiet) as llm, command.traced(llm, trace):
            return Chat(llm, params, options, system, quiet).run()
    command.check_no_trace(trace)
    with connection.client(server, progress=False, model=server_model(engine)) as client:
        return Chat(client, params, options, system, quiet).run()


def check_chat(params: SamplingParams) -> SamplingParams:
    """As they are. Raises CommandError for several samples, InvalidRequestError for what a chat does not show."""
    if params.num_samples > 1:
        raise command.CommandError("--n and --best-of: a chat goes on with one answer")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(params, name) is not None:
            raise InvalidRequestError(name, getattr(params, name), "a chat does not show them; use generate --json")
    return params


class Chat:
    """What was said so far, and how it goes on.

    Args:
      engine: streams the answers.
      system: what the model is told first, if anything.
    """

    def __init__(
        self, engine: Answering, params: SamplingParams, options: RequestOptions, system: str | None, quiet: bool
    ) -> None:
        self._engine, self._params, self._options = engine, params, options
        self._system, self._quiet = system, quiet
        self._said: list[dict[str, str]] = []
        self._some_failed = False

    def run(self) -> int:
        """Takes lines until the end; returns the exit code.

        Raises:
          EngineError, ServiceError: there is nobody to chat with any more.
        """
        command.standard_output().reconfigure(errors="replace")  # type: ignore[attr-defined]
        interactive = command.standard_input().isatty()
        if interactive and not self._quiet:
            command.say(HELP)
        for line in _lines(interactive):
            if line.startswith("/") and not line.startswith("//"):
                if not self._obey(line):
                    break
            elif line.strip():
                self._answer(line.removeprefix("/") if line.startswith("//") else line)
        return command.SOME_FAILED if self._some_failed else command.OK

    def _obey(self, line: str) -> bool:
        """Does what a command says; False ends the chat."""
        name, _, rest = line.partition(" ")
        if name == "/exit":
            return False
        if name == "/reset":
            self._said.clear()
        elif name == "/system":
            self._system = rest.strip() or None
        else:
            command.say(HELP if name == "/help" else f"no such command: {name} · {HELP}")
        return True

    def _answer(self, question: str) -> None:
        """Streams an answer. What has come of one that is stopped counts as said; a failed one does not."""
        before = [] if self._system is None else [{"role": "system", "content": self._system}]
        asked = {"role": "user", "content": question}
        texts: list[str] = []
        output: RequestOutput | None = None
        begun = time.perf_counter()
        try:
            with closing(self._engine.stream([*before, *self._said, asked], self._params, self._options)) as stream:  # type: ignore[type-var]
                for delta in stream:
                    texts.append(delta.text)
                    print(delta.text, end="", flush=True)
                    output = delta.output
            if output is not None and output.error is not None:
                raise output.error
        except KeyboardInterrupt:
            pass
        except (EngineError, ServiceError):
            self._end_line(texts)
            raise
        except JaxOverlapError as error:
            self._end_line(texts)
            command.say(f"error: {error}")
            self._some_failed = True
            return
        self._end_line(texts or [""])
        self._said += [asked, {"role": "assistant", "content": "".join(texts)}]
        if output is not None and not self._quiet:
            rate = len(output.token_ids) / max(time.perf_counter() - begun, 1e-9)
            command.say(
                f"{output.prompt_tokens} prompt tokens ({output.cached_tokens} of them cached) · "
                f"{len(output.token_ids)} output tokens · {rate:.1f} tokens/s · {output.finish_reason}"
            )

    @staticmethod
    def _end_line(texts: list[str]) -> None:
        """After an answer, or what there is of one."""
        if texts and not "".join(texts).endswith("\n"):
            print(flush=True)


def _lines(interactive: bool) -> Iterator[str]:
    """Lines from standard input, without their ends. On a terminal Ctrl-C drops a line that is being typed."""
    if interactive:
        import readline  # noqa: F401  lines can then be edited, and called back
    while True:
        try:
            line = _typed() if interactive else sys.stdin.readline()
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            if not interactive:
                raise
            print(file=sys.stderr)
            continue
        except UnicodeDecodeError as error:
            raise command.CommandError(f"standard input is not valid UTF-8 (byte {error.start})") from None
        if not interactive and not line:
            return
        yield line.removesuffix("\n").removesuffix("\r")


def _typed() -> str:
    """A line from the terminal. The prompt is no answer, so where those go into a file it does not."""
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()
