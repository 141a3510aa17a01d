"""Host time of one decode step: plan + pack + launch + commit, waiting excluded.

Prediction: planning and committing are array operations over all rows, so a step costs a constant (about 50 µs)
and some 0.2 µs a row for handing out its token; under 0.4 ms at 64 rows and 1.0 ms at 256.
"""

from __future__ import annotations

import statistics

from benchmarks import report
from benchmarks.timed_device import timed_engine


def measure(rows: int, steps: int) -> dict:
    engine = timed_engine(rows, lookahead=1, step_seconds=0.0, steps=steps + 8)
    while engine.has_work:
        engine.step()
    times = [t for t in engine.loop.times.records if t.launched_rows == rows]
    micro = {
        name: 1e6 * statistics.median(getattr(t, name) for t in times) for name in ("plan", "launch", "commit", "host")
    }
    p99 = 1e6 * sorted(t.host for t in times)[int(0.99 * len(times))]
    return {
        "rows": rows,
        **{f"{n} µs": v for n, v in micro.items()},
        "host p99 µs": p99,
        "µs per row": micro["host"] / rows,
    }


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=1000)
    args = options.parse_args()
    rows = [measure(count, args.steps) for count in (1, 16, 64, 256, 1024)]
    report.show("Host time of a decode step (medians)", rows, "bar: 400 µs at 64 rows, 1000 µs at 256")
    report.write(args.json, "host", {"rows": rows}, keys={"rows": ["rows"]})


if __name__ == "__main__":
    main()
