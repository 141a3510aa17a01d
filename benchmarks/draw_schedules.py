"""Pictures of the three schedules for docs/, from the embedded model: `python -m benchmarks.draw_schedules`.

Four requests decode when two longer prompts arrive, one after the other; each schedule serves the same, and what its
trace comes to is printed beside, and the moments of one token after the launch of its step. The pictures begin a little
before the first of the two arrives.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from jaxoverlap import LLM, SamplingParams
from jaxoverlap.observe.chrome_trace import REQUESTS
from jaxoverlap.observe.figures import save
from jaxoverlap.observe.step_log import StepRecord
from jaxoverlap.observe.trace_picture import to_figure

SCHEDULES = ("serial", "timeslice", "overlap")
FOLDER = Path(__file__).parent.parent / "docs" / "pictures"


def record(schedule: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The trace of a run, after one that warms up, and a token's moments."""
    long, short = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (24, 8))
    with LLM(schedule=schedule, max_running=8, max_model_len=512, max_batched_tokens=128, progress=False) as llm:
        for trial in range(2):
            llm.flush_cache()
            engine = llm.engine
            for row in range(4):
                engine.add([100 + row] * 32, long)
            if trial:
                llm.start_trace()
            turn = 0
            while engine.has_work or turn <= 12:
                if turn in (8, 12):
                    engine.add([200 + turn] * 200, short)
                engine.step()
                turn += 1
        moments = moments_of(engine.loop.log.last(turn))
        return llm.stop_trace(), {"schedule": schedule, **moments}


def moments_of(steps: Sequence[StepRecord]) -> dict[str, float]:
    """Of the token that is made by the middle one of the steps in which only decoding rows run, in ms."""
    alone = [index for index, step in enumerate(steps[:-1]) if step.kind == "decode" and steps[index + 1].launched]
    before, step, after = (steps[alone[len(alone) // 2] + offset] for offset in (-1, 0, 1))
    moments = {
        "step before materialised": min(before.ready, before.read),  # a thread saw it, perhaps late
        "materialised": min(step.ready, step.read),
        "step after launched": after.launched,
        "committed": step.committed,
    }
    return {name: 1e3 * (moment - step.launched) for name, moment in moments.items()}


def arrival_ms(trace: dict[str, Any], index: int) -> float:
    """When the request came that came as number `index`, counted from the first step's launch."""
    events = trace["traceEvents"]
    first_step = min(event["ts"] for event in events if event.get("cat") == "device")
    queued = [event["ts"] for event in events if event["pid"] == REQUESTS and event["name"] == "queued"]
    return (sorted(queued)[index] - first_step) / 1e3


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--folder", type=Path, default=FOLDER)
    options.add_argument("--before-ms", type=float, default=200)
    options.add_argument("--length-ms", type=float, default=1600)
    options.add_argument("--traces", type=Path, help="keep them in this folder")
    args = options.parse_args()
    recorded = {schedule: record(schedule) for schedule in SCHEDULES}
    traces = {schedule: trace for schedule, (trace, _) in recorded.items()}
    moments = [token for _, token in recorded.values()]
    rows = []
    for schedule, trace in traces.items():
        if args.traces is not None:
            (args.traces / f"{schedule}.json").write_text(json.dumps(trace))
        summary = trace["otherData"]["summary"]
        steps, host, exposed = summary["steps"], sum(summary["host"].values()), sum(summary["exposed"].values())
        rows.append(
            {
                "schedule": schedule,
                "steps": steps,
                "s": summary["seconds"],
                "device busy": summary["device_busy"] / summary["seconds"],
                "host ms a step": 1e3 * host / steps,
                "exposed ms a step": 1e3 * exposed / steps,
            }
        )
    args.folder.mkdir(parents=True, exist_ok=True)
    starts = {schedule: arrival_ms(trace, 4) - args.before_ms for schedule, trace in traces.items()}
    save(to_figure(traces, start_ms=starts, length_ms=args.length_ms), str(args.folder / "schedules.svg"))
    report.show("The same six requests", rows)
    report.show("Moments of a token, ms after its step was launched", moments)
    keys = {"rows": ["schedule"], "moments": ["schedule"]}
    report.write(args.json, "schedules", {"rows": rows, "moments": moments}, keys=keys)


if __name__ == "__main__":
    main()
