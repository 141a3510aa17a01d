"""Deltas, joined, are the one-shot decoding; none ends inside a character."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.text.detokenizer import IncrementalDetokenizer, prompt_end
from jaxoverlap.text.tokenizer import Tokenizer
from tests.tiny_models import make_tokenizer

HARD_TEXT = "ďá👩‍👩‍👧🔥日本 plain, naïve e\u0301 \U0001f9e0"


def word_tokenizer(decoder, *, byte_fallback: bool) -> Tokenizer:
    """Sentencepiece's kind: words with ▁, byte tokens, two special tokens, one user-defined."""
    words = ["▁", "▁▁", "▁▁▁▁", "▁the", "the", "▁leading", "▁x", "x", ".", ",", "é", "日", "本", "\n", "ing", "\ufffd"]
    tokens = ["<unk>", "<s>", "</s>", *words, *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=byte_fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoder
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return Tokenizer(backend)


def llama2_decoder():
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


def nested_byte_level() -> Tokenizer:
    """Byte-level with a further step, so that joining bytes alone is not its decoding."""
    backend = make_tokenizer()
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("x", "<ex>")])
    return Tokenizer(backend)


TOKENIZERS = {
    "nested": nested_byte_level,
    "byte-level": lambda: Tokenizer(make_tokenizer()),
    "metaspace": lambda: word_tokenizer(decoders.Metaspace(), byte_fallback=False),
    "llama2": lambda: word_tokenizer(llama2_decoder(), byte_fallback=True),
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def deltas_of(tokenizer, ids, *, sizes, skip=True, prompt=()):
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip, prompt_ids=prompt)
    deltas, at = [], 0
    while at < len(ids):
        size = sizes()
        deltas.append(detokenizer.add(ids[at : at + size]))
        at += size
    return [*deltas, detokenizer.finish()]


@pytest.mark.parametrize("skip", [True, False])
def test_random_ids_join_to_the_one_shot_decoding(tokenizer, skip):
    # Any ids in any order: half characters, special tokens between them, ids beyond the vocabulary.
    rng = random.Random(1)
    for trial in range(400):
        top = tokenizer.vocab_size + (3 if trial % 4 == 0 else 0)
        ids = [rng.randrange(top) for _ in range(rng.randint(0, 24))]
        for size in (1, 2, 8, 0):
            sizes = (lambda: rng.randint(1, 5)) if size == 0 else (lambda size=size: size)
            deltas = deltas_of(tokenizer, ids, sizes=sizes, skip=skip)
            assert "".join(deltas) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_few_words_in_every_order_join_too(tokenizer):
    # Boundaries and spaces are where left context matters: many short lists of the same awkward tokens.
    awkward = ["▁", "▁▁", "▁▁▁▁", "▁leading", "▁x", ".", "é", "<s>", "<tool>", "Ġ", "ĠĠ", "Ã", "©", "\ufffd"]
    ids = [i for t in awkward if (i := tokenizer.backend.token_to_id(t)) is not None]
    rng = random.Random(2)
    for _ in range(600):
        chosen = rng.choices(ids, k=rng.randint(1, 6))
        assert "".join(deltas_of(tokenizer, chosen, sizes=lambda: 1)) == tokenizer.decode(chosen), chosen


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [(["▁▁▁▁", "."], "."), (["▁", "▁leading", "▁x"], " leading x"), (["▁the", "▁", "x"], "the x")],
)
def test_leading_spaces_go_where_decode_drops_them(tokens, expected):
    tokenizer = TOKENIZERS["metaspace"]()
    ids = [tokenizer.backend.token_to_id(token) for token in tokens]
    assert tokenizer.decode(ids) == expected
    for size in (1, 2, 8):
        assert "".join(deltas_of(tokenizer, ids, sizes=lambda size=size: size)) == expected


# ---------------------------------------------------------------- behind a prompt


