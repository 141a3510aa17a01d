"""JAX's persistent compilation cache, so that the second start is quick."""

from __future__ import annotations

import os
from os import PathLike
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxoverlap.errors import ConfigError


def default_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxoverlap" / "xla"


def enable(folder: str | PathLike[str] | None) -> Path | None:
    """Turns the cache on in `folder` (None: the user's cache folder, "off": leaves it alone).

    Raises:
      ConfigError: the folder can't be made.

    A cache that JAX was already told to use (``JAX_COMPILATION_CACHE_DIR``) is kept.
    """
    if folder == "off":
        return None
    path = Path(folder or getattr(jax.config, "jax_compilation_cache_dir", None) or default_folder())
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"compile_cache: {path} can't be used ({error.strerror}); name another folder or use 'off'"
        ) from None
    if str(path) != getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", str(path))
        compilation_cache.reset_cache()  # JAX keeps the folder of its first compilation
    # By default entries that took under a second are not kept, and small steps take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
