"""JAX's persistent compilation cache, so that the second start is quick."""

from __future__ import annotations

import errno
import logging
import os
from os import PathLike
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from jaxoverlap.errors import ConfigError

logger = logging.getLogger(__name__)


def default_folder() -> Path:
    """Raises RuntimeError where a user has no home."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxoverlap" / "xla"


_FOLDER = "jax_compilation_cache_dir"
_KEEP_EVERYTHING = {
    # By default entries that took under a second are not kept, and small steps take less.
    "jax_persistent_cache_min_compile_time_secs": 0.0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}
_told_before: dict[str, Any] = {}
"""What JAX was told before an engine told it something else."""
_told: dict[str, Any] = {}
"""What an engine told it, the last that did."""


def enable(folder: str | PathLike[str] | None) -> Path | None:
    """Turns the cache on in `folder` (None: the user's cache folder, "off": none).

    Raises:
      ConfigError: the folder that was asked for can't be used.

    JAX has one cache for all of the process: it is the one of the engine that was built last, whatever those before it
    had. One that the program told JAX to use (``JAX_COMPILATION_CACHE_DIR``) is kept by None, and left alone by "off".
    Where nobody asked for a folder and the user's can't be used, it goes without, and says so.
    """
    _take_back()
    if folder == "off":
        return None
    asked = folder or getattr(jax.config, _FOLDER, None)
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
    _told.update({_FOLDER: str(path)} | _KEEP_EVERYTHING)
    _told_before.update({name: getattr(jax.config, name) for name in _told})
    _tell(_told)
    return path


def _take_back() -> None:
    """What the last engine told JAX, unless the program has told it something since."""
    if _told and all(getattr(jax.config, name, None) == value for name, value in _told.items()):
        _tell(_told_before)
    _told.clear()
    _told_before.clear()


def _tell(settings: dict[str, Any]) -> None:
    moves = settings[_FOLDER] != getattr(jax.config, _FOLDER)
    for name, value in settings.items():
        jax.config.update(name, value)
    if moves:
        compilation_cache.reset_cache()  # JAX keeps the folder of its first compilation
