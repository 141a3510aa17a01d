"""How much memory the KV pool may take on a device, once the weights are there."""

from __future__ import annotations

import jax
import psutil

from jaxoverlap.config import EngineConfig
from jaxoverlap.errors import ConfigError
from jaxoverlap.runtime import container

CPU_BUDGET_BYTES = 2 << 30
CPU_SHARE = 0.25
"""Of the memory that is free, in a container of what it may have, at most this much is taken without being asked."""


def kv_memory_bytes(config: EngineConfig, device: jax.Device, reserved: int = 0) -> int:
    """Bytes for KV pages: what the config says, or what is left.

    Args:
      reserved: bytes of a GPU that will be needed later: a request that was accepted must not fail for want of them.

    Raises:
      ConfigError: a GPU has nothing left, or does not say what it has.
    """
    if config.kv_memory_gib is not None:
        return int(config.kv_memory_gib * 2**30)
    if device.platform == "cpu":
        free = [psutil.virtual_memory().available, container.available_bytes()]
        return min(CPU_BUDGET_BYTES, int(CPU_SHARE * min(size for size in free if size is not None)))
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(f"kv_memory_gib: {device} does not report its memory; say how much the KV pool may take")
    # bytes_limit is what this process may use (JAX preallocates a share of what was free when it started), so
    # memory that other processes hold is not counted twice.
    used = stats.get("bytes_in_use", 0) + reserved
    left = int(config.gpu_memory_fraction * stats["bytes_limit"]) - used
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_fraction: {config.gpu_memory_fraction} of {stats['bytes_limit'] / 2**30:.1f} GiB leaves "
            f"nothing beside the {used / 2**30:.1f} GiB used; raise it or use a smaller model"
        )
    return left
