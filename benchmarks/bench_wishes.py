"""What a step costs when its rows ask for something, relative to a step of greedy rows.

The real model decodes `--rows` rows, all with the same wish, or with a grammar for the first one; wishes take turns
(A B C … A B C …) and the medians of their decode steps are compared with greedy's in the same run. The host's share is
planning, launching and committing.

Prediction: penalties and biases read 6 bytes and a few operations per id and row: 64 rows of 49,152 ids are 3 million,
some 10 ms beside a step of 250. The chosen token's log-probability is two passes over the logits, under 5 %. Twenty
alternatives add a partial sort, 0.1 ms a row. Sampling with thresholds takes 32 to 64 passes. The bar is 1.10 for
penalties and for log-probabilities of the chosen token. A step with a row that follows a grammar has its second half
launched after the commit of the step before it, and a mask is made meanwhile: 1 to 2 ms, a bar of 1.05.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import report
from jaxoverlap import LLM, SamplingParams, StructuredOutput
from jaxoverlap.runtime.packing import packed_size

PROMPT = [504, 3575, 282, 4649, 314] * 4
WISHES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"temperature": 0.8},
    "top-k, top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.95},
    "penalties": {"temperature": 0, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "bias": {"temperature": 0, "logit_bias": {11: 1.0}, "banned_token_ids": [7]},
    "min_tokens": {"temperature": 0, "min_tokens": 8},
    "logprobs 0": {"temperature": 0, "logprobs": 0},
    "logprobs 20": {"temperature": 0, "logprobs": 20},
    "one grammar": {"temperature": 0},
}
GRAMMAR = StructuredOutput(regex=r"(?s)[^|]*\|")
"""Forbids next to nothing, and never ends."""


def decode_steps(llm: LLM, name: str, rows: int, steps: int) -> list[tuple[float, float, float]]:
    """Seconds of each full decode step: whole turn, host's part, wait."""
    engine = llm.engine
    params = SamplingParams(max_tokens=steps, ignore_eos=True, **WISHES[name])
    first = SamplingParams(max_tokens=steps, structured_output=GRAMMAR, **WISHES[name])
    for row in range(rows):
        engine.add(PROMPT, first if name == "one grammar" and row == 0 else params)
    while engine.loop.scheduler.state.rows.decoding.sum() < rows:
        engine.step()
    engine.loop.times.clear()
    while engine.has_work:
        engine.step()
    steady = [t for t in engine.loop.times.records if t.launched_rows == rows][2:-2]
    return [(t.host + t.wait, t.host, t.wait) for t in steady]


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--rows", type=int, default=64)
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--wishes", nargs="+", choices=WISHES, default=list(WISHES), help="greedy always takes part")
    args = options.parse_args()
    wishes = [name for name in WISHES if name in ("greedy", *args.wishes)]
    turns: dict[str, list[tuple[float, float, float]]] = {name: [] for name in wishes}
    context = len(PROMPT) + args.steps
    settings = {"max_running": args.rows, "max_model_len": context, "max_batched_tokens": 256, "mixed_steps": False}
    with LLM(progress=False, prefix_cache=False, **settings) as llm:
        for _ in range(args.repeats):
            for name in wishes:
                turns[name] += decode_steps(llm, name, args.rows, args.steps)
        shape = llm.runner.buckets.shape_of(_decoding(args.rows))
        up = 4 * packed_size(shape, llm.runner.step.pages_per_row)
    greedy = statistics.median(turn for turn, _, _ in turns["greedy"])
    rows = []
    for name, records in turns.items():
        turn, host, _ = (statistics.median(column) for column in zip(*records, strict=True))
        exposed = sum(wait < 50e-6 for _, _, wait in records) / len(records)
        down = 8 + (168 if "logprobs" in name else 0)
        rows.append(
            {
                "rows ask for": name,
                "step ms": 1e3 * turn,
                "x greedy": turn / greedy,
                "host ms": 1e3 * host,
                "overlapped share": 1 - exposed,
                "bytes up": up,
                "bytes down": down * shape.sample_rows,
            }
        )
    title = f"A decode step of {args.rows} rows of the real model (medians of {args.repeats} x {args.steps} steps)"
    report.show(
        title, rows, "bar: 1.10 for penalties and logprobs 0, 1.05 for one grammar; overlapped share 0.9 with logprobs"
    )
    report.write(args.json, "wishes", {"rows": rows}, keys={"rows": ["rows ask for"]})


def _decoding(rows: int) -> Any:
    class Plan:
        num_prefill_tokens, decode_rows = 0, range(rows)

    return Plan()


if __name__ == "__main__":
    main()
