"""Which implementation computes a shape on a device, and why. Nothing is swapped silently: who asks for one gets it
or the reason why not."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.errors import IMPLEMENTATIONS
from pallas_kernels.pages import FLOAT8, QUANTIZED

MAX_GROUP = 32
MAX_HEAD_DIM = 256
FLOATS = ("float32", "bfloat16", "float16")
DTYPES = {"xla": FLOATS + QUANTIZED, "triton": FLOATS + QUANTIZED}
"""Of pools, by implementation."""
MIN_CAPABILITY, MIN_CAPABILITY_FLOAT8 = 8.0, 8.9


@dataclass(frozen=True)
class AttentionShape:
    """What of a model and its pools decides whether a kernel takes it.

    Attributes:
      heads, kv_heads, head_dim: H, K, D.
      page_size: S.
      dtype: of the pools; int8 and float8_e4m3fn are quantised.
    """

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: Any

    @property
    def group(self) -> int:
        """Query heads that read one KV head."""
        return self.heads // self.kv_heads


@dataclass(frozen=True)
class Choice:
    implementation: str
    reason: str


def why_not(implementation: str, shape: AttentionShape, device: jax.Device | None = None) -> str | None:
    """What speaks against an implementation for a shape, and what it takes instead; None if nothing does.

    With a device, an NVIDIA GPU must be new enough; on others kernels can be interpreted.
    """
    if implementation not in IMPLEMENTATIONS:
        return f"implementation: got {implementation!r}, allowed is {IMPLEMENTATIONS}"
    if implementation == "mosaic":
        return "implementation 'mosaic' is not in this build; 'xla' and 'triton' are"
    dtype = jnp.dtype(shape.dtype)
    if str(dtype) not in DTYPES[implementation]:
        return f"dtype of the pools: got {dtype}, {implementation!r} takes {', '.join(DTYPES[implementation])}"
    if implementation == "xla":
        return None
    if shape.group > MAX_GROUP:
        return f"query heads for each KV head: got {shape.group}, {implementation!r} takes at most {MAX_GROUP}"
    if shape.head_dim % 8 or not 16 <= shape.head_dim <= MAX_HEAD_DIM:
        return f"head dim: got {shape.head_dim}, {implementation!r} takes multiples of 8 from 16 to {MAX_HEAD_DIM}"
    capability = getattr(device, "compute_capability", None)
    if capability is not None and float(capability) < MIN_CAPABILITY:
        return f"the kernels need compute capability {MIN_CAPABILITY}, this device has {capability}"
    if capability is not None and dtype == FLOAT8 and float(capability) < MIN_CAPABILITY_FLOAT8:
        return (
            f"float8 pools need compute capability {MIN_CAPABILITY_FLOAT8}, this device has {capability}; int8 does not"
        )
    return None


def best_implementation(device: jax.Device, shape: AttentionShape) -> Choice:
    """The implementation for a shape on a device, and the reason.

    Args:
      device: its platform and compute capability decide.
      shape: as the model has it.
    """
    if device.platform == "cpu":
        return Choice("xla", "on a CPU the kernels are only interpreted")
    capability = getattr(device, "compute_capability", None)
    if device.platform not in ("gpu", "cuda") or capability is None:
        return Choice("xla", f"there are no kernels for {device.platform}")
    refused = why_not("triton", shape, device)
    if refused is not None:
        return Choice("xla", refused)
    return Choice("triton", f"compute capability {capability}; it takes this shape")
