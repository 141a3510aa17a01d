"""What a long prompt does to the rows that decode, for each schedule, on the embedded model.

8 rows decode; after some steps of nothing else a prompt of 6,000 tokens arrives, and once its first token is there
some more steps of nothing else follow. A gap is the time between two tokens of a decoding row. Each engine has run
a shorter prompt in the same way before, so that nothing runs for the first time.

    gap, p50 p99 max   before, during and after: from the prompt's arrival to its first token is "during"
    ratio              p99 during / p99 before; bar for overlap: 2.0
    CPU ratio          the same in CPU time of all threads: what is left of it where other programs use the machine
    over after         p99 during / p99 after
    over alone         p99 during / p99 of the same rows in the same steps of a run without the prompt: they are
                       some 700 tokens longer at the end than before, so their own attention takes more time

Predictions. A decode step takes 0.09 s. Serial: prompts first, but after 0.3 s a decode step gets in between, so a gap
is two steps of 512 prompt tokens at the worst, 5 to 10 s deep in the prompt; timeslice: one such step, half of it. Both
have the first token after some 50 s, which is what the prompt takes. Overlap with 64: the first step takes on 64 prompt
tokens, then 32 up to position 1,000 and 8 from there on, which is some 650 steps. A mixed step that was timed alone
takes 1.4 times a decode step with 16 tokens at the beginning, 1.7 at 3,000 and 2.1 at 5,900, and 1.66 with 4 tokens
there; so the dearest, 8 tokens at 5,900, should take 1.8 times: a ratio of 1.8, and a first token after 90 s.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks import report
from jaxoverlap import LLM, SamplingParams
from jaxoverlap.config import PRESETS
from jaxoverlap.engine.engine import Engine
from jaxoverlap.request import Request
from jaxoverlap.runtime.buckets import Buckets, row_multiple
from jaxoverlap.runtime.executables import SampleShape

ROWS = 8


class Watch:
    """Steps an engine and notes when each token came, by request."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.times: dict[int, list[tuple[float, float]]] = {}
        self.steps = 0

    def step(self) -> None:
        output = self.engine.step()
        now = time.perf_counter(), time.process_time()
        self.steps += 1
        for request in output.requests:
            self.times.setdefault(request.request_id, []).append(now)

    def gaps(self, requests: Sequence[Request]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """When each gap between two tokens began and ended, and the CPU time it took, each float64 [n]."""
        times = [np.array(self.times[request.request_id]) for request in requests]
        pairs = np.concatenate([np.stack([one[:-1], one[1:]], axis=2) for one in times])
        return pairs[:, 0, 0], pairs[:, 0, 1], pairs[:, 1, 1] - pairs[:, 1, 0]


def decode_alone(engine: Engine, steps: int, quiet_steps: int, rng: np.random.Generator) -> tuple[float, float]:
    """The rows of `play` without a prompt: p99 of their gaps in the steps in which it would have been there, in seconds
    of the wall and of all threads."""
    watch, vocab = Watch(engine), engine.limits.vocab_size
    params = SamplingParams(temperature=0, max_tokens=7000, ignore_eos=True)
    rows = [engine.add(rng.integers(100, vocab, 32), params) for _ in range(ROWS)]
    while any(len(request.output_ids) < 8 for request in rows):
        watch.step()
    for _ in range(quiet_steps):
        watch.step()
    started = time.perf_counter()
    for _ in range(steps):
        watch.step()
    for request in rows:
        engine.abort(request)
    while engine.has_work:
        watch.step()
    engine.loop.scheduler.flush_cache()
    begins, ends, cpu = watch.gaps(rows)
    return float(np.quantile((ends - begins)[begins >= started], 0.99)), float(
        np.quantile(cpu[begins >= started], 0.99)
    )


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
    arrived, cpu_arrived = time.perf_counter(), time.process_time()
    steps = watch.steps
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    prompt = engine.add(rng.integers(100, vocab, prompt_len), params)
    counters, done = engine.loop.scheduler.counters, []
    computed = counters.computed_tokens
    while not prompt.output_ids:
        watch.step()
        done.append((counters.computed_tokens - computed, time.process_time()))
    first_token, _ = watch.times[prompt.request_id][0]
    steps = watch.steps - steps
    lengths = [request.committed_len for request in rows]
    for _ in range(quiet_steps):
        watch.step()
    for request in rows:
        engine.abort(request)
    while engine.has_work:
        watch.step()
    engine.loop.scheduler.flush_cache()
    assert all(not request.num_preemptions for request in rows), "a row was preempted; the pool is too small"
    begins, ends, cpu = watch.gaps(rows)
    phases = {
        "before": (begins >= started) & (ends <= arrived),
        "during": (ends > arrived) & (begins < first_token),
        "after": begins >= first_token,
    }
    result: dict[str, Any] = {
        "steps": steps,
        "row length": int(np.mean(lengths)),
        "first token s": first_token - arrived,
    }
    for name, chosen in phases.items():
        gaps = 1e3 * (ends - begins)[chosen]
        result[f"{name} p50 ms"] = float(np.quantile(gaps, 0.5))
        result[f"{name} p99 ms"] = float(np.quantile(gaps, 0.99))
        result[f"{name} max ms"] = float(gaps.max())
        result[f"{name} CPU p50 ms"] = float(1e3 * np.quantile(cpu[chosen], 0.5))
        result[f"{name} CPU p99 ms"] = float(1e3 * np.quantile(cpu[chosen], 0.99))
    position, when = np.array(done).T
    taken = np.diff(when, prepend=cpu_arrived)
    eighths = np.minimum(8 * (position - 1) // prompt_len, 7)
    result["CPU by eighth ms"] = [float(1e3 * np.median(taken[eighths == i])) for i in range(8) if (eighths == i).any()]
    result["ratio"] = result["during p99 ms"] / result["before p99 ms"]
    result["CPU ratio"] = result["during CPU p99 ms"] / result["before CPU p99 ms"]
    result["over after"] = result["during p99 ms"] / result["after p99 ms"]
    return result


def engine_of(llm: LLM, schedule: str, mixed: int) -> Engine:
    """Another engine on the same model and memory, with every step it may need compiled."""
    preset = PRESETS[schedule]
    config = dataclasses.replace(
        llm.resolved.scheduler,
        mixed_steps=preset.mixed_steps,
        max_prefill_streak=preset.max_prefill_streak,
        max_mixed_tokens=mixed,
    )
    llm.runner.buckets = Buckets(config, row_multiple(llm.runner.step.attention))
    for shape in llm.runner.buckets:
        llm.runner.executables[shape], llm.runner.executables[SampleShape(shape.sample_rows, with_rules=False)]
    return Engine(config, llm.runner, lookahead=preset.lookahead, eos_token_ids=llm.engine.eos_token_ids)


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--prompt-len", type=int, default=6000)
    options.add_argument("--quiet", type=int, default=150, help="steps without the prompt, before and after")
    options.add_argument("--mixed", type=int, nargs="*", default=[64, 32, 16], help="max_mixed_tokens of overlap")
    options.add_argument("--schedules", nargs="*", default=["overlap", "serial", "timeslice"])
    args = options.parse_args()
    logging.getLogger("jaxoverlap.runtime.executables").setLevel(
        logging.ERROR
    )  # compiling later is what `engine_of` is for
    cases = []
    for schedule in args.schedules:
        cases += [(schedule, mixed) for mixed in (args.mixed if schedule == "overlap" else [max(args.mixed)])]
    rows = []
    settings = {"prompt_len": args.prompt_len, "quiet": args.quiet, "decoding_rows": ROWS}
    with LLM(max_running=ROWS + 1, max_model_len=8192, num_pages=2600, progress=False) as llm:
        for schedule, mixed in cases:
            engine, rng = engine_of(llm, schedule, mixed), np.random.default_rng(0)
            play(engine, 700, 10, rng)
            outcome = play(engine, args.prompt_len, args.quiet, rng)
            if schedule == "overlap":
                wall, cpu = decode_alone(engine, outcome["steps"], args.quiet, rng)
                outcome |= {"alone p99 ms": 1e3 * wall, "alone CPU p99 ms": 1e3 * cpu}
                outcome["over alone"] = outcome["during p99 ms"] / outcome["alone p99 ms"]
                outcome["CPU over alone"] = outcome["during CPU p99 ms"] / outcome["alone CPU p99 ms"]
            rows.append({"schedule": schedule, "mixed tokens": mixed if schedule == "overlap" else "", **outcome})
            keys = {"rows": ["schedule", "mixed tokens"]}
            # A run takes long; what is there is kept.
            report.write(args.json, "long_prompt", {"settings": settings, "rows": rows}, keys=keys)
    title = f"{args.prompt_len} prompt tokens among {ROWS} decoding rows, SmolLM2-135M"
    kept = ("schedule", "mixed tokens", "steps", "first token s", "row length", "ratio", "CPU ratio", "over after")
    kept += ("over alone", "CPU over alone")
    report.show(title, [{name: row.get(name, "") for name in kept} for row in rows], "bar for overlap: ratio ≤ 2.0")
    phases = [
        {
            "schedule": f"{row['schedule']} {row['mixed tokens']}",
            **{
                name.removesuffix(" ms"): value
                for name, value in row.items()
                if name.endswith(" ms") and "CPU" not in name
            },
        }
        for row in rows
    ]
    report.show("Gaps between tokens of a decoding row, ms", phases)
    depths = [
        {"schedule": phase["schedule"], **{f"{i + 1}/8": value for i, value in enumerate(row["CPU by eighth ms"])}}
        for phase, row in zip(phases, rows, strict=True)
        if len(row["CPU by eighth ms"]) == 8
    ]
    if depths:
        report.show("Median CPU time of a turn by how far into the prompt it is, ms", depths)


if __name__ == "__main__":
    main()
