"""`jaxoverlap autotune`: how large the kernels' tiles should be on a GPU, kept as a table in the package."""

from __future__ import annotations

import os
from dataclasses import astuple
from typing import Annotated

import typer

from jaxoverlap.cli.command import FAILED, OK, say
from jaxoverlap.cli.inspect_step import Gpu, KvCacheDtype, Model, PageSize
from jaxoverlap.config import KV_CACHE_DTYPES, MAX_MODEL_LEN, MAX_RUNNING

Rows = Annotated[
    list[int] | None,
    typer.Option("--rows", min=1, max=MAX_RUNNING, help="Rows that decode; may be given several times."),
]
Longest = Annotated[
    int, typer.Option("--max-model-len", min=1, max=MAX_MODEL_LEN, help="Positions that a row may read.")
]
Candidates = Annotated[int, typer.Option("--candidates", min=1, help="Tilings to try for each, by preference.")]
Timed = Annotated[bool, typer.Option("--time", help="Time what fits, on this machine's GPU; else the first one wins.")]
Write = Annotated[bool, typer.Option("--write", help="Keep what was found in the package, where the kernels look.")]


def autotune(
    model: Model = None,
    gpu: Gpu = "h200",
    kv_cache_dtype: KvCacheDtype = "auto",
    page_size: PageSize = 16,
    rows: Rows = None,
    max_model_len: Longest = 2048,
    candidates: Candidates = 12,
    timed: Timed = False,
    write: Write = False,
) -> int:
    """Search block sizes, splits, warps and stages of the attention kernels for a GPU.

    The compiler refuses what spills registers or needs too much shared memory, which takes the CUDA plugin and no GPU;
    with --time what is left runs on this machine's GPU and the fastest wins. --rows is 1, 8, 64 and 256 if left out.
    """
    if not timed:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp

    from jaxoverlap.model.loading import open_model
    from jaxoverlap.runtime.inspect_step import LLAMA_3_8B
    from jaxoverlap.runtime.row_state import resolve_kv_dtype
    from pallas_kernels import autotune as tuner
    from pallas_kernels.aot import TARGETS, CanNotCompile
    from pallas_kernels.tuning import write_table

    for name, value, allowed in (("gpu", gpu, tuple(TARGETS)), ("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)):
        if value not in allowed:
            say(f"error: {name}: {value!r} is not allowed; use one of {', '.join(allowed)}")
            return FAILED
    target = TARGETS[gpu]
    if timed and jax.devices()[0].device_kind != target.name:
        say(f"error: --time needs a {target.name}, this machine has {jax.devices()[0].device_kind}; see --gpu")
        return FAILED
    config = LLAMA_3_8B if model == "llama-3-8b" else open_model(model).config
    dtype = jnp.dtype(jnp.bfloat16)
    found = {}
    for problem in tuner.problems(
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        dtype,
        resolve_kv_dtype(kv_cache_dtype, dtype),
        page_size,
        rows or [1, 8, 64, 256],
        max_model_len,
    ):
        print(problem.key, flush=True)
        trials = []
        try:
            for trial in tuner.search(problem, target, candidates, timed):
                trials.append(trial)
                outcome = trial.refused or ("fits" if trial.seconds is None else f"{trial.seconds * 1e6:.1f} µs")
                queries, block, splits, warps, stages = astuple(trial.tiling)
                sizes = f"{queries} queries, block {block}, {splits} splits, {warps} warps, {stages} stages"
                print(f"  {sizes}: {outcome}", flush=True)
        except CanNotCompile as error:
            say(f"error: {error}")
            return FAILED
        chosen = tuner.best(trials)
        if chosen is not None:
            found[problem.key] = chosen.tiling
    if write:
        print(f"written to {write_table(target.name, found, 'timed' if timed else 'compiled')}")
    return OK
