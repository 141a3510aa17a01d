"""Token ids, and numbers for them, as arrays that look like the tuple or the dict in their place.

A request may name every id of a vocabulary. What has been checked once goes on in this form, which costs the same for
one id and for all of them.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np


class TokenIds(Sequence[int]):
    """`array`: int32, each id once; not to be written to."""

    __slots__ = ("array",)

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def of(cls, ids: Iterable[int]) -> TokenIds:
        return ids if isinstance(ids, TokenIds) else cls(np.fromiter(ids, dtype=np.int32))

    def __len__(self) -> int:
        return len(self.array)

    def __iter__(self) -> Iterator[int]:
        return iter(self.array.tolist())

    def __getitem__(self, index: Any) -> Any:
        return self.array[index].tolist()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.array, dtype=dtype, copy=copy)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


class TokenBiases(Mapping[int, float]):
    """`ids`: int32, each once; `numbers`: float64, one for each. Neither is to be written to."""

    __slots__ = ("ids", "numbers")

    def __init__(self, ids: np.ndarray, values: np.ndarray) -> None:
        self.ids, self.numbers = ids, values

    @classmethod
    def of(cls, biases: Mapping[int, float]) -> TokenBiases:
        if isinstance(biases, TokenBiases):
            return biases
        return cls(np.fromiter(biases, dtype=np.int32), np.fromiter(biases.values(), dtype=np.float64))

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    def __getitem__(self, token_id: int) -> float:
        found = np.flatnonzero(self.ids == token_id)
        if not len(found):
            raise KeyError(token_id)
        return float(self.numbers[found[0]])

    def items(self) -> ItemsView[int, float]:
        return dict(zip(self.ids.tolist(), self.numbers.tolist(), strict=True)).items()

    def __repr__(self) -> str:
        return repr(dict(self.items()))
