"""What a text that must follow a grammar costs: on the host, at the door, and for its neighbours.

Host: SmolLM2's vocabulary of 49,152 ids. A grammar is walked along a text by its tokens, and timed are `advance` (which
works out the next mask) and `fill_mask`, per token. Compiling is timed from the request to its constraint.

Neighbours: a batch of rows decodes; none, one or all of them follow a grammar, in turn. The model has SmolLM2's
vocabulary but next to no layers, so the difference of two steps is what a grammar adds to a step of any model: two
launches for one, masks for all rows uploaded and applied, and their making, which nothing hides here. The bar is 5 % of
a step of the real model, some 60 ms for 8 rows on two quiet cores.

Prediction: some 50 µs a token where the grammar leaves little choice, 100 to 200 inside JSON's strings, where most of
the vocabulary may come; a few ms to compile. One constrained row of 8 adds 1 ms to a step, under 2 %.
"""

from __future__ import annotations

import json
import statistics
import threading
import time
from typing import Any

import numpy as np

from benchmarks import report
from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.model.loading import open_model
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from jaxoverlap.text.grammar_compiler import GrammarCompiler
from jaxoverlap.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 40}},
        "home": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}
SOMEBODY = {
    "name": "Ada Lovelace, Countess of Lovelace",
    "age": 36,
    "tags": ["mathematics", "the analytical engine", "poetry of numbers"] * 6,
    "home": {"city": "London, in the house at St James's Square"},
}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "JSON schema": ({"json_schema": PERSON}, json.dumps(SOMEBODY)),
    "any JSON": ({"any_json": True}, json.dumps(SOMEBODY, indent=2)),
    "regex, narrow": ({"regex": r"([0-9]{4}-[0-9]{2}-[0-9]{2},)*"}, "2024-05-17," * 20),
    "regex, wide": ({"regex": r"(?s)[^|]*\|?"}, "The quick brown fox jumps over the lazy dog. " * 12),
    "choices": ({"choices": [f"choice number {i} of many" for i in range(1000)]}, "choice number 777 of many"),
    "Lark": ({"grammar": 'start: (word " ")* \nword: /[a-z]+/'}, "the quick brown fox jumps over it all " * 12),
}


