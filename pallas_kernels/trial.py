"""A trial of an implementation on the device that is to run it: small random cases, beside plain XLA.

What a compiler makes of a kernel is one driver's and one GPU's; a trial takes seconds once, and a wrong kernel would
speak nonsense for ever.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from pallas_kernels.choice import AttentionShape
from pallas_kernels.pages import QUANTIZED, Pages, QuantizedPages, dequantize, quantized

TOLERANCE = 0.02
"""Of the largest number of a result: bfloat16 and TF32 differ by less, and a kernel that is wrong by more. Beside
quantised pools a code more: where a number lies between two, its last bit decides."""
_CODE = {"int8": 1 / 127, "float8_e4m3fn": 32 / 448}

_PARTS = ("rotation", "the keys' write", "the values' write", "decode attention", "extend attention", "the draw")
"""What is compared; what is wrong first is told."""

_LENGTHS = (1, 17, 700, 0, 1500)
_CHUNKS = (1, 17, 130, 0, 65)
_COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


def disagreement(
    implementation: str, shape: AttentionShape, device: jax.Device | None = None, *, interpret: bool = False
) -> str | None:
    """What `implementation` gets wrong on `device` (None: the default one); None if nothing. Never raises.

    Compares the write with rotation, decode and extend attention over pages in random order, with rows of one part and
    of several, to `TOLERANCE`; and the draw of tokens.
    """
    try:
        with jax.default_device(device):
            results = {
                name: _results(shape, implementation=name, interpret=interpret and name == implementation)
                for name in ("xla", implementation)
            }
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    tolerance = TOLERANCE + _CODE.get(str(jnp.dtype(shape.dtype)), 0)
    for what, expected, got in zip(_PARTS, results["xla"], results[implementation], strict=True):
        off = np.abs(got - expected).max() / np.abs(expected).max()
        if not off <= tolerance:  # NaN is wrong too
            return f"{what} differs by {off:.2g} of its largest number"
    return None


def _results(shape: AttentionShape, **options: Any) -> list[np.ndarray]:
    """float32, as `_PARTS` has them."""
    size, is_quantized = shape.page_size, str(jnp.dtype(shape.dtype)) in QUANTIZED
    dtype = jnp.bfloat16 if is_quantized else shape.dtype
    rng = np.random.default_rng(0)
    counts = [-(-length // size) for length in _LENGTHS]
    columns, pages = max(counts), sum(counts) + 3
    order = iter(rng.permutation(pages).tolist())
    table = np.full((len(_LENGTHS), columns), pages, np.int32)
    for line, count in zip(table, counts, strict=True):
        line[:count] = [next(order) for _ in range(count)]
    lengths = np.array(_LENGTHS, np.int32)
    tokens, width = sum(_CHUNKS), (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    row = np.repeat(np.arange(len(_CHUNKS)), _CHUNKS)
    ends = np.cumsum(_CHUNKS)
    position = lengths[row] - ends[row] + np.arange(tokens)
    slots = (table[row, position // size] * size + position % size).astype(np.int32)

    def normal(*dims: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(dims, np.float32)).astype(dtype)

    numbers = [normal(pages, size, shape.kv_heads, shape.head_dim) for _ in "kv"]
    pools = [quantized(pool, shape.dtype) if is_quantized else pool for pool in numbers]
    angles = position[:, None] / 10_000.0 ** (np.arange(shape.head_dim // 2) / (shape.head_dim // 2))
    phases = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    @functools.partial(jax.jit, compiler_options=_COMPILER_OPTIONS if options["interpret"] else None)
    def run(qkv: jax.Array, queries: jax.Array, k: Pages, v: Pages, *arrays: jax.Array) -> list[jax.Array]:
        cos, sin, slots, table, lengths, cu_q_lens = arrays
        q, k, v = pk.rope_and_write_kv(qkv, k, v, cos, sin, slots, **options)
        attend: dict[str, Any] = {"page_offset": 0, "scale": shape.head_dim**-0.5, **options}
        together = jnp.concatenate([q, queries])  # as in a step with prompts and decoding rows
        out = pk.extend_attention(together, k, v, table, cu_q_lens, lengths, tokens=tokens, **attend)
        out = pk.decode_attention(together, k, v, table, lengths, out=out, **attend)
        pools = [dequantize(pool) if isinstance(pool, QuantizedPages) else pool for pool in (k, v)]
        return [q, *pools, out[tokens:], out[:tokens], _drawn(**options)]

    cu_q_lens = np.array([0, *ends], np.int32)
    queries = normal(len(_LENGTHS), shape.heads, shape.head_dim)
    results = run(normal(tokens, width), queries, *pools, *phases, slots, table, lengths, cu_q_lens)
    return [np.asarray(array, np.float32) for array in results]


def _drawn(**options: Any) -> jax.Array:
    """Draws that no rounding moves: 8 rows with 3 to 96 ids of equal weight left, in a vocabulary of two blocks.

    Ids are scrambled, so that a neighbour's is far off.
    """
    rows = np.arange(8)
    left = 3 * 2 ** np.minimum(rows, 5)
    ids = (np.arange(96) * 47 + 5) % 5000
    logits = np.full((8, 5000), -4.0, np.float32)
    for row, count in zip(rows, left, strict=True):
        logits[row, ids[:count]] = 2.0
    parameters = (np.full(8, 0.8), np.where(rows % 2, left, 0), np.where(rows % 2, 1.0, 0.5), np.full(8, 0.05))
    temperature, top_k, top_p, min_p = (np.asarray(one, np.float32) for one in parameters)
    uniform = ((rows + 0.3) / 8).astype(np.float32)
    highest = np.full(8, 2.0, np.float32)
    arrays = (logits, highest, temperature, top_k.astype(np.int32), top_p, min_p, uniform, rows >= 0)
    return pk.draw_tokens(*map(jnp.asarray, arrays), **options) * 7919 % 1009
