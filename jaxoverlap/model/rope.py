"""Rotary position embedding: its configuration and its frequencies. Imports no jax.

`inverse_frequencies` computes in float32 step by step as transformers does
(modeling_rope_utils.py): at position 100,000 one unit in the last place of a frequency is
already a visible angle.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxoverlap.errors import ModelError
from jaxoverlap.model.fields import positive, unsupported

logger = logging.getLogger(__name__)

ROPE_KINDS = ("default", "linear", "llama3", "yarn")
_DEFAULT_THETA = 10000.0
_NUMBERS = ("theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
_LARGEST = 1e18  # so that the product of two is a number in float32, and so is their quotient


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding over the whole head, halves rotated against each other (as in transformers).

    Attributes:
      theta: base of the frequencies.
      kind: one of `ROPE_KINDS`; the fields below belong to the kind in brackets.
      factor: stretch of the context (linear, llama3, yarn).
      low_freq_factor, high_freq_factor: bounds of the blend (llama3).
      original_max_position_embeddings: context before stretching (llama3, yarn).
      beta_fast, beta_slow, truncate: bounds of the ramp and whether they are rounded (yarn).
      attention_factor: scale of cos and sin; 1 except for yarn, or where a GGUF file has its own.
      frequency_factors: divisors of the frequencies, `[D/2]`, as GGUF files store llama3 scaling;
        empty for none (default).
    """

    theta: float = _DEFAULT_THETA
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_factors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Raises ModelError if there are no frequencies of these numbers."""
        for name in _NUMBERS:
            if not 1 / _LARGEST <= getattr(self, name) <= _LARGEST:
                field = "rope_theta" if name == "theta" else f"rope parameter {name!r}"
                bounds = f"from {1 / _LARGEST:.0e} to {_LARGEST:.0e}"
                raise ModelError(f"{field} is {getattr(self, name)!r}; it must be a number {bounds}")
        if not 1 <= self.original_max_position_embeddings <= _LARGEST:
            original = self.original_max_position_embeddings
            raise ModelError(f"original_max_position_embeddings of rope is {original}; it must be an integer from 1 on")
        for divisor in self.frequency_factors:
            if not 1 / _LARGEST <= divisor <= _LARGEST:
                raise ModelError(f"rope frequency factors: {divisor!r} is among them; they must be positive numbers")
        if self.kind == "yarn" and self.theta <= 1:
            raise ModelError(f"rope_theta is {self.theta}; rope type 'yarn' needs more than 1")
        if self.kind == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise ModelError(
                f"rope parameter 'high_freq_factor' is {self.high_freq_factor}; it must be more than "
                f"'low_freq_factor', {self.low_freq_factor}"
            )

    def stretched(self, max_positions: int) -> int:
        """Positions that the embedding is stretched to, for a model that names `max_positions`; never fewer.

        Some models with linear scaling name what they are stretched to already (deepseek-coder), some what they were
        trained on before (vicuna-16k), and no field tells which: so this is what may be asked for, and what the model
        names is what it gets unasked.
        """
        if self.kind == "yarn":
            return max(max_positions, int(self.original_max_position_embeddings * self.factor))
        return max(max_positions, int(max_positions * self.factor)) if self.kind == "linear" else max_positions


_OF_EVERY_KIND = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_YARN = (
    "factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "truncate",
    "attention_factor",
    "mscale",
    "mscale_all_dim",
)
_HF_PARAMETERS: dict[str, tuple[str, ...]] = {"default": (), "linear": ("factor",), "llama3": _LLAMA3, "yarn": _YARN}


def rope_from_hf(config: Mapping[str, Any], max_positions: int) -> RopeConfig:
    """Reads `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (before).

    As in transformers, `rope_scaling` replaces `rope_parameters` where both are given, an
    `original_max_position_embeddings` beside them comes first, and parameters that a type does not have are ignored
    with a warning. The base of a replaced `rope_parameters` is kept, where transformers would fall back on 10000: who
    adds `rope_scaling` to a model means its own base.

    Raises:
      ModelError: unknown rope type, or a parameter the type needs is missing or no positive number.
    """
    scaling, plain = (_object(config, name) for name in ("rope_scaling", "rope_parameters"))
    parameters = scaling or plain
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if nested := [name for name, value in parameters.items() if isinstance(value, Mapping)]:
        raise ModelError(f"rope parameters per layer type ({', '.join(nested)}): not supported in this build")
    if kind not in ROPE_KINDS:
        raise unsupported("rope_type", kind, ROPE_KINDS)
    if ignored := sorted(set(parameters) - {*_OF_EVERY_KIND, *_HF_PARAMETERS[kind]}):
        logger.warning("rope parameters of the model that rope_type %r does not have are ignored: %s", kind, ignored)

    def of_every_kind(name: str) -> Any:
        return next((given[name] for given in (parameters, config, plain) if given.get(name) is not None), None)

    if (partial := of_every_kind("partial_rotary_factor")) not in (None, 1, 1.0):
        raise ModelError(f"partial_rotary_factor is {partial!r}: not supported in this build; allowed: 1.0")
    theta = of_every_kind("rope_theta")
    theta = positive("rope_theta", _DEFAULT_THETA if theta is None else theta)
    if kind == "default":
        return RopeConfig(theta=theta)

    def get(name: str, default: float | None = None) -> float:
        value = default if parameters.get(name) is None else parameters[name]
        if value is None:
            raise ModelError(f"rope parameter {name!r} is missing; rope_type {kind!r} needs it")
        return positive(f"rope parameter {name!r}", value)

    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=get("factor"))
    original_name = "original_max_position_embeddings"
    given = config.get(original_name)
    original = positive(original_name, given) if given is not None else get(original_name, max_positions)
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            kind=kind,
            factor=get("factor"),
            low_freq_factor=get("low_freq_factor"),
            high_freq_factor=get("high_freq_factor"),
            original_max_position_embeddings=int(original),
        )
    factor = get("factor", max_positions / original)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position_embeddings=int(original),
        beta_fast=get("beta_fast", 32.0),
        beta_slow=get("beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
        attention_factor=_yarn_attention_factor(factor, parameters),
    )


_GGUF_KEYS = frozenset(
    """
    dimension_count freq_base scale_linear scaling.type scaling.factor scaling.original_context_length scaling.finetuned
    scaling.attn_factor scaling.yarn_ext_factor scaling.yarn_beta_fast scaling.yarn_beta_slow
    """.split()  # noqa: SIM905
)


def rope_from_gguf(
    metadata: Mapping[str, Any], architecture: str, context: int, frequency_factors: tuple[float, ...]
) -> RopeConfig:
    """Reads `<architecture>.rope.*` as llama.cpp does; `frequency_factors` is the content of `rope_freqs.weight`.

    Raises:
      ModelError: a key or a scaling type that is unknown, a value out of range, or scaling and frequency factors
        together.
    """
    prefix = f"{architecture}.rope."
    given = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    if unknown := sorted(set(given) - _GGUF_KEYS):
        raise ModelError(f"{prefix}{unknown[0]} is {given[unknown[0]]!r}: not supported in this build")

    def number(name: str, default: float) -> float:
        return positive(prefix + name, given.get(name, default))

    theta = number("freq_base", _DEFAULT_THETA)
    attention_factor = number("scaling.attn_factor", 1.0)
    # An older spelling; in both 0 is none, as a scale of 1 is. Without a type they mean linear scaling.
    name = "scaling.factor" if "scaling.factor" in given else "scale_linear"
    factor = 1.0 if given.get(name, 0) == 0 else number(name, 1.0)
    kind = given.get("scaling.type", "linear")
    kind = "none" if kind == "linear" and factor == 1 else kind
    # How much of yarn's ramp counts: all of it in yarn, else none. Negative is not set.
    ext_factor = given.get("scaling.yarn_ext_factor", -1.0)
    if ext_factor != (1 if kind == "yarn" else 0) and not (isinstance(ext_factor, int | float) and ext_factor < 0):
        raise ModelError(f"{prefix}scaling.yarn_ext_factor is {ext_factor!r}: not supported with scaling type {kind!r}")
    if frequency_factors and kind != "none":
        raise ModelError(f"rope_freqs.weight beside rope scaling type {kind!r}: not supported in this build")
    if kind == "none":
        return RopeConfig(theta=theta, attention_factor=attention_factor, frequency_factors=frequency_factors)
    if kind not in ("linear", "yarn"):
        raise unsupported(f"{prefix}scaling.type", kind, ("none", "linear", "yarn"))
    if kind == "linear":
        return RopeConfig(theta=theta, kind=kind, factor=factor, attention_factor=attention_factor)
    return RopeConfig(
        theta=theta,
        kind=kind,
        factor=factor,
        original_max_position_embeddings=int(number("scaling.original_context_length", context)),
        beta_fast=number("scaling.yarn_beta_fast", 32.0),
        beta_slow=number("scaling.yarn_beta_slow", 1.0),
        attention_factor=attention_factor * _yarn_attention_factor(factor, {}),
    )


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Angle per position of each pair of dimensions, float32 `[head_dim / 2]`."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    powers = np.float32(rope.theta) ** exponents
    plain = np.float32(1.0) / powers
    if rope.frequency_factors:
        return plain / np.asarray(rope.frequency_factors, np.float32)
    if rope.kind == "default":
        return plain
    if rope.kind == "linear":
        return plain / np.float32(rope.factor)
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(powers, rope, head_dim)
    raise unsupported("rope kind", rope.kind, ROPE_KINDS)


def _llama3(plain: np.ndarray, rope: RopeConfig) -> np.ndarray:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    low, high, factor = (np.float32(x) for x in (rope.low_freq_factor, rope.high_freq_factor, rope.factor))
    original = np.float32(rope.original_max_position_embeddings)
    wavelength = np.float32(2 * math.pi) / plain
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * plain / factor + smooth * plain
    stretched = np.where(wavelength > original / low, plain / factor, blended)
    return np.where(wavelength < original / high, plain, stretched).astype(np.float32)


def _yarn(powers: np.ndarray, rope: RopeConfig, head_dim: int) -> np.ndarray:
    """A ramp over the dimensions, between the plain and the stretched frequencies."""

    def dimension(rotations: float) -> float:
        turns = rope.original_max_position_embeddings / (rotations * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    keep = 1 - np.clip(ramp, 0, 1)
    stretched = np.float32(1.0) / (np.float32(rope.factor) * powers)
    return (stretched * (1 - keep) + (np.float32(1.0) / powers) * keep).astype(np.float32)


def _yarn_attention_factor(factor: float, parameters: Mapping[str, Any]) -> float:
    if parameters.get("attention_factor") is not None:
        return positive("rope parameter 'attention_factor'", parameters["attention_factor"])

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    weights = [parameters.get(name) for name in ("mscale", "mscale_all_dim")]
    if not all(weights):
        return scale(1.0)
    over, under = (scale(positive("rope parameters 'mscale' and 'mscale_all_dim'", weight)) for weight in weights)
    return over / under


def _object(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    given = config.get(name) or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"{name} is {given!r}; it must be an object")
    return given
