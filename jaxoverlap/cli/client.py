"""`jaxoverlap client …`: what a server answers, and what its operators ask of it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxoverlap.cli import command
from jaxoverlap.cli.batch import InputFile, Ordered, OutputFile, Overwrite, RetryErrors, answer_file, at_server
from jaxoverlap.cli.batch_file import STANDARD
from jaxoverlap.cli.chat import DEFAULTS as CHAT_DEFAULTS
from jaxoverlap.cli.chat import Chat, check_chat
from jaxoverlap.cli.command import as_command
from jaxoverlap.cli.connection import DEFAULT_TARGET, TARGET_VARIABLE, ConnectionOptions
from jaxoverlap.cli.generate import AsJson, Prompts, Quiet, check_shown, read_prompts, show_answers
from jaxoverlap.cli.request_options import ChatOptions, SamplingOptions, StructureOptions, TreatmentOptions
from jaxoverlap.observe import memory_page
from jaxoverlap.observe.step_log import CAPACITY, describe_step
from jaxoverlap.observe.timeline import MAX_STEPS
from jaxoverlap.observe.trace_page import facts
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxoverlap.client import Client

TOGETHER = 32
MOST = 2**32 - 1
"""That a field of a message holds."""

Target = Annotated[
    str,
    typer.Option(
        "--target",
        "-t",
        envvar=TARGET_VARIABLE,
        metavar="HOST:PORT|unix:PATH",
        help="Where the server is.",
        rich_help_panel="Connection",
    ),
]
Model = Annotated[
    str | None, typer.Option(metavar="NAME", show_default=False, help="Of the served model. Default: whatever is.")
]
Json = Annotated[bool, typer.Option("--json", help="As one object of JSON.")]


def generate(
    prompts: Prompts = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
    model: Model = None,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
    sampling: SamplingOptions,
    structure: StructureOptions,
    chat: ChatOptions,
    treatment: TreatmentOptions,
) -> int:
    """Generate text from prompts, and print it as it comes; as `jaxoverlap generate` does without a server."""
    params = SamplingParams(**(sampling.values(temperature=0.0, max_tokens=256) | structure.values()))
    check_shown(params, as_json)
    texts = read_prompts(prompts or ["-"])
    options = RequestOptions(**treatment.values())
    asked = chat.prompts(texts)
    with connection.client(target, progress=False, model=model) as client:
        together = connection.concurrency or TOGETHER
        return show_answers(client, asked, texts, params, options, together=together, as_json=as_json, quiet=quiet)


def chat(
    system: Annotated[
        str | None, typer.Option(metavar="TEXT", show_default=False, help="What the model is told first.")
    ] = None,
    quiet: Quiet = False,
    model: Model = None,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
    sampling: SamplingOptions,
    treatment: TreatmentOptions,
) -> int:
    """Chat with the model; as `jaxoverlap chat --server`, whose help has the commands."""
    params = check_chat(SamplingParams(**sampling.values(**CHAT_DEFAULTS)))
    options = RequestOptions(**treatment.values())
    with connection.client(target, progress=False, model=model) as client:
        return Chat(client, params, options, system, quiet).run()


def batch(
    source: InputFile,
    output: OutputFile,
    ordered: Ordered = True,
    overwrite: Overwrite = False,
    retry_errors: RetryErrors = False,
    quiet: Quiet = False,
    model: Model = None,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
    sampling: SamplingOptions,
    structure: StructureOptions,
    treatment: TreatmentOptions,
) -> int:
    """Answer a file of requests, in OpenAI's batch format; as `jaxoverlap batch --server`, whose help says more."""
    return answer_file(
        source,
        output,
        at_server(connection, target, model, False if output == STANDARD or quiet else None),
        sampling.values() | structure.values() | treatment.values(),
        ordered=ordered,
        overwrite=overwrite,
        retry_errors=retry_errors,
        quiet=quiet,
    )


def info(as_json: Json = False, target: Target = DEFAULT_TARGET, *, connection: ConnectionOptions) -> int:
    """The served model, and the server with its limits."""
    with connection.client(target, progress=False) as client:
        shown = {"model": dataclasses.asdict(client.model_info()), "server": dataclasses.asdict(client.server_info())}
    _print(shown, as_json)
    return command.OK


def load(as_json: Json = False, target: Target = DEFAULT_TARGET, *, connection: ConnectionOptions) -> int:
    """What the server is doing now."""
    with connection.client(target, progress=False) as client:
        _print(dataclasses.asdict(client.load()), as_json)
    return command.OK


def health(target: Target = DEFAULT_TARGET, *, connection: ConnectionOptions) -> int:
    """Whether the server takes requests.

    Exit codes: 0 it does, 1 it lives but does not, as while it warms up or drains; 2 nobody answers.
    """
    with connection.client(target, progress=False) as client:
        found = client.health()
    print("ready" if found.ready else "live, not ready" if found.live else "not live")
    return command.OK if found.ready else command.SOME_FAILED


def flush(target: Target = DEFAULT_TARGET, *, connection: ConnectionOptions) -> int:
    """Forget all cached prefixes. Refused while requests run."""
    with connection.client(target, progress=False) as client:
        print(f"{client.flush_cache()} pages freed")
    return command.OK


