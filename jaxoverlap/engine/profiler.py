"""JAX's own profiler, around a number of steps. The trace is for TensorBoard's or XProf's profile page, or Perfetto."""

from __future__ import annotations

import logging

from jaxoverlap.errors import ConflictError

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 100
"""A trace grows by megabytes each second, so each one has an end."""


class Profiler:
    """At most one trace at a time, into `folder`; None allows none."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._steps_left = 0

    def start(self, steps: int | None) -> str:
        """Begins a trace that ends after `steps` steps, and returns its folder.

        Raises:
          ConflictError: there is no folder for it, or one is running.
        """
        if self._folder is None:
            raise ConflictError("this server was started without --profile-dir")
        if self._steps_left:
            raise ConflictError("a profile is running already")
        import jax

        jax.profiler.start_trace(self._folder)
        self._steps_left = steps or DEFAULT_STEPS
        return self._folder

    def stop(self) -> str:
        """Ends the trace and returns its folder.

        Raises:
          ConflictError: none is running.
        """
        if not self._steps_left or self._folder is None:
            raise ConflictError("no profile is running")
        import jax

        self._steps_left = 0
        jax.profiler.stop_trace()
        logger.info("profile written to %s", self._folder)
        return self._folder

    def count_step(self) -> None:
        if self._steps_left == 1:
            self.stop()
        elif self._steps_left:
            self._steps_left -= 1
