"""What a long prompt does to the rows that decode, for each schedule, on the embedded model.

8 rows decode; after some steps of nothing else a prompt of 6,000 tokens arrives, and once its first token is there
some more steps of nothing else follow. A gap is the time between two tokens of a decoding row. Each engine has run
a shorter prompt in the same way before, so that nothing runs for the first time.

    gap, p50 p99 max   before, during and after: from the prompt's arrival to its first token is "during"
    ratio              p99 during / p99 before; bar for overlap: 2.0
    over after         p99 during / p99 after; the rows are longer after, so attention alone takes more time

Predictions. A decode step takes 0.09 s. Serial: prompts first, but after 0.3 s a decode step gets in between, so a gap
is two steps of 512 prompt tokens at the worst, 5 to 10 s deep in the prompt; timeslice: one such step, half of it. Both
have the first token after some 50 s, which is what the prompt takes. Overlap: a step takes on 64 prompt tokens, fewer
the further in (7 at position 6,000), so that it never costs more than 64 tokens of the beginning, some 0.12 s: gaps of
0.2 s, a ratio of 2.0 to 2.5 with 64, 1.6 with 32 and 1.3 with 16; for a first token after 90, 130 and 200 s.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import report
from jaxoverlap import LLM, SamplingParams
from jaxoverlap.engine.engine import Engine
from jaxoverlap.request import Request

ROWS = 8


class Watch:
    """Steps an engine and notes when each token came, by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times: dict[int, list[float]] = {}
        self.steps = 0

    def step(self) -> None:
        output = self.engine.step()
        now = time.perf_counter()
        self.steps += 1
        for request in output.requests:
            self.times.setdefault(request.request_id, []).append(now)

    def gaps(self, requests: Sequence[Request], start: float, end: float) -> np.ndarray:
        """Seconds between tokens, of gaps that were open at some time from `start` to `end`."""
        found = []
        for request in requests:
            times = np.array(self.times[request.request_id])
            overlaps = (times[1:] > start) & (times[:-1] < end)
            found.append(np.diff(times)[overlaps])
        return np.concatenate(found)


def play(engine: Engine, prompt_len: int, quiet_steps: int, rng: np.random.Generator) -> dict[str, Any]:
    """The rows alone, the prompt among them, the rows alone again."""
    vocab = engine.limits.vocab_size
    watch = Watch(engine)
    params = SamplingParams(temperature=0, max_tokens=7000, ignore_eos=True)
    rows = [engine.add(rng.integers(100, vocab, 32), params) for _ in range(ROWS)]
    while any(len(request.output_ids) < 8 for request in rows):
        watch.step()
    started = time.perf_counter()
    for _ in range(quiet_steps):
        watch.step()
    arrived = time.perf_counter()
    steps = watch.steps
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt = engine.add(rng.integers(100, vocab, prompt_len), params)
    while not prompt.output_ids:
        watch.step()
    first_token = time.perf_counter()
    steps = watch.steps - steps
    lengths = [request.committed_len for request in rows]
    for _ in range(quiet_steps):
        watch.step()
    ended = time.perf_counter()
    for request in rows:
        engine.abort(request)
    while engine.has_work:
        watch.step()
    engine.loop.scheduler.flush_cache()
    assert all(not request.num_preemptions for request in rows), "a row was preempted; the pool is too small"
    phases = {
        "before": watch.gaps(rows, started, arrived - 1e-3),
        "during": watch.gaps(rows, arrived, first_token - 1e-3),
        "after": watch.gaps(rows, first_token + 1e-3, ended),
    }
    result: dict[str, Any] = {
        "steps": steps,
        "row length": int(np.mean(lengths)),
        "first token s": first_token - arrived,
    }
    for name, gaps in phases.items():
        for label, value in (("p50", np.quantile(gaps, 0.5)), ("p99", np.quantile(gaps, 0.99)), ("max", gaps.max())):
            result[f"{name} {label} ms"] = 1e3 * float(value)
    result["ratio"] = result["during p99 ms"] / result["before p99 ms"]
    result["over after"] = result["during p99 ms"] / result["after p99 ms"]
    return result


def measure(schedule: str, mixed: int | None, args: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    pages = (9 * args.prompt_len + ROWS * 2000) // 16
    with LLM(
        schedule=schedule,
        max_mixed_tokens=mixed,
        max_running=ROWS + 1,
        max_model_len=8192,
        num_pages=min(pages, 2600),
        progress=False,
    ) as llm:
        play(llm.engine, 700, 10, rng)
        return {"schedule": schedule, "mixed tokens": mixed or "", **play(llm.engine, args.prompt_len, args.quiet, rng)}


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--prompt-len", type=int, default=6000)
    options.add_argument("--quiet", type=int, default=150, help="steps without the prompt, before and after")
    options.add_argument("--mixed", type=int, nargs="*", default=[64, 32, 16], help="max_mixed_tokens of overlap")
    options.add_argument("--schedules", nargs="*", default=["serial", "timeslice", "overlap"])
    args = options.parse_args()
    cases = [(schedule, None) for schedule in args.schedules if schedule != "overlap"]
    if "overlap" in args.schedules:
        cases += [("overlap", mixed) for mixed in args.mixed]
    rows = []
    for schedule, mixed in cases:
        rows.append(measure(schedule, mixed, args))
        print(rows[-1], flush=True)
    title = f"{args.prompt_len} prompt tokens among {ROWS} decoding rows, SmolLM2-135M"
    kept = ("schedule", "mixed tokens", "steps", "first token s", "row length", "ratio", "over after")
    report.show(title, [{name: row[name] for name in kept} for row in rows], "bar for overlap: ratio ≤ 2.0")
    phases = [
        {
            "schedule": f"{row['schedule']} {row['mixed tokens']}",
            **{name.removesuffix(" ms"): value for name, value in row.items() if name.endswith(" ms")},
        }
        for row in rows
    ]
    report.show("Gaps between tokens of a decoding row, ms", phases)
    report.write(args.json, "long_prompt", {"rows": rows})


if __name__ == "__main__":
    main()
