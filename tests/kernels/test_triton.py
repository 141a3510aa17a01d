"""The Triton kernels, interpreted, against the dense oracle."""

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pallas_kernels as pk
from pallas_kernels import reference, shapes
from pallas_kernels.tuning import num_splits
from tests.kernels import dense
from tests.kernels.cases import Case, assert_rows_close, make
from tests.kernels.test_extend import cumulative

SMOL = shapes.SMOLLM2_135M
TRITON: dict[str, Any] = {"implementation": "triton", "interpret": True}
# Blocks are of 64 positions, splits of at least 256: several of both, and rows that need one or none.
LENGTHS = (*shapes.AWKWARD_LENGTHS, 0, 257, 1100)


STATIC = ("page_offset", "scale", "window", "softcap", "implementation", "interpret")
UNOPTIMISED = {
    "xla_backend_optimization_level": 0
}  # what is interpreted compiles for seconds and runs for milliseconds
decode_jit = jax.jit(pk.decode_attention, static_argnames=STATIC, compiler_options=UNOPTIMISED)
extend_jit = jax.jit(pk.extend_attention, static_argnames=(*STATIC, "tokens"), compiler_options=UNOPTIMISED)


def decode(
    case: Case, q: jax.Array, arrivals: jax.Array | None = None, out: jax.Array | None = None, **options: Any
) -> Any:
    options = {"page_offset": case.page_offset, "scale": case.scale, **TRITON, **options}
    return decode_jit(q, case.k_pages, case.v_pages, case.page_table, case.seq_lens, arrivals, out=out, **options)


def extend(case: Case, q: jax.Array, chunks: tuple[int, ...], **options: Any) -> jax.Array:
    options = {"page_offset": case.page_offset, "scale": case.scale, **TRITON, **options}
    arrays = (q, case.k_pages, case.v_pages, case.page_table, cumulative(chunks), case.seq_lens)
    return extend_jit(*arrays, **options)


@pytest.mark.parametrize("heads", shapes.HEADS, ids=lambda h: h.name)
def test_decode_over_awkward_lengths(heads):
    case = make(heads, LENGTHS)
    q = case.queries(len(LENGTHS))
    got = decode(case.with_stale(np.nan), q)
    np.testing.assert_array_equal(got, decode(case.with_stale(1e30), q))
    assert_rows_close(got, dense.decode_attention(case, q))
    assert not np.asarray(got[LENGTHS.index(0)]).any()


@pytest.mark.parametrize("heads", shapes.HEADS, ids=lambda h: h.name)
def test_extend_over_ragged_chunks(heads):
    # A prefix of several blocks, a whole prompt, one token, nothing, less than a tile.
    case, chunks = make(heads, (330, 129, 64, 0, 15)), (65, 129, 1, 0, 15)
    q = case.queries(sum(chunks) + 7)
    got = extend(case.with_stale(np.nan), q.at[sum(chunks) :].set(jnp.nan), chunks)
    assert_rows_close(got, dense.attention(case, q, chunks))
    assert not np.asarray(got[sum(chunks) :]).any()


@pytest.mark.parametrize(("page_size", "dtype"), [(8, "bfloat16"), (16, "float16"), (64, "bfloat16")])
def test_page_sizes_and_dtypes(page_size, dtype):
    case, chunks = make(SMOL, (129, 0, 300), page_size=page_size, dtype=dtype), (66, 0, 17)
    q = case.queries(83)
    assert_rows_close(decode(case, q[:3]), dense.decode_attention(case, q[:3]))
    assert_rows_close(extend(case, q, chunks), dense.attention(case, q, chunks))


@pytest.mark.parametrize("window", [1, 16, 65, 1000])
def test_windows(window):
    case, chunks = make(SMOL, (300, 129, 40, 0)), (65, 129, 1, 0)
    q = case.queries(sum(chunks) + 7)
    got = decode(case.outside_window(window), q[:4], window=window)
    assert_rows_close(got, dense.decode_attention(case, q[:4], window=window))
    got = extend(case.outside_window(window, chunks), q, chunks, window=window)
    assert_rows_close(got, dense.attention(case, q, chunks, window=window))


def test_softcap_and_scores_far_from_zero():
    case, chunks, softcap = make(SMOL, (129, 300)), (20, 33), 5.0
    q = case.queries(53) * 5
    assert_rows_close(decode(case, q[:2]), dense.decode_attention(case, q[:2]))
    assert_rows_close(decode(case, q[:2], softcap=softcap), dense.decode_attention(case, q[:2], softcap=softcap))
    want = dense.attention(case, q, chunks, softcap=softcap)
    assert_rows_close(extend(case, q, chunks, softcap=softcap), want)
    xla = {"implementation": "xla", "interpret": False, "softcap": softcap}
    assert_rows_close(extend(case, q, chunks, **xla), want)


def test_the_comparison_sees_values_taken_from_the_keys():
    """Guards the other tests: a kernel that reads K where V belongs must differ."""
    case, chunks = make(SMOL, (300, 70)), (20, 70)
    q = case.queries(90)
    swapped = replace(case, v_pages=case.k_pages)
    with pytest.raises(AssertionError):
        assert_rows_close(decode(swapped, q[:2]), dense.decode_attention(case, q[:2]))
    with pytest.raises(AssertionError):
        assert_rows_close(extend(swapped, q, chunks), dense.attention(case, q, chunks))


