"""Checks of single values, with one way of saying what would have been allowed."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from jaxoverlap.errors import InvalidRequestError

SMALLEST_FLOAT32, _TOO_LARGE = 2.0**-126, 2.0**128 - 2.0**103
"""float32's smallest normal number, and from where on a number rounds to its infinity."""


def check_real(name: str, value: Any, low: float, high: float, allowed: str, *, low_open: bool = False) -> None:
    """A finite number in [low, high], or (low, high]."""
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    try:
        good = good and math.isfinite(value)
    except OverflowError:  # an integer beyond the largest float
        good = False
    if not good or not low <= value <= high or (low_open and value == low):
        raise InvalidRequestError(name, value, f"use {allowed}")


def check_float32(name: str, value: Any, low: float, high: float, allowed: str, *, low_open: bool = False) -> None:
    """As `check_real`, for the device, which would take a number beyond float32's normal ones for 0 or infinity."""
    check_real(name, value, low, high, allowed, low_open=low_open)
    if value != 0 and not SMALLEST_FLOAT32 <= abs(float(value)) < _TOO_LARGE:
        raise InvalidRequestError(name, value, "use a number that a 32-bit float can hold, from 1.2e-38 to 3.4e38")


def check_int(name: str, value: Any, low: int, high: int, allowed: str) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(name, value, f"use {allowed}")


def check_bool(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(name, value, "use true or false")


def check_ids(name: str, ids: Any) -> tuple[int, ...]:
    """Token ids as a tuple, each once, in their order. The vocabulary's end is checked where it is known."""
    is_list = isinstance(ids, Sequence | np.ndarray | set | frozenset) and not isinstance(ids, str | bytes)
    if not is_list or (isinstance(ids, np.ndarray) and ids.ndim != 1):
        raise InvalidRequestError(name, ids, "use a list of token ids")
    if has_only(ids, int) and are_ids(ids):
        return tuple(dict.fromkeys(ids))
    for index, token_id in enumerate(ids):
        check_int(f"{name}[{index}]", token_id, 0, 2**31 - 1, "a token id: an integer from 0 to 2**31 - 1")
    return tuple(dict.fromkeys(int(i) for i in ids))


def has_only(values: Collection[Any], *types: type) -> bool:
    """All values are of these types and of no others derived from them, such as bool. Takes little for each."""
    return set(map(type, values)) <= set(types)


def are_ids(values: Collection[int]) -> bool:
    """All are in the range of token ids. Takes little for each."""
    return not values or (min(values) >= 0 and max(values) < 2**31)
