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

from jaxoverlap.cli import answers, command
from jaxoverlap.cli.connection import Answering
from jaxoverlap.cli.options import EngineOptions
from jaxoverlap.cli.request_options import ChatOptions, SamplingOptions, StructureOptions, TreatmentOptions
from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.outputs import CompletionOutput, RequestOutput, StreamDelta
from jaxoverlap.prompts import Prompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxoverlap.llm import LLM

MAX_TOGETHER = 32
_MOST_PREFILL, _LEAST_PREFILL = 512, 32
_TEMPLATE_TOKENS = 48
_HEADER_CHARS = 60


Prompts = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        show_default=False,
        help="What to continue, or with --chat to answer. Without one, or for '-', it is read from standard input "
        "(less one newline at its end).",
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print an object in a line for each sample of each prompt, once the prompt is finished: index, "
        "sample, prompt, text, token_ids, finish_reason, stop_reason, error, logprobs, usage, seed, timings; with "
        "the first sample of a prompt prompt_logprobs.",
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on standard error but warnings and errors.")]


def generate(
    prompts: Prompts = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    trace: command.TraceFile = None,
    *,
    engine: EngineOptions,
    sampling: SamplingOptions,
    structure: StructureOptions,
    chat: ChatOptions,
    treatment: TreatmentOptions,
) -> int:
    """Generate text from prompts, and print it as it comes.

    Several prompts are decoded together; their answers come in the order of the prompts, each under a header. The
    first unfinished answer is streamed while those behind it wait their turn. Of several samples the first is streamed
    and the others follow; with --best-of all come when the best are known.

    Exit codes: 0 done, 1 an answer broke off, 2 an error, 130 Ctrl-C, 141 standard output was closed.
    """
    params = SamplingParams(**(sampling.values(temperature=0.0, max_tokens=256) | structure.values()))
    check_shown(params, as_json)
    texts = read_prompts(prompts or ["-"])
    options = RequestOptions(**treatment.values())
    asked = chat.prompts(texts)
    # Which steps there are must not depend on the prompts where every bit counts.
    fitting = {} if engine.deterministic else _fitting(texts, chat.chat, params.num_samples)
    settings = engine.settings(**fitting)

    with command.load_llm(settings, progress=None, quiet=quiet, warm_up=False) as llm:
        for index, prompt in enumerate(asked):
            _check(llm, prompt, params, index, len(asked))
        command.warm_up_llm(llm)
        with command.traced(llm, trace):
            together = llm.resolved.scheduler.max_running
            return show_answers(llm, asked, texts, params, options, together=together, as_json=as_json, quiet=quiet)


def check_shown(params: SamplingParams, as_json: bool) -> None:
    """Raises InvalidRequestError for log-probabilities that would be computed and not printed."""
    for name in ("logprobs", "prompt_logprobs"):
        if not as_json and getattr(params, name) is not None:
            raise InvalidRequestError(name, getattr(params, name), "plain text does not show them; use --json as well")


def show_answers(
    engine: Answering,
    asked: list[Prompt],
    texts: list[str],
    params: SamplingParams,
    options: RequestOptions,
    *,
    together: int,
    as_json: bool,
    quiet: bool,
) -> int:
    """Prints the answers as they come, and a summary; returns the exit code.

    Args:
      texts: the prompts as they were given.
      together: streams that run at once.
    """
    command.standard_output()
    started = time.perf_counter()
    if params.is_ranked:
        deltas = _whole(engine, asked, params, options)
    else:
        deltas = in_order([engine.stream(prompt, params, options) for prompt in asked], together=together)
    show = _print_json if as_json else _print_text
    outputs = list(show(deltas, texts, params.n))
    elapsed = time.perf_counter() - started
    samples = [(index, sample) for index, output in enumerate(outputs) for sample in output.outputs]
    for index, sample in samples:
        if sample.error is not None:
            command.say(f"error: prompt {index + 1}: {sample.error}")
    if not quiet:
        command.say(_summary(outputs, elapsed))
    broken_off = sum(not sample.finish_reason.as_asked for _, sample in samples)
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


def read_prompts(prompts: list[str]) -> list[str]:
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


