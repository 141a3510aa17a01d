"""How an engine is set up. `EngineConfig` is what the user says, `ResolvedConfig` what it came to: every "auto"
is decided once, in `EngineConfig.resolve`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from os import PathLike
from typing import Any, Literal

from jaxoverlap.errors import ConfigError, shortened
from jaxoverlap.request import RequestLimits
from jaxoverlap.scheduler.config import SchedulerConfig

ATTENTION = ("auto", "xla", "triton", "mosaic")
DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "int8")
GENERATION_CONFIGS = ("auto", "off")
SCHEDULES = ("overlap", "timeslice", "serial")
MAX_PREFILL_ROWS = 16
MAX_MODEL_LEN = 2**24
MAX_RUNNING = 65_536
MAX_LOOKAHEAD = 64


@dataclass(frozen=True)
class Schedule:
    """What a schedule's name stands for; the loop is one and the same.

    Attributes:
      lookahead: launched steps whose results may stay unread.
      mixed_steps: prompt chunks share steps with the decoding rows.
      max_prefill_streak: prefill steps between two decode steps, where they are not mixed; None leaves it to time.
    """

    lookahead: int
    mixed_steps: bool
    max_prefill_streak: int | None


PRESETS = {
    "overlap": Schedule(lookahead=1, mixed_steps=True, max_prefill_streak=None),
    "timeslice": Schedule(lookahead=0, mixed_steps=False, max_prefill_streak=1),
    "serial": Schedule(lookahead=0, mixed_steps=False, max_prefill_streak=None),
}


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Settings of an engine; all have defaults that work.

    Attributes:
      model: a folder with safetensors, a ``.gguf`` file or a Hugging Face hub id. None is the embedded default,
        SmolLM2-135M-Instruct.
      generation_config: "auto" takes what a request leaves out (temperature, top_p, top_k, min_p, repetition_penalty)
        from the model's generation_config.json, where it says something; "off" takes the defaults of `SamplingParams`.
      dtype: of weights and activations. "auto" is float32 on a CPU, bfloat16 on a GPU.
      kv_cache_dtype: of KV pages; "auto" is `dtype`. "fp8" (e4m3) and "int8" take about half the memory of bfloat16:
        codes of 8 bits, and a float32 scale for each position and KV head. docs/kernels.md has what they cost in
        accuracy.
      max_model_len: longest prompt + outputs in tokens; None is the model's own. Where the model's rope
        scaling reaches further, so may it: the original context times the factor (yarn), the own one times it (linear).
        Some models with linear scaling name a context with the factor in it (deepseek-coder): leave theirs as it is.
      max_running: requests that decode together at most; None is 32 on a CPU, 256 on a GPU.
      max_batched_tokens: prompt tokens in one step at most; longer prompts run in chunks. None is 512 on a CPU,
        2048 on a GPU; 32 and 128 for a deterministic engine.
      min_prefill_tokens: prompt tokens of the smallest step that is compiled for prompts alone; fewer are computed as
        if they were so many. Each doubling of it up to `max_batched_tokens` is a step less to compile at start. A
        deterministic engine has one step, whatever this is.
      page_size: tokens in a KV page.
      num_pages: KV pages; None takes what `kv_memory_gib` holds.
      kv_memory_gib: memory for KV pages. None is 2 GiB on a CPU (less where memory is short), and on a GPU
        what `gpu_memory_fraction` allows less what is taken once the weights are loaded and what the penalties and
        biases of all rows would take.
      gpu_memory_fraction: in (0, 1], the share of the GPU's memory that is used: for weights, KV pages, and a tenth of
        it for what steps need meanwhile. Commands and servers let JAX preallocate so much; in a program of somebody
        else JAX has what XLA_CLIENT_MEM_FRACTION says, 0.75 by default, and more is not used. Beside `num_pages` or
        `kv_memory_gib`, which say how large the pool is, it is no more than what JAX preallocates.
      schedule: "overlap" launches a step before the last one is read and mixes prompt chunks with decoding rows;
        "timeslice" alternates prefill and decode steps and reads each at once; "serial" runs prompts first. They are
        presets of the next three, which may be set one by one.
      lookahead: launched steps whose results may stay unread; 0 is serial, 1 hides the host's time.
      mixed_steps: prompt chunks share steps with the decoding rows.
      max_prefill_streak: prefill steps between two decode steps, where they are not mixed.
      max_mixed_tokens: prompt tokens in a step with decoding rows at most; what they wait for. Tokens far into a long
        prompt count more. None is 64 on a CPU, 512 on a GPU. Without effect where steps are not mixed.
      decode_wait_ms: where steps are not mixed, prefill gives way once decoding rows have waited so long.
      prompt_wait_ms: once the first in the queue has waited so long, a younger request that had its turn is preempted
        for it. Infinity never does that.
      headroom: tokens that a request gets at least before it may be preempted; doubled by the first three times.
      prefix_cache: keep the KV of what was computed for prompts that begin with it. None is on, except for models
        whose every layer has a sliding window: there pages that fall out of it are freed instead.
      cache_aware_order: admit the longest cached prefix first, within `prompt_wait_ms`; without effect where a model's
        sliding windows leave no cache.
      deterministic: the tokens and log-probabilities of a request are bit for bit the same whatever its neighbours, its
        chunks, the schedule, the cache and preemption, on the same device: every step has the same shape, and prompts
        attend as decoding rows do. Slower, for prompts above all.
      max_queue: requests that may wait without having run; None is no limit. Beyond it a server refuses, and callers of
        an `LLM` are held back.
      attention: who computes it: "xla"; "triton", kernels for NVIDIA GPUs, which a CPU only interprets, for tests;
        "mosaic", kernels for Hopper GPUs, refused at start elsewhere; "auto" takes what suits the device and the model.
      watchdog_seconds: how much longer than expected a step may take before the state of the pipeline, the last steps
        and the stacks of all threads are logged and a server is no longer healthy; infinity watches nothing.
      watchdog_exit_seconds: how much longer than that before the process ends, with exit code 3. None is 30 for
        commands and servers and infinity, never, for an `LLM` in a program of somebody else.
      compile_cache: folder of JAX's persistent compilation cache; None is the one that JAX was told to use, or else the
        user's cache folder; "off" adds none. It is one for the whole process: that of the engine that was built last.

    Raises:
      ConfigError: a value of the wrong type or out of range.
    """

    model: str | PathLike[str] | None = None
    generation_config: Literal["auto", "off"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"] = "auto"
    max_model_len: int | None = None
    max_running: int | None = None
    max_batched_tokens: int | None = None
    min_prefill_tokens: int = 16
    page_size: int = 16
    num_pages: int | None = None
    kv_memory_gib: float | None = None
    gpu_memory_fraction: float = 0.9
    schedule: Literal["overlap", "timeslice", "serial"] = "overlap"
    lookahead: int | None = None
    mixed_steps: bool | None = None
    max_prefill_streak: int | None = None
    max_mixed_tokens: int | None = None
    decode_wait_ms: float = 300.0
    prompt_wait_ms: float = 2000.0
    headroom: int = 64
    prefix_cache: bool | None = None
    cache_aware_order: bool = False
    deterministic: bool = False
    max_queue: int | None = None
    attention: Literal["auto", "xla", "triton", "mosaic"] = "auto"
    watchdog_seconds: float = 5.0
    watchdog_exit_seconds: float | None = None
    compile_cache: str | PathLike[str] | None = None

    def __post_init__(self) -> None:
        for name in ("model", "compile_cache"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str | PathLike) or not str(value)):
                raise ConfigError(f"{name}: {shortened(value)} is not allowed; use a path or a name, or leave it out")
        if self.num_pages is not None and self.kv_memory_gib is not None:
            raise ConfigError("num_pages and kv_memory_gib both say how large the KV pool is; use one of them")
        _check_choice("generation_config", self.generation_config, GENERATION_CONFIGS)
        _check_choice("dtype", self.dtype, DTYPES)
        _check_choice("kv_cache_dtype", self.kv_cache_dtype, KV_CACHE_DTYPES)
        _check_choice("schedule", self.schedule, SCHEDULES)
        _check_choice("attention", self.attention, ATTENTION)
        for name, low, high in (
            ("max_model_len", 2, MAX_MODEL_LEN),
            ("max_running", 1, MAX_RUNNING),
            ("max_batched_tokens", 1, 2**20),
            ("num_pages", 1, 2**30),
            ("lookahead", 0, MAX_LOOKAHEAD),
            ("max_prefill_streak", 1, 2**20),
            ("max_mixed_tokens", 1, 2**20),
            ("max_queue", 1, 2**30),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high)
        _check_int("min_prefill_tokens", self.min_prefill_tokens, 1, 2**20)
        _check_int("page_size", self.page_size, 1, 1024)
        _check_int("headroom", self.headroom, 1, 2**24)
        for name in ("mixed_steps", "prefix_cache"):
            _check_choice(name, getattr(self, name), (True, False, None))
        for name in ("cache_aware_order", "deterministic"):
            _check_choice(name, getattr(self, name), (True, False))
        for name in ("decode_wait_ms", "prompt_wait_ms"):
            _check_fraction(name, getattr(self, name), math.inf)
        _check_fraction("gpu_memory_fraction", self.gpu_memory_fraction, 1.0)
        _check_fraction("watchdog_seconds", self.watchdog_seconds, math.inf)
        if self.watchdog_exit_seconds is not None:
            _check_fraction("watchdog_exit_seconds", self.watchdog_exit_seconds, math.inf)
        if self.kv_memory_gib is not None:
            _check_fraction("kv_memory_gib", self.kv_memory_gib, 1e6)
        if self.cache_aware_order and self.prefix_cache is False:
            raise ConfigError(
                "cache_aware_order: True is not allowed with prefix_cache False; it goes by what is cached"
            )
        if self.cache_aware_order and math.isinf(self.prompt_wait_ms):
            raise ConfigError(
                "prompt_wait_ms: inf is not allowed with cache_aware_order; it bounds how long others pass"
            )

    def without_effect(self, platform: str | None = None) -> dict[str, str]:
        """Settings that change nothing beside the others, and why; with a platform also those that are for others."""
        is_mixed = PRESETS[self.schedule].mixed_steps if self.mixed_steps is None else self.mixed_steps
        found: dict[str, str] = {}
        if is_mixed:
            found |= dict.fromkeys(("max_prefill_streak", "decode_wait_ms"), "prompts share steps with decoding rows")
        else:
            found["max_mixed_tokens"] = "prompts have steps of their own"
        if self.deterministic:
            found["min_prefill_tokens"] = "a deterministic engine has one step"
        if math.isinf(self.watchdog_seconds) and self.watchdog_exit_seconds not in (None, math.inf):
            found["watchdog_exit_seconds"] = "watchdog_seconds is infinite"
        if platform == "cpu":
            found["gpu_memory_fraction"] = "there is no GPU"
        defaults = type(self)
        return {name: why for name, why in found.items() if getattr(self, name) != getattr(defaults, name)}

    def rows_on(self, platform: str) -> int:
        """`max_running`, decided."""
        return self.max_running or (32 if platform == "cpu" else 256)

    def resolve(
        self,
        *,
        platform: str,
        vocab_size: int,
        model_len: int,
        page_bytes: int,
        kv_memory_bytes: int,
        longest_len: int | None = None,
        window: int | None = None,
        context_per_token: float | None = None,
    ) -> ResolvedConfig:
        """Decides every "auto".

        Args:
          platform: "cpu" or "gpu".
          vocab_size, model_len: the model's.
          page_bytes: of one page over all layers, K and V.
          kv_memory_bytes: what the KV pool may take, unless `num_pages` says it.
          longest_len: what `max_model_len` may be at most; None is `model_len`.
          window: the widest sliding window, if every layer of the model has one.
          context_per_token: at this position a prompt token costs twice what the first one does.

        Raises:
          ConfigError: a setting that the model or the memory does not allow.
        """
        on_cpu = platform == "cpu"
        longest_len = longest_len or model_len
        if self.max_model_len is not None and self.max_model_len > longest_len:
            reach = "" if longest_len == model_len else f", and {longest_len} with its rope scaling"
            raise ConfigError(
                f"max_model_len: {self.max_model_len} is not allowed; the model's context is {model_len}{reach}"
            )
        max_model_len = self.max_model_len or model_len
        max_running = self.rows_on(platform)
        # More pages than every row at its longest can fill are of no use.
        useful = max_running * -(-max_model_len // self.page_size)
        num_pages = self.num_pages or min(int(kv_memory_bytes // page_bytes), useful)
        if num_pages < 1:
            raise ConfigError(
                f"no room for KV pages: one takes {page_bytes} bytes and {kv_memory_bytes} are left; "
                "raise kv_memory_gib or gpu_memory_fraction, or take a smaller model"
            )
        limits = RequestLimits(vocab_size, max_model_len, self.page_size, num_pages)
        preset = PRESETS[self.schedule]
        # Every step of a deterministic engine pays for as many prompt tokens as one may have.
        usual_tokens = (32 if on_cpu else 128) if self.deterministic else (512 if on_cpu else 2048)
        max_batched_tokens = min(self.max_batched_tokens or usual_tokens, max_model_len * max_running)
        return ResolvedConfig(
            scheduler=SchedulerConfig(
                limits=limits,
                max_running=max_running,
                max_batched_tokens=max_batched_tokens,
                max_prefill_rows=min(MAX_PREFILL_ROWS, max_running),
                mixed_steps=preset.mixed_steps if self.mixed_steps is None else self.mixed_steps,
                max_mixed_tokens=min(self.max_mixed_tokens or (64 if on_cpu else 512), max_batched_tokens),
                context_per_token=context_per_token,
                max_prefill_streak=self.max_prefill_streak or preset.max_prefill_streak,
                max_decode_wait=self.decode_wait_ms / 1e3,
                max_prompt_wait=self.prompt_wait_ms / 1e3,
                headroom=self.headroom,
                prefix_cache=window is None if self.prefix_cache is None else self.prefix_cache,
                cache_aware_order=self.cache_aware_order,
                window=window,
                max_queue=self.max_queue,
                deterministic=self.deterministic,
            ),
            platform=platform,
            schedule=self.schedule,
            lookahead=preset.lookahead if self.lookahead is None else self.lookahead,
            attention="xla" if on_cpu and self.attention == "auto" else self.attention,
            kv_bytes=num_pages * page_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig:
    """An engine's settings with nothing left to decide, save that `DeviceRunner` knows what "auto" attention is."""

    scheduler: SchedulerConfig
    platform: str
    schedule: str
    lookahead: int
    attention: str
    kv_bytes: int

    @property
    def shortfall(self) -> str | None:
        """What to change when the pool can't hold one request of the model's full length, else None."""
        limits = self.scheduler.limits
        held = limits.num_pages * limits.page_size
        if held >= limits.max_model_len - 1:
            return None
        return (
            f"the KV pool holds {held} tokens, fewer than one request of max_model_len {limits.max_model_len}; longer "
            "requests will be refused. Raise kv_memory_gib (or num_pages), or lower max_model_len"
        )

    def describe(self) -> str:
        limits = self.scheduler.limits
        cache = "on" if self.scheduler.prefix_cache else "off"
        return (
            f"KV pool: {limits.num_pages} pages of {limits.page_size} tokens = {limits.num_pages * limits.page_size} "
            f"tokens, {self.kv_bytes / 2**30:.2f} GiB; up to {self.scheduler.max_running} requests of up to "
            f"{limits.max_model_len} tokens; attention: {self.attention}; schedule: {self.schedule}, lookahead "
            f"{self.lookahead}; prefix cache: {cache}" + ("; deterministic" if self.scheduler.deterministic else "")
        )


def _check_choice(name: str, value: Any, allowed: tuple[str | bool | None, ...]) -> None:
    if not isinstance(value, str | bool | None) or value not in allowed:  # 1 would be in (True, False)
        raise ConfigError(f"{name}: {shortened(value)} is not allowed; use one of {', '.join(map(str, allowed))}")


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(f"{name}: {shortened(value)} is not allowed; use an integer from {low} to {high}")


def _check_fraction(name: str, value: Any, high: float) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        good = good and 0 < float(value) <= high
    except OverflowError:  # an integer beyond the largest float
        good = False
    if not good:
        raise ConfigError(f"{name}: {shortened(value)} is not allowed; use a number above 0, at most {high:g}")
