"""The Mosaic kernels, interpreted, against the dense oracle; with races detected.

With NPROC=16 in the environment, as .ci/mosaic has it: interpreted warpgroups wait for each other inside of XLA's
threads, of which there are otherwise as many as cores, and where those do not suffice, none goes on. A case is seconds,
so a few say the most; with JAXOVERLAP_ALL_MOSAIC there are more of them. What is not interpreted:
wgmma with its left operand in registers (here it goes through shared memory), and what wgmma reads is no part of the
detection of races.
"""

import functools
import os
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import shapes, trial
from pallas_kernels.choice import unavailable
from pallas_kernels.shapes import Heads
from tests.kernels import dense
from tests.kernels.cases import Case, assert_rows_close, make
from tests.kernels.test_extend import cumulative
from tests.kernels.test_quantized import in_codes
from tests.kernels.test_triton import UNOPTIMISED

pytestmark = [
    pytest.mark.skipif(unavailable("mosaic") is not None, reason=str(unavailable("mosaic"))),
    pytest.mark.skipif(int(os.environ.get("NPROC", "0")) < 16, reason="NPROC is not 16 or more"),
]
MORE = pytest.mark.skipif(not os.environ.get("JAXOVERLAP_ALL_MOSAIC"), reason="JAXOVERLAP_ALL_MOSAIC is not set")

MOSAIC: dict[str, Any] = {"implementation": "mosaic", "interpret": True}
G3 = Heads("g3", 3, 1, 64)
G5 = Heads("g5", 5, 1, 80)
G8 = Heads("g8", 8, 1, 128)
# Blocks are of 64 positions, splits of at least 256: several of both, and rows that need one or none.
LENGTHS = (*shapes.AWKWARD_LENGTHS, 0, 257, 1100)


def without_races(result: jax.Array) -> jax.Array:
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    result.block_until_ready()
    assert not get_races().races_found
    return result


def decode(case: Case, q: jax.Array, out: jax.Array | None = None, **options: Any) -> jax.Array:
    options = {"page_offset": case.page_offset, "scale": case.scale, **MOSAIC, **options}
    run = jax.jit(functools.partial(pk.decode_attention, **options), compiler_options=UNOPTIMISED)
    return without_races(run(q, case.k_pages, case.v_pages, case.page_table, case.seq_lens, out=out))


def extend(case: Case, q: jax.Array, chunks: tuple[int, ...], **options: Any) -> jax.Array:
    options = {"page_offset": case.page_offset, "scale": case.scale, **MOSAIC, **options}
    run = jax.jit(functools.partial(pk.extend_attention, **options), compiler_options=UNOPTIMISED)
    return without_races(run(q, case.k_pages, case.v_pages, case.page_table, cumulative(chunks), case.seq_lens))


def test_decode_over_awkward_lengths():
    case = make(G3, LENGTHS, dtype="bfloat16")
    q = case.queries(len(LENGTHS))
    got = decode(case.with_stale(np.nan), q)
    assert_rows_close(got, dense.decode_attention(case, q))
    assert not np.asarray(got[LENGTHS.index(0)]).any()


def test_decode_over_int8_with_a_window_and_a_softcap():
    case, options = make(G8, (300, 129, 40, 0), page_size=8), {"window": 65, "softcap": 5.0}
    q = case.queries(4, dtype="bfloat16") * 3
    got = decode(in_codes(case.outside_window(65), "int8")[0], q, **options)
    assert_rows_close(got, dense.decode_attention(in_codes(case, "int8")[1], q, **options))


def test_extend_over_ragged_chunks():
    # A prefix of several blocks, a whole prompt, one token, nothing, less than a tile.
    case, chunks = make(G3, (330, 129, 64, 0, 15), dtype="bfloat16"), (65, 129, 1, 0, 15)
    q = case.queries(sum(chunks) + 7)
    got = extend(case.with_stale(np.nan), q.at[sum(chunks) :].set(jnp.nan), chunks)
    assert_rows_close(got, dense.attention(case, q, chunks))
    assert not np.asarray(got[sum(chunks) :]).any()


def test_extend_with_a_window_and_a_softcap():
    case, chunks = make(G8, (300, 40, 0), page_size=8, dtype="float16"), (20, 1, 0)
    q, options = case.queries(24) * 3, {"window": 65, "softcap": 5.0}
    got = extend(case.outside_window(65, chunks), q, chunks, **options)
    assert_rows_close(got, dense.attention(case, q, chunks, **options))


@pytest.mark.parametrize(("heads", "lengths"), [(G3, (40, 0, 15)), (G5, (600, 0, 15))])
def test_prompts_and_rows_share_queries_and_result(heads, lengths):
    case, chunks = make(heads, lengths, dtype="bfloat16"), (9, 0, 5)
    q = case.queries(14 + 2 + 3)
    out = extend(case, q, chunks, tokens=14)
    got = decode(case, q, out=out)
    assert_rows_close(got[:16], dense.attention(case, q[:16], chunks))
    assert_rows_close(got[16:], dense.decode_attention(case, q[16:]))


