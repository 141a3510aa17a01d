"""`jaxoverlap simulate`: what schedules would come to on a device and a host of given speeds."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from jaxoverlap.cli import command
from jaxoverlap.config import MAX_LOOKAHEAD, MAX_MODEL_LEN, MAX_RUNNING, EngineConfig

if TYPE_CHECKING:
    from jaxoverlap.simulation.virtual_time import Arrival, Prediction, Speeds


_time = functools.partial(typer.Option, min=0.0, callback=command.finite)


def simulate(
    rows: Annotated[int, typer.Option(min=1, max=MAX_RUNNING, help="Requests that decode together at most.")] = 64,
    requests: Annotated[int, typer.Option(min=1, help="How many come.")] = 256,
    rate: Annotated[float, typer.Option(help="Requests a second, Poisson; inf: all at once.")] = math.inf,
    prompt_len: Annotated[int, typer.Option(min=1, max=MAX_MODEL_LEN, help="Tokens of each prompt.")] = 128,
    output_len: Annotated[int, typer.Option(min=1, max=MAX_MODEL_LEN, help="Tokens of each answer.")] = 128,
    device_ms: Annotated[
        float | None, _time(help="Device time of a step, whatever is in it.", show_default="5")
    ] = None,
    device_us_per_row: Annotated[float | None, _time(help="For each decoding row.", show_default="10")] = None,
    device_us_per_prompt_token: Annotated[float | None, _time(help="For each prompt token.", show_default="20")] = None,
    device_ns_per_kv_token: Annotated[
        float | None, _time(help="For each KV position that a row reads.", show_default="0")
    ] = None,
    host_ms: Annotated[float | None, _time(help="Host time of a step, whatever is in it.", show_default="0.1")] = None,
    host_us_per_row: Annotated[float | None, _time(help="For each row.", show_default="1")] = None,
    lookaheads: Annotated[
        list[int] | None, typer.Option("--lookahead", min=0, max=MAX_LOOKAHEAD, help="Of overlap. Default: 1, 2 and 4.")
    ] = None,
    measured: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TRACE",
            show_default=False,
            help="A file that --trace has written, may be repeated: speeds that are not given are fitted to it.",
        ),
    ] = None,
    platform: Annotated[
        Literal["gpu", "cpu"] | None,
        typer.Option(
            show_default=False,
            help="Whose defaults the engine has, such as tokens of a step. Default: that of the traces, else gpu.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="As a list of objects.")] = False,
) -> int:
    """Predict throughput and latencies of the three schedules, with the real scheduler in virtual time.

    A step takes --device-ms and what its rows, prompt tokens and KV positions add; the host likewise. --measured takes
    them from a trace. The queue, the pages and the order are the real engine's; a network and noise are not in it.
    """
    from jaxoverlap.simulation.virtual_time import Arrival
    from jaxoverlap.simulation.virtual_time import simulate as run

    if not rate > 0:
        raise command.CommandError("--rate: use requests a second, above 0")
    given = {
        "step": (device_ms, 1e3),
        "row": (device_us_per_row, 1e6),
        "prompt_token": (device_us_per_prompt_token, 1e6),
        "kv_token": (device_ns_per_kv_token, 1e9),
        "host_step": (host_ms, 1e3),
        "host_row": (host_us_per_row, 1e6),
    }
    assumed: dict[str, Any] = {name: value / unit for name, (value, unit) in given.items() if value is not None}
    measured_speeds, measured_on = _measured(measured or [])
    platform = platform or measured_on
    speeds = replace(measured_speeds, **assumed)
    if not assumed.keys() <= {"host_step", "host_row"}:
        speeds = replace(speeds, shapes={})  # measured of another device than is asked for
    arrivals = [Arrival(moment, prompt_len, output_len) for moment in _moments(requests, rate, seed)]
    found, unmeasured = [], []
    schedules: list[tuple[str, int]] = [("serial", 0), ("timeslice", 0)]
    for schedule, lookahead in schedules + [("overlap", depth) for depth in lookaheads or [1, 2, 4]]:
        config = EngineConfig(schedule=schedule, lookahead=lookahead, max_running=rows)  # type: ignore[arg-type]
        prediction = run(config, speeds, arrivals, platform)
        if speeds.shapes and prediction.measured < prediction.steps / 2:
            unmeasured.append(f"{schedule} {lookahead}: {prediction.measured} of {prediction.steps}")
        found.append({"schedule": schedule, "lookahead": lookahead, **_described(prediction)})
    if unmeasured:
        command.say(
            "warning: most steps are not among those that were measured, and go by rows and prompt tokens "
            f"({'; '.join(unmeasured)}); --platform is {platform}, and --rows {rows}"
        )
    if as_json:
        print(json.dumps(found))
    else:
        _show(found, arrivals)
    return command.OK


def _measured(paths: list[str]) -> tuple[Speeds, Literal["gpu", "cpu"]]:
    """The speeds of traces and the platform they were recorded on; without any, what is assumed.

    Raises:
      CommandError: a trace can't be read, or they are of different platforms.
    """
    from jaxoverlap.observe import trace_file
    from jaxoverlap.simulation.measured_speeds import speeds_of
    from jaxoverlap.simulation.virtual_time import Speeds

    if not paths:
        return Speeds(step=5e-3, row=10e-6, prompt_token=20e-6, host_step=1e-4, host_row=1e-6), "gpu"
    try:
        traces = [trace_file.read(path) for path in paths]
        speeds = speeds_of(*traces)
    except OSError as error:
        raise command.CommandError(f"--measured {error.filename}: {error.strerror or error}") from error
    except ValueError as error:
        raise command.CommandError(f"--measured: {error}") from error
    said = [trace.get("otherData", {}).get("platform") for trace in traces]  # not by traces of older versions
    platforms = {platform for platform in said if platform is not None}
    if len(platforms) > 1:
        raise command.CommandError(f"--measured: the traces are of different platforms: {', '.join(sorted(platforms))}")
    command.say(
        f"measured: --device-ms {1e3 * speeds.step:.4g} --device-us-per-row {1e6 * speeds.row:.4g}"
        f" --device-us-per-prompt-token {1e6 * speeds.prompt_token:.4g}"
        f" --device-ns-per-kv-token {1e9 * speeds.kv_token:.4g}"
        f" --host-ms {1e3 * speeds.host_step:.4g} --host-us-per-row {1e6 * speeds.host_row:.4g}"
    )
    if speeds.shapes:
        command.say(f"and {len(speeds.shapes)} compiled steps on their own, as long as no --device option is given")
    return speeds, "cpu" if platforms == {"cpu"} else "gpu"


def _moments(count: int, rate: float, seed: int) -> Iterator[float]:
    chance, now = random.Random(seed), 0.0
    for _ in range(count):
        yield now
        now += 0.0 if math.isinf(rate) else chance.expovariate(rate)


def _described(prediction: Prediction) -> dict[str, Any]:
    import numpy as np

    def ms(values: Any, share: float) -> float | None:
        return float(1e3 * np.percentile(values, share)) if len(values) else None

    return {
        "tokens/s": prediction.tokens_per_second,
        "first token ms p50": ms(prediction.first_token, 50),
        "p99": ms(prediction.first_token, 99),
        "between tokens ms p50": ms(prediction.gaps, 50),
        "gap p99": ms(prediction.gaps, 99),
        "device busy": prediction.busy / prediction.seconds if prediction.seconds else 0.0,
        "steps": prediction.steps,
        "overlapped": prediction.overlapped / prediction.steps,
    }


def _show(found: list[dict[str, Any]], arrivals: list[Arrival]) -> None:
    table = Table(title=f"{len(arrivals)} requests, predicted", title_justify="left")
    for name in found[0]:
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(*(_cell(name, value) for name, value in row.items()))
    Console(width=140).print(table)


def _cell(name: str, value: Any) -> str:
    if name in ("device busy", "overlapped"):
        return f"{value:.1%}"
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
