"""Small vocabularies, random JSON schemas, and walks that choose tokens where a model would."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxoverlap.constraint import CompiledConstraint, TokenConstraint
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import Request
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


@functools.cache
def ascii_tokenizer() -> Tokenizer:
    """Few enough ids for the models of `tests.tiny` and `tests.fakes`, whose table has more rows; id 5 is the end."""
    special = [*SPECIAL, "<eos>"]
    characters = 'abcdefghijklmnopqrstuvwxyz0123456789{}[]":,.-+ĠĊ'
    vocab = {
        token: i for i, token in enumerate([*special, *characters, '{"', '":', '"}', "12", "ab", "bb", "aaa", "Ġ{"])
    }
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return Tokenizer(backend, eos_token_ids=[5])


def make_compiler(tokenizer: Tokenizer | None = None, table_size: int = TABLE_SIZE, **changes: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer or byte_level_tokenizer(), table_size, EOS_IDS, **changes)


def constraint(
    compiler: GrammarCompiler,
    sampling: dict[str, Any] | None = None,
    *,
    prompt_ids: Sequence[int] = (),
    **structure: Any,
) -> GrammarConstraint:
    """Behind a prompt without text, unless one is given."""
    params = SamplingParams(structured_output=StructuredOutput(**structure), **(sampling or {}))
    made = compiler.submit(params).result().behind(prompt_ids).start()
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


class RecordingConstraint:
    """Remembers what it was told, and insists on the rules of `TokenConstraint`."""

    def __init__(self, inner: TokenConstraint) -> None:
        self.inner = inner
        self.seen: list[int] = []

    is_complete = property(lambda self: self.inner.is_complete)
    error = property(lambda self: self.inner.error)

    def fill_mask(self, out: np.ndarray) -> None:
        assert not self.is_complete and self.error is None
        self.inner.fill_mask(out)

    def advance(self, token_id: int) -> None:
        assert not self.is_complete and self.error is None
        self.seen.append(token_id)
        self.inner.advance(token_id)


class _Recording:
    def __init__(self, compiled: CompiledConstraint) -> None:
        self._compiled = compiled

    def behind(self, prompt_ids: Any) -> _Recording:
        return _Recording(self._compiled.behind(prompt_ids))

    def start(self) -> RecordingConstraint:
        return RecordingConstraint(self._compiled.start())


class RecordingCompiler(GrammarCompiler):
    """Its constraints are `RecordingConstraint`s."""

    def submit(self, sampling: SamplingParams) -> Future[CompiledConstraint]:
        recorded: Future[CompiledConstraint] = Future()

        def record(compiled: Future[CompiledConstraint]) -> None:
            if (error := compiled.exception()) is not None:
                recorded.set_exception(error)
            else:
                recorded.set_result(_Recording(compiled.result()))

        super().submit(sampling).add_done_callback(record)
        return recorded


def outcome(request: Request) -> tuple[list[int], FinishReason | None]:
    """What came of a request, once it is certain that its constraint has seen exactly its outputs."""
    if isinstance(request.constraint, RecordingConstraint):
        ended_by_id = request.finish_reason in (FinishReason.EOS, FinishReason.STOP_TOKEN)
        assert request.constraint.seen == (request.output_ids[:-1] if ended_by_id else request.output_ids)
    return request.output_ids, request.finish_reason


def random_schema(rng: np.random.Generator, depth: int = 5, *, bounded: bool = False) -> dict[str, Any]:
    """A JSON schema, objects and arrays nested to `depth`, of the keywords that people write.

    `bounded` leaves out what lets a text go on forever, so that it comes to its end whatever a model likes.
    """
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth > 1:
        kinds += ["object", "array", "anyOf"] * 3
    kind = str(rng.choice(kinds))
    inner = functools.partial(random_schema, rng, depth - 1, bounded=bounded)
    if kind == "object":
        names = [f"k{i}" for i in range(int(rng.integers(0, 4)))]
        schema: dict[str, Any] = {"type": "object", "properties": {name: inner() for name in names}}
        schema["required"] = [name for name in names if rng.random() < 0.6]
        if bounded or rng.random() < 0.6:
            schema["additionalProperties"] = False
        elif rng.random() < 0.5:
            schema["additionalProperties"] = random_schema(rng, 1)
        return schema
    if kind == "array":
        low = int(rng.integers(0, 3))
        return {"type": "array", "items": inner(), "minItems": low, "maxItems": low + (1 if bounded else 2)}
    if kind == "anyOf":
        return {"anyOf": [inner() for _ in range(int(rng.integers(1, 4)))]}
    low = int(rng.integers(-50, 50))
    options: dict[str, list[dict[str, Any]]] = {
        "string": [
            {"maxLength": 5},
            {"minLength": 2, "maxLength": 4},
            {"pattern": "^[a-c]{1,3}$"},
            {"format": "date"},
            {},
        ],
        "integer": [{"minimum": low, "maximum": low + 30}, {"exclusiveMinimum": low}],
        "number": [{"minimum": -1.5, "maximum": 2.25, "multipleOf": 0.25}, {}],
    }
    if kind in options:
        possible = options[kind][:-1] if bounded else options[kind]
        return {"type": kind} | possible[int(rng.integers(len(possible)))]
    if kind == "enum":
        return {"enum": ["a", "déjà", 1, None, True][: int(rng.integers(1, 6))]}
    if kind == "const":
        return {"const": [7, "x y", None, {"a": [1]}][int(rng.integers(4))]}
    return {"type": kind}
