"""SmolLM2's tokenizer, rebuilt from the GGUF file."""

from __future__ import annotations

import json
import random
from itertools import groupby
from pathlib import Path

import pytest

from jaxoverlap.model.loading import open_model
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.text.detokenizer import IncrementalDetokenizer
from jaxoverlap.text.tokenizer import Tokenizer
from tests.text.test_output_assembler import check_all, whole

pytestmark = pytest.mark.real_model

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "golden.json").read_text("utf-8"))["items"]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_source(open_model(None).tokenizer_source)


@pytest.mark.parametrize("item", GOLDEN, ids=lambda item: item["text"][:20])
def test_golden_prompts_and_outputs(tokenizer, item):
    assert tokenizer.encode(item["text"]) == item["prompt_ids"]
    if item["kind"] == "chat":
        prompt = item["prompt"]
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        assert tokenizer.apply_chat_template(ChatPrompt(messages=messages)) == item["prompt_ids"]
    assert tokenizer.decode(item["output_ids"], skip_special_tokens=False) == item["output_text"]
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    deltas = [detokenizer.add([token_id]) for token_id in item["output_ids"]]
    assert "".join(deltas) + detokenizer.finish() == item["output_text"]


def test_special_tokens_are_the_control_tokens(tokenizer):
    assert tokenizer.special_ids == frozenset(range(17))
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49152, 1, (2,))
    assert not tokenizer.adds_bos


def test_every_digit_is_a_piece_of_its_own(tokenizer):
    # transformers' GGUF tokenizer leaves this split out: about one text in five differs.
    rng = random.Random(0)
    pieces = [
        "1",
        "23",
        "456",
        " 7",
        "x8",
        "½",
        "٣",
        "Ⅷ",
        "²",
        " the",
        "ab",
        ".",
        ",",
        "  ",
        "\n",
        "é",
        "日",
        "🔥",
        "'s",
        "-",
    ]
    together = 0
    for _ in range(2000):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 10)))
        parts = []
        for numeric, run in groupby(text, str.isnumeric):
            piece = "".join(run)
            parts += piece if numeric else [piece]
        ids = [token_id for part in parts for token_id in tokenizer.encode(part)]
        assert tokenizer.encode(text) == ids, text
        assert tokenizer.decode(ids) == text
        together += len(parts) > 1
    assert together > 1000


def test_random_ids_stream_as_they_decode(tokenizer):
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 40))]
        detokenizer = IncrementalDetokenizer(tokenizer)
        deltas = [detokenizer.add(ids[at : at + 3]) for at in range(0, len(ids), 3)]
        assert "".join(deltas) + detokenizer.finish() == tokenizer.decode(ids)


def test_stops_in_random_ids_cut_the_same_in_every_delta(tokenizer):
    rng = random.Random(2)
    matched = 0
    for trial in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(1, 40))]
        text = tokenizer.decode(ids)
        places = [rng.randrange(max(len(text), 1)) for _ in range(rng.randint(1, 4))]
        stops = [text[at : at + rng.randint(1, 12)] + rng.choice(["", "", "é"]) for at in places] if text else ["x"]
        min_tokens, include = rng.choice([0, 0, 5]), trial % 2 == 0
        check_all(tokenizer, ids, stops, rng, min_tokens=min_tokens, include=include)
        matched += whole(tokenizer, ids, stops)[2] is not None
    assert 100 < matched < 300
