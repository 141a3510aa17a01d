"""What the door refuses, and what a compiled chain of layers may cost in memory."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels as pk
from pallas_kernels import choice, pages

F32 = jnp.float32
POOL = (12, 16, 3, 64)
GOOD = {
    "q": jnp.zeros((2, 9, 64)),
    "k_pages": jnp.zeros(POOL),
    "v_pages": jnp.zeros(POOL),
    "page_table": jnp.zeros((2, 4), jnp.int32),
    "seq_lens": jnp.zeros((2,), jnp.int32),
}


def decode(**changed):
    return pk.decode_attention(**{**GOOD, "page_offset": 0, "scale": 1.0, **changed})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"q": jnp.zeros((2, 8, 64))}, r"q: got float32\[2, 8, 64\].*multiple of the 3 KV heads"),
        ({"q": jnp.zeros((2, 9, 32))}, r"q: .*head dim 64"),
        ({"q": jnp.zeros((3, 9, 64))}, r"q: .*2 rows"),
        ({"q": jnp.zeros((2, 9, 64), jnp.int32)}, r"q: got int32.*float32, bfloat16 or float16"),
        ({"v_pages": jnp.zeros((12, 16, 3, 32))}, r"v_pages: .*that of k_pages"),
        ({"v_pages": jnp.zeros(POOL, jnp.bfloat16)}, r"v_pages: got bfloat16"),
        ({"k_pages": jnp.zeros(POOL, jnp.int8)}, r"k_pages: got int8.*bfloat16, float16 or QuantizedPages"),
        ({"v_pages": pages.quantized(jnp.zeros(POOL), "int8")}, r"v_pages: got int8.*that of k_pages, float32"),
        ({"k_pages": pk.QuantizedPages(jnp.zeros(POOL), jnp.zeros((12, 3, 16)))}, r"k_pages.codes: got float32.*int8"),
        (
            {"k_pages": pk.QuantizedPages(jnp.zeros(POOL, jnp.int8), jnp.zeros((12, 16, 3)))},
            r"k_pages.scales: .*float32 \[N, K, S\]",
        ),
        ({"k_pages": jnp.zeros(POOL[1:])}, r"k_pages: .*\[N, S, K, D\]"),
        ({"page_table": jnp.zeros((3, 4), jnp.int32)}, r"page_table: .*\[2, C >= 1\]"),
        ({"page_table": jnp.zeros((2, 4), jnp.uint32)}, r"page_table: got uint32.*int32 of rank 2"),
        ({"seq_lens": jnp.zeros((2,), F32)}, r"seq_lens: got float32"),
        ({"page_offset": 12}, r"page_offset: got 12, allowed is a Python int in \[0, 12\)"),
        ({"page_offset": jnp.int32(0)}, r"page_offset: "),
        ({"window": 0}, r"window: got 0, allowed is None or a Python int in \[1, 2147483647\]"),
        ({"window": 2**31}, r"window: got 2147483648"),
        ({"window": 1.5}, r"window: got 1.5"),
        ({"softcap": 0.0}, r"softcap: got 0.0, allowed is None or a positive number"),
        ({"arrivals": jnp.zeros((2, 2), jnp.int32)}, r"arrivals: .*int32\[2, 3\], rows and KV heads"),
        ({"out": jnp.zeros((3, 9, 64))}, r"out: got float32\[3, 9, 64\].*that of q, float32\[2, 9, 64\]"),
        ({"q": jnp.zeros((1, 9, 64)), "out": jnp.zeros((1, 9, 64))}, r"q: .*at least 2 rows"),
    ],
)
def test_decode_refuses(changed, message):
    decode()
    with pytest.raises(ValueError, match=message):
        decode(**changed)


def test_extend_refuses_a_wrong_number_of_chunks_and_no_window():
    args = {**GOOD, "page_offset": 0, "scale": 1.0}
    pk.extend_attention(**args, cu_q_lens=jnp.zeros((3,), jnp.int32))
    with pytest.raises(ValueError, match="window: got 0"):
        pk.extend_attention(**args, cu_q_lens=jnp.zeros((3,), jnp.int32), window=0)
    with pytest.raises(ValueError, match=r"cu_q_lens: got int32\[2\].*one more than seq_lens"):
        pk.extend_attention(**args, cu_q_lens=jnp.zeros((2,), jnp.int32))
    with pytest.raises(ValueError, match=r"tokens: got 3, allowed is None or a Python int in \[0, 2\]"):
        pk.extend_attention(**args, cu_q_lens=jnp.zeros((3,), jnp.int32), tokens=3)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("k", jnp.zeros((4, 3, 64))),
        ("v", jnp.zeros((5, 3, 32))),
        ("slots", jnp.zeros((5,), jnp.uint32)),
        ("slots", jnp.zeros((5, 1), jnp.int32)),
    ],
)
def test_write_refuses(name, value):
    args = {"k": jnp.zeros((5, 3, 64)), "v": jnp.zeros((5, 3, 64)), "slots": jnp.zeros((5,), jnp.int32)}
    with pytest.raises(ValueError, match=f"{name}: got "):
        pk.write_kv(GOOD["k_pages"], GOOD["v_pages"], **{**args, name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("qkv", jnp.zeros((5, 14 * 64))),
        ("qkv", jnp.zeros((4, 15 * 64))),
        ("cos", jnp.zeros((5, 64))),
        ("sin", jnp.zeros((5, 32), jnp.bfloat16)),
        ("qk_norms", jnp.zeros((2, 32))),
    ],
)
def test_rope_refuses(name, value):
    phases = {"cos": jnp.zeros((5, 32)), "sin": jnp.zeros((5, 32))}
    args = {"qkv": jnp.zeros((5, 15 * 64)), **phases, "slots": jnp.zeros((5,), jnp.int32)}
    pk.rope_and_write_kv(k_pages=GOOD["k_pages"], v_pages=GOOD["v_pages"], **args)
    with pytest.raises(ValueError, match=f"{name}: got "):
        pk.rope_and_write_kv(k_pages=GOOD["k_pages"], v_pages=GOOD["v_pages"], **{**args, name: value})


def test_a_pool_that_slots_can_not_address_is_refused():
    big = jax.ShapeDtypeStruct((2**27, 16, 1, 1), F32)
    line = jax.ShapeDtypeStruct((1, 1, 1), F32)
    with pytest.raises(ValueError, match="slot fits int32"):
        jax.eval_shape(pk.write_kv, big, big, line, line, jax.ShapeDtypeStruct((1,), jnp.int32))


def test_what_can_not_be_computed_says_so(monkeypatch):
    with pytest.raises(ValueError, match="implementation: got 'cuda'"):
        decode(implementation="cuda")
    with pytest.raises(ValueError, match="interpret: got True, allowed is False with implementation 'xla'"):
        decode(interpret=True)
    monkeypatch.setattr(choice, "MOSAIC_JAX", (99, 0))
    with pytest.raises(pk.ImplementationNotAvailable, match=r"'mosaic' needs jax .* this is jax"):
        decode(implementation="mosaic")
    assert issubclass(pk.ImplementationNotAvailable, NotImplementedError)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((9, 3, 60, 16, "bfloat16"), "head dim: got 60, 'triton' takes multiples of 8 from 16 to 256"),
        ((9, 3, 512, 16, "bfloat16"), "head dim: got 512"),
        ((64, 1, 64, 16, "bfloat16"), "query heads for each KV head: got 64, 'triton' takes at most 32"),
        ((9, 3, 64, 16, "int4"), "dtype of the pools: got int4, 'triton' takes float32, bfloat16, float16, int8"),
    ],
)
def test_shapes_that_the_kernels_do_not_take(shape, message):
    shape = pk.AttentionShape(*shape)
    assert message in pk.why_not("triton", shape)
    gpu = SimpleNamespace(platform="gpu", compute_capability="9.0")
    assert message in pk.best_implementation(gpu, shape).reason


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((9, 3, 64, 16, "float32"), "dtype of the pools: got float32, 'mosaic' takes bfloat16, float16, int8"),
        ((9, 3, 72, 16, "bfloat16"), "head dim: got 72, 'mosaic' takes multiples of 16 from 16 to 256"),
        ((9, 3, 64, 12, "bfloat16"), "page size: got 12, 'mosaic' takes multiples of 8"),
        ((17, 1, 128, 16, "bfloat16"), "got 17, 'mosaic' takes at most 16 beside a head dim of 128"),
        ((9, 1, 160, 16, "bfloat16"), "got 9, 'mosaic' takes at most 8 beside a head dim of 160"),
    ],
)
def test_shapes_that_mosaic_does_not_take(monkeypatch, shape, message):
    monkeypatch.setattr(choice, "MOSAIC_JAX", (0, 0))
    assert message in pk.why_not("mosaic", pk.AttentionShape(*shape))
    reason = pk.best_implementation(HOPPER, pk.AttentionShape(*shape)).reason
    assert "mosaic" not in reason


HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0")


def test_mosaic_is_for_hopper(monkeypatch):
    monkeypatch.setattr(choice, "MOSAIC_JAX", (0, 0))
    shape = pk.AttentionShape(9, 3, 64, 16, "bfloat16")
    assert pk.why_not("mosaic", shape) is None
    assert pk.why_not("mosaic", shape, HOPPER) is None
    for device, found in (
        ({"platform": "cpu"}, "is a cpu"),
        ({"platform": "gpu", "compute_capability": "8.0"}, "has 8.0"),
    ):
        reason = pk.why_not("mosaic", shape, SimpleNamespace(**device))
        assert f"'mosaic' is for Hopper GPUs, of compute capability 9.0, by their wgmma; this device {found}" == reason
    assert "so does mosaic, which no GPU has measured yet" in pk.best_implementation(HOPPER, shape).reason


@pytest.mark.parametrize(
    ("device", "best"),
    [
        ({"platform": "cpu"}, pk.Choice("xla", "on a CPU the kernels are only interpreted")),
        ({"platform": "tpu"}, pk.Choice("xla", "there are no kernels for tpu")),
        (
            {"platform": "gpu", "compute_capability": "7.5"},
            pk.Choice("xla", "the kernels need compute capability 8.0, this device has 7.5"),
        ),
        (
            {"platform": "gpu", "compute_capability": "8.0"},
            pk.Choice("triton", "compute capability 8.0; it takes this shape"),
        ),
        (
            {"platform": "gpu", "compute_capability": "gfx942"},
            pk.Choice("xla", "'triton' is for NVIDIA GPUs; this device is a gfx942"),
        ),
    ],
)
def test_the_best_implementation_says_why(device, best):
    assert pk.best_implementation(SimpleNamespace(**device), pk.AttentionShape(9, 3, 64, 16, "bfloat16")) == best


def test_float8_pools_need_a_newer_gpu_than_int8_pools():
    gpu = SimpleNamespace(platform="gpu", compute_capability="8.0")
    shape = pk.AttentionShape(9, 3, 64, 16, "float8_e4m3fn")
    reason = "float8 pools need compute capability 8.9, this device has 8.0; int8 does not"
    assert pk.why_not("triton", shape, gpu) == reason and pk.why_not("triton", shape) is None
    assert pk.best_implementation(gpu, shape) == pk.Choice("xla", reason)
    assert pk.best_implementation(gpu, pk.AttentionShape(9, 3, 64, 16, "int8")).implementation == "triton"


LAYERS, PAGES = 3, 400


def chain(kind: str, tokens: int, window: int | None, dtype: str):
    """write_kv and attention in each of LAYERS layers, on donated pools."""

    def layer(index, q, k_pages, v_pages, k, v, slots, table, lens, cu):
        at = slots + jnp.int32(index * PAGES * 16)
        k_pages, v_pages = pk.write_kv(k_pages, v_pages, k + q[:, :3], v + q[:, :3], at)
        common = {"page_offset": index * PAGES, "scale": 0.125, "window": window}
        if kind == "decode":
            return pk.decode_attention(q, k_pages, v_pages, table, lens, **common), k_pages, v_pages
        return pk.extend_attention(q, k_pages, v_pages, table, cu, lens, **common), k_pages, v_pages

    def step(k_pages, v_pages, q, *rest):
        for index in range(LAYERS):
            q, k_pages, v_pages = layer(index, q, k_pages, v_pages, *rest)
        return k_pages, v_pages, q

    rows = tokens if kind == "decode" else 2
    pool = pages.abstract((LAYERS * PAGES, 16, 3, 64), dtype)
    ints = [jax.ShapeDtypeStruct(s, jnp.int32) for s in ((tokens,), (rows, 32), (rows,), (rows + 1,))]
    floats = [jax.ShapeDtypeStruct((tokens, h, 64), F32) for h in (9, 3, 3)]
    return jax.jit(step, donate_argnums=(0, 1)).lower(pool, pool, *floats, *ints).compile(), pool


@pytest.mark.parametrize(
    ("kind", "tokens", "window", "dtype"),
    [
        ("decode", 1, None, "float32"),
        ("decode", 2, None, "float32"),
        ("decode", 16, None, "float32"),
        ("decode", 16, 24, "float32"),
        ("extend", 32, None, "float32"),
        ("extend", 32, 24, "float32"),
        ("decode", 1, None, "int8"),
        ("decode", 16, None, "int8"),
        ("extend", 32, None, "int8"),
        ("decode", 1, None, "float8_e4m3fn"),
        ("extend", 32, None, "float8_e4m3fn"),
    ],
)
def test_a_donated_pool_is_updated_in_place(kind, tokens, window, dtype):
    compiled, pool = chain(kind, tokens, window, dtype)
    memory, float32_bytes = compiled.memory_analysis(), int(np.prod(pool.shape)) * 4
    assert memory.alias_size_in_bytes >= 2 * pages.num_bytes(pool)
    assert memory.temp_size_in_bytes < min(float32_bytes // 4, pages.num_bytes(pool))
    for part in jax.tree.leaves(pool):
        shape = re.escape(f"[{','.join(map(str, part.shape))}]")
        assert not re.search(rf"= \w+{shape}\S* copy\(", compiled.as_text())
