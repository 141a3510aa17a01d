"""Pictures of the three schedules for docs/, from the embedded model: `python -m benchmarks.draw_schedules`.

Four requests decode when two longer prompts arrive, one after the other; each schedule serves the same, and what its
trace comes to is printed beside. The pictures are of the moment at which the first of the two arrives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import report
from jaxoverlap import LLM, SamplingParams
from jaxoverlap.observe.figures import save
from jaxoverlap.observe.trace_picture import to_figure

SCHEDULES = ("serial", "timeslice", "overlap")
FOLDER = Path(__file__).parent.parent / "docs" / "pictures"


def record(schedule: str) -> dict[str, Any]:
    """The trace of a run, after one that warms up."""
    long, short = (SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (24, 8))
    with LLM(schedule=schedule, max_running=8, max_model_len=512, max_batched_tokens=128, progress=False) as llm:
        for trial in range(2):
            llm.flush_cache()
            engine = llm.engine
            for row in range(4):
                engine.add([100 + row] * 32, long)
            if trial:
                llm.start_trace()
            for turn in range(200):
                if turn in (8, 12):
                    engine.add([200 + turn] * 200, short)
                if not engine.has_work:
                    break
                engine.step()
        return llm.stop_trace()


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--folder", type=Path, default=FOLDER)
    options.add_argument("--start-ms", type=float, default=600)
    options.add_argument("--length-ms", type=float, default=1200)
    options.add_argument("--traces", type=Path, help="keep them in this folder")
    args = options.parse_args()
    traces = {schedule: record(schedule) for schedule in SCHEDULES}
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
    save(to_figure(traces, start_ms=args.start_ms, length_ms=args.length_ms), str(args.folder / "schedules.svg"))
    report.show("The same six requests", rows)
    report.write(args.json, "schedules", {"rows": rows})


if __name__ == "__main__":
    main()