def host_costs(compiler: GrammarCompiler, tokenizer: Tokenizer, rounds: int) -> list[dict[str, Any]]:
    mask = np.zeros(compiler.vocabulary.num_words, dtype=np.int32)
    rows = []
    for name, (structure, text) in CASES.items():
        params = SamplingParams(structured_output=StructuredOutput(**structure))
        started = time.perf_counter()
        compiled = compiler.submit(params).result()
        compile_ms = 1e3 * (time.perf_counter() - started)
        started = time.perf_counter()
        compiler.submit(params).result()
        again_us = 1e6 * (time.perf_counter() - started)
        started = time.perf_counter()
        compiled.start()
        start_us = 1e6 * (time.perf_counter() - started)
        costs: list[float] = []
        for _ in range(rounds):
            constraint = compiled.start()
            for token_id in tokenizer.encode(text):
                started = time.perf_counter()
                constraint.advance(token_id)
                constraint.fill_mask(mask)
                costs.append(1e6 * (time.perf_counter() - started))
                assert constraint.error is None, (name, constraint.error)
                if constraint.is_complete:
                    break
        costs.sort()
        rows.append(
            {
                "grammar": name,
                "compile ms": compile_ms,
                "again µs": again_us,
                "start µs": start_us,
                "tokens": len(costs) // rounds,
                "µs mean": statistics.mean(costs),
                "p50": costs[len(costs) // 2],
                "p99": costs[int(0.99 * len(costs))],
                "max": costs[-1],
            }
        )
    return rows


def nested(depth: int, width: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {f"k{i}": schema for i in range(width)}}
    return schema


def door(compiler: GrammarCompiler) -> list[dict[str, Any]]:
    """Monstrous schemas, and how late another thread of this process wakes up meanwhile."""
    many = {f"key{i}": {"type": "string"} for i in range(8000)}
    monsters: dict[str, Any] = {
        "nothing": None,
        "nested 8": nested(8, 1),
        "nested 14": nested(14, 1),
        "nested 20": nested(20, 1),
        "nested 8, 3 wide": nested(8, 3),
        "nested 12, 2 wide": nested(12, 2),
        "8,000 properties": {"type": "object", "properties": many},
    }
    return [_at_the_door(compiler, name, schema) for name, schema in monsters.items()]


def _at_the_door(compiler: GrammarCompiler, name: str, schema: Any) -> dict[str, Any]:
    late: list[float] = []
    done = threading.Event()

    def tick() -> None:
        while not done.is_set():
            started = time.perf_counter()
            time.sleep(0.002)
            late.append(1e3 * (time.perf_counter() - started) - 2)

    ticking = threading.Thread(target=tick)
    ticking.start()
    started = time.perf_counter()
    outcome = "compiled"
    if schema is None:
        time.sleep(1.0)
        outcome = ""
    else:
        try:
            compiler.submit(SamplingParams(structured_output=StructuredOutput(json_schema=schema))).result()
        except InvalidRequestError as error:
            outcome = error.allowed[:60]
    seconds = time.perf_counter() - started
    done.set()
    ticking.join()
    late.sort()
    return {
        "schema": name,
        "seconds": seconds,
        "another thread late ms p50": late[len(late) // 2],
        "p99": late[int(0.99 * len(late))],
        "max": late[-1],
        "": outcome,
    }


def neighbours(compiler: GrammarCompiler, rows: int, new_tokens: int, rounds: int) -> list[dict[str, Any]]:
    import jax.numpy as jnp

    from jaxoverlap.engine.engine import Engine
    from jaxoverlap.model.config import ModelConfig
    from jaxoverlap.model.decoder import random_weights
    from jaxoverlap.model.rope import RopeConfig
    from jaxoverlap.request import RequestLimits
    from jaxoverlap.runtime.runner import DeviceRunner
    from jaxoverlap.scheduler.config import SchedulerConfig

    model = ModelConfig(
        family="llama",
        vocab_size=compiler.vocabulary.vocab_size,
        hidden_size=64,
        num_layers=1,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=64,
        norm_eps=1e-5,
        rope=RopeConfig(theta=1e4),
        tie_word_embeddings=True,
        max_position_embeddings=256,
    )
    limits = RequestLimits(model.vocab_size, 16 + new_tokens, 16, rows * 16)
    config = SchedulerConfig(limits=limits, max_running=rows, max_batched_tokens=16 * rows)
    runner = DeviceRunner(model, random_weights(model, np.float32, 0), config, dtype=jnp.float32)
    engine = Engine(config, runner, lookahead=1, constraints=compiler)
    free = SamplingParams(temperature=0, max_tokens=new_tokens)
    # Hardly anything is forbidden, to the end.
    bound = SamplingParams(
        temperature=0, max_tokens=new_tokens, structured_output=StructuredOutput(regex=r"(?s)[^|]*\|")
    )
    kinds = {"none": [free] * rows, "one": [free] * (rows - 1) + [bound], "all": [bound] * rows}
    walls: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name, params in kinds.items():
            for index, one in enumerate(params):
                engine.add([100 + 7 * index] * 16, one)
            engine.loop.times.clear()
            while engine.has_work:
                engine.step()
            if turn:  # the first warms up
                times = engine.loop.times.records
                walls[name] += [t.host + t.wait for t in times if t.launched_rows == t.launched_tokens == rows]

    def line(name: str) -> dict[str, Any]:
        p10, p50 = (1e3 * float(np.percentile(walls[name], p)) for p in (10, 50))
        base = 1e3 * float(np.percentile(walls["none"], 10))
        return {
            f"of {rows} rows follow a grammar": name,
            "step ms p10": p10,
            "p50": p50,
            "more than none ms": p10 - base,
        }

    return [line(name) for name in kinds]


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--rows", type=int, nargs="+", default=[8])
    options.add_argument("--new-tokens", type=int, default=48)
    args = options.parse_args()
    files = open_model(None)
    tokenizer = Tokenizer.from_source(files.tokenizer_source)
    compiler = GrammarCompiler(tokenizer, files.config.vocab_size, files.config.eos_token_ids)
    started = time.perf_counter()
    compiler.submit(SamplingParams(structured_output=StructuredOutput(regex="a"))).result()
    first = time.perf_counter() - started
    costs, monsters = host_costs(compiler, tokenizer, args.rounds), door(compiler)
    report.show("Host, per token of one row", costs, f"the first grammar of all, with the process: {first:.2f} s")
    report.show("At the door", monsters, "limit: 5 s of compiling in the trial process, and as long again here")
    batches = [neighbours(compiler, rows, args.new_tokens, args.rounds) for rows in args.rows]
    for batch in batches:
        report.show("Decode steps of next to no model", batch)
    compiler.close()
    results = {"first_seconds": first, "host": costs, "door": monsters, "neighbours": batches}
    report.write(args.json, "structured", results, keys={"host": ["grammar"], "door": ["schema"]})


if __name__ == "__main__":
    main()
