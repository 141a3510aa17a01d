"""Text out: what a token costs on its way from id to a piece that may leave, early and late in a long answer.

One sequence of 32,768 tokens, a token at a time, as decoding gives them; CPU time of one core, by position. Two
tokenizers: SmolLM2's own (byte-level), and a sentencepiece kind with words and byte tokens, which decodes a window.
Texts are random tokens, so that characters break and special tokens come in between.

Prediction: flat, since nothing looks back further than the last piece: the last thousand tokens cost what the first do,
within 10 %. Some 3 µs a token byte-level, twice that where a window is decoded; stop strings add 0.2 µs a character,
log-probabilities with 5 alternatives 5 µs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks import report
from jaxoverlap.model.loading import open_model
from jaxoverlap.outputs import TokenScore
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.text.detokenizer import IncrementalDetokenizer
from jaxoverlap.text.output_assembler import OutputAssembler
from jaxoverlap.text.tokenizer import Tokenizer
from tests.text.test_detokenizer import llama2_decoder, word_tokenizer

POSITIONS = (1024, 4096, 32768)
WINDOW = 1024
STOPS = ("\n\nUser:", "</answer>", "Observation:", "```\n")


def tokens_of(tokenizer: Tokenizer, count: int) -> list[int]:
    """Random, one in ten a byte token where there are such."""
    rng = random.Random(0)
    some_bytes = [i for i in range(tokenizer.vocab_size) if tokenizer.is_byte_token(i)]
    words = sorted(set(range(tokenizer.vocab_size)) - set(some_bytes))
    return [rng.choice(some_bytes if some_bytes and rng.random() < 0.1 else words) for _ in range(count)]


def detokenizer(tokenizer: Tokenizer) -> Callable[[int], Any]:
    stream = IncrementalDetokenizer(tokenizer)
    return lambda token_id: stream.add((token_id,))


def assembler(tokenizer: Tokenizer, **sampling: Any) -> Callable[[int], Any]:
    pieces = OutputAssembler(tokenizer, SamplingParams(**sampling))
    if "logprobs" not in sampling:
        return lambda token_id: pieces.add((token_id,))
    top = tuple((token_id, -1.0) for token_id in range(5))
    return lambda token_id: pieces.add((token_id,), (TokenScore(token_id, -1.0, 1, top),))


CASES: dict[str, Callable[[Tokenizer], Callable[[int], Any]]] = {
    "detokenizer": detokenizer,
    "assembler": assembler,
    "with 4 stops": lambda tokenizer: assembler(tokenizer, stop=STOPS),
    "with 5 log-probabilities": lambda tokenizer: assembler(tokenizer, logprobs=5),
}


def microseconds(add: Callable[[int], Any], ids: list[int]) -> dict[int, float]:
    """Per token, over the last `WINDOW` tokens before each position."""
    found, at = {}, 0
    for position in POSITIONS:
        for token_id in ids[at : position - WINDOW]:
            add(token_id)
        started = time.process_time()
        for token_id in ids[max(at, position - WINDOW) : position]:
            add(token_id)
        found[position] = 1e6 * (time.process_time() - started) / WINDOW
        at = position
    return found


def measure(name: str, tokenizer: Tokenizer, repeats: int) -> list[dict[str, Any]]:
    ids = tokens_of(tokenizer, POSITIONS[-1])
    rows = []
    for case, make in CASES.items():
        runs = [microseconds(make(tokenizer), ids) for _ in range(repeats)]
        best = {position: min(run[position] for run in runs) for position in POSITIONS}
        rows.append(
            {
                "tokenizer": name,
                "what": case,
                **{f"µs at {position}": value for position, value in best.items()},
                "late / early": best[POSITIONS[-1]] / best[POSITIONS[0]],
                "tokens/s": 1e6 / best[POSITIONS[-1]],
            }
        )
    return rows


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--repeats", type=int, default=5)
    args = options.parse_args()
    rows = measure("SmolLM2", Tokenizer.from_source(open_model(None).tokenizer_source), args.repeats)
    rows += measure("sentencepiece kind", word_tokenizer(llama2_decoder(), byte_fallback=True), args.repeats)
    report.show("A token on its way out (CPU time, best of the repeats)", rows, "bar: late / early at most 1.1")
    report.write(args.json, "detokenizer", {"rows": rows}, keys={"rows": ["tokenizer", "what"]})


if __name__ == "__main__":
    main()
