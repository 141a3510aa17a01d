"""`jaxoverlap generate`: a few prompts from the command line, answers as they come."""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxoverlap.cli import command
from jaxoverlap.cli.options import EngineOptions, SamplingOptions, TreatmentOptions
from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxoverlap.llm import LLM, Prompt, RequestOutput, StreamDelta

MAX_TOGETHER = 32
_USUAL_PREFILL, _SMALLEST_PREFILL = 512, 32
_TEMPLATE_TOKENS = 48
_HEADER_CHARS = 60


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT",
            show_default=False,
            help="What to continue, or with --chat to answer. Without one, or for '-', it is read from standard input "
            "(less one newline at its end).",
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Put each prompt as a user's message, through the model's chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", show_default=False, help="With --chat: the system's message.")
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="Print an object in a line for each prompt, once it is finished: index, prompt, text, token_ids, "
            "finish_reason, usage, seed, timings.",
        ),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Nothing on standard error but warnings and errors.")
    ] = False,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    treatment: TreatmentOptions,
) -> int:
    """Generate text from prompts, and print it as it comes.

    Several prompts are decoded together; their answers come in the order of the prompts, each under a header. The
    first unfinished answer is streamed while those behind it wait their turn.

    Exit codes: 0 done, 1 an answer broke off, 2 an error, 130 Ctrl-C, 141 standard output was closed.
    """
    if system is not None and not chat:
        raise command.CommandError("--system needs --chat")
    texts = _read_prompts(prompts or ["-"])
    params = SamplingParams(**sampling.values(temperature=0.0, max_tokens=256))
    options = RequestOptions(**treatment.values())
    settings = engine.settings(**_fitting(texts, chat))
    inputs = [_as_messages(text, system) if chat else text for text in texts]

    with command.load_llm(settings, progress=None, quiet=quiet) as llm:
        started = time.perf_counter()
        streams = [_stream(llm, given, params, options, index, len(inputs)) for index, given in enumerate(inputs)]
        deltas = in_order(streams, together=settings["max_running"])
        outputs = list(_print_json(deltas, texts) if as_json else _print_text(deltas, texts))
        elapsed = time.perf_counter() - started
    for index, output in enumerate(outputs):
        if output.error is not None:
            command.say(f"error: prompt {index + 1}: {output.error}")
    if not quiet:
        command.say(_summary(outputs, elapsed))
    broken_off = sum(not output.finish_reason.as_asked for output in outputs)
    return command.OK if not broken_off else command.SOME_FAILED


def in_order(streams: list[Iterator[StreamDelta]], *, together: int) -> Iterator[tuple[int, StreamDelta]]:
    """Draws from the first unfinished stream, while up to `together` of them run in the engine.

    A stream enters the engine when it is first drawn from. One more enters with each piece of the first, so that
    nobody waits for all prompts to be read before seeing a word.
    """
    waiting = deque(enumerate(streams))
    running: deque[tuple[int, Iterator[StreamDelta]]] = deque()
    while waiting or running:
        if waiting and len(running) < together:
            index, stream = waiting.popleft()
            running.append((index, chain([next(stream)], stream)))
        index, stream = running[0]
        delta = next(stream)
        if delta.output is not None:
            running.popleft()
        yield index, delta


def _read_prompts(prompts: list[str]) -> list[str]:
    if prompts.count("-") > 1:
        raise command.CommandError("'-' (standard input) can be one prompt, not several")
    return [_read_stdin() if prompt == "-" else prompt for prompt in prompts]


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        raise command.CommandError("no prompt: give one as an argument, or pipe one in; see jaxoverlap generate --help")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise command.CommandError(f"standard input is not valid UTF-8 (byte {error.start})") from None


def _as_messages(text: str, system: str | None) -> list[dict[str, str]]:
    messages = [] if system is None else [{"role": "system", "content": system}]
    return [*messages, {"role": "user", "content": text}]


def _fitting(texts: list[str], chat: bool) -> dict[str, Any]:
    """An engine no larger than the job: every step size costs seconds to compile.

    How many tokens the prompts have is known only once the model is loaded; three bytes for each is a good guess,
    and where it is wrong the prompts run in two chunks.
    """
    guess = sum(len(text.encode(errors="replace")) // 3 + chat * _TEMPLATE_TOKENS for text in texts)
    fitting = {"max_running": min(len(texts), MAX_TOGETHER)}
    if guess <= _USUAL_PREFILL:
        fitting["max_batched_tokens"] = max(_SMALLEST_PREFILL, 1 << (guess - 1).bit_length())
    return fitting


def _stream(
    llm: LLM, prompt: Prompt, params: SamplingParams, options: RequestOptions, index: int, count: int
) -> Iterator[StreamDelta]:
    try:
        return llm.stream(prompt, params, options)
    except InvalidRequestError as error:
        which = f"prompt {index + 1}: " if count > 1 else ""
        raise command.CommandError(f"{which}{error}") from error


def _print_text(deltas: Iterator[tuple[int, StreamDelta]], texts: list[str]) -> Iterator[RequestOutput]:
    """Yields each output once it is printed."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    shown = -1
    for index, delta in deltas:
        piece = delta.text
        if index != shown and len(texts) > 1:
            piece = ("\n" if index else "") + _header(index, texts) + piece
        shown = index
        if delta.output is not None:
            piece += "" if delta.output.text.endswith("\n") else "\n"
        sys.stdout.write(piece)
        sys.stdout.flush()
        if delta.output is not None:
            yield delta.output


def _header(index: int, texts: list[str]) -> str:
    line = " ".join(texts[index].split())
    shown = line if len(line) <= _HEADER_CHARS else line[: _HEADER_CHARS - 1] + "…"
    return f"==> {index + 1}/{len(texts)}: {shown} <==\n"


def _print_json(deltas: Iterator[tuple[int, StreamDelta]], texts: list[str]) -> Iterator[RequestOutput]:
    """Yields each output once it is printed."""
    for index, delta in deltas:
        output = delta.output
        if output is None:
            continue
        print(json.dumps({"index": index, "prompt": texts[index]} | _described(output)), flush=True)
        yield output


def _described(output: RequestOutput) -> dict[str, Any]:
    prompt_tokens, completion_tokens = output.prompt_tokens, len(output.token_ids)
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": str(output.finish_reason),
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
        },
        "seed": output.seed,
        "timings": {
            "queue_seconds": output.queue_seconds,
            "first_token_seconds": output.first_token_seconds,
            "total_seconds": output.total_seconds,
        },
    }


def _summary(outputs: list[RequestOutput], elapsed: float) -> str:
    prompt_tokens = sum(output.prompt_tokens for output in outputs)
    output_tokens = sum(len(output.token_ids) for output in outputs)
    first = outputs[0].first_token_seconds
    reasons = Counter(str(output.finish_reason) for output in outputs)
    parts = [
        f"{prompt_tokens} prompt tokens",
        f"{output_tokens} output tokens",
        f"{output_tokens / elapsed:.1f} tokens/s",
        *([] if first is None else [f"first token after {first:.2f} s"]),
        "finished by " + ", ".join(f"{reason} ({n})" if len(outputs) > 1 else reason for reason, n in reasons.items()),
    ]
    return " · ".join(parts)
