"""extend_attention: ragged chunks against the oracle, and against decode."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import reference, shapes
from tests.kernels.cases import Case, assert_close, make

SMOL = shapes.SMOLLM2_135M
jitted_decode = jax.jit(pk.decode_attention, static_argnames=("page_offset", "scale"))


def cumulative(chunks: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.concatenate([[0], np.cumsum(chunks)]), jnp.int32)


def extend(
    case: Case,
    q: jax.Array,
    chunks: tuple[int, ...],
    seq_lens: jax.Array | None = None,
    window: int | None = None,
) -> jax.Array:
    call = jax.jit(pk.extend_attention, static_argnames=("page_offset", "scale", "window"))
    return call(
        q, case.k_pages, case.v_pages, case.page_table, cumulative(chunks),
        case.seq_lens if seq_lens is None else seq_lens,
        page_offset=case.page_offset, scale=case.scale, window=window,
    )  # fmt: skip


def oracle(case: Case, q: jax.Array, chunks: tuple[int, ...], window: int | None = None) -> jax.Array:
    call = jax.jit(reference.extend_attention, static_argnames=("page_offset", "scale", "window"))
    return call(
        q, case.k_pages, case.v_pages, case.page_table, cumulative(chunks), case.seq_lens,
        page_offset=case.page_offset, scale=case.scale, window=window,
    )  # fmt: skip


@pytest.mark.parametrize("heads", shapes.HEADS, ids=lambda h: h.name)
def test_heads_over_ragged_chunks(heads):
    case = make(heads, (129, 16, 64, 0, 15))
    chunks = (65, 16, 1, 0, 15)  # a cached prefix, a whole prompt, one token, nothing
    q = case.queries(sum(chunks) + 7)
    assert_close(extend(case, q, chunks), oracle(case, q, chunks))


@pytest.mark.parametrize(("page_size", "dtype"), [(8, "bfloat16"), (16, "float16"), (64, "float32")])
def test_page_sizes_and_dtypes(page_size, dtype):
    case = make(SMOL, (130, 17), page_size=page_size, dtype=dtype)
    chunks = (66, 17)
    q = case.queries(83)
    assert_close(extend(case, q, chunks), oracle(case, q, chunks))


def test_chunk_lengths_around_a_tile():
    chunks = (*shapes.AWKWARD_LENGTHS, 63, 64, 65)
    case = make(SMOL, tuple(n + 20 * (i % 2) for i, n in enumerate(chunks)))
    q = case.queries(sum(chunks))
    assert_close(extend(case, q, chunks), oracle(case, q, chunks))


FEW, MANY = ((8195, 4100, 2049, 40), (3, 5, 1, 7)), ((2100, 520, 513), (70, 20, 1))


@pytest.mark.parametrize(
    ("lengths", "chunks", "window"), [(*FEW, None), (*FEW, 3000), (*MANY, None), (*MANY, 100)], ids=str
)
def test_far_into_a_prompt(lengths, chunks, window):
    """Where blocks are long first and short then: at their ends, and with windows that begin in either."""
    case = make(SMOL, lengths)
    q = case.queries(sum(chunks))
    got = extend(case.outside_window(window, chunks) if window else case.with_stale(np.nan), q, chunks, window=window)
    assert_close(got, oracle(case, q, chunks, window=window))


@pytest.mark.parametrize("stale", [np.nan, 1e30])
def test_stale_positions_never_matter(stale):
    case = make(SMOL, (129, 5, 0))
    chunks = (30, 5, 0)
    q = case.queries(40)
    got = extend(case.with_stale(stale), q, chunks)
    np.testing.assert_array_equal(got, extend(case, q, chunks))
    assert_close(got, oracle(case, q, chunks))


def test_padding_is_zeros():
    case = make(SMOL, (20, 0)).with_stale(np.nan)
    q = case.queries(32).at[10:].set(jnp.nan)
    got = np.asarray(extend(case, q, (10, 0)))
    assert not got[10:].any() and np.isfinite(got).all() and got[:10].any()
    nothing = make(SMOL, (0,)).with_stale(np.nan)
    assert not np.asarray(extend(nothing, nothing.queries(4), (0,))).any()


def test_one_token_per_chunk_is_decode():
    case = make(SMOL, shapes.AWKWARD_LENGTHS)
    rows = len(case.lengths)
    q = case.queries(rows)
    decoded = jitted_decode(
        q, case.k_pages, case.v_pages, case.page_table, case.seq_lens,
        page_offset=case.page_offset, scale=case.scale,
    )  # fmt: skip
    assert_close(extend(case, q, (1,) * rows), decoded)


@pytest.mark.parametrize("cut", [1, 64])
def test_two_chunks_equal_one(cut):
    case = make(SMOL, (150,))
    q = case.queries(150)
    whole = extend(case, q, (150,))
    first = extend(case, q[:cut], (cut,), jnp.asarray([cut], jnp.int32))
    rest = extend(case, q[cut:], (150 - cut,))
    assert_close(jnp.concatenate([first, rest]), whole)


def test_a_query_does_not_see_the_future():
    case = make(SMOL, (140,))
    q = case.queries(140)
    page, offset = int(case.page_table[0, 100 // 16]) + case.page_offset, 100 % 16
    changed = replace(case, k_pages=case.k_pages.at[page, offset].add(3.0))
    before, after = np.asarray(extend(case, q, (140,))), np.asarray(extend(changed, q, (140,)))
    np.testing.assert_array_equal(before[:100], after[:100])
    assert (np.abs(before[100:] - after[100:]).max(axis=(1, 2)) > 0).all()


def test_the_comparison_sees_values_taken_from_the_keys():
    case = make(SMOL, (70,))
    q = case.queries(70)
    wrong = extend(replace(case, v_pages=case.k_pages), q, (70,))
    with pytest.raises(AssertionError):
        assert_close(wrong, oracle(case, q, (70,)))
