"""Decode throughput of the embedded model beside other engines, in one run on the same prompts.

    python -m benchmarks.bench_throughput --peers transformers vLLM --python vLLM=/somewhere/bin/python

Greedy, float32, prompt 64 tokens, 128 new tokens, batch 1, 8, 32. Each engine has a process of its own
(`benchmarks.engines` says which there are) and may have its own Python, with `--python`. They take turns within each
repeat, no prompt comes twice, and medians are compared. Needs torch (`pip install .[test]`), for transformers and to
write the model's files.

Prediction: a float32 step reads 540 MB of weights, some 47 ms on two cores, so about 20 tokens/s at batch 1; at 8 rows
and more the matrix products bound it. transformers pays for its Python in every step, so it stays behind at every size.
vLLM's and llama.cpp's attention is made for a CPU, ours is what XLA makes of gathers and small products, so from 8 rows
on we stay behind them.
"""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.engines import ENGINES, EngineProcess, Ids, Settings
from benchmarks.model_files import write_all

PROMPT_LEN = 64
OURS, *PEERS = ENGINES


def prompts(count: int, turn: int) -> Ids:
    return [[(7 * row + 13 * i + 97 * turn) % 40_000 + 100 for i in range(PROMPT_LEN)] for row in range(count)]


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int, default=os.cpu_count())
    options.add_argument("--peers", nargs="*", choices=PEERS, default=["transformers", "continuous batching"])
    options.add_argument(
        "--python", nargs="*", default=[], metavar="PEER=PATH", help="of peers in environments of their own"
    )
    args = options.parse_args()
    pythons = dict(pair.split("=", 1) for pair in args.python)
    if unknown := pythons.keys() - set(PEERS):
        options.error(f"--python: there is no peer {', '.join(map(repr, unknown))}; there are {', '.join(PEERS)}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        if args.peers:
            write_all(Path(folder))
        settings = Settings(max(args.batches), PROMPT_LEN, args.new_tokens, args.threads, folder)
        engines = {}
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # it ends as with Ctrl-C, and the engines with it
        try:
            for name in (OURS, *args.peers):
                engines[name] = EngineProcess(name, settings, **({"python": pythons[name]} if name in pythons else {}))
            for batch in args.batches:
                rows.append(compare(engines, batch, args))
                _write(args, rows)
        finally:
            for engine in engines.values():
                engine.close()
    note = f"prompt {PROMPT_LEN}, {args.new_tokens} new tokens, prefill included, median of {args.repeats}"
    lines = []
    for row in rows:
        for name in (OURS, *args.peers):
            words = {"tokens/s": f"{name} tokens/s", "ours ÷ it": f"ours / {name}", "same ids": f"same ids as {name}"}
            line = {"batch": row["batch"], "engine": name}
            lines.append(line | {word: row.get(key, "") for word, key in words.items()})
    report.show("SmolLM2-135M, greedy, float32", lines, note)


def compare(engines: dict[str, EngineProcess], batch: int, args: Any) -> dict[str, Any]:
    """A row: throughput of each, how often each is slower than ours, and how many of its ids are ours."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    answers: dict[str, Ids] = {}
    for turn in range(args.repeats + 1):
        for name, engine in engines.items():
            taken, answers[name] = engine.generate(prompts(batch, turn))
            if turn:  # the first round warms up
                seconds[name].append(taken)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    tokens = batch * args.new_tokens
    row: dict[str, Any] = {"batch": batch, f"{OURS} tokens/s": tokens / median[OURS]}
    for name in args.peers:
        same = sum(map(_same, answers[OURS], answers[name]))
        row |= {
            f"{name} tokens/s": tokens / median[name],
            f"ours / {name}": median[name] / median[OURS],
            f"same ids as {name}": f"{same}/{tokens}",
        }
    return row


def _write(args: Any, rows: list[dict[str, Any]]) -> None:
    plot = {
        "title": "Decode throughput",
        "table": "rows",
        "x": "batch",
        "lines": [f"{name} tokens/s" for name in (OURS, *args.peers)],
        "unit": "tokens a second",
        "log": True,
    }
    settings = {"threads": args.threads, "repeats": args.repeats, "new tokens": args.new_tokens}
    results = {"settings": settings, "rows": rows, "plots": [plot]}
    report.write(args.json, "throughput", results, keys={"rows": ["batch"]})


def _same(ours: list[int], theirs: list[int]) -> int:
    return sum(mine == other for mine, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
