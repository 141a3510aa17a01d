"""A tiny random model without a checkpoint, and engines on it. Compiled steps are shared between tests."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.engine.engine import Engine
from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.decoder import random_weights
from jaxoverlap.model.rope import RopeConfig
from jaxoverlap.request import Request, RequestLimits
from jaxoverlap.runtime.row_state import KVPages
from jaxoverlap.runtime.runner import DeviceRunner
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.config import SchedulerConfig
from tests.model.dense import dense_logits

VOCAB_SIZE = 128
EOS_ID = 5
CONFIG = ModelConfig(
    family="llama",
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    norm_eps=1e-5,
    rope=RopeConfig(theta=1e4),
    tie_word_embeddings=True,
    max_position_embeddings=256,
    eos_token_ids=(EOS_ID,),
)
WINDOWED = replace(CONFIG, windows=(24, 24))


@functools.cache
def weights() -> Any:
    """Larger than a real model's, so that contexts matter and greedy tokens are no near-ties."""
    return jax.tree.map(lambda array: array * 8 if array.ndim == 2 else array, random_weights(CONFIG, np.float32, 0))


def scheduler_config(**changes: Any) -> SchedulerConfig:
    limits = {"vocab_size": VOCAB_SIZE, "max_model_len": 128, "page_size": 16, "num_pages": 40}
    sizes = {"max_running": 4, "max_batched_tokens": 32, "max_prefill_rows": 4}
    for name, value in changes.items():
        (limits if name in limits else sizes)[name] = value
    return SchedulerConfig(limits=RequestLimits(**limits), **sizes)


@functools.cache
def _compiled(config: SchedulerConfig, model: ModelConfig, kv_dtype: str | None) -> dict:
    """Filled as tests need it."""
    return {}


def make_runner(
    model: ModelConfig = CONFIG, *, warm: bool = False, kv_dtype: str | None = None, **changes: Any
) -> DeviceRunner:
    """Compiles what a test needs, unless other tests have; `warm` compiles all of it first, as the engine does."""
    config = scheduler_config(**changes)
    runner = DeviceRunner(model, weights(), config, dtype=jnp.float32, kv_dtype=kv_dtype)
    runner.executables._compiled = _compiled(config, model, kv_dtype)
    if warm:
        runner.warm_up()
    return runner


def change_pool(runner: DeviceRunner, change: Callable[[KVPages], KVPages], stage: int | None = None) -> None:
    """Of each stage's pool, or of one."""
    runner._kv = tuple(change(kv) if stage in (None, index) else kv for index, kv in enumerate(runner._kv))


def make_engine(
    lookahead: int = 1,
    model: ModelConfig = CONFIG,
    *,
    warm: bool = False,
    kv_dtype: str | None = None,
    **changes: Any,
) -> tuple[Engine, DeviceRunner]:
    runner = make_runner(model, warm=warm, kv_dtype=kv_dtype, **changes)
    engine = Engine(scheduler_config(**changes), runner, lookahead=lookahead, eos_token_ids=(EOS_ID,))
    return engine, runner


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.loop.scheduler.check_integrity()
    assert engine.loop.scheduler.state.memory.num_available == engine.limits.num_pages


def random_requests(engine: Engine, seed: int, count: int, **fixed: Any) -> list[Request]:
    rng = np.random.default_rng(seed)
    requests = []
    for _ in range(count):
        prompt = rng.integers(0, VOCAB_SIZE, int(rng.integers(1, 70))).tolist()
        sampling = {"max_tokens": int(rng.integers(1, 30)), "temperature": 0.0, "seed": int(rng.integers(1 << 62))}
        requests.append(engine.add(prompt, SamplingParams(**(sampling | fixed))))
    return requests


def dense_greedy(prompt: list[int], count: int, model: ModelConfig = CONFIG) -> tuple[list[int], list[float]]:
    """The oracle: no pages, no cache, no batch. Returns tokens and the gap between the two highest logits."""
    tokens, gaps = list(prompt), []
    for _ in range(count):
        padded = np.zeros(-(-len(tokens) // 128) * 128, dtype=np.int32)
        padded[: len(tokens)] = tokens
        logits = dense_logits(model, weights(), padded)[len(tokens) - 1]
        second, first = np.sort(logits)[-2:]
        gaps.append(float(first - second))
        tokens.append(int(np.argmax(logits)))
    return tokens[len(prompt) :], gaps
