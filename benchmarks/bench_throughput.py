"""Decode throughput of the embedded model beside transformers, in one run on the same prompts: `generate`, and its
continuous batching (`generate_batch`, paged attention over a KV cache as ours).

Greedy, float32, prompt 64 tokens, 128 new tokens, batch 1, 8, 32; engines alternate within each repeat, and the
median of the repeats is compared. Needs torch (`pip install .[test]`).

Prediction: a float32 step reads 540 MB of weights, some 47 ms on two cores, so about 20 tokens/s at batch 1; at 8
rows and more the matrix products bound it. transformers pays
for its Python in every step, so it stays behind at every size.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks import report

PROMPT_LEN = 64


def prompts(count: int) -> list[list[int]]:
    return [[(7 * row + 13 * i) % 40_000 + 100 for i in range(PROMPT_LEN)] for row in range(count)]


class Ours:
    name = "jaxoverlap"

    def __init__(self, batches: list[int], new_tokens: int) -> None:
        from jaxoverlap import LLM, SamplingParams

        rows = max(batches)
        self.params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        self.llm = LLM(max_running=rows, max_model_len=PROMPT_LEN + new_tokens, max_batched_tokens=512, progress=False)

    def generate(self, batch: int) -> list[list[int]]:
        return [output.token_ids for output in self.llm.generate(prompts(batch), self.params)]


class Transformers:
    name = "transformers"

    def __init__(self, batches: list[int], new_tokens: int) -> None:
        import torch

        from tests.real_model import transformers_model

        self.torch, self.new_tokens = torch, new_tokens
        self.model = transformers_model()

    def generate(self, batch: int) -> list[list[int]]:
        ids = self.torch.tensor(prompts(batch))
        with self.torch.inference_mode():
            output = self.model.generate(
                ids,
                attention_mask=self.torch.ones_like(ids),
                max_new_tokens=self.new_tokens,
                min_new_tokens=self.new_tokens,
                do_sample=False,
                pad_token_id=0,
            )
        return output[:, PROMPT_LEN:].tolist()


class ContinuousBatching(Transformers):
    name = "continuous batching"

    def __init__(self, batches: list[int], new_tokens: int) -> None:
        from transformers import GenerationConfig

        super().__init__(batches, new_tokens)
        # It has no minimum: an end of sequence that is no token makes its answers as long as the others'.
        self.config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def generate(self, batch: int) -> list[list[int]]:
        answers = self.model.generate_batch(prompts(batch), generation_config=self.config)
        return [answer.generated_tokens for answer in answers.values()]


PEERS = {engine.name: engine for engine in (Transformers, ContinuousBatching)}


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    args = options.parse_args()
    engines = [engine(args.batches, args.new_tokens) for engine in (Ours, *(PEERS[name] for name in args.peers))]
    rows = []
    for batch in args.batches:
        seconds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        answers = {}
        for repeat in range(args.repeats + 1):
            for engine in engines:
                started = time.perf_counter()
                answers[engine.name] = engine.generate(batch)
                if repeat:  # the first round warms up
                    seconds[engine.name].append(time.perf_counter() - started)
        median = {name: statistics.median(values) for name, values in seconds.items()}
        tokens = batch * args.new_tokens
        row: dict[str, Any] = {"batch": batch, f"{Ours.name} tokens/s": tokens / median[Ours.name]}
        for name in args.peers:
            same = sum(map(_same, answers[Ours.name], answers[name]))
            row |= {
                f"{name} tokens/s": tokens / median[name],
                f"ours / {name}": median[name] / median[Ours.name],
                f"same ids as {name}": f"{same}/{tokens}",
            }
        rows.append(row)
    note = f"prompt {PROMPT_LEN}, {args.new_tokens} new tokens, prefill included, median of {args.repeats}"
    report.show("SmolLM2-135M, greedy, float32", rows, note)
    plot = {
        "title": "Decode throughput",
        "table": "rows",
        "x": "batch",
        "lines": [f"{name} tokens/s" for name in (Ours.name, *args.peers)],
        "unit": "tokens a second",
        "log": True,
    }
    report.write(args.json, "throughput", {"rows": rows, "plots": [plot]})


def _same(ours: list[int], theirs: list[int]) -> int:
    return sum(mine == other for mine, other in zip(ours, theirs, strict=True))


if __name__ == "__main__":
    main()
