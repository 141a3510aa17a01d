"""A model in stages: so many consecutive layers each, with their weights, so that a stage is itself a small model.

    embedding ─► stage 0 ─► stage 1 ─► … ─► final norm, logits

Equal stages are one function with different weights, which is compiled once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.layout import Weights


def stage_sizes(num_layers: int, most: int) -> tuple[int, ...]:
    """Layers of each of at most so many stages: all equal but the last, with as few layers as possible to compile."""

    def to_compile(size: int) -> int:
        return size + num_layers % size

    size = min(range(-(-num_layers // most), num_layers + 1), key=to_compile)
    rest = num_layers % size
    return (size,) * (num_layers // size) + ((rest,) if rest else ())


def split_config(config: ModelConfig, sizes: tuple[int, ...]) -> tuple[ModelConfig, ...]:
    """Each stage's shape; those of equal ones are equal."""
    return tuple(
        replace(config, num_layers=size, windows=config.windows[first : first + size]) for first, size in _spans(sizes)
    )


def split_weights(weights: Weights, sizes: tuple[int, ...]) -> tuple[Weights, ...]:
    """Each stage's weights, with those before and behind the layers in all of them. No matrix is copied."""
    params = weights["params"]
    by_layer = {name: array for name, array in params.items() if name in ("norms", "qk_norms")}
    shared = {name: array for name, array in params.items() if name not in by_layer and not name.startswith("layers_")}
    return tuple(
        {
            "params": {
                **shared,
                **{name: array[first : first + size] for name, array in by_layer.items()},
                **{f"layers_{index}": params[f"layers_{first + index}"] for index in range(size)},
            }
        }
        for first, size in _spans(sizes)
    )


def _spans(sizes: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    first = 0
    for size in sizes:
        yield first, size
        first += size
