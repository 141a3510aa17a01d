"""Which implementation computes a shape on a device, and why. Nothing is swapped silently: who asks for one gets it
or the reason why not."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.errors import IMPLEMENTATIONS

MAX_GROUP = 32
MAX_HEAD_DIM = 256
FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class AttentionShape:
    """What of a model and its pools decides whether a kernel takes it.

    Attributes:
      heads, kv_heads, head_dim: H, K, D.
      page_size: S.
      dtype: of the pools.
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


def why_not(implementation: str, shape: AttentionShape) -> str | None:
    """What speaks against an implementation for a shape, and what it takes instead; None if nothing does."""
    if implementation not in IMPLEMENTATIONS:
        return f"implementation: got {implementation!r}, allowed is {IMPLEMENTATIONS}"
    if implementation == "mosaic":
        return "implementation 'mosaic' is not in this build; 'xla' and 'triton' are"
    if str(jnp.dtype(shape.dtype)) not in FLOATS:
        return f"dtype of the pools: got {jnp.dtype(shape.dtype)}, allowed is {', '.join(FLOATS)}"
    if implementation == "xla":
        return None
    if shape.group > MAX_GROUP:
        return f"query heads for each KV head: got {shape.group}, {implementation!r} takes at most {MAX_GROUP}"
    if shape.head_dim % 8 or not 16 <= shape.head_dim <= MAX_HEAD_DIM:
        return f"head dim: got {shape.head_dim}, {implementation!r} takes multiples of 8 from 16 to {MAX_HEAD_DIM}"
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
    if float(capability) < 8.0:
        return Choice("xla", f"the kernels need compute capability 8.0, this device has {capability}")
    refused = why_not("triton", shape)
    if refused is not None:
        return Choice("xla", refused)
    return Choice("triton", f"compute capability {capability}; it takes this shape")
