"""Reads a safetensors file: a length, a JSON header, raw little-endian tensors.

Read directly rather than through the safetensors library, so that bfloat16 comes out bit for bit
(NumPy itself has none) and so that every defect of a file names the file and the tensor.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxoverlap.errors import ModelError

_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


class SafetensorsFile:
    """An open file; tensors are views of its memory map until copied.

    Attributes:
      path: the file.
      header: the raw JSON header.
      names: the tensors it holds.

    Raises:
      ModelError: not a safetensors file, truncated, or ranges that disagree with shapes or with each other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        if len(self._map) < 8:
            raise ModelError(f"{path}: {len(self._map)} bytes is no safetensors file")
        header_bytes = int.from_bytes(self._map[:8], "little")
        if header_bytes > min(_MAX_HEADER_BYTES, len(self._map) - 8):
            raise ModelError(f"{path}: truncated, or no safetensors file (header of {header_bytes} bytes)")
        self.header = bytes(self._map[8 : 8 + header_bytes])
        self._data_start = 8 + header_bytes
        try:
            entries = json.loads(self.header, object_pairs_hook=self._unique)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{path}: unreadable safetensors header: {error}") from error
        if not isinstance(entries, dict):
            raise ModelError(f"{path}: unreadable safetensors header: expected a JSON object")
        entries.pop("__metadata__", None)
        self._entries: dict[str, dict[str, Any]] = entries
        for name in entries:
            self._check(name)
        self._check_that_nothing_is_between()

    @property
    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._entries[name]["shape"])

    def read(self, name: str) -> np.ndarray:
        """The tensor in its own dtype (bfloat16, float16 or float32), not copied.

        Raises:
          ModelError: another dtype.
        """
        entry = self._entries[name]
        dtype = _DTYPES.get(entry["dtype"])
        if dtype is None:
            raise ModelError(
                f"{self.path}: tensor {name!r} has dtype {entry['dtype']}: not supported in this build; "
                f"allowed: {', '.join(_DTYPES)}"
            )
        shape = self.shape(name)
        begin = self._data_start + entry["data_offsets"][0]
        return np.frombuffer(self._map, dtype, math.prod(shape), begin).reshape(shape)

    def _check(self, name: str) -> None:
        try:
            entry = self._entries[name]
            begin, end = entry["data_offsets"]
            if not all(type(size) is int and size >= 0 for size in (begin, end, *entry["shape"])):
                raise TypeError("sizes are integers from 0 on")
            items = math.prod(entry["shape"])
            dtype = _DTYPES.get(entry["dtype"])
        except (KeyError, TypeError, ValueError) as error:
            raise ModelError(f"{self.path}: tensor {name!r} has an unreadable header entry") from error
        if begin > end:
            raise ModelError(f"{self.path}: tensor {name!r} spans bytes {begin} to {end}")
        available = len(self._map) - self._data_start
        if end > available:
            raise ModelError(
                f"{self.path}: truncated: tensor {name!r} ends at byte {end} of the data, which has {available}"
            )
        if dtype is not None and end - begin != items * np.dtype(dtype).itemsize:
            raise ModelError(
                f"{self.path}: tensor {name!r} has {end - begin} bytes; "
                f"{entry['dtype']} of shape {tuple(entry['shape'])} has {items * np.dtype(dtype).itemsize}"
            )

    def _check_that_nothing_is_between(self) -> None:
        """Tensors lie side by side from the first byte to the last, as the format has it."""
        end, before = 0, "the header"
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["data_offsets"][0] != end:
                begin = entry["data_offsets"][0]
                raise ModelError(
                    f"{self.path}: tensor {name!r} begins at byte {begin} of the data, but {before} ends at {end}"
                )
            end, before = entry["data_offsets"][1], f"tensor {name!r}"
        if (available := len(self._map) - self._data_start) != end:
            raise ModelError(f"{self.path}: {before} ends at byte {end} of the data, which has {available}")

    def _unique(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ModelError(f"{self.path}: {name!r} appears twice in the header")
            found[name] = value
        return found


def map_file(path: Path) -> mmap.mmap:
    """The file's bytes, read on demand; ModelError if there are none to read."""
    try:
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise ModelError(f"{path}: can't be read: {error}") from error
