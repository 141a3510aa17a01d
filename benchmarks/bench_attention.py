"""Paged attention on this machine, against gather + einsum in the same run.

Every case is a chain of layers as in a step: each writes its keys and values and then
attends, on one donated flat pool. The figures are per layer. "naive" gathers every
row's pages up to the longest row and uses dense einsums; its column is what the
ratio is against. Two runs of a shared machine differ by more than two columns do.
"""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks import report
from pallas_kernels.shapes import DECODE_CASES, EXTEND_CASES, SMOLLM2_135M, DecodeCase, ExtendCase

HEADS = SMOLLM2_135M
SCALE = HEADS.dim**-0.5
CONTEXT = 8192
Attention = Callable[..., jax.Array]


def naive(
    q: jax.Array, k_pages: jax.Array, v_pages: jax.Array, table: jax.Array,
    row: jax.Array, visible: jax.Array, page_offset: int, width: int,
) -> jax.Array:  # fmt: skip
    """Gather `width` pages of every row, then dense dots: q [T, H, D], row and visible [T]."""
    pages = jnp.where(table[:, :width] < k_pages.shape[0], table[:, :width], 0) + page_offset
    k, v = (pool[pages].reshape(table.shape[0], -1, HEADS.kv_heads, HEADS.dim) for pool in (k_pages, v_pages))
    if q.shape[0] != table.shape[0]:
        k, v = k[row], v[row]
    q = q.reshape(q.shape[0], HEADS.kv_heads, HEADS.group, HEADS.dim)
    scores = jnp.einsum("tkgd,txkd->tkgx", q, k) * SCALE
    seen = jnp.arange(k.shape[1], dtype=jnp.int32)[None, :] < visible[:, None]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None, :], scores, -1e30), axis=-1)
    return jnp.einsum("tkgx,txkd->tkgd", weights, v).reshape(q.shape[0], HEADS.heads, HEADS.dim)


def measure(case: DecodeCase | ExtendCase, which: str, layers: int, size: int, repeats: int) -> dict[str, float]:
    """Milliseconds per layer (median, least), seconds to compile, megabytes of temporaries."""
    decode = isinstance(case, DecodeCase)
    lengths = np.asarray(case.lengths if decode else [case.cached + case.chunk] * case.rows, np.int32)
    chunks = np.ones_like(lengths) if decode else np.full_like(lengths, case.chunk)
    cu = np.concatenate([[0], np.cumsum(chunks)]).astype(np.int32)
    row = np.repeat(np.arange(case.rows, dtype=np.int32), chunks)
    visible = (lengths[row] - (cu[row + 1] - np.arange(cu[-1])) + 1).astype(np.int32)

    counts = -(-lengths // size)
    pages = max(16384 // size, int(counts.sum()))
    rng = np.random.default_rng(0)
    ids = np.split(rng.permutation(pages)[: counts.sum()], np.cumsum(counts)[:-1])
    table = np.full((case.rows, CONTEXT // size), pages, np.int32)
    for line, some in zip(table, ids, strict=True):
        line[: len(some)] = some
    slots = table[row, (visible - 1) // size] * size + (visible - 1) % size

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, offset: int, arrays: tuple[jax.Array, ...]) -> jax.Array:
        table, lengths, cu, row, visible = arrays
        if which == "naive":
            return naive(q, k, v, table, row, visible, offset, int(counts.max()))
        if decode:
            return pk.decode_attention(q, k, v, table, lengths, page_offset=offset, scale=SCALE)
        return pk.extend_attention(q, k, v, table, cu, lengths, page_offset=offset, scale=SCALE)

    def step(k_pages, v_pages, q, new, slots, *arrays):
        for layer in range(layers):
            kv = new + q[:, : HEADS.kv_heads]
            at = slots + jnp.int32(layer * pages * size)
            k_pages, v_pages = pk.write_kv(k_pages, v_pages, kv, kv, at)
            q = attend(q, k_pages, v_pages, layer * pages, arrays)
        return k_pages, v_pages, q

    pool = rng.standard_normal((pages, size, HEADS.kv_heads, HEADS.dim), np.float32)
    k_pages, v_pages = (jnp.tile(jnp.asarray(pool), (layers, 1, 1, 1)) for _ in range(2))
    q, new = (
        jnp.asarray(rng.standard_normal((cu[-1], h, HEADS.dim), np.float32)) for h in (HEADS.heads, HEADS.kv_heads)
    )
    rest = [q, new, *(jnp.asarray(x) for x in (slots, table, lengths, cu, row, visible))]

    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(k_pages, v_pages, *rest).compile()
    seconds = time.perf_counter() - start
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        k_pages, v_pages, _ = jax.block_until_ready(compiled(k_pages, v_pages, *rest))
        times.append((time.perf_counter() - start) * 1e3 / layers)
    return {
        "ms": float(np.median(times[2:])),
        "least": min(times[2:]),
        "compile s": seconds / layers,
        "temp MB": compiled.memory_analysis().temp_size_in_bytes / 1e6,
    }


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--page-size", type=int, default=16)
    options.add_argument("--repeats", type=int, default=20)
    args = options.parse_args()
    rows = []
    for case in (*DECODE_CASES, *EXTEND_CASES):
        ours, theirs = (measure(case, w, args.layers, args.page_size, args.repeats) for w in ("xla", "naive"))
        ratio = theirs["least"] / ours["least"]
        naive_ms = {"naive ms": theirs["ms"], "naive least": theirs["least"]}
        rows.append({"case": repr(case), **ours, **naive_ms, "ratio": ratio})
    report.show("Attention over pages, per layer", rows)
    report.write(args.json, "attention", {"rows": rows}, keys={"rows": ["case"]})


if __name__ == "__main__":
    main()
