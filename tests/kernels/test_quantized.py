"""Pools of 8-bit codes: what a code keeps of a number, and attention over codes against the dense oracle over the
numbers that they stand for."""

from __future__ import annotations

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
from pallas_kernels import pages, reference, shapes
from tests.kernels import dense
from tests.kernels.cases import Case, assert_rows_close, make
from tests.kernels.test_triton import DROP, PAGES, SIZE, SMOL, TRITON, UNOPTIMISED, decode, extend

DTYPES = pytest.mark.parametrize("dtype", pages.QUANTIZED)
XLA: dict[str, Any] = {"implementation": "xla", "interpret": False}
IMPLEMENTATIONS = pytest.mark.parametrize("options", [TRITON, XLA], ids=["triton", "xla"])
quantize = jax.jit(pages.quantize, static_argnums=1)


def in_codes(case: Case, dtype: str) -> tuple[Case, Case]:
    """The same case over codes, and over the numbers that the codes stand for."""
    codes = [pages.quantized(pool, dtype) for pool in (case.k_pages, case.v_pages)]
    numbers = [pages.dequantize(pool) for pool in codes]
    return tuple(replace(case, k_pages=k, v_pages=v) for k, v in (codes, numbers))


# ---------------------------------------------------------------- codes


@pytest.mark.parametrize(
    ("dtype", "page", "reached"),
    [
        *((dtype, 2**31, True) for dtype in ("int8", "float8_e4m3fn", "bfloat16", "float32")),
        *((dtype, count, False) for dtype in ("int8", "float8_e4m3fn") for count in (2**31 + 128, 2**32)),
        *((dtype, 2**32 + 128, True) for dtype in ("int8", "float8_e4m3fn")),
        *((dtype, 2**31 + 128, True) for dtype in ("bfloat16", "float16", "float32")),
    ],
)
def test_only_one_byte_codes_between_two_and_four_gib_are_out_of_reach(dtype, page, reached):
    assert pages.is_addressable(pages.abstract((page // 128, 1, 1, 128), dtype)) is reached


@DTYPES
@pytest.mark.parametrize("implementation", ["triton", "xla"])
def test_a_pool_that_the_kernels_can_not_address_is_refused_by_each_of_them(dtype, implementation):
    pool = pages.abstract((2**31 // 1024 + 1, 16, 1, 64), dtype)

    def ints(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    def floats(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16 if len(shape) == 3 or shape[-1] > 64 else jnp.float32)

    x, options = floats(8, 1, 64), {"page_offset": 0, "scale": 1.0}
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (pk.write_kv, (pool, pool, x, x, ints(8)), {}),
        (pk.rope_and_write_kv, (floats(8, 192), pool, pool, floats(8, 32), floats(8, 32), ints(8)), {}),
        (pk.decode_attention, (x, pool, pool, ints(8, 2), ints(8)), options),
        (pk.extend_attention, (x, pool, pool, ints(1, 2), ints(2), ints(1)), options),
    ]
    for function, arguments, more in calls:
        run = functools.partial(function, implementation=implementation, **more)
        if implementation == "xla":
            jax.eval_shape(run, *arguments)
            continue
        with pytest.raises(ValueError, match=r"at most 2\*\*31 codes or more than 2\*\*32"):
            jax.eval_shape(run, *arguments)


@DTYPES
@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), exponent=st.integers(-25, 36))
def test_a_number_comes_back_within_half_a_step(dtype, seed, exponent):
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((4, 3, 24)) * 10.0 ** (exponent - rng.integers(0, 4, (4, 3, 24)))).astype(np.float32)
    codes, scales = quantize(x, dtype)
    assert codes.shape == x.shape and scales.shape == x.shape[:2] and scales.dtype == jnp.float32
    back = np.asarray(pages.decoded(codes, jnp.float32)).astype(np.float64) * np.asarray(scales)[..., None]
    scale, off = np.asarray(scales)[..., None], np.abs(back - x)
    allowed = scale / 2 if dtype == "int8" else np.maximum(np.abs(x) / 16, scale * 2.0**-10)
    assert (off <= allowed * (1 + 1e-5)).all()
    largest = np.abs(x).max(axis=-1)
    np.testing.assert_allclose(np.abs(back).max(axis=-1), largest, rtol=1e-5)


@DTYPES
@pytest.mark.parametrize("dtype_of_x", ["float32", "bfloat16"])
def test_zeros_come_back_and_what_is_no_number_is_noticed(dtype, dtype_of_x):
    x = np.ones((4, 16), np.float32)
    x[0], x[1, 3], x[2, 5], x[3, 7] = 0, np.nan, np.inf, -np.inf
    codes, scales = quantize(jnp.asarray(x, dtype_of_x), dtype)
    back = pages.decoded(codes, jnp.float32) * scales[:, None]
    assert not np.asarray(back[0]).any() and np.isnan(np.asarray(back[1:])).all()


def test_every_code_of_float8_is_what_its_bits_say():
    codes = jnp.arange(256, dtype=jnp.uint8)
    want = np.arange(256, dtype=np.uint8).view(jnp.float8_e4m3fn)
    for dtype in ("bfloat16", "float32"):
        np.testing.assert_array_equal(
            np.asarray(pages.decoded(codes, dtype)).astype(np.float32), want.astype(np.float32)
        )


# ---------------------------------------------------------------- writes

SLOTS = jnp.asarray([0, DROP, DROP - 1, DROP + 1, 2**31 - 1, 19, 2**30, DROP], jnp.int32)
NAMED = [0, 19, DROP - 1]


def pools(heads: shapes.Heads, dtype: str) -> list[pages.QuantizedPages]:
    rng = np.random.default_rng(0)
    shape = (PAGES, SIZE, heads.kv_heads, heads.dim)
    return [pages.quantized(jnp.asarray(rng.standard_normal(shape, np.float32)), dtype) for _ in "kv"]


def by_slot(pool: pages.QuantizedPages) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N*S, K*D] and scales [N*S, K]."""
    scales = np.asarray(pool.scales).swapaxes(1, 2)
    return np.asarray(pool.codes).reshape(DROP, -1), scales.reshape(DROP, -1)


EACH = pytest.mark.parametrize(("heads", "dtype"), [(SMOL, "int8"), (shapes.HEADS[1], "float8_e4m3fn")], ids=str)


@EACH
@IMPLEMENTATIONS
def test_a_write_changes_the_codes_and_scales_of_the_named_slots_only(heads, dtype, options):
    rng = np.random.default_rng(1)
    new = [jnp.asarray(rng.standard_normal((8, heads.kv_heads, heads.dim), np.float32)) for _ in "kv"]
    new[0] = new[0].at[2, 1, 5].set(jnp.nan)
    before = pools(heads, dtype)
    write = jax.jit(lambda *arrays: pk.write_kv(*arrays, **options), compiler_options=UNOPTIMISED)
    after = write(*before, *new, SLOTS)
    numbers = reference.write_kv(*(pages.dequantize(pool) for pool in before), *new, SLOTS)
    for old, got, want, x in zip(before, after, numbers, new, strict=True):
        assert got.dtype == dtype
        for was, now in zip(by_slot(old), by_slot(got), strict=True):
            assert np.flatnonzero((was != now).any(axis=1)).tolist() == NAMED
        back = np.asarray(pages.dequantize(got))
        step = np.abs(np.nan_to_num(np.asarray(x))).max() * (1 / 127 if dtype == "int8" else 1 / 16)
        np.testing.assert_allclose(back, np.where(np.isnan(back), np.nan, want), atol=step)
        assert np.isnan(back).sum() == (heads.dim if np.isnan(np.asarray(x)).any() else 0)


@EACH
def test_rope_and_write_writes_what_rope_then_write_does(heads, dtype):
    rng = np.random.default_rng(2)
    qkv = jnp.asarray(rng.standard_normal((8, (heads.heads + 2 * heads.kv_heads) * heads.dim), np.float32))
    angles = jnp.asarray(rng.uniform(0, 6, (8, heads.dim // 2)), jnp.float32)

    def rope(**options: Any) -> Any:
        call = jax.jit(lambda *arrays: pk.rope_and_write_kv(*arrays, **options), compiler_options=UNOPTIMISED)
        return call(qkv, *pools(heads, dtype), jnp.cos(angles), jnp.sin(angles), SLOTS)

    (q, *got), (want_q, *want) = rope(**TRITON), rope()
    assert_rows_close(q, want_q)
    for pool, wanted in zip(got, want, strict=True):
        np.testing.assert_allclose(pool.scales, wanted.scales, rtol=1e-6)
        differ = np.count_nonzero(np.asarray(pool.codes != wanted.codes))
        assert differ <= 2, "more than numbers that lie between two codes"


# ---------------------------------------------------------------- attention


LENGTHS = (1, 15, 16, 17, 129, 0, 1100)


@DTYPES
@IMPLEMENTATIONS
def test_decode_over_awkward_lengths_with_poison_around(dtype, options):
    case = make(SMOL, LENGTHS)
    q = case.queries(len(LENGTHS))
    want = dense.decode_attention(in_codes(case, dtype)[1], q)
    got = decode(in_codes(case.with_stale(np.nan), dtype)[0], q, **options)
    np.testing.assert_array_equal(got, decode(in_codes(case.with_stale(1e30), dtype)[0], q, **options))
    assert_rows_close(got, want)
    assert not np.asarray(got[LENGTHS.index(0)]).any()


@DTYPES
@IMPLEMENTATIONS
@pytest.mark.parametrize("of", ["k_pages", "v_pages"])
def test_what_was_no_number_when_written_is_none_when_read_and_hurts_no_other_row(dtype, options, of):
    case = make(SMOL, LENGTHS)
    q, row, codes = case.queries(len(LENGTHS)), LENGTHS.index(129), in_codes(case, dtype)[0]
    page, pool = int(codes.page_table[row, 3]) + codes.page_offset, getattr(codes, of)
    broken = replace(codes, **{of: replace(pool, scales=pool.scales.at[page, 1, 5].set(jnp.nan))})
    right, got = (np.array(decode(case, q, **options)) for case in (codes, broken))
    assert np.isnan(got[row, 3:6]).any()  # what reads KV head 1
    got[row] = right[row]
    np.testing.assert_array_equal(got, right)


@DTYPES
@IMPLEMENTATIONS
def test_extend_over_ragged_chunks_with_poison_around(dtype, options):
    case, chunks = make(SMOL, (330, 129, 64, 0, 15)), (65, 129, 1, 0, 15)
    q = case.queries(sum(chunks) + 7)
    got = extend(in_codes(case.with_stale(np.nan), dtype)[0], q.at[sum(chunks) :].set(jnp.nan), chunks, **options)
    assert_rows_close(got, dense.attention(in_codes(case, dtype)[1], q, chunks))
    assert not np.asarray(got[sum(chunks) :]).any()


@pytest.mark.parametrize(("dtype", "options"), [("int8", TRITON), ("float8_e4m3fn", XLA)])
def test_windows_and_softcap(dtype, options):
    case, chunks = make(SMOL, (300, 129, 40, 0)), (65, 129, 1, 0)
    q, limits = case.queries(sum(chunks)), {"window": 65, "softcap": 2.0}
    got = decode(in_codes(case.outside_window(65), dtype)[0], q[:4], **limits, **options)
    assert_rows_close(got, dense.decode_attention(in_codes(case, dtype)[1], q[:4], **limits))
    got = extend(in_codes(case.outside_window(65, chunks), dtype)[0], q, chunks, **limits, **options)
    assert_rows_close(got, dense.attention(in_codes(case, dtype)[1], q, chunks, **limits))


def test_bfloat16_queries_and_scores_far_from_zero():
    codes, numbers = in_codes(make(shapes.HEADS[3], (129, 0, 300)), "float8_e4m3fn")
    chunks = (66, 0, 17)
    q = (codes.queries(83, dtype=jnp.float32) * 3).astype(jnp.bfloat16)
    assert_rows_close(decode(codes, q[:3]), dense.decode_attention(numbers, q[:3]))
    assert_rows_close(extend(codes, q, chunks), dense.attention(numbers, q, chunks))


@settings(max_examples=2, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    dtype=st.sampled_from(pages.QUANTIZED),
    group=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([16, 24, 40, 80, 96, 128]),
    page_size=st.sampled_from([1, 8, 24, 64, 128]),
    lengths=st.lists(st.integers(0, 300), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_shape(dtype, group, kv_heads, dim, page_size, lengths, data):
    case = make(shapes.Heads("any", group * kv_heads, kv_heads, dim), tuple(lengths), page_size=page_size)
    codes, numbers = in_codes(case, dtype)
    chunks = tuple(data.draw(st.integers(0, min(length, 80))) for length in lengths)
    q = case.queries(max(sum(chunks), len(lengths)) + 2)
    rows = q[: len(lengths)]
    assert_rows_close(decode(codes, rows), dense.decode_attention(numbers, rows))
    assert_rows_close(extend(codes, q, chunks), dense.attention(numbers, q, chunks))
