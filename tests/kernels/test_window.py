"""Sliding windows: what a query sees, and that nothing before it is ever read."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import shapes
from tests.kernels import test_decode, test_extend
from tests.kernels.cases import assert_close, make
from tests.kernels.test_decode import decode
from tests.kernels.test_extend import extend

SMOL = shapes.SMOLLM2_135M
PAGE = 16
WINDOWS = (1, PAGE - 1, PAGE, PAGE + 1, 65, 129, 1000)  # around a page and a block; longer than every length
LENGTHS = (*shapes.AWKWARD_LENGTHS, 0, 300, 289)  # two tiles of rows; several blocks before the window


@pytest.mark.parametrize("window", WINDOWS)
def test_decode_sees_its_window_and_reads_nothing_before(window):
    case = make(SMOL, LENGTHS, page_size=PAGE)
    q = case.queries(len(LENGTHS))
    got = decode(case.outside_window(window), q, window)
    np.testing.assert_array_equal(got, decode(case, q, window))
    assert_close(got, test_decode.oracle(case, q, window))


@pytest.mark.parametrize("window", WINDOWS)
def test_extend_sees_each_query_s_window_and_reads_nothing_before_the_first(window):
    # A long prefix, a whole prompt, one token, nothing, a tile and one, and chunks that start on a page's border.
    lengths, chunks = (300, 129, 40, 0, 200, 64), (65, 129, 1, 0, 64, 48)
    case = make(SMOL, lengths, page_size=PAGE)
    q = case.queries(sum(chunks) + 7)
    got = extend(case.outside_window(window, chunks), q, chunks, window=window)
    np.testing.assert_array_equal(got, extend(case, q, chunks, window=window))
    assert_close(got, test_extend.oracle(case, q, chunks, window))


@pytest.mark.parametrize("heads", shapes.HEADS, ids=lambda h: h.name)
def test_heads(heads):
    case = make(heads, (129, 17, 70), page_size=PAGE)
    q, chunks = case.queries(90), (66, 17, 7)
    assert_close(decode(case, q[:3], 33), test_decode.oracle(case, q[:3], 33))
    assert_close(extend(case, q, chunks, window=33), test_extend.oracle(case, q, chunks, 33))


@pytest.mark.parametrize(("page_size", "dtype"), [(8, "bfloat16"), (64, "float16")])
def test_page_sizes_and_dtypes(page_size, dtype):
    case = make(SMOL, (129, 200), page_size=page_size, dtype=dtype)
    q, chunks, window = case.queries(99), (66, 33), page_size + 1
    freed = case.outside_window(window)
    assert_close(decode(freed, q[:2], window), test_decode.oracle(freed, q[:2], window))
    freed = case.outside_window(window, chunks)
    assert_close(extend(freed, q, chunks, window=window), test_extend.oracle(freed, q, chunks, window))


def test_the_comparison_sees_a_window_that_is_one_too_long():
    """Guards the other tests: what lies outside would poison a query that read it."""
    case, window, chunks = make(SMOL, (129, 300), page_size=PAGE), 33, (20, 130)
    q = case.queries(150)
    assert np.isnan(decode(case.outside_window(window), q[:2], window + 1)).any(axis=(1, 2)).all()
    longer = np.isnan(extend(case.outside_window(window, chunks), q, chunks, window=window + 1))
    assert longer[[0, 20]].any(axis=(1, 2)).all()  # the first query of each chunk


def test_a_window_of_one_is_the_value_of_the_query_s_own_position():
    case = make(SMOL, (40,), page_size=PAGE)
    x = np.arange(40)
    own = case.v_pages[np.asarray(case.page_table)[0, x // PAGE] + case.page_offset, x % PAGE]
    got = extend(case, case.queries(40), (40,), window=1)
    assert_close(got, jnp.repeat(own, SMOL.group, axis=1))
    assert_close(decode(case, case.queries(1), 1), got[-1:])


def test_a_window_as_long_as_the_context_changes_nothing():
    case = make(SMOL, (129, 300), page_size=PAGE)
    q = case.queries(150)
    np.testing.assert_array_equal(decode(case, q[:2], 300), decode(case, q[:2]))
    np.testing.assert_array_equal(extend(case, q, (20, 130), window=300), extend(case, q, (20, 130)))


def test_the_window_s_edge_is_exact():
    """A key changed at position 100 is seen by the queries 100 to 100 + window - 1."""
    case, window = make(SMOL, (200,), page_size=PAGE), 24
    q = case.queries(200)
    page, offset = int(case.page_table[0, 100 // PAGE]) + case.page_offset, 100 % PAGE
    changed = replace(case, k_pages=case.k_pages.at[page, offset].add(3.0))
    before, after = (np.asarray(extend(c, q, (200,), window=window)) for c in (case, changed))
    moved = np.abs(before - after).max(axis=(1, 2)) > 0
    assert np.flatnonzero(moved).tolist() == list(range(100, 100 + window))


@pytest.mark.parametrize("cut", [1, 64, 100])
def test_two_chunks_equal_one_and_decode_continues_them(cut):
    case, window = make(SMOL, (150,), page_size=PAGE), 20
    q = case.queries(150)
    whole = extend(case, q, (150,), window=window)
    first = extend(case, q[:cut], (cut,), jnp.asarray([cut], jnp.int32), window)
    rest = extend(case, q[cut:], (150 - cut,), window=window)
    assert_close(jnp.concatenate([first, rest]), whole)
    assert_close(decode(case, q[-1:], window), whole[-1:])
