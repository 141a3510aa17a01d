"""What the three schedules come to where no measurement reaches, for docs/: `python -m benchmarks.draw_simulations`.

The real scheduler in virtual time (`jaxoverlap simulate`), a GPU whose step takes G = 2 ms and what its tokens add, and
a host that takes 0.15 ms a step and 1 µs a row: two to five times what the loop itself does (docs/benchmarks.md).

    rows     1 to 1,000 rows, 20 requests for each of them, all there at once
    queue    1,000 rows and a queue that grows to 100,000 requests
    gpus     1,000 rows on as many GPUs that share a model: each has a part of the work, and 0.3 ms a step are for
             exchanging what they have computed. (Engines beside each other just come to a multiple of one.)

Prediction: serial loses C / (G + C), which is 7 % at 1 row and a third at 1,000; overlap nothing as long as C < G.
With 8 GPUs G is less than C: one step in advance hides the shorter of both, and the host is what is left.
A queue of any length changes nothing but the wait.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from benchmarks import report
from jaxoverlap.config import EngineConfig
from jaxoverlap.observe.figures import save
from jaxoverlap.simulation.virtual_time import Arrival, Speeds, simulate

Schedule = Literal["serial", "timeslice", "overlap"]
SCHEDULES: list[tuple[Schedule, int]] = [("serial", 0), ("timeslice", 0), ("overlap", 1), ("overlap", 2)]
DEVICE = {"step": 2e-3, "row": 2e-6, "prompt_token": 5e-6}
HOST = {"host_step": 150e-6, "host_row": 1e-6}
EXCHANGE = 0.3e-3
"""Seconds a step; see "gpus"."""
PROMPT_LEN, OUTPUT_LEN = 32, 64
PICTURE = Path(__file__).parent.parent / "docs" / "pictures" / "simulations.svg"


def predict(rows: int, requests: int, gpus: int = 1) -> list[dict[str, Any]]:
    """A line for each schedule."""
    device = {name: seconds / gpus for name, seconds in DEVICE.items()}
    device["step"] += EXCHANGE if gpus > 1 else 0.0
    arrivals = [Arrival(0.0, PROMPT_LEN, OUTPUT_LEN)] * requests
    lines = []
    for schedule, lookahead in SCHEDULES:
        config = EngineConfig(schedule=schedule, lookahead=lookahead, max_running=rows)
        found = simulate(config, Speeds(**device, **HOST), arrivals, "gpu")
        lines.append(
            {
                "rows": rows,
                "requests": requests,
                "GPUs": gpus,
                "schedule": f"{schedule} {lookahead}" if lookahead else schedule,
                "tokens/s": found.tokens_per_second,
                "device busy": found.busy / found.seconds,
                "last first token s": float(found.first_token.max()),
            }
        )
    return lines


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 1000])
    options.add_argument("--queues", type=int, nargs="+", default=[10_000, 100_000])
    options.add_argument("--gpus", type=int, nargs="+", default=[1, 2, 4, 8])
    options.add_argument("--picture", type=Path, default=PICTURE)
    args = options.parse_args()
    most = max(args.rows)
    results = {
        "rows": [line for rows in args.rows for line in predict(rows, 20 * rows)],
        "queue": [line for requests in args.queues for line in predict(most, requests)],
        "gpus": [line for gpus in args.gpus for line in predict(most, 20 * most, gpus)],
    }
    for name, lines in results.items():
        report.show(name, lines)
    keys = {name: ["rows", "requests", "GPUs", "schedule"] for name in results}
    report.write(args.json, "simulations", results, keys=keys)
    draw(results, args.picture)


def draw(results: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Tokens a second over rows, and over GPUs."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    axes = figure.subplots(1, 2)
    for ax, table, x in zip(axes, ("rows", "gpus"), ("rows", "GPUs"), strict=True):
        for schedule in dict.fromkeys(line["schedule"] for line in results[table]):
            points = [(line[x], line["tokens/s"]) for line in results[table] if line["schedule"] == schedule]
            ax.plot(*zip(*points, strict=True), marker=".", label=schedule)
        ax.set(xscale="log", yscale="log", xlabel=x, ylabel="tokens a second")
        ax.grid(alpha=0.3)
    axes[0].set_title("1 GPU")
    axes[1].set_title(f"{max(line['rows'] for line in results['gpus'])} rows")
    axes[0].legend()
    save(figure, str(path))


if __name__ == "__main__":
    main()
