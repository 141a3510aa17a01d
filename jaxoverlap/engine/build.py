"""From settings to a running engine: the model, the memory, the device, the warm-up."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from jaxoverlap.config import EngineConfig, ResolvedConfig
from jaxoverlap.engine.engine import Engine
from jaxoverlap.errors import ModelError
from jaxoverlap.model.checkpoint import TokenizerSource
from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.loading import load_weights, open_model, resolve_dtype
from jaxoverlap.model.logit_rules import RowRules
from jaxoverlap.request import MAX_STOP_IDS
from jaxoverlap.runtime import compile_cache
from jaxoverlap.runtime.memory import check_pool_fits, kv_memory_bytes
from jaxoverlap.runtime.row_state import KVPages, kv_dtype_name, resolve_kv_dtype
from jaxoverlap.runtime.runner import DeviceRunner, Progress
from jaxoverlap.text.grammar_compiler import GrammarCompiler
from jaxoverlap.text.tokenizer import Tokenizer
from pallas_kernels.pages import num_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class BuiltEngine:
    """An engine that is ready once `runner` is warmed up: then nothing compiles any more.

    Attributes:
      name: what to call its model; architecture: its kind.
      sampling_defaults: fields of `SamplingParams` for requests that leave them out.
      tokenizer_source: for `Tokenizer.from_source`, where another process needs one.
      dtype, kv_cache_dtype, devices: what computes, in words.
    The last six are only for servers to tell.
    """

    name: str
    engine: Engine
    runner: DeviceRunner
    tokenizer: Tokenizer
    model_config: ModelConfig
    resolved: ResolvedConfig
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    tokenizer_source: TokenizerSource = Path()
    architecture: str = ""
    dtype: str = ""
    kv_cache_dtype: str = ""
    devices: tuple[str, ...] = ()


def build_engine(
    config: EngineConfig, progress: Progress = lambda shapes, count: shapes, *, warm_up: bool = True
) -> BuiltEngine:
    """Loads the model, sizes the KV pool and compiles every step; `warm_up=False` leaves the last to the caller.

    Raises:
      ModelError: the model can't be used.
      ConfigError: the settings don't fit the model or the device.
    """
    compile_cache.enable(config.compile_cache)
    device = jax.devices()[0]
    dtype = resolve_dtype(config.dtype, device.platform)
    files = open_model(config.model)
    tokenizer = Tokenizer.from_source(files.tokenizer_source)
    shape = replace(files.config, eos_token_ids=end_ids(files.config, tokenizer))
    weights = jax.device_put(load_weights(files, dtype).weights, device)
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, dtype)
    resolved = config.resolve(
        platform=device.platform,
        vocab_size=shape.vocab_size,
        model_len=shape.max_position_embeddings,
        page_bytes=num_bytes(KVPages.abstract(shape, 1, config.page_size, kv_dtype)),
        kv_memory_bytes=kv_memory_bytes(
            config, device, reserved=RowRules.num_bytes(config.rows_on(device.platform), shape.vocab_size)
        ),
        longest_len=shape.longest_context,
        window=shape.window,
        context_per_token=context_per_token(shape),
    )
    check_pool_fits(config, device, resolved.kv_bytes)
    logger.info("%s, KV %s, on %s: %s", dtype.name, kv_dtype_name(kv_dtype), device, resolved.describe())
    for name, why in config.without_effect(device.platform).items():
        logger.warning("%s has no effect: %s", name, why)
    if resolved.shortfall:
        logger.warning(resolved.shortfall)
    runner = DeviceRunner(
        shape,
        weights,
        resolved.scheduler,
        dtype=dtype,
        kv_dtype=kv_dtype,
        attention=resolved.attention,
        min_prefill_tokens=config.min_prefill_tokens,
        device=device,
    )
    if warm_up:
        runner.warm_up(progress)
    engine = Engine(
        resolved.scheduler,
        runner,
        lookahead=resolved.lookahead,
        eos_token_ids=shape.eos_token_ids,
        constraints=GrammarCompiler(tokenizer, shape.vocab_size, shape.eos_token_ids),
    )
    return BuiltEngine(
        files.name,
        engine,
        runner,
        tokenizer,
        shape,
        resolved,
        sampling_defaults=files.sampling_defaults if config.generation_config == "auto" else {},
        tokenizer_source=files.tokenizer_source,
        architecture=shape.family,
        dtype=dtype.name,
        kv_cache_dtype=kv_dtype_name(kv_dtype),
        devices=(device.device_kind,),
    )


def end_ids(shape: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every id that ends a sequence of a model: what its configuration says and what its tokenizer says.

    An id that the embedding table does not have can't come, and is left out with a warning.

    Raises:
      ModelError: more of them than a request may have.
    """
    ids = sorted({*shape.eos_token_ids, *tokenizer.eos_token_ids})
    known = tuple(token_id for token_id in ids if token_id < shape.vocab_size)
    if len(known) < len(ids):
        outside = ", ".join(map(str, ids[len(known) :]))
        logger.warning("end-of-sequence id %s is outside the model's %d ids and ignored", outside, shape.vocab_size)
    if len(known) > MAX_STOP_IDS:
        raise ModelError(
            f"eos_token_id: {len(known)} ids end a sequence of this model; at most {MAX_STOP_IDS} are allowed"
        )
    return known


def context_per_token(shape: ModelConfig) -> float:
    """The position at which a prompt token's attention costs as much as its products with the weights.

    Counts multiplications; those of attention run at half the rate (docs/benchmarks.md).
    """
    weights = shape.hidden_size * (2 * shape.q_size + 2 * shape.kv_size + 3 * shape.intermediate_size)
    attention = 2 * shape.q_size
    return weights / attention / 2.0
