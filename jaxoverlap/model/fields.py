"""Fields of a model's configuration, read strictly: what is wrong is named with its value and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from jaxoverlap.errors import ModelError


def unsupported(field: str, value: Any, allowed: Iterable[Any]) -> ModelError:
    """The error for a value this build can't compute."""
    choices = ", ".join(str(choice) for choice in allowed)
    return ModelError(f"{field} is {value!r}: not supported in this build; allowed: {choices}")


def required_int(source: Mapping[str, Any], name: str, most: int = 2**31 - 1) -> int:
    if name not in source:
        raise ModelError(f"{name} is missing from the model's configuration")
    value = source[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ModelError(f"{name} is {value!r}; it must be an integer from 1 to {most}")
    return value


def flag(source: Mapping[str, Any], name: str) -> bool:
    value = source.get(name)
    if not isinstance(value, bool | None):
        raise ModelError(f"{name} is {value!r}; it must be true or false")
    return bool(value)


def token_ids(field: str, value: Any) -> list[int]:
    """One id, a list of them, or none; ModelError names the field if it is something else."""
    ids = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise ModelError(f"{field} is {value!r}; it must be a token id (an integer from 0 on) or a list of them")
    return ids


def positive(field: str, value: Any) -> float:
    """`value` as a float; ModelError names the field if it is no positive finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ModelError(f"{field} is {value!r}; it must be a positive number")
    return float(value)
