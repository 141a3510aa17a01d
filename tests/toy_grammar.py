"""A grammar on token ids for the toy device: what may come next is a hash of everything that has come."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np

from tests.fakes import VOCAB_SIZE

_RNG = random.Random(0)
_CHOICES = [frozenset(_RNG.sample(range(VOCAB_SIZE), count)) for count in (1, 2, 5, 40, VOCAB_SIZE) * 20]
"""What may come, at one place or another."""


def _mask(ids: Set[int]) -> np.ndarray:
    bits = np.zeros(-(-VOCAB_SIZE // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


_MASKS = [_mask(ids) for ids in _CHOICES]


@dataclass(frozen=True)
class ToyGrammar:
    """A `CompiledConstraint`.

    Args:
      salt: grammars of other salts allow other ids.
      num_tokens: after so many nothing more may follow.
      breaks: then the grammar is not complete but at a dead end.
    """

    salt: int
    num_tokens: int
    breaks: bool = False

    def behind(self, prompt_ids: Sequence[int] | np.ndarray) -> ToyGrammar:
        return self

    def start(self) -> ToyConstraint:
        return ToyConstraint(self)


class ToyConstraint:
    """A `TokenConstraint` that insists on being told each token once, in order, and nothing after the end."""

    def __init__(self, grammar: ToyGrammar) -> None:
        self.is_complete = False
        self.error: str | None = None
        self._grammar = grammar
        self._tokens: list[int] = []
        self._checksum = zlib.crc32(grammar.salt.to_bytes(8))

    def fill_mask(self, out: np.ndarray) -> None:
        out[:] = _MASKS[self._checksum % len(_CHOICES)]

    def advance(self, token_id: int) -> None:
        assert not self.is_complete and self.error is None, "told a token after its end"
        assert token_id in _CHOICES[self._checksum % len(_CHOICES)], f"token {token_id} does not follow {self._tokens}"
        self._tokens.append(token_id)
        self._checksum = zlib.crc32(token_id.to_bytes(8), self._checksum)
        if len(self._tokens) == self._grammar.num_tokens:
            self.is_complete = not self._grammar.breaks
            self.error = "dead end" if self._grammar.breaks else None
