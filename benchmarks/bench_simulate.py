"""`jaxoverlap simulate` beside what really happens: the same requests, served by the embedded model and on paper.

Each schedule has an engine; they take turns with the same arrivals. The speeds are fitted to the traces of the first
round, all schedules together, and predict the others: tokens a second, and medians of the time to the first token and
of the time between two tokens.

Prediction: throughput within 10 %, since its errors average out; the first token within 10 % where requests come faster
than they are served, and worse where it is one short step that the fit gets wrong. A machine that other programs use
moves between rounds by more than that.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks import load, report
from jaxoverlap import LLM
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.engine import Engine
from jaxoverlap.simulation.measured_speeds import speeds_of
from jaxoverlap.simulation.virtual_time import Arrival, Prediction, simulate

SCHEDULES = [("serial", 0), ("timeslice", 0), ("overlap", 1), ("overlap", 2)]
FIGURES = ("tokens/s", "first token s", "between tokens s")


def serve(engine: Engine, work: list[load.Work], moments: list[float]) -> dict[str, float]:
    """The figures of a run in real time."""
    requests, began = [], time.perf_counter()
    clock_began = engine.loop.scheduler.now()
    while len(requests) < len(work) or engine.has_work:
        now = time.perf_counter() - began
        while len(requests) < len(work) and moments[len(requests)] <= now:
            one = work[len(requests)]
            requests.append(engine.add(list(one.prompt), one.params))
        if engine.has_work:
            engine.step()
        else:
            time.sleep(moments[len(requests)] - now)
    first = np.array([request.first_token_time for request in requests])
    last = np.array([request.finish_time for request in requests])
    outputs = np.array([one.output_len for one in work])
    gaps = (last - first) / (outputs - 1)
    return _figures(outputs.sum() / (last.max() - clock_began), first - clock_began - moments, gaps)


def predicted(prediction: Prediction) -> dict[str, float]:
    return _figures(prediction.tokens_per_second, prediction.first_token, prediction.gaps)


def _figures(rate: float, first: np.ndarray, gaps: np.ndarray) -> dict[str, float]:
    return dict(zip(FIGURES, (float(rate), float(np.median(first)), float(np.median(gaps))), strict=True))


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--requests", type=int, default=24)
    options.add_argument("--rows", type=int, default=8)
    options.add_argument("--prompt-len", default="uniform:16,256", help="N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA")
    options.add_argument("--output-len", default="uniform:16,64", help="the same")
    options.add_argument("--rates", type=float, nargs="+", default=[0.5, math.inf], help="requests a second; inf")
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    context = 512
    configs = {
        (schedule, lookahead): EngineConfig(
            schedule=schedule,  # type: ignore[arg-type]
            lookahead=lookahead,
            max_running=args.rows,
            max_model_len=context,
            kv_memory_gib=0.5,
            prefix_cache=False,
        )
        for schedule, lookahead in SCHEDULES
    }
    engines = {key: LLM(**_given(config), progress=False) for key, config in configs.items()}
    rows = []
    for rate in args.rates:
        work = load.make_work(args.requests, args.prompt_len, args.output_len, None, context)
        moments = load.arrivals(len(work), rate, burst=1)
        traces: list[dict[str, Any]] = []
        measured: dict[tuple[str, int], list[dict[str, float]]] = {key: [] for key in engines}
        for repeat in range(args.repeats + 1):
            for key, llm in engines.items():
                if repeat == 0:
                    llm.start_trace()
                    serve(llm.engine, work, moments)
                    traces.append(llm.stop_trace())
                else:
                    measured[key].append(serve(llm.engine, work, moments))
        speeds = speeds_of(*traces)
        arrivals = [Arrival(moment, len(one.prompt), one.output_len) for moment, one in zip(moments, work, strict=True)]
        for (schedule, lookahead), config in configs.items():
            found = predicted(simulate(config, speeds, arrivals, "cpu"))
            row: dict[str, Any] = {"rate": str(rate), "schedule": schedule, "lookahead": lookahead}
            for name in FIGURES:
                seen = statistics.median(one[name] for one in measured[schedule, lookahead])
                row |= {name: seen, f"{name} predicted": found[name], f"{name} ratio": found[name] / seen}
            rows.append(row)
        report.show(f"Predicted ÷ measured, {rate:g} requests a second", [_short(row) for row in rows], str(speeds))
    results = {"rows": rows, "speeds of the last rate": asdict(speeds)}
    report.write(args.json, "simulate", results, keys={"rows": ["rate", "schedule", "lookahead"]})


def _given(config: EngineConfig) -> dict[str, Any]:
    return {name: value for name, value in asdict(config).items() if value != getattr(EngineConfig(), name)}


def _short(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if not name.endswith("predicted")}


if __name__ == "__main__":
    main()
