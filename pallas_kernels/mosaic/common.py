"""What the Mosaic kernels share: the softmax over blocks that stream through shared memory.

The warpgroups of a program have different work. The last one loads (`stream.py`). The others compute: scores and
weighted values are wgmma products of 64 rows, which are queries. Of pools of codes, the scales multiply scores and
weights, in float32.

Sources: warpgroups that load and that compute, FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608); softmax in
base 2 over blocks, FlashAttention-2 (Dao 2023, arXiv:2307.08691).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils

from pallas_kernels.mosaic.stream import PER_COLUMN, PER_ROW, ROWS, WGMMA, Stream, plgpu

mgpu: Any = utils  # it has names that older versions of jax lack
LOG2_E = math.log2(math.e)
FLOOR = -1e30  # finite, because the difference of two infinities is NaN

Softmax = tuple[jax.Array, jax.Array, jax.Array]
"""Maximum [64] and sum [64] of the weights, accumulator [64, D]; all float32."""


def call(kernel: Any, *, name: str, interpret: bool, **options: Any) -> Any:
    """`plgpu.kernel`; interpreted, it watches for races."""
    return plgpu.kernel(
        kernel,
        kernel_name=name,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=plgpu.InterpretGPUParams(detect_races=True, inline_mgpu="ignore") if interpret else None,
        **options,
    )


@dataclass(frozen=True)
class Scores:
    """How the product of a query and a key makes an exponent of 2: softcap(scale * q.k) * log2(e)."""

    scale: float
    softcap: float | None

    def __call__(self, products: jax.Array) -> jax.Array:
        if self.softcap is None:
            return products * (self.scale * LOG2_E)
        # tanh(x) by the power of 2 that is exact enough; the GPU's own tanh has 11 bits.
        power = jnp.exp2(products * (2 * LOG2_E * self.scale / self.softcap))
        return (1.0 - 2.0 / (power + 1.0)) * (self.softcap * LOG2_E)


@plgpu.inline_mgpu()
def fence(_: Any) -> None:
    """Orders memory between the programs of a cluster; its barriers order what is in shared memory only."""
    mgpu.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)


def take(rows: Any, q: Any) -> None:
    """Queries, as they came, into the tiles that wgmma reads. TMA would fill tiles from multiples of 8 rows only."""
    q[...] = plgpu.load(rows, layout=WGMMA, optimized=False).astype(q.dtype)
    plgpu.commit_smem()


def store_lines(ref: Any, x: jax.Array) -> None:
    """To shared memory, line by line, as results leave: banks may conflict, because this is done once for a tile.

    Newer versions of jax would look for a layout without conflicts, and at head dim 256 find no end.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, x, optimized=False)
    else:
        ref[...] = x


def product(a: Any, b: Any) -> jax.Array:
    """a [64, X] by b [X, Y], both in shared memory."""

    def run(acc_ref: Any) -> jax.Array:
        plgpu.wgmma(acc_ref, a, b)
        return acc_ref[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def no_weight(dim: int) -> Softmax:
    """The softmax over nothing."""
    rows = plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), PER_ROW)
    return rows + FLOOR, rows, plgpu.layout_cast(jnp.zeros((ROWS, dim), jnp.float32), WGMMA)


def along_columns(ref: Any) -> jax.Array:
    """[X] in shared memory -> [64, X]."""
    return lax.broadcast_in_dim(plgpu.load(ref, layout=PER_COLUMN, optimized=False), (ROWS, *ref.shape), (1,))


def along_rows(x: jax.Array, width: int) -> jax.Array:
    """[64] -> [64, width]."""
    return lax.broadcast_in_dim(x, (ROWS, width), (0,))


def attend(
    stream: Stream,
    index: jax.Array,
    state: Softmax,
    q: Any,
    scores: Scores,
    seen: Callable[[jax.Array], jax.Array],
    *,
    whole: jax.Array,
    consumer: jax.Array | int,
    weights_ref: Any,
) -> Softmax:
    """Adds a block of the stream.

    Args:
      q: [64, D] in shared memory.
      seen: from positions [64, X] to which of them a query sees.
      whole: every query sees the whole block.
      weights_ref: None where they go to wgmma in registers, which can not be interpreted; then [64, X] in
        shared memory.
    """
    top, total, acc = state
    slot, blocks = stream.slot(index), stream.blocks
    plgpu.barrier_wait(stream.keys_here.at[slot])
    products = product(q, stream.keys.numbers.at[slot].transpose((1, 0)))
    if stream.keys.scales is not None:
        products *= along_columns(stream.keys.scales.at[slot])
    logits = scores(products)

    def masked() -> jax.Array:
        position = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=WGMMA) + stream.start(index)
        return jnp.where(seen(position), logits, FLOOR)

    logits = lax.cond(whole, lambda: logits, masked)
    new = jnp.maximum(top, logits.max(axis=1))
    weights = jnp.exp2(logits - along_rows(new, blocks.size))
    shrink = jnp.exp2(top - new)
    total = total * shrink + weights.sum(axis=1)
    acc = acc * along_rows(shrink, blocks.dim)
    if stream.values.scales is not None:
        weights *= along_columns(stream.values.scales.at[slot])
    weights = weights.astype(blocks.dtype)

    plgpu.barrier_wait(stream.values_here.at[slot])
    stream.blank(index, consumer)
    values = stream.values.numbers.at[slot]
    if weights_ref is None:
        acc = pl.run_state(lambda acc_ref: plgpu.wgmma(acc_ref, weights, values))(plgpu.ACC.init(acc))
    else:
        weights_ref[...] = weights
        plgpu.commit_smem()
        acc = acc + product(weights_ref, values)
    plgpu.barrier_arrive(stream.free.at[slot])
    return new, total, acc


def normalized(state: Softmax) -> jax.Array:
    """[64, D]: weighted means; zeros where there was no weight."""
    _, total, acc = state
    return acc / along_rows(jnp.where(total > 0, total, 1.0), acc.shape[1])
