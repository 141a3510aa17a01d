"""JAX's persistent compilation cache, so that the second start is quick."""

from __future__ import annotations

import errno
import logging
import os
from os import PathLike
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxoverlap.errors import ConfigError

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """Raises RuntimeError where a user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxoverlap" / "xla"


def enable(folder: str | PathLike[str] | None) -> Path | None:
    """Turns the cache on in `folder` (None: the user's cache folder, "off": leaves it alone).

    Raises:
      ConfigError: the folder that was asked for can't be used.

    A cache that JAX was already told to use (``JAX_COMPILATION_CACHE_DIR``) is kept. Where nobody asked for a folder
    and the user's can't be used, it goes without, and says so.
    """
    if folder == "off":
        return None
    asked = folder or getattr(jax.config, "jax_compilation_cache_dir", None)
    try:
        path = Path(asked or default_folder())
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or error
        if asked:
            advice = "name another folder or use 'off'"
            raise ConfigError(f"compile_cache: {asked} can't be used ({reason}); {advice}") from None
        logger.warning("compile_cache: off, for the user's cache folder can't be used (%s)", reason)
        return None
    if str(path) != getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", str(path))
        compilation_cache.reset_cache()  # JAX keeps the folder of its first compilation
    # By default entries that took under a second are not kept, and small steps take less.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path
