"""`jaxoverlap top`: a running server, live in the terminal."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from jaxoverlap.cli import command
from jaxoverlap.cli.client import Target
from jaxoverlap.cli.connection import DEFAULT_TARGET, ConnectionOptions
from jaxoverlap.observe.boundaries import BOUNDARIES
from jaxoverlap.observe.histogram import quantile

_WAIT = "wait"
_NEVER_LESS = ("steps", "prompt_tokens", "generation_tokens")


def top(
    interval: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.1,
            max=command.LONGEST_SECONDS,
            callback=command.finite,
            help="Between two looks.",
        ),
    ] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look for one interval, print it and leave.")] = False,
    target: Target = DEFAULT_TARGET,
    *,
    connection: ConnectionOptions,
) -> int:
    """Watch a server: rates, latencies, rows, KV pages, and how much of the host's time the device waits for.

    Everything is of the last interval. The table has where the host's time of a step goes, and what of it is exposed,
    which is an upper bound. Ctrl-C leaves.
    """
    with connection.client(target, progress=False) as client:
        info = client.server_info()
        head = f"{client.model_info().served_name} at {target} · {', '.join(info.devices)} · {info.schedule}"
        rows = info.max_running
        before, began = client.metrics(), time.monotonic()
        if once:
            time.sleep(interval)
            now = time.monotonic()
            Console().print(screen(head, rows, before, client.metrics(), now - began))
            return command.OK
        with contextlib.suppress(KeyboardInterrupt), Live(Text("…"), screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(interval)
                after, now = client.metrics(), time.monotonic()
                live.update(screen(head, rows, before, after, now - began), refresh=True)
                before, began = after, now
    return command.OK


def screen(head: str, max_running: int, before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Group:
    """What has happened between two readings of the server's metrics, `seconds` apart, or since it started anew."""
    if any(after[name] < before[name] for name in _NEVER_LESS):
        before = _none_of(after)
    return Group(Text(head, style="bold"), _numbers(max_running, before, after, seconds), _boundaries(before, after))


def _none_of(read: Any) -> Any:
    """What a server tells that has counted nothing yet."""
    if isinstance(read, Mapping):
        return {name: value if name == "bounds" else _none_of(value) for name, value in read.items()}
    return [0] * len(read) if isinstance(read, list) else 0


def _numbers(max_running: int, before: Mapping[str, Any], after: Mapping[str, Any], seconds: float) -> Table:
    def gain(name: str) -> float:
        return after[name] - before[name]

    def latency(name: str) -> str:
        ms = [quantile(before[name], after[name], q) for q in (0.5, 0.99)]
        return " / ".join("–" if value is None else f"{1e3 * value:.3g}" for value in ms)

    def rate(name: str) -> str:
        return f"{gain(name) / seconds:,.1f}"

    steps, exposed = gain("steps"), gain("exposed_host_seconds")
    host = after["step_host_seconds"]["sum"] - before["step_host_seconds"]["sum"]
    ended = {name: count - before["request_success"][name] for name, count in after["request_success"].items()}
    cached = _share(gain("prefix_cache_hits"), gain("prefix_cache_queries"))
    table = Table.grid(padding=(0, 3))
    for pair in (
        ("tokens/s", rate("generation_tokens"), "prompt tokens/s", rate("prompt_tokens")),
        ("steps/s", rate("steps"), "requests/s", f"{sum(ended.values()) / seconds:,.2f}"),
        ("running", f"{after['num_requests_running']} of {max_running}", "waiting", str(after["num_requests_waiting"])),
        ("KV pages used", f"{after['kv_cache_usage_perc']:.0%}", "prefix cache hits", cached),
        (
            "first token ms, p50 / p99",
            latency("time_to_first_token_seconds"),
            "preempted",
            str(gain("num_preemptions")),
        ),
        ("between tokens ms, p50 / p99", latency("inter_token_latency_seconds"), "failed", str(ended.get("error", 0))),
        ("overlapped steps", _share(gain("overlapped_steps"), steps), "host ms a step", _per(1e3 * host, steps)),
        ("exposed share of host time", _share(exposed, host), "exposed ms a step", _per(1e3 * exposed, steps)),
    ):
        table.add_row(*(Text(text, style="bold" if place % 2 else "dim") for place, text in enumerate(pair)))
    return table


def _boundaries(before: Mapping[str, Any], after: Mapping[str, Any]) -> Table:
    steps = after["steps"] - before["steps"]
    seconds = {name: value - before["boundary_seconds"][name] for name, value in after["boundary_seconds"].items()}
    exposed = {
        name: value - before["boundary_exposed_seconds"][name]
        for name, value in after["boundary_exposed_seconds"].items()
    }
    total = sum(seconds.values())
    table = Table(box=None, pad_edge=False)
    for name in ("a step", "µs", "share", "exposed µs", "what"):
        table.add_column(name, justify="left" if name in ("a step", "what") else "right")
    for boundary in BOUNDARIES:
        spent = seconds[boundary.lap]
        if spent > 0:
            shown = "the device" if boundary.lap == _WAIT else _per(1e6 * exposed[boundary.lap], steps)
            table.add_row(boundary.lap, _per(1e6 * spent, steps), _share(spent, total), shown, boundary.what)
    return table


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.1%}" if whole else "–"


def _per(value: float, count: float) -> str:
    return f"{value / count:.4g}" if count else "–"