@pytest.mark.parametrize("skip", [True, False])
def test_behind_a_prompt_the_text_is_what_decoding_both_adds(tokenizer, skip):
    rng = random.Random(3)
    awkward = ["▁", "▁▁", "▁▁▁▁", "▁leading", "▁x", "x", ".", "<s>", "</s>", "<tool>", "Ġ", "ĠĠ", "\ufffd", "é"]
    # The last may be part of a character, which is another test's.
    words = [i for t in awkward if (i := tokenizer.backend.token_to_id(t)) is not None]
    for trial in range(600):
        prompt, ids = rng.choices(words[:-1], k=rng.randint(0, 7)), rng.choices(words, k=rng.randint(1, 6))
        if trial % 3 == 0:
            ids = [rng.randrange(tokenizer.vocab_size) for _ in ids]
        before, both = (tokenizer.decode(some, skip_special_tokens=skip) for some in (prompt, prompt + ids))
        for size in (1, 8):
            deltas = deltas_of(tokenizer, ids, sizes=lambda size=size: size, skip=skip, prompt=np.array(prompt, int))
            assert before + "".join(deltas) == both, (prompt, ids)


def test_the_end_of_a_prompt_stands_for_it(tokenizer):
    rng = random.Random(4)
    for trial in range(300):
        skip = trial % 2 == 0
        prompt, ids = ([rng.randrange(tokenizer.vocab_size) for _ in range(rng.randint(0, 9))] for _ in range(2))
        end = prompt_end(tokenizer, np.array(prompt, int), skip)
        assert len(end) <= len(prompt) and prompt_end(tokenizer, end, skip) == end
        of_end, whole = (deltas_of(tokenizer, ids, sizes=lambda: 1, skip=skip, prompt=some) for some in (end, prompt))
        assert of_end == whole, (prompt, ids)


@pytest.mark.parametrize("name", ["metaspace", "llama2"])
def test_a_first_word_has_its_space_unless_the_prompt_adds_no_text(name):
    tokenizer = TOKENIZERS[name]()
    of = tokenizer.backend.token_to_id
    for prompt, skip, text in (
        (["▁the"], True, " leading x"),
        (["<s>", "▁the", "</s>"], True, " leading x"),  # as behind the opening of an answer
        (["<s>"], True, "leading x"),
        (["<s>"], False, " leading x"),
        ([], True, "leading x"),
    ):
        ids = [of("▁leading"), of("▁x")]
        deltas = deltas_of(tokenizer, ids, sizes=lambda: 1, skip=skip, prompt=[of(token) for token in prompt])
        assert "".join(deltas) == text
    assert deltas_of(tokenizer, [of("▁▁▁▁"), of("x")], sizes=lambda: 1, prompt=[of("▁the")])[0] == "    "


@pytest.mark.parametrize("name", ["byte-level", "nested", "llama2"])
def test_a_prompt_that_ends_inside_a_character(name):
    """It is a character of the text if the outputs complete it, and else the prompt's own U+FFFD."""
    tokenizer = TOKENIZERS[name]()

    def of(text: bytes) -> list[int]:
        if name == "llama2":
            return [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in text]
        single = {tokenizer.token_bytes(i): i for i in reversed(range(5, tokenizer.vocab_size))}
        return [single[bytes([byte])] for byte in text]

    def behind(prompt: bytes, *outputs: bytes) -> str:
        begun, ids = of(prompt), of(b"".join(outputs))
        start = [tokenizer.backend.token_to_id("▁the")] if name == "llama2" else of(b"t")
        return "".join(deltas_of(tokenizer, ids, sizes=lambda: 1, prompt=start + begun))

    assert behind(b"\xe6\x97", b"\xa5", b"\n") == "日\n"
    assert behind(b"\n\xe6", b"\x97\xa5.") == "日."
    assert behind(b"\xe6\x97", b"{") == "{"
    assert behind(b"\xe6\x97") == ""
    assert behind("日\n".encode(), b"\xff") == "\ufffd"  # what is read stays
    assert behind("日\n".encode(), "日".encode()) == "日"


# ---------------------------------------------------------------- when it comes


