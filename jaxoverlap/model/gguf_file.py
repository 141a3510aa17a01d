"""Reads a GGUF file: key-value metadata, a table of tensors, quantised data.

The header is parsed here because the gguf package's reader spends seconds on the strings of a
vocabulary; dequantisation is the package's own. Layout: ggml's docs/gguf.md.
"""

from __future__ import annotations

import bisect
import itertools
import math
import mmap
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxoverlap.errors import ModelError
from jaxoverlap.model.safetensors_file import map_file

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, ...]  # slowest dimension first, as NumPy has it
    ggml_type: int
    begin: int


class GgufFile:
    """An open file.

    Attributes:
      path: the file.
      metadata: key to value; arrays are lists.
      header: the raw bytes before the tensor data.
      names: the tensors it holds, by their GGUF names.

    Raises:
      ModelError: not a GGUF file of version 2 or 3, truncated, or a name or the place of a tensor appears twice.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self.metadata: dict[str, Any] = {}
        self._entries: dict[str, _Entry] = {}
        self._begins: list[int] = []
        try:
            self._parse()
        except (struct.error, IndexError, UnicodeDecodeError, RecursionError) as error:
            raise ModelError(f"{path}: truncated or damaged GGUF header: {error}") from error

    @property
    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def read(self, name: str) -> np.ndarray:
        """The tensor dequantised to float32 (a view of the file where it is float32 there).

        Raises:
          ModelError: truncated, reaching into another tensor, or quantised in a way that can't be decoded.
        """
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        entry = self._entries[name]
        try:
            kind = GGMLQuantizationType(entry.ggml_type)
            block_items, block_bytes = GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise ModelError(f"{self.path}: tensor {name!r} has unknown GGML type {entry.ggml_type}") from None
        row_items = entry.shape[-1] if entry.shape else 1
        if row_items % block_items:
            raise ModelError(f"{self.path}: tensor {name!r} has rows of {row_items}, not whole {kind.name} blocks")
        row_bytes = row_items // block_items * block_bytes
        size = math.prod(entry.shape[:-1]) * row_bytes
        if entry.begin + size > len(self._map):
            raise ModelError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {entry.begin + size}, "
                f"the file has {len(self._map)}"
            )
        follower = bisect.bisect_right(self._begins, entry.begin)
        if entry.begin + size > (next_begin := self._begins[follower] if follower < len(self._begins) else math.inf):
            raise ModelError(
                f"{self.path}: tensor {name!r} ends at byte {entry.begin + size}, and another begins at {next_begin}"
            )
        raw = np.frombuffer(self._map, np.uint8, size, entry.begin).reshape(*entry.shape[:-1], row_bytes)
        try:
            return dequantize(raw, kind).reshape(entry.shape)
        except NotImplementedError as error:
            raise ModelError(f"{self.path}: tensor {name!r}: {kind.name} is not supported in this build") from error

    def _parse(self) -> None:
        cursor = _Cursor(self._map)
        magic, version = self._map[:4], struct.unpack_from("<I", self._map, 4)[0]
        if magic != b"GGUF":
            raise ModelError(f"{self.path}: no GGUF file (it starts with {bytes(magic)!r})")
        if version not in _VERSIONS:
            raise ModelError(f"{self.path}: GGUF version {version}: not supported in this build; allowed: 2, 3")
        cursor.at = 8
        tensor_count, key_count = cursor.scalar("<Q"), cursor.scalar("<Q")
        for _ in range(key_count):
            key = cursor.string()
            if key in self.metadata:
                raise ModelError(f"{self.path}: {key!r} appears twice in the metadata")
            self.metadata[key] = cursor.value(cursor.scalar("<I"))
        relative: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(tensor_count):
            name = cursor.string()
            shape = tuple(cursor.scalar("<Q") for _ in range(cursor.scalar("<I")))
            relative.append((name, shape[::-1], cursor.scalar("<I"), cursor.scalar("<Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise ModelError(f"{self.path}: general.alignment is {alignment!r}; it must be a positive integer")
        self.header = bytes(self._map[: cursor.at])
        data_start = -(-cursor.at // alignment) * alignment
        for name, shape, ggml_type, offset in relative:
            if name in self._entries:
                raise ModelError(f"{self.path}: tensor {name!r} appears twice")
            self._entries[name] = _Entry(shape, ggml_type, data_start + offset)
        self._begins = sorted(entry.begin for entry in self._entries.values() if 0 not in entry.shape)
        for first, second in itertools.pairwise(self._begins):
            if first == second:
                raise ModelError(f"{self.path}: two tensors begin at byte {first}")


class _Cursor:
    """Walks the header; running off the end raises struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def string(self) -> str:
        begin = self.at + 8
        self.at = begin + self.scalar("<Q")
        if self.at > len(self._data):
            raise struct.error(f"a string ends at byte {self.at}, the file has {len(self._data)}")
        return self._data[begin : self.at].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item_kind, count = self.scalar("<I"), self.scalar("<Q")
            if item_kind in _SCALARS:
                layout = f"<{count}{_SCALARS[item_kind][1]}"
                values = list(struct.unpack_from(layout, self._data, self.at))
                self.at += struct.calcsize(layout)
                return values
            return [self.value(item_kind) for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind} at byte {self.at}")
        return self.scalar(_SCALARS[kind])
