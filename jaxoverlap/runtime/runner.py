"""Executes step plans on one JAX device, asynchronously.

Rules: the KV pool and the row state are donated to each step and only its results are kept. Every packed array
is built anew and never written to again, because JAX may read a NumPy argument in place. `launch` starts the
copy of the output to the host and returns; `LaunchedDeviceStep.read` is where the wait is.

A step with rows that must follow a grammar is launched in two halves: `launch`, and `LaunchedDeviceStep.sample` when
it is known what they may say. No other step is launched in between.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jaxoverlap.errors import UnsupportedError
from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.stages import split_weights
from jaxoverlap.runtime.buckets import MIN_PREFILL_TOKENS, Buckets, StepShape, row_multiple
from jaxoverlap.runtime.executables import Executables, Rare, SampleShape, Shape, mask_words
from jaxoverlap.runtime.packing import pack
from jaxoverlap.runtime.row_state import KVPages, RowState, stages_for_pool
from jaxoverlap.runtime.rules_seats import RulesSeats
from jaxoverlap.runtime.sample_step import ReadyToSample
from jaxoverlap.runtime.step import DeviceStep
from jaxoverlap.scheduler.config import SchedulerConfig
from jaxoverlap.scheduler.plan import StepPlan, StepResult
from pallas_kernels import AttentionShape, Choice, best_implementation, trial, why_not

logger = logging.getLogger(__name__)

MAX_STAGES = 8
"""Functions that a CPU's layers are divided into at most. JAX lets 32 calls wait for a CPU before the next one blocks:
those of some three steps."""

Progress = Callable[[Iterable[Shape], int], Iterable[Shape]]
"""Wraps an iterable of shapes and its length, to show how far warm-up is."""


def choose_attention(attention: str, device: jax.Device, config: ModelConfig, page_size: int, dtype: Any) -> str:
    """The implementation in `pallas_kernels` for KV pages of `dtype`; says in the log why.

    "auto" takes kernels that suit the device and the model once they have agreed with plain XLA there, tried on
    small cases, which takes seconds; else plain XLA. "mosaic" is tried like that too, and refused where it disagrees:
    none of its kernels has been on a GPU yet. The others are taken at their word.

    Raises:
      UnsupportedError: it does not take this model's shape or this device, or gets it wrong there.
    """
    shape = AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, page_size, dtype)
    if attention == "auto":
        choice = best_implementation(device, shape)
        wrong = None if choice.implementation == "xla" else trial.disagreement(choice.implementation, shape, device)
        if wrong is not None:
            choice = Choice("xla", f"{choice.implementation} was tried on this device: {wrong}")
        level = logging.INFO if wrong is None else logging.WARNING
        logger.log(level, "attention: %s, because %s", choice.implementation, choice.reason)
        return choice.implementation
    reason = why_not(attention, shape, device)
    if reason is None and attention == "mosaic":
        wrong = trial.disagreement(attention, shape, device)
        reason = None if wrong is None else f"mosaic was tried on this device: {wrong}"
    if reason is not None:
        raise UnsupportedError(f"attention: {reason}; use 'auto' or 'xla'")
    if attention == "triton" and device.platform == "cpu":
        logger.warning("attention: triton is interpreted on a CPU: right, and very slow")
    return attention


@dataclass(slots=True)
class LaunchedDeviceStep:
    """A step on its way.

    Attributes:
      output: int32 [sample_rows, 2] on the device; None until the second half is launched.
      scores: int32 [sample_rows, SCORE_WORDS]; only where a row of the plan asks for it.
      prompt_scores: int32 [max_step_tokens, SCORE_WORDS]; only where a chunk of the plan asks for it.
    """

    runner: DeviceRunner
    plan: StepPlan
    shape: StepShape
    ready: ReadyToSample | None
    with_rules: bool
    prompt_scores: jax.Array | None
    output: jax.Array | None = None
    scores: jax.Array | None = None

    def sample(self, allowed: np.ndarray) -> None:
        """Launches the second half; int32 [len(plan.rows), mask words], see `apply_rules`."""
        words = np.full((self.shape.sample_rows, allowed.shape[1]), -1, dtype=np.int32)
        words[: len(self.plan.chunks)] = allowed[: len(self.plan.chunks)]
        first = self.shape.prefill_rows
        words[first : first + len(self.plan.decode_rows)] = allowed[len(self.plan.chunks) :]
        words.flags.writeable = False
        self.runner.launch_sampling(self, words)

    def read(self) -> StepResult:
        assert self.output is not None, "only the first half of the step was launched"
        scores = None if self.scores is None else self._of_the_plan(np.asarray(self.scores))
        prompt_scores = None if self.prompt_scores is None else np.asarray(self.prompt_scores)
        return StepResult(self._of_the_plan(np.asarray(self.output)), scores, prompt_scores)

    def _of_the_plan(self, result: np.ndarray) -> np.ndarray:
        first = self.shape.prefill_rows
        prompts = result[: len(self.plan.chunks)]
        return np.concatenate([prompts, result[first : first + len(self.plan.decode_rows)]])


class DeviceRunner:
    """Holds the weights, the pool and the row state of one engine.

    `dtype` is that of weights and activations, `kv_dtype` of KV pages, where it is another: also int8, float8_e4m3fn.
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
        min_prefill_tokens: int = MIN_PREFILL_TOKENS,
        device: jax.Device | None = None,
    ) -> None:
        limits = scheduler_config.limits
        self.device = device or jax.devices()[0]
        pool_dtype = dtype if kv_dtype is None else kv_dtype
        implementation = choose_attention(attention, self.device, config, limits.page_size, pool_dtype)
        if implementation == "xla":
            max_stages = MAX_STAGES if self.device.platform == "cpu" else 1
        else:
            max_stages = stages_for_pool(config, limits.num_pages, limits.page_size, pool_dtype)
        self.buckets = Buckets(scheduler_config, row_multiple(implementation), min_prefill_tokens=min_prefill_tokens)
        self.step = DeviceStep(
            config=config,
            dtype=dtype,
            num_rows=scheduler_config.max_running,
            pages_per_row=scheduler_config.pages_per_row,
            num_pages=limits.num_pages,
            page_size=limits.page_size,
            max_step_tokens=max(each.prefill_tokens + each.decode_rows for each in self.buckets if each.prefill_tokens),
            attention=implementation,
            interpret=attention == "triton" and self.device.platform == "cpu",
            deterministic=scheduler_config.deterministic,
            max_stages=max_stages,
        )
        self._weights = split_weights(jax.device_put(weights, self.device), self.step.stage_sizes)
        with jax.default_device(self.device):
            pools = [
                KVPages.abstract(stage, limits.num_pages, limits.page_size, pool_dtype) for stage in self.step.stages
            ]
            self._kv = tuple(jax.tree.map(lambda array: jax.numpy.zeros(array.shape, array.dtype), pools))
            self._state = RowState.blank(self.step.num_rows, self.step.pages_per_row, self.step.num_pages)
        self.executables = Executables(self.step, self.buckets, self._weights, self._kv, self._state)
        self._rules = RulesSeats(self.executables, self.step.num_rows, config.vocab_size)
        self._everything: dict[int, jax.Array] = {}

    @property
    def compiles_after_ready(self) -> int:
        """Functions that had to be compiled while serving; anything but 0 is a bug."""
        return self.executables.compiles_after_ready

    def warm_up(self, progress: Progress = lambda shapes, count: shapes) -> None:
        """Compiles everything a step can need, and runs each step once. After it, `launch` compiles nothing.

        The run is of a plan of nothing, a no-op. XLA's CPU back end prepares each matrix product when it first
        executes, some 5 ms apiece: without the run, the first use of a step of 30 layers takes up to 1 s longer.
        It does not reach the products in attention's loops, which run no turn then: 0.15–0.25 s stay.
        """
        self.executables.compile_all(progress)
        for shape in self.buckets:
            self._launch(StepPlan.of_nothing(self.step.num_pages), shape)
        self.executables.seal()

    def release(self) -> None:
        """Lets go of the device's memory; nothing can be launched any more."""
        self.executables.clear()
        self._everything.clear()
        del self._weights, self._kv, self._state, self._rules

    def launch(self, plan: StepPlan) -> LaunchedDeviceStep:
        """Starts a step and returns at once; of a constrained plan, the first half."""
        return self._launch(plan, self.buckets.shape_of(plan))

    def _launch(self, plan: StepPlan, shape: StepShape) -> LaunchedDeviceStep:
        packed = pack(plan, shape, self.step.num_rows, self.step.pages_per_row)
        first_half = self.executables[shape]
        self._kv, self._state, ready, hidden = first_half(self._weights, self._kv, self._state, packed)
        with_rules = self._rules.seat(plan)
        launched = LaunchedDeviceStep(self, plan, shape, ready, with_rules, self._score_prompt(plan, hidden))
        if not plan.is_constrained:
            self.launch_sampling(launched, self._all_ids(shape.sample_rows))
        return launched

    def launch_sampling(self, step: LaunchedDeviceStep, allowed: np.ndarray | jax.Array) -> None:
        """The second half; `allowed` as in `apply_rules`, read in steps with rules."""
        second_half = self.executables[SampleShape(step.shape.sample_rows, step.with_rules)]
        if step.with_rules:
            result = second_half(self._state, step.ready, self._rules.rules, allowed)
        else:
            result = second_half(self._state, step.ready)
        self._state, step.output, scores, rules = result
        step.ready = None
        if step.with_rules:
            self._rules.rules = rules
        if step.plan.is_scored:
            step.scores = scores
            scores.copy_to_host_async()
        assert step.output is not None
        step.output.copy_to_host_async()

    def _all_ids(self, num_rows: int) -> jax.Array:
        """The mask that allows everything, kept on the device."""
        if num_rows not in self._everything:
            words = np.full((num_rows, mask_words(self.step.config.vocab_size)), -1, dtype=np.int32)
            self._everything[num_rows] = jax.device_put(words, self.device)
        return self._everything[num_rows]

    def _score_prompt(self, plan: StepPlan, hidden: jax.Array | None) -> jax.Array | None:
        if hidden is None or not any(chunk.scores_prompt for chunk in plan.chunks):
            return None
        targets = np.zeros(len(hidden), dtype=np.int32)
        num_top = np.full(len(hidden), -1, dtype=np.int32)
        start = 0
        for chunk in plan.chunks:
            wanted = chunk.request.sampling.prompt_logprobs
            if chunk.scores_prompt and wanted is not None:
                predicted = chunk.predicted_ids
                targets[start : start + len(predicted)] = predicted
                num_top[start : start + len(predicted)] = wanted
            start += len(chunk.token_ids)
        targets.flags.writeable = num_top.flags.writeable = False
        scores = self.executables[Rare.SCORE_PROMPT](self._weights[0], hidden, targets, num_top)
        scores.copy_to_host_async()
        return scores