def test_arrivals_come_back_as_zeros_for_the_next_layer():
    case = make(SMOL, (1100, 3, 0))
    q, arrivals = case.queries(3), jnp.zeros((3, 3), jnp.int32)
    for _ in range(2):
        got, arrivals = decode(case, q, arrivals)
        assert_rows_close(got, dense.decode_attention(case, q))
        assert not np.asarray(arrivals).any()


@pytest.mark.parametrize("options", [{"implementation": "xla", "interpret": False}, TRITON], ids=["xla", "triton"])
@pytest.mark.parametrize("lengths", [(40, 0, 15), (1100, 0, 257)], ids=["one split", "several"])
def test_prompts_and_rows_share_queries_and_result(options, lengths):
    case, chunks = make(SMOL, lengths), (9, 0, 5)
    q, arrivals = case.queries(14 + 2 + 3), jnp.zeros((3, 3), jnp.int32)  # two tokens between them are padding
    out = extend(case, q, chunks, tokens=14, **options)
    got, arrivals = decode(case, q, arrivals, out, **options)
    assert_rows_close(got[:16], dense.attention(case, q[:16], chunks))
    assert_rows_close(got[16:], dense.decode_attention(case, q[16:]))
    assert not np.asarray(arrivals).any()


def test_splits_fill_a_gpu_and_no_more():
    assert num_splits(1, 8, 32768) == 64  # all that are allowed
    assert num_splits(1, 8, 1024) == 4  # 256 positions each
    assert num_splits(256, 8, 32768) == 1  # rows enough


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 24, 40, 64, 80, 96, 128]),
    page_size=st.sampled_from([1, 8, 24, 64, 128]),
    lengths=st.lists(st.integers(0, 400), min_size=1, max_size=4),
    window=st.one_of(st.none(), st.integers(1, 300)),
    data=st.data(),
)
def test_any_shape(group, kv_heads, dim, page_size, lengths, window, data):
    case = make(shapes.Heads("any", group * kv_heads, kv_heads, dim), tuple(lengths), page_size=page_size)
    chunks = tuple(data.draw(st.integers(0, min(length, 80))) for length in lengths)
    q = case.queries(max(sum(chunks), len(lengths)) + 2)
    rows = q[: len(lengths)]
    assert_rows_close(decode(case, rows, window=window), dense.decode_attention(case, rows, window=window))
    assert_rows_close(extend(case, q, chunks, window=window), dense.attention(case, q, chunks, window=window))


PAGES, SIZE = 7, 8
DROP = PAGES * SIZE


def pools(heads: shapes.Heads, dtype: str) -> tuple[jax.Array, ...]:
    rng = np.random.default_rng(0)
    shape = (PAGES, SIZE, heads.kv_heads, heads.dim)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in "kv")


@pytest.mark.parametrize(("heads", "dtype"), [(SMOL, "bfloat16"), (shapes.HEADS[1], "float32")])
def test_a_write_changes_the_named_slots_only(heads, dtype):
    slots = jnp.asarray([0, DROP, DROP - 1, DROP + 1, 2**31 - 1, 19, 2**30, DROP], jnp.int32)
    rng = np.random.default_rng(1)
    k, v = (jnp.asarray(rng.standard_normal((8, heads.kv_heads, heads.dim), np.float32)) for _ in "kv")
    got = pk.write_kv(*pools(heads, dtype), k, v, slots, **TRITON)
    for pool, want in zip(got, reference.write_kv(*pools(heads, dtype), k, v, slots), strict=True):
        assert np.asarray(pool).tobytes() == np.asarray(want).tobytes()


@pytest.mark.parametrize(
    ("heads", "norms"), [(SMOL, True), *((heads, False) for heads in shapes.HEADS[1:])], ids=lambda h: str(h)[:14]
)
def test_rope_and_write_is_rope_then_write(heads, norms):
    slots = jnp.asarray([0, DROP, 19, 2**31 - 1, DROP - 1], jnp.int32)
    rng = np.random.default_rng(2)
    width = (heads.heads + 2 * heads.kv_heads) * heads.dim
    dtype = "float32" if norms else "bfloat16"
    qkv = jnp.asarray(rng.standard_normal((5, width), np.float32), dtype)
    angles = jnp.asarray(rng.uniform(0, 6, (5, heads.dim // 2)), jnp.float32)
    qk_norms = jnp.asarray(rng.uniform(0.5, 2, (2, heads.dim)), jnp.float32) if norms else None

    def rope(**options: Any) -> Any:
        function = functools.partial(pk.rope_and_write_kv, norm_eps=1e-6, **options)
        call = jax.jit(function, compiler_options=UNOPTIMISED)
        return call(qkv, *pools(heads, dtype), jnp.cos(angles), jnp.sin(angles), slots, qk_norms)

    result = rope(**TRITON)
    for got, want in zip(result, rope(), strict=True):
        assert_rows_close(got, want)
    before, after = pools(heads, dtype)[0].reshape(DROP, -1), result[1].reshape(DROP, -1)
    changed = np.flatnonzero(np.asarray(before != after).any(axis=1))
    assert changed.tolist() == [0, 19, DROP - 1]
