"""Decode throughput of the embedded model beside transformers' `generate`, in one run on the same prompts.

Greedy, float32, prompt 64 tokens, 128 new tokens, batch 1, 8, 32; engines alternate within each repeat, and the
median of the repeats is compared. Needs torch (`pip install .[test]`).

Prediction: a float32 step reads 540 MB of weights, some 47 ms on two cores, so about 20 tokens/s at batch 1; at 8
rows and more the matrix products bound it. transformers pays
for its Python in every step, so it stays behind at every size.
"""

from __future__ import annotations

import statistics
import time

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


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    options.add_argument("--new-tokens", type=int, default=128)
    options.add_argument("--repeats", type=int, default=3)
    args = options.parse_args()
    engines = [Ours(args.batches, args.new_tokens), Transformers(args.batches, args.new_tokens)]
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
        ours, theirs = (statistics.median(seconds[engine.name]) for engine in engines)
        tokens = batch * args.new_tokens
        pairs = zip(*(answers[engine.name] for engine in engines), strict=True)
        same = sum(a == b for mine, other in pairs for a, b in zip(mine, other, strict=True))
        rows.append(
            {
                "batch": batch,
                "jaxoverlap tokens/s": tokens / ours,
                "transformers tokens/s": tokens / theirs,
                "ratio": theirs / ours,
                "same ids": f"{same}/{tokens}",
            }
        )
    note = f"prompt {PROMPT_LEN}, {args.new_tokens} new tokens, prefill included, median of {args.repeats}"
    report.show("SmolLM2-135M, greedy, float32", rows, note)
    report.write(args.json, "throughput", {"rows": rows})


if __name__ == "__main__":
    main()
