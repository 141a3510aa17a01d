"""How much memory the KV pool may take on a device, once the weights are there.

    a GPU's memory ├───────── JAX's share ─────────┤
                   ├ weights ┼ rules ┼ KV ┼ steps ─┤

JAX preallocates its share of each GPU that it sees when its client starts: 75 % unless an environment variable says
another. A process of ours lets it take what `gpu_memory_fraction` says (`let_jax_take`); in somebody else's program JAX
has what it has, and the engine keeps within both.
"""

from __future__ import annotations

import os

import jax
import psutil

from jaxoverlap.config import EngineConfig
from jaxoverlap.errors import ConfigError
from jaxoverlap.runtime import container

CPU_BUDGET_BYTES = 2 << 30
CPU_SHARE = 0.25
"""Of the memory that is free, in a container of what it may have, at most this much is taken without being asked."""

STEPS_SHARE = 0.1
"""Of the memory that may be used on a GPU, what steps need while they run is left."""

_SHARE, _OLD_SHARE = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
_USUAL_SHARE = 0.75
"""What JAX takes if neither variable is set."""


def let_jax_take(fraction: float) -> None:
    """JAX's share of a GPU, unless the environment says one. To be called before JAX's client starts."""
    if not (os.environ.get(_SHARE) or os.environ.get(_OLD_SHARE)):
        os.environ[_SHARE] = str(fraction)


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
        return min(CPU_BUDGET_BYTES, int(CPU_SHARE * _free_bytes()))
    stats = device.memory_stats()
    if not stats or "bytes_limit" not in stats:
        raise ConfigError(f"kv_memory_gib: {device} does not report its memory; say how much the KV pool may take")
    jax_has = stats["bytes_limit"]
    whole = jax_has / float(os.environ.get(_SHARE) or os.environ.get(_OLD_SHARE) or _USUAL_SHARE)
    used = stats.get("bytes_in_use", 0) + reserved
    left = int((1 - STEPS_SHARE) * min(config.gpu_memory_fraction * whole, jax_has)) - used
    if left <= 0:
        raise ConfigError(
            f"gpu_memory_fraction: {config.gpu_memory_fraction} of {whole / 2**30:.1f} GiB, of which JAX has "
            f"{jax_has / 2**30:.1f}, leaves nothing beside the {used / 2**30:.1f} GiB used; raise it or use a smaller "
            "model"
        )
    return left


def check_pool_fits(config: EngineConfig, device: jax.Device, kv_bytes: int) -> None:
    """To be called before the KV pool is made. A GPU's allocator refuses one that is too large; on a CPU the system
    ends the process without a word.

    Raises:
      ConfigError: the machine has less memory than the config asks for.
    """
    if device.platform != "cpu" or kv_bytes <= (free := _free_bytes()):
        return
    name = "kv_memory_gib" if config.num_pages is None else "num_pages"
    raise ConfigError(
        f"{name}: {getattr(config, name)} is not allowed; the KV pool would take {kv_bytes / 2**30:.2f} GiB, and "
        f"{free / 2**30:.2f} GiB of memory are free"
    )


def _free_bytes() -> int:
    """Of the host's memory, or of the container's."""
    free = [psutil.virtual_memory().available, container.available_bytes()]
    return min(size for size in free if size is not None)
