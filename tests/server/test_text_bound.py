"""Texts that can't fit are refused untokenized, and none that fits is."""

from __future__ import annotations

import random

import grpc
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.server.text_bound import TextBound
from jaxoverlap.text.tokenizer import Tokenizer
from jaxoverlap.v1 import generate_service_pb2 as pb
from tests.server.rig import generation
from tests.server.test_statuses import failure_of, field_of
from tests.server.toy import CONTEXT
from tests.toy_tokenizer import make_tokenizer

WORDS = ["the ", "then ", "there ", "  ", "é", "e\u0301", "\u1112\u1161\u11ab", "😀", "\t", "<end>", "日本"]


def byte_level(normalizer: normalizers.Normalizer | None = None) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    backend.train_from_iterator([" ".join(WORDS)] * 9, trainer)
    backend.add_special_tokens(["<end>"])
    return backend


def falling_back() -> tokenizers.Tokenizer:
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "t", "h", "e", "th", "the", "▁the"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    model = models.BPE(
        {t: i for i, t in enumerate(tokens)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return backend


def with_greedy_token() -> tokenizers.Tokenizer:
    backend = byte_level()
    backend.add_tokens([AddedToken("<mask>", lstrip=True)])
    return backend


@pytest.mark.parametrize("make", [byte_level, lambda: byte_level(normalizers.NFC()), falling_back])
def test_what_is_refused_has_more_tokens(make):
    tokenizer, rng = Tokenizer(make()), random.Random(1)
    bound = TextBound.of(tokenizer)
    assert bound is not None
    refused = 0
    for _ in range(300):
        text = "".join(rng.choices(WORDS, k=rng.randrange(1, 60)))
        count, most = len(tokenizer.encode(text)), rng.randrange(1, 40)
        try:
            bound.check(text, most)
        except InvalidRequestError:
            refused += 1
            assert count > most
    assert refused


def test_bytes_without_a_token_do_not_count():
    bound = TextBound.of(make_tokenizer())
    assert bound is not None
    bound.check("é" * 10_000 + "abc", 3)
    with pytest.raises(InvalidRequestError, match=r"^prompt: '10004 bytes' is not allowed; .* more than the 3 tokens"):
        bound.check("a" * 10_004, 3)


@pytest.mark.parametrize(
    "backend",
    [
        byte_level(normalizers.NFKC()),
        byte_level(normalizers.Strip()),
        byte_level(normalizers.Replace(tokenizers.Regex(" +"), " ")),
        with_greedy_token(),
        tokenizers.Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>")),
        tokenizers.Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True)),
    ],
)
def test_where_texts_may_shrink_nothing_is_refused(backend):
    assert TextBound.of(Tokenizer(backend)) is None


def test_a_text_that_can_not_fit_is_not_tokenized(rig, monkeypatch):
    model = rig.frontend._generate.model
    encoded: list[str] = []
    encode = model.tokenizer.encode
    monkeypatch.setattr(
        model.tokenizer, "encode", lambda text, **options: encoded.append(text) or encode(text, **options)
    )
    text = "x" * (1 << 20)
    chat = {"messages": [{"role": "user", "content": text}]}
    for call, given in (
        (rig.caller.answer, generation(None, chat=chat)),
        (rig.caller.generate.Tokenize, pb.TokenizeRequest(chat=chat)),
        (rig.caller.answer, generation(text)),
        (rig.caller.stream, generation(text)),
        (rig.caller.generate.Tokenize, pb.TokenizeRequest(text=text)),
    ):
        error = failure_of(call, given)
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT and field_of(error).endswith("prompt")
    assert encoded == []
    assert len(rig.caller.generate.Tokenize(pb.TokenizeRequest(text="x" * CONTEXT)).token_ids) == CONTEXT