def snapshot(
    as_svg: Annotated[bool, typer.Option("--svg", help="As a picture.")] = False,
    html: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            callback=command.writable,
            help="As a map over time, into a page of HTML.",
        ),
    ] = None,
    count: Annotated[
        int | None, typer.Option(min=1, show_default=False, help="Moments of the map. Default: 1.")
    ] = None,
    every: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            max=command.LONGEST_SECONDS,
            callback=command.finite,
            show_default=False,
            help="Between two of them. Default: 1.",
        ),
    ] = None,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
) -> int:
    """Who has which KV page, as JSON, as a picture, or with --html over time: a page to look at."""
    if html is None:
        for name, value in (("count", count), ("every", every)):
            if value is not None:
                raise command.CommandError(f"--{name} is for a map over time; it needs --html")
    elif as_svg:
        raise command.CommandError("--svg is one moment and --html a map over time; use one of them")
    with connection.client(target, progress=False) as client:
        if html is not None:
            moments = _snapshots(client, count or 1, 1.0 if every is None else every)
            command.write_text(html, memory_page.to_page(list(moments)))
            return command.OK
        found = client.memory_snapshot()
    print(found.to_svg() if as_svg else json.dumps(found.to_dict()))
    return command.OK


def _snapshots(client: Client, count: int, every: float) -> Iterator[tuple[float, dict[str, Any]]]:
    """So many, each with the seconds since the first; Ctrl-C ends it sooner."""
    began = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        for index in range(count):
            time.sleep(every if index else 0.0)
            yield time.monotonic() - began, client.memory_snapshot().to_dict()


def steps(
    last: Annotated[
        int, typer.Option(metavar="N", min=1, max=CAPACITY, help="So many of the newest; the log holds 1000.")
    ] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="As objects, one in a line.")] = False,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
) -> int:
    """The last steps of the engine: who was in them, where they wrote and what came of them. The log is always on."""
    with connection.client(target, progress=False) as client:
        found = client.step_log(last)
    for record in found:
        print(json.dumps(record) if as_json else describe_step(record))
    return command.OK


def trace(
    output: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="FILE", callback=command.writable, help="Compressed, if the name ends in .gz."
        ),
    ],
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0, max=command.LONGEST_SECONDS, callback=command.finite, help="How long. Ctrl-C ends it sooner."
        ),
    ] = 5.0,
    max_steps: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_STEPS, show_default=False, help="Keep the last so many. Default: 2000."),
    ] = None,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
) -> int:
    """Record what the server's host and device do when, for `jaxoverlap trace view` or Perfetto."""
    with connection.client(target, progress=False) as client:
        client.start_trace(max_steps)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(seconds)
        finally:
            recorded = client.stop_trace()
    command.save_trace(output, recorded)
    command.say(" · ".join(f"{name} {value}" for name, value in facts(recorded["otherData"])) or "no steps")
    return command.OK


def profile(
    steps: Annotated[
        int | None, typer.Option(min=1, max=MOST, show_default=False, help="It ends after so many. Default: 100.")
    ] = None,
    stop: Annotated[bool, typer.Option("--stop", help="End the one that is running.")] = False,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
) -> int:
    """Start JAX's profiler in the server, which needs --profile-dir; prints the folder on its machine."""
    if stop and steps is not None:
        raise command.CommandError("--steps is for a profile that begins, --stop ends one; use one of them")
    with connection.client(target, progress=False) as client:
        print(client.stop_profile() if stop else client.start_profile(steps))
    return command.OK


def abort(
    request_ids: Annotated[list[str] | None, typer.Argument(metavar="REQUEST_ID", show_default=False)] = None,
    all_requests: Annotated[bool, typer.Option("--all", help="Whatever runs or waits.")] = False,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
) -> int:
    """End requests, whoever waits for them.

    Exit codes: 0 all were ended, 1 some ids are none of a request that runs or waits.
    """
    if bool(request_ids) == all_requests:
        raise command.CommandError("name requests, or use --all")
    with connection.client(target, progress=False) as client:
        ended = client.abort(request_ids or (), all_requests=all_requests)
    for request_id in ended.aborted_ids:
        print(request_id)
    for request_id in ended.unknown_ids:
        command.say(f"no such request: {request_id}")
    return command.SOME_FAILED if ended.unknown_ids else command.OK


def drain(
    timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", min=0.0, show_default=False, help="How long to wait. Default: the server's own."
        ),
    ] = None,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
) -> int:
    """Let the server refuse new requests, and wait for those that run.

    Exit codes: 0 nothing runs any more, 1 something does.
    """
    with connection.client(target, progress=False) as client:
        still_running = client.drain(timeout)
    print(f"{still_running} still running")
    return command.SOME_FAILED if still_running else command.OK


def _print(values: dict[str, Any], as_json: bool, indent: str = "") -> None:
    if as_json:
        print(json.dumps(values))
        return
    for name, value in values.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            _print(value, False, indent + "  ")
        else:
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            print(f"{indent}{name}: {shown}")


app = typer.Typer(no_args_is_help=True, help="Speak with a server that `jaxoverlap serve` runs.")
for _work in (generate, chat, batch, info, load, health, flush, snapshot, steps, trace, profile, abort, drain):
    app.command(_work.__name__)(as_command(_work))