def test_a_head_dim_that_fills_no_line():
    case, chunks = make(G5, (150, 5), page_size=64, dtype="bfloat16"), (9, 5)
    q = case.queries(14)
    assert_rows_close(extend(case.with_stale(1e30), q, chunks), dense.attention(case, q, chunks))
    assert_rows_close(decode(case.with_stale(1e30), q[:2]), dense.decode_attention(case, q[:2]))


def test_the_same_over_float8():
    case, chunks = make(G5, (150, 5), page_size=24), (9, 5)
    q, numbers = case.queries(14, dtype="bfloat16"), in_codes(case, "float8_e4m3fn")[1]
    far, none = (in_codes(case.with_stale(value), "float8_e4m3fn")[0] for value in (1e30, np.nan))
    assert_rows_close(extend(far, q, chunks), dense.attention(numbers, q, chunks))
    assert_rows_close(decode(none, q[:2]), dense.decode_attention(numbers, q[:2]))


def test_the_comparison_sees_values_taken_from_the_keys():
    """Guards the other tests: a kernel that reads K where V belongs must differ."""
    case = make(G3, (70,), dtype="bfloat16")
    q = case.queries(20)
    swapped = replace(case, v_pages=case.k_pages)
    with pytest.raises(AssertionError, match="off by"):
        assert_rows_close(decode(swapped, q[:1]), dense.decode_attention(case, q[:1]))
    with pytest.raises(AssertionError, match="off by"):
        assert_rows_close(extend(swapped, q, (20,)), dense.attention(case, q, (20,)))


@pytest.mark.parametrize("name", ["decode_attention", "extend_attention"])
def test_a_trial_names_what_is_wrong(monkeypatch, name):
    from pallas_kernels import mosaic

    def computed(each: str, spoilt: bool) -> Any:
        def call(*arguments: Any, interpret: bool, **options: Any) -> jax.Array:
            right = getattr(pk.xla, each)(*arguments, **options)
            return right.at[-4 if each == "decode_attention" else 1].multiply(1.5) if spoilt else right

        return call

    for each in ("decode_attention", "extend_attention"):
        monkeypatch.setattr(mosaic, each, computed(each, each == name))
    shape = pk.AttentionShape(3, 1, 16, 8, jnp.bfloat16)
    assert f"{name.replace('_', ' ')} differs" in (trial.disagreement("mosaic", shape, interpret=True) or "")


@MORE
@pytest.mark.parametrize("heads", [*shapes.HEADS, Heads("wide", 8, 2, 256)], ids=lambda h: h.name)
@pytest.mark.parametrize(("page_size", "dtype"), [(8, "bfloat16"), (24, "float16"), (64, "bfloat16")])
def test_all_heads(heads, page_size, dtype):
    case = make(heads, LENGTHS, page_size=page_size, dtype=dtype)
    q = case.queries(len(LENGTHS))
    got = decode(case.with_stale(np.nan), q)
    np.testing.assert_array_equal(got, decode(case.with_stale(1e30), q))
    assert_rows_close(got, dense.decode_attention(case, q))
    case, chunks = make(heads, (330, 129, 64, 0, 15), page_size=page_size, dtype=dtype), (65, 129, 1, 0, 15)
    q = case.queries(sum(chunks) + 7)
    got = extend(case.with_stale(np.nan), q.at[sum(chunks) :].set(jnp.nan), chunks)
    assert_rows_close(got, dense.attention(case, q, chunks))
    assert not np.asarray(got[sum(chunks) :]).any()


@MORE
@pytest.mark.parametrize("heads", [G3, G5, G8, Heads("wide", 8, 2, 256)], ids=lambda h: h.name)
@pytest.mark.parametrize(("page_size", "dtype"), [(8, "float8_e4m3fn"), (16, "int8"), (64, "float8_e4m3fn")])
def test_all_codes(heads, page_size, dtype):
    case, chunks = make(heads, (330, 129, 0, 15), page_size=page_size), (65, 1, 0, 15)
    q, (codes, numbers) = case.queries(81 + 7, dtype="bfloat16"), in_codes(case, dtype)
    stale = in_codes(case.with_stale(1e30), dtype)[0]
    assert_rows_close(decode(stale, q[:4]), dense.decode_attention(numbers, q[:4]))
    assert_rows_close(extend(stale, q, chunks), dense.attention(numbers, q, chunks))
    np.testing.assert_array_equal(decode(stale, q[:4]), decode(codes, q[:4]))


@MORE
@pytest.mark.parametrize("window", [1, 16, 65, 1000])
def test_all_windows(window):
    case, chunks = make(G3, (300, 129, 40, 0), dtype="bfloat16"), (65, 129, 1, 0)
    q = case.queries(sum(chunks) + 7)
    got = decode(case.outside_window(window), q[:4], window=window)
    assert_rows_close(got, dense.decode_attention(case, q[:4], window=window))
    got = extend(case.outside_window(window, chunks), q, chunks, window=window)
    assert_rows_close(got, dense.attention(case, q, chunks, window=window))
