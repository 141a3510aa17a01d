"""Small vocabularies, random JSON schemas, and walks that choose tokens where a model would."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from jaxoverlap.text.grammar import GrammarConstraint
from jaxoverlap.text.grammar_compiler import GrammarCompiler
from jaxoverlap.text.tokenizer import Tokenizer

SPECIAL = ("<pad>", "<s>", "</s>", "<|end|>", "<|tool|>")
EOS_IDS = (2, 3)
TABLE_SIZE = 330
"""More rows than the tokenizer has tokens, as padded tables do."""

_PIECES = ['{"', '":', '",', '"}', "}}", "[]", "{}", ', "', '": "', "true", "false", "null", "00", "ab", " a"]
_CHARS = pre_tokenizers.ByteLevel.alphabet()


@functools.cache
def byte_level_tokenizer() -> Tokenizer:
    """All bytes, some pieces of JSON, special tokens and a user-defined one."""
    pieces = [piece.replace(" ", "Ġ") for piece in _PIECES]
    vocab = {token: i for i, token in enumerate([*SPECIAL, *sorted(_CHARS), *pieces])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.add_tokens([AddedToken("<note>", special=False, normalized=False)])
    return Tokenizer(backend, eos_token_ids=EOS_IDS[:1])


@functools.cache
def sentencepiece_tokenizer(*, byte_fallback: bool) -> Tokenizer:
    """Words with ▁ and byte tokens; its decoding drops a space at the beginning of a text."""
    words = ["▁", "▁▁", "▁a", "▁b", "ab", "▁{", *'abcnulltre{}[]":,.12é日本']
    vocab = {
        token: i
        for i, token in enumerate(dict.fromkeys([*SPECIAL, *words, *(f"<0x{byte:02X}>" for byte in range(256))]))
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<pad>", byte_fallback=byte_fallback))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps) if byte_fallback else decoders.Metaspace()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return Tokenizer(backend, eos_token_ids=EOS_IDS[:1])


def make_compiler(tokenizer: Tokenizer | None = None, table_size: int = TABLE_SIZE, **changes: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer or byte_level_tokenizer(), table_size, EOS_IDS, **changes)


def constraint(
    compiler: GrammarCompiler, sampling: dict[str, Any] | None = None, **structure: Any
) -> GrammarConstraint:
    params = SamplingParams(structured_output=StructuredOutput(**structure), **(sampling or {}))
    made = compiler.submit(params).result().start()
    assert isinstance(made, GrammarConstraint)
    return made


def allowed_ids(made: GrammarConstraint, table_size: int = TABLE_SIZE) -> list[int]:
    """What the mask allows, read as the device would."""
    words = np.full(-(-table_size // 32), -1, dtype=np.int32)
    made.fill_mask(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def walk(
    made: GrammarConstraint, choose: Callable[[list[int]], int], max_tokens: int, table_size: int = TABLE_SIZE
) -> list[int]:
    """Ids chosen from the masks until the text ends (the ending id included) or `max_tokens` are there."""
    ids: list[int] = []
    while not made.is_complete and len(ids) < max_tokens:
        ids.append(choose(allowed_ids(made, table_size)))
        made.advance(ids[-1])
        assert made.error is None
    return ids


class JsonWriter:
    """Chooses ids at random for a while, then those that bring a JSON text to its end."""

    def __init__(self, tokenizer: Tokenizer, seed: int, free: int = 40) -> None:
        self._rng = np.random.default_rng(seed)
        self._free = free
        self._bytes = {i: tokenizer.token_bytes(i) or b"" for i in range(tokenizer.vocab_size)}
        self._ids = {token: i for i, token in self._bytes.items() if i not in tokenizer.special_ids}
        # What would put the end off: another item or level, white space, one more digit.
        self._late = {
            i for i, token in self._bytes.items() if token[:1] in b"{[,0123456789eE.+-\\ \n\t\r" or b"," in token
        }
        self._text = b""

    def __call__(self, allowed: list[int]) -> int:
        self._free -= 1
        chosen = int(self._rng.choice(allowed)) if self._free >= 0 else self._closing(allowed)
        self._text += self._bytes.get(chosen, b"")
        return chosen

    def _closing(self, allowed: list[int]) -> int:
        in_string = re.sub(rb"\\.", b"", self._text, flags=re.DOTALL).count(b'"') % 2
        closers = [b'"'] if in_string else [b"}", b"]", b'"', b":"]
        for wanted in (*EOS_IDS, *(self._ids[closer] for closer in closers)):
            if wanted in allowed:
                return wanted
        return int(self._rng.choice([i for i in allowed if i not in self._late] or allowed))


def random_schema(rng: np.random.Generator, depth: int = 5) -> dict[str, Any]:
    """A JSON schema, objects and arrays nested to `depth`, of the keywords that people write."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth > 1:
        kinds += ["object", "array", "anyOf"] * 3
    kind = str(rng.choice(kinds))
    if kind == "object":
        names = [f"k{i}" for i in range(int(rng.integers(0, 4)))]
        schema: dict[str, Any] = {"type": "object", "properties": {n: random_schema(rng, depth - 1) for n in names}}
        schema["required"] = [name for name in names if rng.random() < 0.6]
        if rng.random() < 0.7:
            schema["additionalProperties"] = False if rng.random() < 0.8 else random_schema(rng, 1)
        return schema
    if kind == "array":
        low = int(rng.integers(0, 3))
        return {"type": "array", "items": random_schema(rng, depth - 1), "minItems": low, "maxItems": low + 2}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth - 1) for _ in range(int(rng.integers(1, 4)))]}
    if kind == "string":
        options: list[dict[str, Any]] = [
            {},
            {"maxLength": 5},
            {"minLength": 2, "maxLength": 4},
            {"pattern": "^[a-c]{1,3}$"},
        ]
        options.append({"format": "date"})
        return {"type": "string"} | options[int(rng.integers(len(options)))]
    if kind == "integer":
        low = int(rng.integers(-50, 50))
        bounds = [{}, {"minimum": low, "maximum": low + 30}, {"exclusiveMinimum": low}]
        return {"type": "integer"} | bounds[int(rng.integers(len(bounds)))]
    if kind == "number":
        return {"type": "number"} | ({"minimum": -1.5, "maximum": 2.25} if rng.random() < 0.5 else {})
    if kind == "enum":
        return {"enum": ["a", "déjà", 1, None, True][: int(rng.integers(1, 6))]}
    if kind == "const":
        return {"const": [7, "x y", None, {"a": [1]}][int(rng.integers(4))]}
    return {"type": kind}
