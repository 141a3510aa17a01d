"""JAX's own profiler, around a number of steps. The trace is for TensorBoard's or XProf's profile page, or Perfetto."""

from __future__ import annotations

import logging
from pathlib import Path

from jaxoverlap.errors import ConflictError

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 100
"""A trace grows by megabytes each second, so each one has an end."""


class Profiler:
    """At most one trace at a time, into `folder`; None allows none. What JAX can't do is no failure of the engine.

    A trace that could not be written waits for another `stop`: JAX keeps it, and starts no other meanwhile.
    """

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._is_running = False
        self._steps_left = 0

    def start(self, steps: int | None) -> str:
        """Begins a trace that ends after `steps` steps, and returns its folder.

        Raises:
          ConflictError: there is no folder for it, one is running, or JAX can't start it.
        """
        if self._folder is None:
            raise ConflictError("this server was started without --profile-dir")
        if self._is_running:
            raise ConflictError("a profile is running already, or has still to be stopped")
        import jax

        try:
            Path(self._folder).mkdir(parents=True, exist_ok=True)
            jax.profiler.start_trace(self._folder)
        except Exception as error:  # JAX's have many types
            raise ConflictError(f"the profile can't be started: {error}") from error
        self._is_running, self._steps_left = True, steps or DEFAULT_STEPS
        return self._folder

    def stop(self) -> str:
        """Ends the trace and returns its folder.

        Raises:
          ConflictError: none is running, or it can't be written.
        """
        if not self._is_running or self._folder is None:
            raise ConflictError("no profile is running")
        import jax

        self._steps_left = 0
        try:
            jax.profiler.stop_trace()
        except Exception as error:
            raise ConflictError(f"the profile can't be written: {error}; stop it again when it can") from error
        self._is_running = False
        logger.info("profile written to %s", self._folder)
        return self._folder

    def count_step(self) -> None:
        """Raises nothing: nobody waits for the end of a trace."""
        if self._steps_left == 1:
            try:
                self.stop()
            except ConflictError as error:
                logger.error("%s", error)
        elif self._steps_left:
            self._steps_left -= 1
