"""Executes step plans on one JAX device, asynchronously.

Rules: the KV pool and the row state are donated to each step and only its results are kept. Every packed array
is built anew and never written to again, because JAX may read a NumPy argument in place. `launch` starts the
copy of the output to the host and returns; `LaunchedDeviceStep.read` is where the wait is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.runtime.buckets import Buckets, StepShape
from jaxoverlap.runtime.packing import pack, packed_size
from jaxoverlap.runtime.row_state import KVPages, RowState
from jaxoverlap.runtime.step import DeviceStep
from jaxoverlap.scheduler.config import SchedulerConfig
from jaxoverlap.scheduler.plan import StepPlan

logger = logging.getLogger(__name__)

Progress = Callable[[Iterable[StepShape], int], Iterable[StepShape]]
"""Wraps an iterable of shapes and its length, to show how far warm-up is."""


@dataclass(frozen=True, slots=True)
class LaunchedDeviceStep:
    """`output`: int32 [prefill_rows + decode_rows, 2] on the device; the plan's rows are at `index`."""

    output: jax.Array
    plan: StepPlan
    shape: StepShape

    def read(self) -> np.ndarray:
        result = np.asarray(self.output)
        first_decode = self.shape.prefill_rows
        prompts = result[: len(self.plan.chunks)]
        return np.concatenate([prompts, result[first_decode : first_decode + len(self.plan.decode_rows)]])


class DeviceRunner:
    """Holds the weights, the pool and the row state of one engine.

    Attributes:
      compiles_after_ready: steps that had to be compiled while serving; anything but 0 is a bug.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Any,
        scheduler_config: SchedulerConfig,
        *,
        dtype: Any,
        kv_dtype: Any = None,
        attention: str = "xla",
        device: jax.Device | None = None,
    ) -> None:
        limits = scheduler_config.limits
        self.device = device or jax.devices()[0]
        self.buckets = Buckets(scheduler_config)
        self.step = DeviceStep(
            config=config,
            dtype=dtype,
            num_rows=scheduler_config.max_running,
            pages_per_row=scheduler_config.pages_per_row,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            attention=attention,
        )
        self.compiles_after_ready = 0
        self._ready = False
        self._executables: dict[StepShape, jax.stages.Compiled] = {}
        self._weights = jax.device_put(weights, self.device)
        with jax.default_device(self.device):
            pool = (config.num_layers * limits.num_pages, limits.page_size, config.num_kv_heads, config.head_dim)
            self._kv = KVPages(*(jax.numpy.zeros(pool, dtype=kv_dtype or dtype) for _ in "kv"))
            self._state = RowState.blank(self.step.num_rows, self.step.pages_per_row, self.step.num_pages)

    def warm_up(self, progress: Progress = lambda shapes, count: shapes) -> None:
        """Compiles every shape a step can have, and runs each once. After it, `launch` compiles nothing.

        The run is of a plan of nothing, a no-op. XLA's CPU back end prepares each matrix product when it first
        executes, some 5 ms apiece: without the run, the first use of a step of 30 layers takes up to 1 s longer.
        It does not reach the products in attention's loops, which run no turn then: 0.15–0.25 s stay.
        """
        shapes = list(self.buckets)
        # Tracing is Python and compiling is not: two at a time take a quarter less.
        pool = ThreadPoolExecutor(max_workers=2)
        try:
            compiled = pool.map(self._compile, shapes)
            for shape in progress(shapes, len(shapes)):
                self._executables[shape] = next(compiled)
                packed = pack(self._no_work(), shape, self.step.num_rows, self.step.pages_per_row)
                self._kv, self._state, _ = self._executables[shape](self._weights, self._kv, self._state, packed)
        finally:
            pool.shutdown(cancel_futures=True)
        self._ready = True

    def _no_work(self) -> StepPlan:
        none = np.zeros(0, dtype=np.int32)
        return StepPlan(0, (), none, none, none, none, none, no_page=self.step.num_pages)

    def executable(self, shape: StepShape) -> jax.stages.Compiled:
        """The compiled step of a shape, e.g. for its ``memory_analysis()``."""
        if shape not in self._executables:
            if self._ready:
                self.compiles_after_ready += 1
                logger.warning("a step of shape '%s' was compiled after warm-up; this is a bug", shape)
            self._executables[shape] = self._compile(shape)
        return self._executables[shape]

    def _compile(self, shape: StepShape) -> jax.stages.Compiled:
        packed = jax.ShapeDtypeStruct((packed_size(shape, self.step.pages_per_row),), np.int32)
        jitted = jax.jit(partial(self.step, shape), donate_argnums=(1, 2))
        return jitted.lower(self._weights, self._kv, self._state, packed).compile()

    def release(self) -> None:
        """Lets go of the device's memory; nothing can be launched any more."""
        self._executables.clear()
        del self._weights, self._kv, self._state

    def launch(self, plan: StepPlan) -> LaunchedDeviceStep:
        """Starts a step and returns at once."""
        shape = self.buckets.shape_of(plan)
        packed = pack(plan, shape, self.step.num_rows, self.step.pages_per_row)
        self._kv, self._state, output = self.executable(shape)(self._weights, self._kv, self._state, packed)
        output.copy_to_host_async()
        return LaunchedDeviceStep(output, plan, shape)
