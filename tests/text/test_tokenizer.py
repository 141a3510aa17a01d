"""Tokenizers from folders and from GGUF metadata agree with the originals; what can't be rebuilt is refused."""

from __future__ import annotations

import json
import random
import threading
import time

import pytest
import tokenizers
import transformers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxoverlap.errors import InvalidRequestError, ModelError
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.text.tokenizer import Tokenizer
from jaxoverlap.text.tokenizer_gguf import from_gguf
from tests.tiny_models import make_tokenizer, save_tokenizer, tokenizer_metadata

TEXTS = [
    "",
    " ",
    "The capital of France is",
    "  two  spaces\n\n\ttabs\r\nand 1234567 digits, ½ ² ٣ Ⅷ",
    "<s>already begun</s>",
    "<|im_start|>user\nhi<|im_end|>\n<tool>call</tool>",
    "日本語のテキスト 🔥👩‍👩‍👧 ďá naïve e\u0301",
    "don't they'll WE'VE I'm",
    "\u00a0\u200b\ufeff\0\x7f",
]


def random_texts(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    pieces = [
        "the",
        " quick",
        "123",
        " 42",
        "é",
        "日本",
        "🔥",
        "\n",
        "  ",
        "'s",
        "<s>",
        "<tool>",
        "<|im_end|>",
        ".",
        "½",
        "٣",
    ]
    return ["".join(rng.choices(pieces, k=rng.randint(1, 12))) for _ in range(count)]


@pytest.fixture
def folder(tmp_path):
    return save_tokenizer(make_tokenizer(), tmp_path)


def hf(folder):
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.mark.parametrize("bos", [False, True])
def test_folder_equals_transformers(tmp_path, bos):
    folder = save_tokenizer(make_tokenizer(bos=bos), tmp_path)
    ours, theirs = Tokenizer.from_folder(folder), hf(folder)
    for text in TEXTS + random_texts(300):
        for special in (True, False):
            expected = theirs.encode(text, add_special_tokens=special)
            if bos and special and text.startswith("<s>"):  # the one documented difference
                assert expected[:2] == [1, 1]
                expected = expected[1:]
            assert ours.encode(text, add_special_tokens=special) == expected
            for skip in (True, False):
                assert ours.decode(expected, skip_special_tokens=skip) == theirs.decode(
                    expected, skip_special_tokens=skip
                )


def test_gguf_equals_the_folder(folder):
    from_metadata, from_files = Tokenizer.from_gguf(tokenizer_metadata(make_tokenizer())), Tokenizer.from_folder(folder)
    assert from_metadata.special_ids == from_files.special_ids == {0, 1, 2, 3, 4}
    assert from_metadata.vocab_size == from_files.vocab_size
    assert (from_metadata.bos_token_id, from_metadata.eos_token_ids) == (1, (2,))
    for text in TEXTS + random_texts(300):
        ids = from_files.encode(text)
        assert from_metadata.encode(text) == ids
        for skip in (True, False):
            assert from_metadata.decode(ids, skip_special_tokens=skip) == from_files.decode(
                ids, skip_special_tokens=skip
            )


def test_from_source_takes_both(folder):
    assert Tokenizer.from_source(folder).encode("hi 12") == Tokenizer.from_source(str(folder)).encode("hi 12")
    assert Tokenizer.from_source(tokenizer_metadata(make_tokenizer())).encode("hi 12") == Tokenizer.from_source(
        folder
    ).encode("hi 12")


# What each named pre-tokenizer does to digits and contractions


def merged_everything(pre: str) -> Tokenizer:
    """A vocabulary that can hold any run of digits as one token: only the split keeps them apart."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    runs = ["12", "123", "1234", "12345", "Ġ1", "Ġ12"]
    merges = ["1 2", "12 3", "123 4", "1234 5", "Ġ 1", "Ġ1 2"]
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [*alphabet, *runs],
            "tokenizer.ggml.token_type": [1] * (len(alphabet) + len(runs)),
            "tokenizer.ggml.merges": merges,
        }
    )


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["Ġ", "1", "2", "3", "4", "5"]),
        ("qwen2", ["Ġ", "1", "2", "3", "4", "5"]),
        ("llama-bpe", ["Ġ", "123", "4", "5"]),
        ("gpt-2", ["Ġ", "12345"]),
    ],
)
def test_digits_are_split_as_the_name_says(pre, pieces):
    tokenizer = merged_everything(pre)
    assert [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(" 12345")] == pieces


def test_qwen2_composes_characters_first():
    assert merged_everything("qwen2").encode("e\u0301") == merged_everything("qwen2").encode("é")
    assert merged_everything("gpt-2").encode("e\u0301") != merged_everything("gpt-2").encode("é")


def test_llama_bpe_takes_whole_words_before_merges_and_begins_with_bos():
    metadata = tokenizer_metadata(make_tokenizer(), pre="llama-bpe")
    metadata["tokenizer.ggml.tokens"] = [*metadata["tokenizer.ggml.tokens"], "zqx"]  # no merge makes it
    metadata["tokenizer.ggml.token_type"] = [*metadata["tokenizer.ggml.token_type"], 1]
    del metadata["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_gguf(metadata).encode("zqx") == [1, len(metadata["tokenizer.ggml.tokens"]) - 1]
    assert Tokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "qwen2"}).encode("zqx") != [1, 314]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'.*allowed: gpt2"),
        ({"model": None}, "tokenizer.ggml.model is None"),
        ({"pre": "deepseek-llm"}, "tokenizer.ggml.pre is 'deepseek-llm'.*allowed: gpt-2, llama-bpe, qwen2, smollm"),
        ({"pre": "default"}, "tokenizer.ggml.pre is 'default'"),
        ({"pre": None}, "tokenizer.ggml.pre is None"),
        ({"pre": ["qwen2"]}, r"tokenizer.ggml.pre is \['qwen2'\]; it must be a name"),
        ({"merges": None}, "merges are needed"),
        ({"tokens": 1.5}, "tokens .texts.*are needed"),
        ({"token_type": 1}, "token_type .*are needed"),
        ({"tokens": ["a", []], "token_type": [1, 1]}, "tokens .texts.*are needed"),
        ({"token_type": [1]}, "one per token"),
        ({"tokens": ["a", "a"], "token_type": [1, 1]}, "a token appears twice"),
        ({"merges": ["zz yy"]}, "can't be built"),
        ({"eos_token_id": 10_000}, "eos_token has id 10000"),
    ],
)
def test_gguf_tokenizers_that_can_not_be_rebuilt_are_refused(change, named):
    metadata = tokenizer_metadata(make_tokenizer()) | {f"tokenizer.ggml.{k}": v for k, v in change.items()}
    with pytest.raises(ModelError, match=named):
        from_gguf(metadata)


@pytest.mark.parametrize("key", ["tokenizer.chat_template", "tokenizer.chat_template.tool_use"])
def test_a_gguf_chat_template_that_is_no_text_is_refused(key):
    with pytest.raises(ModelError, match=r"tokenizer\.chat_template: the template '\w+' is 5; it must be a text"):
        from_gguf(tokenizer_metadata(make_tokenizer()) | {key: 5})


# BOS


def test_raw_text_gets_exactly_one_bos(tmp_path):
    tokenizer = Tokenizer.from_folder(save_tokenizer(make_tokenizer(bos=True), tmp_path))
    assert tokenizer.encode("hi").count(1) == 1
    assert tokenizer.encode("<s>hi") == tokenizer.encode("hi")  # a written BOS counts
    assert tokenizer.encode("<s><s>hi").count(1) == 2  # only the added one is dropped
    assert tokenizer.encode("").count(1) == 1
    assert tokenizer.encode("hi", add_special_tokens=False).count(1) == 0
    assert tokenizer.encode("<s>hi", add_special_tokens=False).count(1) == 1


def test_a_tokenizer_that_adds_no_bos_leaves_written_ones_alone():
    assert Tokenizer(make_tokenizer(), bos_token_id=1).encode("<s><s>hi").count(1) == 2


@pytest.mark.parametrize("says", [True, False])
def test_tokenizer_json_decides_about_bos_not_the_config(tmp_path, says):
    for bos in (True, False):
        folder = save_tokenizer(make_tokenizer(bos=bos), tmp_path, add_bos_token=says)
        ids = Tokenizer.from_folder(folder).encode("a")
        assert (ids[0] == 1) is bos
        assert ids == hf(folder).encode("a")


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_gguf_says_whether_bos_and_eos_are_added(bos, eos):
    metadata = tokenizer_metadata(make_tokenizer())
    metadata |= {"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos}
    plain = Tokenizer(make_tokenizer()).encode("hi 12")
    assert Tokenizer.from_gguf(metadata).encode("hi 12") == [1] * bos + plain + [2] * eos


# Files


def test_truncation_and_padding_left_from_training_are_off(tmp_path):
    backend = make_tokenizer()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = Tokenizer.from_folder(save_tokenizer(backend, tmp_path))
    plain = Tokenizer(make_tokenizer())
    for text in ("hi", "a much longer text than four tokens"):
        assert tokenizer.encode(text) == plain.encode(text)


def test_special_tokens_named_only_in_the_config_are_special(tmp_path):
    backend = make_tokenizer()
    folder = save_tokenizer(backend, tmp_path, eos_token="<tool>")
    ours = Tokenizer.from_folder(folder)
    tool = backend.token_to_id("<tool>")
    assert tool in ours.special_ids and ours.eos_token_ids == (tool,)
    assert ours.decode([tool]) == hf(folder).decode([tool], skip_special_tokens=True) == ""
    added = {str(backend.token_to_id("e")): {"content": "e", "special": True}}
    assert (
        backend.token_to_id("e")
        in Tokenizer.from_folder(save_tokenizer(backend, tmp_path, added_tokens_decoder=added)).special_ids
    )


NEW = {
    "content": "<|new|>",
    "special": True,
    "lstrip": False,
    "rstrip": False,
    "single_word": False,
    "normalized": False,
}
NEW_ID = Tokenizer(make_tokenizer()).vocab_size
ADDED = {
    "added_tokens_decoder": {"added_tokens_decoder": {str(NEW_ID): NEW}},
    "with few words": {"added_tokens_decoder": {str(NEW_ID): {"content": "<|new|>"}}},
    "two": {"added_tokens_decoder": {str(NEW_ID + 1): NEW, str(NEW_ID): {**NEW, "content": "<|newer|>"}}},
    "additional": {"additional_special_tokens": ["<tool>", "<|new|>"]},
    "objects": {"additional_special_tokens": [{**NEW, "__type": "AddedToken"}]},
    "extra": {"extra_special_tokens": ["<|new|>"]},
    "a role of its own": {"image_token": "<|new|>", "prefix_token": "<|newer|>"},
    "extra with roles": {"extra_special_tokens": {"image_token": "<|new|>"}, "audio_token": "<|newer|>"},
    "an object": {"image_token": {"content": "<|new|>", "__type": "AddedToken"}, "add_bos_token": True},
    "a role": {"pad_token": "<|new|>", "eos_token": {"content": "<|newer|>", "__type": "AddedToken"}},
    "named": {"extra_special_tokens": {"think_start": "<|new|>", "think_end": "<tool>"}},
    "the model's own": {"image_token": "<|new|>", "add_thing_token": True, "end_of_turn_token": "<tool>"},
    "split": {"split_special_tokens": True},
    "added_tokens.json": {},
}


@pytest.mark.parametrize("name", ADDED)
def test_tokens_that_tokenizer_json_lacks_are_those_of_transformers(tmp_path, name):
    folder = save_tokenizer(make_tokenizer(bos=True), tmp_path, **ADDED[name])
    if name == "added_tokens.json":
        (folder / "added_tokens.json").write_text(json.dumps({"<|new|>": NEW_ID, "</s>": 2}))
    ours, theirs = Tokenizer.from_folder(folder), hf(folder)
    text = "a <tool> b <|new|>c<|newer|></s> <s>"
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    for skip in (True, False):
        assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize("added", [{}, {"added_tokens_decoder": {"2": {"content": "</s>", "special": True}}}], ids=len)
def test_special_tokens_map_counts_in_the_older_form_only(tmp_path, added):
    folder = save_tokenizer(
        make_tokenizer(),
        tmp_path,
        bos_token="",
        image_token="<tool>",
        chat_template="{{ bos_token }}{{ image_token }}{{ cls_token }}{{ eos_token }}",
        **added,
    )
    roles = {"bos_token": {"content": "<s>", "lstrip": False}, "cls_token": "<unk>", "eos_token": "<|im_end|>"}
    (folder / "special_tokens_map.json").write_text(json.dumps(roles))
    ours, theirs = Tokenizer.from_folder(folder), hf(folder)
    assert ours.eos_token_ids == (theirs.eos_token_id,) == ((2,) if added else (4,))
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(ChatPrompt(messages=messages)) == theirs.apply_chat_template(
        messages, return_dict=False
    )


@pytest.mark.parametrize("token_id", [3, NEW_ID + 1])
def test_an_added_token_whose_id_does_not_fit_is_refused(tmp_path, token_id):
    folder = save_tokenizer(make_tokenizer(), tmp_path, added_tokens_decoder={str(token_id): NEW})
    with pytest.raises(ModelError, match=rf"'<\|new\|>' has id {token_id}, .*room for {NEW_ID}"):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize(
    "fields",
    [
        {"added_tokens_decoder": [1]},
        {"added_tokens_decoder": {"260": "x"}},
        {"added_tokens_decoder": {"x": NEW}},
        {"added_tokens_decoder": {"260": {"special": True}}},
        {"added_tokens_decoder": {"260": {"content": 3}}},
        {"additional_special_tokens": "<x>"},
        {"additional_special_tokens": [3]},
        {"extra_special_tokens": {"think": 3}},
        {"image_token": {"special": True}},
        {"eos_token": 7},
        {"eos_token": {"special": True}},
        {"chat_template": [1]},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": {"default": 1}},
        {"chat_template": 3},
    ],
    ids=str,
)
def test_a_tokenizer_config_of_the_wrong_form_is_refused_by_field(tmp_path, fields):
    folder = save_tokenizer(make_tokenizer(), tmp_path, **fields)
    with pytest.raises(ModelError, match=rf"tokenizer_config\.json: {next(iter(fields))}.* is .*it must be"):
        Tokenizer.from_folder(folder)


def test_older_forms_come_through_transformers(tmp_path):
    data = json.loads(make_tokenizer().to_str())
    (tmp_path / "vocab.json").write_text(json.dumps(data["model"]["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(m) for m in data["model"]["merges"]))
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.encode("the quick 12") == transformers.AutoTokenizer.from_pretrained(tmp_path).encode(
        "the quick 12"
    )
    assert tokenizer.decode(tokenizer.encode("the quick 12")) == "the quick 12"
    assert tokenizer.eos_token_ids == (2,)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json: the tokenizer can't be built"):
        Tokenizer.from_folder(tmp_path)
    save_tokenizer(make_tokenizer(), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json: expected a JSON object"):
        Tokenizer.from_folder(tmp_path)


# Ids and bytes


def test_ids_beyond_the_vocabulary_decode_to_nothing():
    tokenizer = Tokenizer(make_tokenizer())
    ids = tokenizer.encode("hello")
    assert tokenizer.vocab_size == max(tokenizer.backend.get_vocab().values()) + 1
    assert tokenizer.decode([*ids, tokenizer.vocab_size, 2**31 - 1, 2**32, 2**70]) == "hello"
    assert tokenizer.token_bytes(tokenizer.vocab_size) is None and tokenizer.token_bytes(2**32) is None
    with pytest.raises(InvalidRequestError, match="ids: -1"):
        tokenizer.decode([*ids, -1])


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff"])
def test_text_that_is_not_unicode_is_refused(text):
    with pytest.raises(InvalidRequestError, match=r"prompt: .*valid Unicode"):
        Tokenizer(make_tokenizer()).encode(text)
    with pytest.raises(InvalidRequestError, match="prompt: 3"):
        Tokenizer(make_tokenizer()).encode(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("decoder", [decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])])
def test_token_bytes_join_to_the_text(decoder):
    backend = make_tokenizer()
    backend.decoder = decoder
    tokenizer = Tokenizer(backend)
    for text in TEXTS:
        parts = [tokenizer.token_bytes(i) for i in tokenizer.encode(text)]
        assert b"".join(part or b"?" for part in parts).decode() == text
    emoji = [tokenizer.token_bytes(i) for i in tokenizer.encode("\U0001f9e0")]
    assert len(emoji) > 1 and b"".join(filter(None, emoji)) == "\U0001f9e0".encode()  # halves are bytes, not U+FFFD


def test_token_bytes_of_byte_fallback():
    vocab = {"<unk>": 0, "▁the": 1, **{f"<0x{byte:02X}>": byte + 2 for byte in range(256)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<unk>", special=True)])
    tokenizer = Tokenizer(backend)
    assert [tokenizer.token_bytes(i) for i in (1, 2, 0xE6 + 2)] == [b" the", b"\0", b"\xe6"]
    assert [tokenizer.is_byte_token(i) for i in (0, 1, 2)] == [False, False, True]


def test_a_long_prompt_lets_other_threads_run():
    tokenizer = Tokenizer(make_tokenizer())
    text = "the quick brown fox jumps over 42 dogs. " * 20_000
    thread = threading.Thread(target=tokenizer.encode, args=[text])
    started = last = time.perf_counter()
    thread.start()
    longest = 0.0
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < 0.7 * (last - started)
