"""What bit-equality whatever else runs costs: the deterministic mode beside the usual one, on the real model.

Two engines take turns (A B A B …): a prompt of 512 tokens alone, and decode steps with few and many rows.

Prediction: every deterministic step runs `max_running` rows and 32 prompt tokens, used or not, and samples for all of
them. With 32 rows that is twice the rows of a full decode step: about 1.6 times its time; with one row some ten times.
A prompt enters 32 tokens a step instead of 512, and attends row by row: three times as long at least.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks import report
from jaxoverlap import LLM, SamplingParams

PROMPT = [504, 3575, 282, 4649, 314]


def prefill_seconds(llm: LLM, length: int) -> float:
    llm.flush_cache()
    started = time.perf_counter()
    llm.generate((PROMPT * length)[:length], SamplingParams(temperature=0, max_tokens=1), progress=False)
    return time.perf_counter() - started


def decode_step_seconds(llm: LLM, rows: int, steps: int) -> float:
    engine = llm.engine
    for _ in range(rows):
        engine.add(PROMPT * 4, SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True))
    while engine.loop.scheduler.state.rows.decoding.sum() < rows:
        engine.step()
    engine.loop.times.clear()
    while engine.has_work:
        engine.step()
    return statistics.median(t.host + t.wait for t in engine.loop.times.records if t.launched_rows == rows)


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--steps", type=int, default=16)
    args = options.parse_args()
    settings: dict[str, Any] = {"max_running": 32, "max_model_len": 640, "num_pages": 1400, "progress": False}
    found: dict[tuple[str, bool], list[float]] = {}
    with LLM(**settings) as usual, LLM(deterministic=True, **settings) as deterministic:
        for _ in range(args.repeats):
            for is_deterministic, llm in ((False, usual), (True, deterministic)):
                found.setdefault(("prompt of 512", is_deterministic), []).append(prefill_seconds(llm, 512))
                for rows in (1, 8, 32):
                    seconds = decode_step_seconds(llm, rows, args.steps)
                    found.setdefault((f"decode step, {rows} rows", is_deterministic), []).append(seconds)
    rows_of_table = []
    for what in dict.fromkeys(name for name, _ in found):
        plain, fixed = (statistics.median(found[what, flag]) for flag in (False, True))
        ratio = fixed / plain
        rows_of_table.append({"what": what, "usual ms": 1e3 * plain, "deterministic ms": 1e3 * fixed, "ratio": ratio})
    report.show(f"Deterministic mode (medians of {args.repeats})", rows_of_table)
    report.write(args.json, "deterministic", {"rows": rows_of_table}, keys={"rows": ["what"]})


if __name__ == "__main__":
    main()
