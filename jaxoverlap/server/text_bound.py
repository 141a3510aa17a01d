"""How many tokens a text has at the least, told from its bytes: so that one that can't fit is refused untokenized.

Each token stands for so many bytes at the most, if nothing of a text vanishes on its way to tokens. That is known of
two kinds of tokenizers, which are nearly all: BPE over bytes, and BPE with a token for each byte to fall back on. Where
a normaliser may shrink texts (NFKC, one that collapses white space), where unknown words become one token, or added
tokens swallow the space around them, nothing is known, and nothing is refused.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import models

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.text.tokenizer import Tokenizer

_SPACE = "▁"
_PLAIN_SPLITS = {"ByteLevel", "Split", "Digits", "Metaspace"}
_NFC_SHRINKS = 3
"""By this factor at the most: Unicode's own bound for UTF-8."""


@dataclass(frozen=True)
class TextBound:
    """Attributes:
    bytes_per_token: at the most.
    vanishing: bytes that have no token, and are left out.
    """

    bytes_per_token: int
    vanishing: bytes

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> TextBound | None:
        """None where nothing is known."""
        backend = tokenizer.backend
        model, added = backend.model, backend.get_added_tokens_decoder().values()
        if not isinstance(model, models.BPE) or any(token.lstrip or token.rstrip for token in added):
            return None
        if not all(part["type"] in _PLAIN_SPLITS and _keeps_all(part) for part in _parts(backend.pre_tokenizer)):
            return None
        vocabulary = backend.get_vocab(with_added_tokens=False)
        longest_added = max((len(token.content.encode()) for token in added), default=0)
        normalizers = _parts(backend.normalizer)
        if tokenizer.has_byte_alphabet:
            singles = {tokenizer.token_bytes(token_id) for token, token_id in vocabulary.items() if len(token) == 1}
            vanishing = bytes(byte for byte in range(256) if bytes([byte]) not in singles)
            shrinks = 1
            if [part["type"] for part in normalizers] == ["NFC"] and not vanishing:
                shrinks = _NFC_SHRINKS
            elif normalizers:
                return None
            return cls(shrinks * max(longest_added, max(map(len, vocabulary))), vanishing)
        falls_back = model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        if not falls_back or not all(map(_only_marks_spaces, normalizers)):
            return None
        longest = max(len(token.replace(_SPACE, " ").encode()) for token in vocabulary)
        return cls(max(longest_added, longest), b"")

    def check(self, text: str, most: int) -> None:
        """Raises `InvalidRequestError` for a text that must have more tokens than `most`."""
        if len(text) <= most:
            return
        data = text.encode(errors="replace")
        if len(data.translate(None, self.vanishing)) > most * self.bytes_per_token:
            allowed = f"a text as long as this has more than the {most} tokens that a prompt may have"
            raise InvalidRequestError("prompt", f"{len(data)} bytes", allowed)


def _parts(piece: Any) -> list[dict[str, Any]]:
    """A normaliser or a pre-tokenizer, as its JSON, in its parts; None has none."""
    if piece is None:
        return []
    described = json.loads(piece.__getstate__())
    return described.get("normalizers") or described.get("pretokenizers") or [described]


def _keeps_all(split: dict[str, Any]) -> bool:
    return split.get("behavior") != "Removed"


def _only_marks_spaces(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Replace":
        return normalizer["pattern"] == {"String": " "} and normalizer["content"] == _SPACE
    return normalizer["type"] == "Prepend"
