"""The kernels on this machine's GPU: first whether they are right, then how fast.

Each case is a chain of calls in one jitted function, on different layers of one pool of random numbers, and every
call's queries are the result of the one before: so the device works without a pause, and no cache holds the pages. A
figure is the median over repeats, per call. Decode is told as a share of the copy bandwidth measured here, extend as a
rate beside that of a plain product. "xla" is the same function without kernels, "upstream" the paged attention that
jax brings. Draws of tokens are chained too, a draw's uniform numbers come of the tokens before; but on the same logits,
which the L2 cache may hold, as it may after the product that makes them.

Without a GPU the same code runs on small cases with the kernels interpreted: that proves the script, and its times
mean nothing.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks import report
from jaxoverlap.config import KV_CACHE_DTYPES
from jaxoverlap.runtime.row_state import resolve_kv_dtype
from pallas_kernels.pages import QUANTIZED, abstract, num_bytes, quantized
from pallas_kernels.reference import draw_error
from pallas_kernels.shapes import HEADS, SMOLLM2_135M, Heads

LLAMA_3_8B = Heads("llama-3-8b", 32, 8, 128)
MODELS = (SMOLLM2_135M, LLAMA_3_8B, *HEADS[1:])
POOL_BYTES = 8 << 30  # of all layers of a case, at most where one layer is not larger already
DECODE_BAR, DECODE_BAR_FROM = 0.75, 128 * 1024  # share of the copy bandwidth; positions in all rows
EXTEND_BAR, EXTEND_BAR_FROM = 300e12, 2048  # floating-point operations a second; tokens
TOLERANCE = {"bfloat16": 2e-2, "float32": 2e-5}
DRAWS = 16  # in a chain
DRAW_TOLERANCE = 1e-4  # of the cumulated weights
LIMITS = {  # temperature, top-k, top-p, min-p
    "temperature": (1.0, 0, 1.0, 0.0),
    "top-k 50": (0.8, 50, 1.0, 0.0),
    "top-p 0.9": (0.8, 0, 0.9, 0.0),
    "all limits": (1.2, 200, 0.95, 0.02),
}
Attention = Callable[..., jax.Array]


@dataclass(frozen=True)
class Case:
    """`rows` rows of `length` positions each; `chunk` of them are queries, or one where it decodes."""

    heads: Heads
    rows: int
    length: int
    chunk: int
    page_size: int
    dtype: Any
    pool_dtype: Any
    layers: int

    @property
    def is_decode(self) -> bool:
        return self.chunk == 1

    @property
    def layer_bytes(self) -> int:
        return 2 * num_bytes(
            abstract((1, self.rows * self.length, self.heads.kv_heads, self.heads.dim), self.pool_dtype)
        )

    @property
    def operations(self) -> float:
        """Multiplications and additions of a call, what the causal mask hides left out."""
        seen = self.rows * self.chunk * (self.length - (self.chunk - 1) / 2)
        return 4 * seen * self.heads.heads * self.heads.dim

    def __str__(self) -> str:
        kind = "decode" if self.is_decode else f"extend {self.chunk}"
        return f"{self.heads.name} {kind} B={self.rows} L={self.length}"


def cases(on_gpu: bool, page_size: int, models: tuple[Heads, ...], pool_dtype: Any = None) -> Iterator[Case]:
    dtype = jnp.bfloat16 if on_gpu else jnp.float32
    pool_dtype = dtype if pool_dtype is None else pool_dtype
    decodes = [(b, n) for b in (1, 8, 64, 256) for n in (512, 2048, 8192, 32768)] if on_gpu else [(2, 40), (1, 600)]
    extends = [(1, 512, 512), (1, 2048, 2048), (1, 2048, 16384), (8, 256, 2048)] if on_gpu else [(2, 20, 70)]
    for heads in models:
        for rows, chunk, length in [*((b, 1, n) for b, n in decodes), *extends]:
            one = Case(heads, rows, length, chunk, page_size, dtype, pool_dtype, 1)
            layers = max(1, min(16, POOL_BYTES // one.layer_bytes)) if on_gpu else 2
            yield Case(heads, rows, length, chunk, page_size, dtype, pool_dtype, layers)


@dataclass(frozen=True)
class Arrays:
    """A case's arguments, on the device."""

    q: jax.Array
    k_pages: pk.Pages
    v_pages: pk.Pages
    table: jax.Array
    cu_q_lens: jax.Array
    lengths: jax.Array
    pages: int

    @classmethod
    def of(cls, case: Case) -> "Arrays":
        columns = -(-case.length // case.page_size)
        pages = case.rows * columns
        keys = jax.random.split(jax.random.key(0), 3)
        pool = (case.layers * pages, case.page_size, case.heads.kv_heads, case.heads.dim)
        draw = jax.jit(partial(jax.random.normal, dtype=case.dtype), static_argnums=1)
        is_quantized = jnp.dtype(case.pool_dtype).name in QUANTIZED
        drawn = (draw(key, pool) for key in keys[1:])
        k_pages, v_pages = (
            jax.jit(quantized, static_argnums=1)(x, case.pool_dtype) if is_quantized else x.astype(case.pool_dtype)
            for x in drawn
        )
        order = np.random.default_rng(0).permutation(pages).reshape(case.rows, columns)
        tokens = case.rows * case.chunk
        return cls(
            q=draw(keys[0], (tokens, case.heads.heads, case.heads.dim)),
            k_pages=k_pages,
            v_pages=v_pages,
            table=jnp.asarray(order, jnp.int32),
            cu_q_lens=jnp.arange(0, tokens + 1, case.chunk, dtype=jnp.int32),
            lengths=jnp.full((case.rows,), case.length, jnp.int32),
            pages=pages,
        )


def ours(case: Case, arrays: Arrays, layer: int, q: jax.Array, pools: Any, **options: Any) -> jax.Array:
    options = {"page_offset": layer * arrays.pages, "scale": case.heads.dim**-0.5, **options}
    if case.is_decode:
        return pk.decode_attention(q, *pools, arrays.table, arrays.lengths, **options)
    return pk.extend_attention(q, *pools, arrays.table, arrays.cu_q_lens, arrays.lengths, **options)


def upstream(case: Case, arrays: Arrays, layer: int, q: jax.Array, pools: Any) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    # Its pools are [K, N, S, D]; those of ours are taken as if they were, which makes wrong sums of as many numbers.
    k, v = (pool.reshape(case.heads.kv_heads, -1, case.page_size, case.heads.dim) for pool in pools)
    return paged_attention(q * case.heads.dim**-0.5, k, v, arrays.table + layer * arrays.pages, arrays.lengths)


def chain(case: Case, arrays: Arrays, attend: Attention) -> Callable[..., jax.Array]:
    def run(q: jax.Array, k_pages: pk.Pages, v_pages: pk.Pages) -> jax.Array:
        for layer in range(case.layers):
            q = attend(case, arrays, layer, q, (k_pages, v_pages))
        return q

    return jax.jit(run)


@dataclass(frozen=True)
class Draw:
    """A draw for `rows` rows of `vocab` logits that share their limits, a key of `LIMITS`."""

    rows: int
    vocab: int
    limits: str

    def __str__(self) -> str:
        return f"draw by {self.limits} B={self.rows} V={self.vocab}"

    def measure(self, interpret: bool, repeats: int) -> dict[str, Any]:
        rng = np.random.default_rng(0)
        logits = (3 * rng.standard_normal((self.rows, self.vocab), np.float32)).astype(np.float32)
        uniform = rng.random(self.rows, np.float32)
        names = ("temperature", "top_k", "top_p", "min_p")
        limits: dict[str, Any] = dict(zip(names, LIMITS[self.limits], strict=True))
        per_row = [
            jnp.full(self.rows, limit, jnp.int32 if name == "top_k" else jnp.float32) for name, limit in limits.items()
        ]
        arrays = (logits, logits.max(axis=1), *per_row, uniform, np.ones(self.rows, bool))
        arguments = [jnp.asarray(array) for array in arrays]
        kernel = partial(pk.draw_tokens, implementation="triton", interpret=interpret)
        tokens = np.asarray(jax.jit(kernel)(*arguments)).tolist()
        off = max(
            draw_error(token, line, **limits, uniform=share)
            for token, line, share in zip(tokens, logits, uniform, strict=True)
        )

        def microseconds(draw: Callable[..., jax.Array]) -> float:
            def run(*arguments: jax.Array) -> jax.Array:
                *others, uniform, draws = arguments
                for _ in range(DRAWS):
                    uniform = (draw(*others, uniform, draws) % 97) / 97.0
                return uniform

            return seconds(jax.jit(run), *arguments, repeats=repeats) / DRAWS * 1e6

        return {
            "case": str(self),
            "off": off,
            "right": off <= DRAW_TOLERANCE,
            "µs": microseconds(kernel),
            "of copy": "",
            "TFLOP/s": "",
            "xla µs": microseconds(pk.draw_tokens),
            "upstream µs": "",
            "bar": "",
        }


def draws(on_gpu: bool) -> Iterator[Draw]:
    sizes = [(b, v) for v in (49_152, 128_256) for b in (1, 8, 64, 256)] if on_gpu else [(2, 97), (3, 9001)]
    for rows, vocab in sizes:
        yield from (Draw(rows, vocab, limits) for limits in LIMITS)


def seconds(function: Callable[..., Any], *arguments: Any, repeats: int) -> float:
    """Median of a call that is waited for."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return float(np.median(times[2:]))


def copy_bandwidth(size: int, repeats: int) -> float:
    """Bytes read and written a second."""
    x = jnp.zeros(size // 2, jnp.bfloat16)
    return 2 * size / seconds(jax.jit(lambda x: x + 1), x, repeats=repeats)


def matrix_rate(size: int, repeats: int) -> float:
    """Operations a second of a bfloat16 product."""
    x = jnp.ones((size, size), jnp.bfloat16)
    return 2 * size**3 / seconds(jax.jit(jnp.dot), x, x, repeats=repeats)


def measure(case: Case, implementation: str, interpret: bool, repeats: int, bandwidth: float) -> dict[str, Any]:
    arrays = Arrays.of(case)
    pools = (arrays.k_pages, arrays.v_pages)
    kernels = partial(ours, implementation=implementation, interpret=interpret)
    once = [jax.jit(partial(f, case, arrays, 0))(arrays.q, pools).astype(jnp.float32) for f in (kernels, ours)]
    off = float(jnp.abs(once[0] - once[1]).max() / jnp.abs(once[1]).max())
    row: dict[str, Any] = {"case": str(case), "off": off, "right": off <= TOLERANCE[str(jnp.dtype(case.dtype))]}

    def per_call(attend: Attention) -> float:
        return seconds(chain(case, arrays, attend), arrays.q, *pools, repeats=repeats) / case.layers

    took = per_call(kernels)
    row["µs"] = took * 1e6
    share, rate = case.layer_bytes / took / bandwidth, case.operations / took
    row["of copy"] = share if case.is_decode else ""
    row["TFLOP/s"] = "" if case.is_decode else rate / 1e12
    row["xla µs"] = per_call(ours) * 1e6
    row["upstream µs"] = _upstream_microseconds(case, per_call, interpret)
    if case.is_decode and case.rows * case.length >= DECODE_BAR_FROM:
        row["bar"] = "met" if share >= DECODE_BAR else "MISSED"
    elif not case.is_decode and case.rows * case.chunk >= EXTEND_BAR_FROM and case.heads.dim == 128:
        row["bar"] = "met" if rate >= EXTEND_BAR else "MISSED"
    else:
        row["bar"] = ""
    return row


def _upstream_microseconds(case: Case, per_call: Callable[[Attention], float], interpret: bool) -> float | str:
    if interpret or not case.is_decode or case.pool_dtype != case.dtype:
        return ""
    try:
        return per_call(upstream) * 1e6
    except Exception as error:  # it refuses head dims, and page counts that its splits do not divide
        return type(error).__name__


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--page-size", type=int, default=16)
    options.add_argument("--implementation", choices=["triton", "mosaic"], default="triton", help="default: triton")
    options.add_argument("--repeats", type=int, default=20)
    kv_help = "of the pools; else that of the queries"
    options.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES[1:], help=kv_help)
    options.add_argument("--model", choices=[heads.name for heads in MODELS], help="only the heads of this one")
    args = options.parse_args()
    device = jax.devices()[0]
    on_gpu = device.platform == "gpu"
    if args.implementation == "mosaic" and not on_gpu:
        options.error("mosaic is measured on a Hopper GPU; tests/kernels/test_mosaic.py has it interpreted")
    repeats = args.repeats if on_gpu else 1
    bandwidth = copy_bandwidth((4 << 30) if on_gpu else (1 << 22), repeats)
    rate = matrix_rate(8192 if on_gpu else 128, repeats)
    models = tuple(heads for heads in MODELS if args.model in (None, heads.name))
    kv_dtype = resolve_kv_dtype(args.kv_cache_dtype, jnp.dtype(jnp.bfloat16)) if args.kv_cache_dtype else None
    rows = [
        measure(case, args.implementation, not on_gpu, repeats, bandwidth)
        for case in cases(on_gpu, args.page_size, models, kv_dtype)
    ]
    rows += [draw.measure(not on_gpu, repeats) for draw in draws(on_gpu)]
    measured = f"copy {bandwidth / 1e9:.0f} GB/s, product {rate / 1e12:.1f} TFLOP/s on {device.device_kind}"
    note = f"{args.implementation}; {measured}"
    if not on_gpu:
        note += "; interpreted without a GPU: the times mean nothing"
    report.show("Kernels, per call", rows, note)
    results = {"rows": rows, "note": note, "measured": on_gpu}
    report.write(args.json, "kernels", results, keys={"rows": ["case"]})
    wrong = [row["case"] for row in rows if not row["right"]]
    if wrong:
        raise SystemExit(f"wrong: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
