"""Searches tilings of the attention kernels for a GPU: what compiles for it without spilling, and what is fastest.

Candidates come in the order of the formula's preference: first the formula's own, then those that differ from it in
one size, then in two. The compiler refuses some, with no GPU needed. On a GPU what is left is timed and the fastest
wins; elsewhere the first wins. `tuning.write_table` keeps what was found.
"""

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import triton
from pallas_kernels.aot import CanNotCompile, Target, compile_for, spec
from pallas_kernels.pages import QUANTIZED, abstract, quantized
from pallas_kernels.tuning import MAX_SPLITS, Problem, Tiling, formula

MAX_CHANGES = 2  # sizes in which a candidate differs from the formula's
CHUNK = 512  # queries of an extend call


@dataclass(frozen=True)
class Trial:
    """A candidate and what became of it.

    Attributes:
      refused: why it does not fit, or None.
      seconds: of a call; None where it was not timed.
    """

    tiling: Tiling
    refused: str | None
    seconds: float | None = None


def problems(
    heads: int, kv_heads: int, dim: int, dtype: Any, pool_dtype: Any, page_size: int, rows: list[int], longest: int
) -> Iterator[Problem]:
    """Decode at each number of rows, and extend."""
    common = heads // kv_heads, kv_heads, dim, str(jnp.dtype(dtype)), str(jnp.dtype(pool_dtype)), page_size
    for count in rows:
        yield Problem("decode_attention", *common, count, longest)
    yield Problem("extend_attention", *common, 1, longest)


def candidates(problem: Problem) -> list[Tiling]:
    """All there are, by preference."""
    own = formula(problem)
    decodes = problem.kernel == "decode_attention"
    choices: dict[str, set[int]] = {
        "queries": set() if decodes else {size for size in (32, 64, 128) if size >= problem.group},
        "block": {16, 32, 64, 128},
        "splits": {own.splits // 2, min(2 * own.splits, MAX_SPLITS)} - {0} if decodes else set(),
        "num_warps": {4, 8},
        "num_stages": {2, 3, 5, 7},
    }
    found = [own]
    for number in range(1, MAX_CHANGES + 1):
        for names in itertools.combinations(choices, number):
            others = [sorted(choices[name] - {getattr(own, name)}) for name in names]
            found += [replace(own, **dict(zip(names, sizes, strict=True))) for sizes in itertools.product(*others)]
    return found


def call_of(problem: Problem, tiling: Tiling) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A call of the kernel, and its arguments as shapes: queries, pools, page tables, lengths."""
    columns = -(-problem.longest // problem.page_size)
    heads = problem.group * problem.kv_heads
    pages = problem.rows * columns
    pool = abstract((pages, problem.page_size, problem.kv_heads, problem.dim), problem.pool_dtype)
    decodes = problem.kernel == "decode_attention"
    tokens = problem.rows if decodes else min(CHUNK, problem.longest)
    q, tables = spec((tokens, heads, problem.dim), problem.dtype), spec((problem.rows, columns), jnp.int32)
    lengths = spec((problem.rows,), jnp.int32)
    options: dict[str, Any] = {"page_offset": 0, "scale": problem.dim**-0.5, "tuned": tiling}
    if decodes:
        arrivals = spec((problem.rows, problem.kv_heads), jnp.int32)
        return partial(triton.decode_attention, **options), (q, pool, pool, tables, lengths, arrivals)
    cu_q_lens = spec((problem.rows + 1,), jnp.int32)
    return partial(triton.extend_attention, **options), (q, pool, pool, tables, cu_q_lens, lengths)


def why_not(problem: Problem, tiling: Tiling, target: Target) -> str | None:
    """What the compiler has against a tiling.

    Raises:
      CanNotCompile: there is no compiler.
    """
    function, specs = call_of(problem, tiling)
    try:
        report = compile_for(target, function, *specs)
    except CanNotCompile:
        raise
    except Exception as error:  # XLA has no type of its own for shared memory that is too small
        return str(error).strip().splitlines()[0][:120]
    spilled = report.resources[problem.kernel].spilled
    shared = max(thunk.shared_memory for thunk in report.kernels if thunk.name == problem.kernel)
    if spilled:
        return f"spills {spilled} bytes"
    if shared > target.shared_memory:
        return f"needs {shared} bytes of shared memory, there are {target.shared_memory}"
    return None


def seconds_of(problem: Problem, tiling: Tiling, repeats: int = 20) -> float:
    """Of a call on this machine's GPU, every row at its longest; the median."""
    function, specs = call_of(problem, tiling)
    rng = np.random.default_rng(0)
    columns = specs[3].shape[1]
    q = jnp.asarray(rng.standard_normal(specs[0].shape, np.float32), specs[0].dtype)
    table = jnp.asarray(rng.permutation(problem.rows * columns).reshape(problem.rows, columns), jnp.int32)
    numbers = jax.random.normal(jax.random.key(0), specs[1].shape, jnp.bfloat16)
    is_quantized = problem.pool_dtype in QUANTIZED
    pool = quantized(numbers, problem.pool_dtype) if is_quantized else numbers.astype(problem.pool_dtype)
    lengths = jnp.full((problem.rows,), problem.longest, jnp.int32)
    if problem.kernel == "decode_attention":
        rest = lengths, jnp.zeros(specs[5].shape, jnp.int32)
    else:
        rest = jnp.asarray([0, len(q)], jnp.int32), lengths
    run, times = jax.jit(function), []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(run(q, pool, pool, table, *rest))
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def search(problem: Problem, target: Target, most: int, timed: bool) -> Iterator[Trial]:
    """Tries up to `most` candidates, and says of each what became of it."""
    for tiling in candidates(problem)[:most]:
        refused = why_not(problem, tiling, target)
        yield Trial(tiling, refused, seconds_of(problem, tiling) if timed and refused is None else None)


def best(trials: list[Trial]) -> Trial | None:
    """The fastest that fits; the first where none was timed; None if none fits."""
    fits = [trial for trial in trials if trial.refused is None]
    return min(fits, key=lambda trial: trial.seconds or 0.0, default=None)
