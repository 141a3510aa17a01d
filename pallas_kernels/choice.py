"""Which implementation computes a shape on a device, and why. Nothing is swapped silently: who asks for one gets it
or the reason why not."""

import re
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
"""Of pools, by implementation; mosaic's are those of wgmma."""
MIN_CAPABILITY, MIN_CAPABILITY_FLOAT8 = 8.0, 8.9
HOPPER = "9.0"  # wgmma is on no other, not even on newer ones
MOSAIC_JAX = (0, 11)
MOSAIC_QUERIES = {128: 16, 256: 8}  # up to a head dim: query heads for each KV head, of which 8 tokens fill a tile


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


def unavailable(implementation: str) -> str | None:
    """Why an implementation can not run beside the installed jax; None if it can."""
    if implementation == "mosaic" and jax.__version_info__ < MOSAIC_JAX:
        return f"'mosaic' needs jax 0.11 or newer, which needs Python 3.12; this is jax {jax.__version__}"
    return None


def why_not(implementation: str, shape: AttentionShape, device: jax.Device | None = None) -> str | None:
    """What speaks against an implementation for a shape, and what it takes instead; None if nothing does.

    Args:
      device: that is to run it; None leaves that question open. On what is no NVIDIA GPU `triton` can be interpreted.
    """
    if implementation not in IMPLEMENTATIONS:
        return f"implementation: got {implementation!r}, allowed is {IMPLEMENTATIONS}"
    if implementation == "mosaic":
        return _why_not_mosaic(shape, device)
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
    if capability is not None and not _is_nvidia(capability):
        return f"{implementation!r} is for NVIDIA GPUs; this device is a {capability}"
    if capability is not None and float(capability) < MIN_CAPABILITY:
        return f"the kernels need compute capability {MIN_CAPABILITY}, this device has {capability}"
    if capability is not None and dtype == FLOAT8 and float(capability) < MIN_CAPABILITY_FLOAT8:
        return (
            f"float8 pools need compute capability {MIN_CAPABILITY_FLOAT8}, this device has {capability}; int8 does not"
        )
    return None


def _is_nvidia(capability: Any) -> bool:
    """By its form: that of AMD's is a name, such as 'gfx942'."""
    return re.fullmatch(r"\d+\.\d+", str(capability)) is not None


def _why_not_mosaic(shape: AttentionShape, device: jax.Device | None) -> str | None:
    if (missing := unavailable("mosaic")) is not None:
        return missing
    if device is not None:
        capability = getattr(device, "compute_capability", None)
        if str(capability) != HOPPER:
            found = f"is a {device.platform}" if capability is None else f"has {capability}"
            return f"'mosaic' is for Hopper GPUs, of compute capability {HOPPER}, by their wgmma; this device {found}"
    if jnp.dtype(shape.dtype).itemsize > 2:
        allowed = f"bfloat16, float16, {' and '.join(QUANTIZED)}: wgmma rounds float32 to TF32"
        return f"dtype of the pools: got {shape.dtype}, 'mosaic' takes {allowed}"
    if shape.head_dim % 16 or not 16 <= shape.head_dim <= MAX_HEAD_DIM:
        return (
            f"head dim: got {shape.head_dim}, 'mosaic' takes multiples of 16 from 16 to {MAX_HEAD_DIM}, those of wgmma"
        )
    if shape.page_size % 8:
        return f"page size: got {shape.page_size}, 'mosaic' takes multiples of 8, the rows of TMA's tiles"
    most = next(group for dim, group in MOSAIC_QUERIES.items() if shape.head_dim <= dim)
    if shape.group > most:
        beside = f"'mosaic' takes at most {most} beside a head dim of {shape.head_dim}"
        return f"query heads for each KV head: got {shape.group}, {beside}"
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
    reason = f"compute capability {capability}; it takes this shape"
    if why_not("mosaic", shape, device) is None:
        reason += "; so does mosaic, which no GPU has measured yet"
    return Choice("triton", reason)