def _fitting(texts: list[str], chat: bool, num_samples: int = 1) -> dict[str, Any]:
    """An engine no larger than the job: every step size costs seconds to compile.

    How many tokens the prompts have is known only once the model is loaded; three bytes for each is a good guess,
    and where it is wrong the prompts run in two chunks. They are computed once, so that padding costs less than another
    step size would.
    """
    guess = sum(len(text.encode(errors="replace")) // 3 + chat * _TEMPLATE_TOKENS for text in texts)
    fitting = {"max_running": min(len(texts) * num_samples, MAX_TOGETHER), "min_prefill_tokens": _MOST_PREFILL}
    if guess <= _MOST_PREFILL:
        tokens = max(_LEAST_PREFILL, 1 << (guess - 1).bit_length())
        fitting |= {"max_batched_tokens": tokens, "min_prefill_tokens": tokens}
    return fitting


def _check(llm: LLM, prompt: Prompt, params: SamplingParams, index: int, count: int) -> None:
    try:
        llm.check(prompt, params)
    except InvalidRequestError as error:
        which = f"prompt {index + 1}: " if count > 1 else ""
        raise command.CommandError(f"{which}{error}") from error


def _whole(
    engine: Answering, prompts: list[Prompt], params: SamplingParams, options: RequestOptions
) -> Iterator[tuple[int, StreamDelta]]:
    """What has no order before the end: each output in one piece."""
    for index, output in enumerate(engine.generate(prompts, params, options)):
        yield index, StreamDelta(text=output.text, token_ids=output.token_ids, output=output)


def _print_text(deltas: Iterator[tuple[int, StreamDelta]], texts: list[str], n: int) -> Iterator[RequestOutput]:
    """Yields each output once it is printed."""
    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]
    shown = -1
    for index, delta in deltas:
        piece = delta.text if delta.index == 0 else ""
        if index != shown and len(texts) * n > 1:
            piece = ("\n" if index else "") + _header(index, texts, 0, n) + piece
        shown = index
        if delta.output is not None:
            first, *others = delta.output.outputs
            piece += _line_end(first)
            for place, sample in enumerate(others, start=1):
                piece += f"\n{_header(index, texts, place, n)}{sample.text}{_line_end(sample)}"
        sys.stdout.write(piece)
        sys.stdout.flush()
        if delta.output is not None:
            yield delta.output


def _line_end(sample: CompletionOutput) -> str:
    return "" if sample.text.endswith("\n") else "\n"


def _header(index: int, texts: list[str], place: int, n: int) -> str:
    line = " ".join(texts[index].split())
    shown = line if len(line) <= _HEADER_CHARS else line[: _HEADER_CHARS - 1] + "…"
    sample = f", sample {place + 1}/{n}" if n > 1 else ""
    return f"==> {index + 1}/{len(texts)}{sample}: {shown} <==\n"


def _print_json(deltas: Iterator[tuple[int, StreamDelta]], texts: list[str], n: int) -> Iterator[RequestOutput]:
    """Yields each output once it is printed."""
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    for index, delta in deltas:
        output = delta.output
        if output is None:
            continue
        for place, sample in enumerate(output.outputs):
            line = {"index": index, "sample": sample.index, "prompt": texts[index]} | _described(output, sample)
            if place == 0 and output.prompt_logprobs is not None:
                line["prompt_logprobs"] = answers.prompt_logprobs(output.prompt_logprobs)
            print(json.dumps(line, ensure_ascii=False), flush=True)
        yield output


def _described(output: RequestOutput, sample: CompletionOutput) -> dict[str, Any]:
    return {
        "text": sample.text,
        "token_ids": sample.token_ids,
        "finish_reason": str(sample.finish_reason),
        "stop_reason": answers.stop_reason(sample),
        "error": None if sample.error is None else str(sample.error),
        "logprobs": None if sample.logprobs is None else answers.token_logprobs(sample.logprobs),
        "usage": answers.usage(output, [sample]),
        "seed": output.seed,
        "timings": {
            "queue_seconds": sample.queue_seconds,
            "first_token_seconds": sample.first_token_seconds,
            "total_seconds": sample.total_seconds,
        },
    }


def _summary(outputs: list[RequestOutput], elapsed: float) -> str:
    samples = [sample for output in outputs for sample in output.outputs]
    prompt_tokens = sum(output.prompt_tokens for output in outputs)
    output_tokens = sum(len(sample.token_ids) for sample in samples)
    first = outputs[0].first_token_seconds
    reasons = Counter(str(sample.finish_reason) for sample in samples)
    parts = [
        f"{prompt_tokens} prompt tokens",
        f"{output_tokens} output tokens",
        f"{output_tokens / elapsed:.1f} tokens/s",
        *([] if first is None else [f"first token after {first:.2f} s"]),
        "finished by " + ", ".join(f"{reason} ({n})" if len(samples) > 1 else reason for reason, n in reasons.items()),
    ]
    return " · ".join(parts)
