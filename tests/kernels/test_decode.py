"""decode_attention against the dense oracle, over the lengths and layouts that break kernels."""

from dataclasses import replace

import jax
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import reference, shapes
from tests.kernels.cases import Case, assert_close, make

SMOL = shapes.SMOLLM2_135M
jitted_decode = jax.jit(pk.decode_attention, static_argnames=("page_offset", "scale"))


def decode(case: Case, q: jax.Array, window: int | None = None, **changed: jax.Array) -> jax.Array:
    args = {"k_pages": case.k_pages, "v_pages": case.v_pages, **changed}
    call = jax.jit(pk.decode_attention, static_argnames=("page_offset", "scale", "window"))
    return call(
        q, args["k_pages"], args["v_pages"], case.page_table, case.seq_lens,
        page_offset=case.page_offset, scale=case.scale, window=window,
    )  # fmt: skip


def oracle(case: Case, q: jax.Array, window: int | None = None) -> jax.Array:
    call = jax.jit(reference.decode_attention, static_argnames=("page_offset", "scale", "window"))
    return call(
        q, case.k_pages, case.v_pages, case.page_table, case.seq_lens,
        page_offset=case.page_offset, scale=case.scale, window=window,
    )  # fmt: skip


@pytest.mark.parametrize("heads", shapes.HEADS, ids=lambda h: h.name)
def test_heads_over_awkward_lengths(heads):
    case = make(heads, shapes.AWKWARD_LENGTHS)
    q = case.queries(len(case.lengths))
    assert_close(decode(case, q), oracle(case, q))


@pytest.mark.parametrize(("page_size", "dtype"), [(8, "bfloat16"), (16, "float16"), (64, "float32")])
def test_page_sizes_and_dtypes(page_size, dtype):
    case = make(SMOL, (129, 0, 17), page_size=page_size, dtype=dtype)
    q = case.queries(3)
    assert_close(decode(case, q), oracle(case, q))


@pytest.mark.parametrize("rows", [8, 9, 20])
def test_rows_that_fill_a_tile_and_do_not(rows):
    lengths = tuple((37 * i) % 141 for i in range(1, rows + 1))
    case = make(SMOL, lengths)
    q = case.queries(rows)
    assert_close(decode(case, q), oracle(case, q))


@pytest.mark.parametrize("stale", [np.nan, 1e30])
def test_stale_positions_never_matter(stale):
    case = make(SMOL, (1, 0, 129, 16, 0, 127))
    q = case.queries(6)
    got = decode(case.with_stale(stale), q)
    np.testing.assert_array_equal(got, decode(case, q))
    assert_close(got, oracle(case, q))


def test_rows_of_length_zero_are_zeros():
    case = make(SMOL, (0, 5, 0)).with_stale(np.nan)
    q = case.queries(3)
    got = np.asarray(decode(case, q))
    assert not got[[0, 2]].any() and got[1].any()
    nothing = make(SMOL, (0,))
    assert not np.asarray(decode(nothing, nothing.queries(1))).any()


def test_a_row_does_not_depend_on_its_neighbours():
    case = make(SMOL, (129, 17, 64))
    q = case.queries(3)
    both = decode(case, q)
    alone = jitted_decode(
        q[1:2], case.k_pages, case.v_pages, case.page_table[1:2], case.seq_lens[1:2],
        page_offset=case.page_offset, scale=case.scale,
    )  # fmt: skip
    assert_close(both[1:2], alone)


def test_the_comparison_sees_values_taken_from_the_keys():
    """Guards the other tests: an implementation that reads K where V belongs must differ."""
    case = make(SMOL, (17, 129))
    q = case.queries(2)
    wrong = decode(case, q, v_pages=case.k_pages)
    with pytest.raises(AssertionError):
        assert_close(wrong, oracle(case, q))
    with pytest.raises(AssertionError):  # ... and so must one that reads another layer
        assert_close(decode(replace(case, page_offset=0), q), oracle(case, q))


def test_scores_far_from_zero():
    case = make(SMOL, (129, 16))
    q = case.queries(2) * 20
    assert_close(decode(case, q), oracle(case, q))
