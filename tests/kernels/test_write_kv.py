"""write_kv: the named slots change, every other byte stays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import reference

PAGES, SIZE, KV_HEADS, DIM = 7, 8, 3, 16
DROP = PAGES * SIZE


def pools(dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    shape = (PAGES, SIZE, KV_HEADS, DIM)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for _ in range(2))


def lines(count: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1)
    shape = (count, KV_HEADS, DIM)
    return tuple(jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_only_the_named_slots_change(dtype):
    before = pools(dtype)
    new = lines(8)
    # The first and the last slot, one in between, and five ways of being out of range.
    slots = np.array([0, DROP, DROP - 1, DROP + 1, 2**31 - 1, 19, 2**30, DROP], np.int32)
    after = jax.jit(pk.write_kv)(*before, *new, jnp.asarray(slots))
    for old, got, line in zip(before, after, new, strict=True):
        want = np.asarray(old).reshape(DROP, KV_HEADS, DIM).copy()
        for slot, value in zip(slots, np.asarray(line.astype(dtype)), strict=True):
            if slot < DROP:
                want[slot] = value
        assert got.dtype == old.dtype
        assert np.asarray(got).tobytes() == want.tobytes()
        assert np.asarray(got).tobytes() != np.asarray(old).tobytes()


@pytest.mark.parametrize("count", [1, 2, 33])
def test_equals_the_reference(count):
    slots = jnp.asarray(np.random.default_rng(2).permutation(DROP + 4)[:count], jnp.int32)
    args = (*pools("float32"), *lines(count), slots)
    for got, want in zip(pk.write_kv(*args), reference.write_kv(*args), strict=True):
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes()


def test_keys_and_values_go_to_their_own_pool():
    k, v = lines(1)
    k_pages, v_pages = pk.write_kv(*pools("float32"), k, v, jnp.asarray([9], jnp.int32))
    np.testing.assert_array_equal(k_pages[1, 1], k[0])
    np.testing.assert_array_equal(v_pages[1, 1], v[0])
