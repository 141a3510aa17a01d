"""The decoder computes what transformers computes, on the same files."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.extend.core import jaxprs_in_params

import pallas_kernels as pk
from jaxoverlap.model import layout
from jaxoverlap.model.decoder import Decoder, abstract_weights, contract, matmul_precision, random_weights
from jaxoverlap.model.loading import load_model
from pallas_kernels import pages
from tests.model.dense import dense_attend, dense_logits
from tests.tiny_models import MODELS, VOCAB_SIZE, make_model, save_folder

TOKENS = 230
IDS = np.random.default_rng(7).integers(0, VOCAB_SIZE, TOKENS)


def hf_logits(model, ids, first_position: int = 0) -> np.ndarray:
    positions = first_position + torch.arange(len(ids))[None]
    with torch.no_grad():
        return model(torch.tensor(ids)[None], position_ids=positions).logits[0].numpy()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """name → (transformers model, its folder), made once."""
    made = {}

    def get(name: str):
        if name not in made:
            model = make_model(name)
            made[name] = model, save_folder(model, tmp_path_factory.mktemp(name))
        return made[name]

    return get


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers_at_every_position(saved, name):
    model, folder = saved(name)
    loaded = load_model(folder, "float32")
    ours, theirs = dense_logits(loaded.config, loaded.weights, IDS), hf_logits(model, IDS)
    assert ours.shape == theirs.shape == (TOKENS, VOCAB_SIZE)
    assert np.abs(theirs).max() > 1  # else a tolerance means nothing
    assert np.abs(ours - theirs).max() < 2e-4


@pytest.mark.parametrize("name", ["llama", "llama-theta", "llama-llama3-rope", "llama-yarn-rope"])
def test_rope_holds_at_far_positions(saved, name):
    # Relative rotation hides a common shift, so the sequence has to span the positions.
    model, folder = saved(name)
    loaded = load_model(folder, "float32")
    positions = np.concatenate([np.arange(40), 2000 + np.arange(40)])
    with torch.no_grad():
        theirs = model(torch.tensor(IDS[:80])[None], position_ids=torch.tensor(positions)[None]).logits[0].numpy()
    decoder = Decoder(loaded.config, np.float32)
    hidden = decoder.apply(loaded.weights, jnp.asarray(IDS[:80]), jnp.asarray(positions), dense_attend)
    ours = decoder.apply(loaded.weights, hidden, method=Decoder.logits)
    assert np.abs(np.asarray(ours) - theirs).max() < 5e-4


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
@pytest.mark.parametrize("spelling", ["rope_theta", "rope_parameters"])
def test_rope_theta_is_read_in_both_spellings(tmp_path, theta, spelling):
    model = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": theta})
    fields = {"rope_parameters": None, "rope_theta": theta} if spelling == "rope_theta" else {}
    loaded = load_model(save_folder(model, tmp_path, config=fields), "float32")
    assert loaded.config.rope.theta == theta
    assert np.abs(dense_logits(loaded.config, loaded.weights, IDS) - hf_logits(model, IDS)).max() < 2e-4


def test_a_wrong_theta_would_be_seen(saved):
    _, folder = saved("llama")
    model = make_model("llama", rope_parameters={"rope_type": "default", "rope_theta": 20000.0})
    loaded = load_model(folder, "float32")
    assert np.abs(dense_logits(loaded.config, loaded.weights, IDS) - hf_logits(model, IDS)).max() > 1e-2


@pytest.mark.parametrize(
    ("name", "windows"),
    [
        ("mistral-window", (24, 24)),
        ("qwen2-window", (24, 24)),
        ("qwen2-window-of-a-layer", (None, 24)),
        ("qwen3-window-of-a-layer", (24, None)),
    ],
)
def test_a_wrong_window_would_be_seen(saved, name, windows):
    model, folder = saved(name)
    loaded, theirs = load_model(folder, "float32"), hf_logits(model, IDS)
    assert loaded.config.windows == windows
    for wrong in (None, 23, 25):
        config = replace(loaded.config, windows=tuple(wrong if window else None for window in windows))
        difference = np.abs(dense_logits(config, loaded.weights, IDS) - theirs).max(axis=1)
        first_seen = min(wrong or 25, 24)  # the first token whose past differs
        assert difference[:first_seen].max() < 2e-4
        assert difference[first_seen:].max() > 1e-2


@pytest.mark.parametrize("name", ["llama-biases", "qwen3-tied-biases", "qwen2"])
def test_the_layout_is_the_module_s_own(saved, name):
    config = load_model(saved(name)[1], "float32").config
    decoder = Decoder(config, jnp.bfloat16)

    def touch(self, ids, positions, attend):
        return self.logits(self(ids, positions, attend))

    ids = jnp.zeros(3, jnp.int32)
    made = jax.eval_shape(lambda: decoder.init(jax.random.key(0), ids, ids, dense_attend, method=touch))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), made) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_weights(config, jnp.bfloat16)
    )


def test_random_weights_have_the_abstract_form_and_follow_the_seed(saved):
    config = load_model(saved("qwen3")[1], "float32").config
    first, again, other = (random_weights(config, jnp.bfloat16, seed) for seed in (1, 1, 2))
    expected = jax.tree.map(lambda x: (x.shape, x.dtype), abstract_weights(config, jnp.bfloat16))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), first) == expected
    assert jax.tree.all(jax.tree.map(np.array_equal, first, again))
    assert not jax.tree.all(jax.tree.map(np.array_equal, first, other))


@pytest.mark.parametrize("name", ["llama-biases", "qwen3"])
def test_kernels_can_be_stored_the_other_way_round(saved, monkeypatch, name):
    model, folder = saved(name)
    monkeypatch.setattr(layout, "OUT_AXIS", 1)
    loaded = load_model(folder, "float32")
    kernel = loaded.weights["params"]["layers_0"]["down"]["kernel"]
    assert kernel.shape == (loaded.config.intermediate_size, loaded.config.hidden_size)
    assert np.abs(dense_logits(loaded.config, loaded.weights, IDS) - hf_logits(model, IDS)).max() < 2e-4


def test_few_arrays(saved):
    config = load_model(saved("llama")[1], "float32").config
    assert len(jax.tree.leaves(abstract_weights(config, jnp.float32))) == 4 * config.num_layers + 4


def test_bfloat16_runs_close_to_float32_and_gives_float32_logits(saved):
    model, folder = saved("llama-tied")
    loaded = load_model(folder, "bfloat16")
    assert loaded.weights["params"]["embedding"].dtype == jnp.bfloat16
    assert loaded.weights["params"]["norms"].dtype == np.float32
    ours, theirs = dense_logits(loaded.config, loaded.weights, IDS[:40]), hf_logits(model, IDS[:40])
    assert ours.dtype == np.float32
    assert len(np.unique(ours[0])) > 0.9 * VOCAB_SIZE  # bfloat16 logits would collide
    assert np.corrcoef(ours.ravel(), theirs.ravel())[0, 1] > 0.999


def test_attend_is_called_once_per_layer_in_order_with_grouped_heads(saved):
    config = load_model(saved("llama")[1], "float32").config
    calls = []

    def attend(layer, q, k, v):
        calls.append((layer, q.shape, k.shape, v.shape))
        return q

    ids = jnp.zeros(5, jnp.int32)
    Decoder(config, np.float32).apply(random_weights(config, np.float32), ids, ids, attend)
    shapes = (5, 6, config.head_dim), (5, 2, config.head_dim), (5, 2, config.head_dim)
    assert calls == [(layer, *shapes) for layer in range(config.num_layers)]


def test_padding_ids_read_zeros(saved):
    config = load_model(saved("llama")[1], "float32").config
    weights = random_weights(config, np.float32)
    weights["params"]["embedding"][-1] = np.nan  # a clamped gather would read it
    ids = jnp.array([3, config.vocab_size, 2**31 - 1], jnp.int32)
    hidden = Decoder(config, np.float32).apply(weights, ids, jnp.zeros(3, jnp.int32), lambda layer, q, k, v: q)
    assert np.isfinite(np.asarray(hidden)).all()


@pytest.mark.parametrize(("tokens", "forms"), [(1, 1), (2, 2)], ids=["one form", "a CPU's and another"])
def test_float32_products_are_pinned_to_full_precision(saved, tokens, forms):
    # A GPU would compute them in TF32, about 1e-3 off; bfloat16 is left alone.
    config = load_model(saved("llama")[1], "float32").config
    assert matmul_precision(jnp.bfloat16) == jax.lax.Precision.DEFAULT
    ids = jnp.zeros(tokens, jnp.int32)

    def run(weights):
        decoder = Decoder(config, np.float32)
        hidden = decoder.apply(weights, ids, ids, lambda layer, q, k, v: q)
        return decoder.apply(weights, hidden, method=Decoder.logits)

    products = list(_products(jax.make_jaxpr(run)(abstract_weights(config, np.float32)).jaxpr))
    assert len(products) == forms * (4 * config.num_layers + 1)
    highest = jax.lax.Precision.HIGHEST
    assert all(equation.params["precision"] == (highest, highest) for equation in products)


@pytest.mark.parametrize(
    ("dtype", "pool_dtype", "precision"),
    [
        ("float32", "float32", "HIGHEST"),
        ("float32", "bfloat16", "HIGHEST"),
        ("float32", "int8", "HIGHEST"),
        ("bfloat16", "float32", "HIGHEST"),
        ("bfloat16", "bfloat16", "DEFAULT"),
        ("bfloat16", "int8", "DEFAULT"),
    ],
)
def test_so_are_those_of_attention_in_plain_xla(dtype, pool_dtype, precision):
    """Scores and weighted values of decode, and of extend for both KV heads and both of its loops."""
    pool, options = pages.abstract((40, 16, 2, 64), pool_dtype), {"page_offset": 0, "scale": 1.0}
    table, one, two = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 400), (1,), (2,)))
    for kernel, tokens, lengths, count in (
        (pk.decode_attention, 1, (one,), 2),
        (pk.extend_attention, 64, (two, one), 2 * 2 * 2),
    ):
        q = jax.ShapeDtypeStruct((tokens, 4, 64), dtype)
        traced = jax.make_jaxpr(partial(kernel, **options))(q, pool, pool, table, *lengths)
        products = list(_products(traced.jaxpr))
        assert len(products) == count
        wanted = jax.lax.Precision[precision]
        assert {equation.params["precision"] for equation in products} == {(wanted, wanted)}


@pytest.mark.parametrize(
    ("tokens", "platform", "turned"), [(1, "cpu", 0), (2, "cpu", 1), (32, "cpu", 1), (33, "cpu", 0), (8, "cuda", 0)]
)
def test_products_of_few_tokens_are_turned_on_a_cpu_only(tokens, platform, turned):
    arguments = np.ones((tokens, 24), np.float32), np.ones((40, 24), np.float32)
    traced = jax.jit(lambda x, kernel: contract(x, kernel, 1, jnp.float32)).trace(*arguments)
    lowered = traced.lower(lowering_platforms=(platform,)).as_text()
    assert lowered.count("optimization_barrier") == turned
    assert lowered.count("stablehlo.dot_general") == 1


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("tokens", [1, 2, 32, 33])
def test_products_of_few_tokens_are_the_same_sums(tokens, axis):
    rng = np.random.default_rng(tokens)
    x, kernel = rng.standard_normal((tokens, 24), np.float32), rng.standard_normal((40, 24), np.float32)
    found = jax.jit(contract, static_argnums=(2, 3))(x, kernel if axis else kernel.T.copy(), axis, jnp.float32)
    np.testing.assert_allclose(found, x @ kernel.T, rtol=1e-5, atol=1e-5)


def _products(jaxpr):
    """All of its equations that are products, those of its branches, loops and functions included."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _products(inner)