@pytest.mark.parametrize("name", ["byte-level", "nested", "llama2"])
def test_no_delta_shows_half_a_character(name):
    tokenizer = TOKENIZERS[name]()
    if name != "llama2":
        ids = tokenizer.encode(HARD_TEXT)
        assert len(ids) > len(HARD_TEXT)  # the text does fall into bytes
    else:
        ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in HARD_TEXT.encode()]
    deltas = deltas_of(tokenizer, ids, sizes=lambda: 1)
    assert "".join(deltas) == HARD_TEXT
    assert not any("\ufffd" in delta for delta in deltas)


def test_byte_level_deltas_come_as_soon_as_a_character_is_whole():
    tokenizer = TOKENIZERS["byte-level"]()
    detokenizer = IncrementalDetokenizer(tokenizer)
    for character in HARD_TEXT:
        ids = tokenizer.encode(character)
        assert [detokenizer.add([i]) for i in ids][-1] == character
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["metaspace", "llama2"])
def test_a_replacement_character_that_the_model_says_is_not_held_back(name):
    tokenizer = TOKENIZERS[name]()
    detokenizer = IncrementalDetokenizer(tokenizer)
    said = tokenizer.backend.token_to_id("\ufffd")
    assert [detokenizer.add([said]) for _ in range(3)] == ["\ufffd"] * 3 and not detokenizer.is_waiting


def test_words_are_not_held_back():
    tokenizer = TOKENIZERS["llama2"]()
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = [tokenizer.backend.token_to_id(token) for token in ("▁the", "▁x", ".")]
    assert [detokenizer.add([i]) for i in ids] == ["the", " x", "."]


@pytest.mark.parametrize(
    ("name", "half"), [("byte-level", ["ð", "Ł"]), ("llama2", ["<0xF0>", "<0x9F>"])], ids=["byte-level", "llama2"]
)
def test_output_cut_inside_a_character_ends_as_decode_ends(name, half):
    tokenizer = TOKENIZERS[name]()
    ids = [tokenizer.backend.token_to_id(token) for token in ["x", *half]]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert [detokenizer.add([i]) for i in ids] == ["x", "", ""]
    rest = detokenizer.finish()
    assert set(rest) == {"\ufffd"}
    assert "x" + rest == tokenizer.decode(ids)
    assert detokenizer.finish() == ""


def test_what_a_run_of_bytes_says_so_far_is_what_it_says_if_it_ends():
    tokenizer = TOKENIZERS["llama2"]()
    detokenizer = IncrementalDetokenizer(tokenizer)
    shown = []
    for byte in "é\n日".encode() + b"\x80":
        assert detokenizer.add([tokenizer.backend.token_to_id(f"<0x{byte:02X}>")]) == ""
        shown.append(detokenizer.tentative)
    assert shown == ["", "é", "é\n", "é\n", "é\n", "é\n日", ""]
    assert detokenizer.finish() == "\ufffd" * 7 and detokenizer.tentative == ""


def test_special_tokens_are_hidden_only_if_asked(tokenizer):
    special, tool = tokenizer.backend.token_to_id("</s>"), tokenizer.backend.token_to_id("<tool>")
    assert "".join(deltas_of(tokenizer, [special, tool], sizes=lambda: 1)) == "<tool>"
    assert "".join(deltas_of(tokenizer, [special, tool], sizes=lambda: 1, skip=False)) == "</s><tool>"


def test_negative_ids_are_refused_and_nothing_is_taken(tokenizer):
    detokenizer = IncrementalDetokenizer(tokenizer)
    with pytest.raises(InvalidRequestError, match="ids: -1"):
        detokenizer.add([5, -1])
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_a_token_costs_the_same_late_as_early(tokenizer, kind):
    rng = random.Random(0)
    words = [i for i in range(5, tokenizer.vocab_size) if not tokenizer.is_byte_token(i)]
    some_bytes = [i for i in range(5, tokenizer.vocab_size) if tokenizer.is_byte_token(i)] or words
    pool = words if kind == "words" else some_bytes
    detokenizer = IncrementalDetokenizer(tokenizer)

    def seconds(count: int) -> float:
        started = time.process_time()
        for _ in range(count):
            detokenizer.add([rng.choice(pool)])
        return time.process_time() - started

    seconds(500)
    early = seconds(2000)
    seconds(8000)
    assert seconds(2000) < 3 * early + 0.01
