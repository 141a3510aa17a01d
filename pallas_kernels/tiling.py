"""How ragged chunks are cut into tiles of queries. Depends on lengths alone, so the layers of a step share it."""

import jax
import jax.numpy as jnp
from jax import lax


def blocks(positions: jax.Array, block: int) -> jax.Array:
    """Blocks that hold so many positions."""
    return lax.div(positions + jnp.int32(block - 1), jnp.int32(block))


def tile_map(
    cu_q_lens: jax.Array, seq_lens: jax.Array, tokens: int, width: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Cut chunks into tiles of `width`: their number; row, first token and its position of each.

    Tiles past the number belong to the last row, and begin at or past its end.
    """
    chunk = cu_q_lens[1:] - cu_q_lens[:-1]
    per_row = blocks(chunk, width)
    ends = jnp.cumsum(per_row)
    tile = jnp.arange(-(-tokens // width) + chunk.shape[0], dtype=jnp.int32)
    row = jnp.sum(ends[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, chunk.shape[0] - 1)
    skip = (tile - (ends[row] - per_row[row])) * width
    return ends[-1], row, cu_q_lens[row] + skip, seq_lens[row] - chunk[row] + skip
