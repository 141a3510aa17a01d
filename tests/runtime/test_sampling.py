"""Choosing tokens: right in distribution, right at the edges, and each row by its own parameters only."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxoverlap.model.sampling import SamplingRows, choose_tokens, most_probable, usable

V = 64


@partial(jax.jit)
def _choose(logits, rows, used):
    return choose_tokens(logits, rows, used & ~rows.greedy)[0], usable(logits)


def choose(logits, *, used=None, **params):
    """Tokens and which rows were usable; parameters are scalars or lists, one per row."""
    logits = jnp.asarray(logits, dtype=jnp.float32)
    count = logits.shape[0]

    def column(name, default, dtype):
        return jnp.broadcast_to(jnp.asarray(params.get(name, default), dtype=dtype), (count,))

    seed = np.broadcast_to(np.asarray(params.get("seed", 0), dtype=np.uint64), (count,))
    rows = SamplingRows(
        temperature=column("temperature", 1.0, jnp.float32),
        top_k=column("top_k", 0, jnp.int32),
        top_p=column("top_p", 1.0, jnp.float32),
        min_p=column("min_p", 0.0, jnp.float32),
        seed=jnp.asarray(np.stack([seed & 0xFFFFFFFF, seed >> np.uint64(32)], -1).astype(np.uint32)),
        sample_index=column("sample_index", 0, jnp.int32),
        position=column("position", 0, jnp.int32),
    )
    used = jnp.ones(count, dtype=bool) if used is None else jnp.asarray(used)
    tokens, sound = _choose(logits, rows, used)
    return np.asarray(tokens), np.asarray(sound)


def draws(row, count, **params):
    return choose(np.broadcast_to(row, (count, len(row))), position=np.arange(count), **params)[0]


def random_logits(rows, vocab=V, seed=0):
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * 3


def test_greedy_takes_the_highest_and_the_lowest_id_among_equals():
    logits = random_logits(5)
    assert choose(logits, temperature=0)[0].tolist() == logits.argmax(-1).tolist()
    for top_p in (0.1, 1.0):
        for top_k in (0, 1, 2):
            tokens = choose([[1, 1, 0], [1, 1, 0]], temperature=[0, 1], top_p=top_p, top_k=top_k)[0]
            assert tokens[0] == 0


def test_a_greedy_row_is_the_argmax_beside_random_rows_in_every_batch_size():
    for count in (1, 2, 4, 8, 16):
        logits = random_logits(count, seed=count)
        tokens = choose(logits, temperature=[0.0 if i % 2 == 0 else 0.8 for i in range(count)])[0]
        assert (tokens[::2] == logits.argmax(-1)[::2]).all()


@pytest.mark.parametrize("seed", [0, 42, 2**64 - 1])
def test_drawn_tokens_follow_the_distribution(seed):
    p = np.array([0.5, 0.3, 0.15, 0.05])
    tokens = draws(np.log(p), 20_000, seed=seed)
    counts = np.bincount(tokens, minlength=4)
    chi_square = ((counts - 20_000 * p) ** 2 / (20_000 * p)).sum()
    assert chi_square < 16.3


def test_temperature_sharpens_and_flattens():
    row = np.log([0.6, 0.3, 0.1])
    for temperature in (0.5, 2.0):
        p = np.exp(row / temperature)
        p /= p.sum()
        counts = np.bincount(draws(row, 20_000, temperature=temperature), minlength=3)
        assert ((counts - 20_000 * p) ** 2 / (20_000 * p)).sum() < 13.8


def test_successive_positions_draw_afresh():
    tokens = draws(np.zeros(V), 200)
    assert len(set(tokens.tolist())) >= 50
    assert (tokens[1:] == tokens[:-1]).mean() < 0.1
    assert (tokens != draws(np.zeros(V), 200, seed=1)).any()
    assert (tokens != draws(np.zeros(V), 200, sample_index=1)).any()


def kept(row, **params):
    return set(draws(row, 3000, **params).tolist())


def test_top_k_keeps_the_k_highest_and_ties_with_the_last():
    row = np.array([0.0, 0.5, 0.4, 0.5, 0.3, 0.4])
    assert kept(row, top_k=1) == {1}
    assert kept(row, top_k=2) == {1, 3}
    assert kept(row, top_k=3) == {1, 2, 3, 5}
    assert kept(row, top_k=6) == kept(row, top_k=1000) == kept(row, top_k=-1) == set(range(6))


def test_top_p_keeps_the_smallest_set_that_reaches_it():
    row = np.log([0.15, 0.5, 0.05, 0.3])
    assert kept(row, top_p=0.49) == {1}
    assert kept(row, top_p=0.51) == {1, 3}
    assert kept(row, top_p=0.79) == {1, 3}
    assert kept(row, top_p=0.81) == {0, 1, 3}
    assert kept(row, top_p=1e-9) == {1}


def test_top_p_is_taken_of_what_top_k_leaves():
    row = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(row, top_k=2, top_p=0.56) == {0}
    assert kept(row, top_k=2, top_p=0.58) == {0, 1}


def test_min_p_is_relative_to_the_most_probable():
    row = np.log([0.5, 0.3, 0.15, 0.05])
    assert kept(row, min_p=0.61) == {0}
    assert kept(row, min_p=0.59) == {0, 1}
    assert kept(row, min_p=1.0) == {0}


def test_thresholds_agree_with_a_sort():
    logits = random_logits(40, vocab=500, seed=3)
    rng = np.random.default_rng(4)
    for index, row in enumerate(logits):
        top_k, top_p = int(rng.integers(1, 60)), float(rng.uniform(0.05, 0.99))
        order = np.argsort(-row)
        p = np.exp(row[order[:top_k]].astype(np.float64) - row.max())
        needed = int(np.searchsorted(np.cumsum(p) / p.sum(), top_p)) + 1
        tokens = draws(row, 256, top_k=top_k, top_p=top_p, seed=index)
        assert set(tokens.tolist()) <= set(order[:needed].tolist())


def test_a_row_depends_on_nothing_but_itself():
    logits = random_logits(8, vocab=4096)
    params = {"temperature": [0.7 + 0.1 * i for i in range(8)], "seed": list(range(8)), "position": list(range(8))}
    together = choose(logits, **params)[0]
    for count in (1, 3):
        for i in range(8 - count + 1):
            part = {name: values[i : i + count] for name, values in params.items()}
            assert (choose(logits[i : i + count], **part)[0] == together[i : i + count]).all()
    reverse = {name: values[::-1] for name, values in params.items()}
    assert (choose(logits[::-1], **reverse)[0][::-1] == together).all()
    neighbours = params | {"top_p": [1.0] + [0.3] * 7, "top_k": [0] + [3] * 7}
    assert choose(logits, **neighbours)[0][0] == together[0]


@pytest.mark.parametrize("temperature", [2e-5, 1e-3, 1e6, 1e30])
def test_extreme_temperatures_give_a_token(temperature):
    tokens, sound = choose(random_logits(4) * 1e3, temperature=temperature)
    assert sound.all()
    assert ((tokens >= 0) & (tokens < V)).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_nan_or_infinite_logit_marks_its_row_and_no_other(bad, temperature):
    logits = random_logits(4)
    good = choose(logits, temperature=temperature)[0]
    logits[2, 7] = bad
    tokens, sound = choose(logits, temperature=temperature)
    assert sound.tolist() == [True, True, False, True]
    assert (tokens[[0, 1, 3]] == good[[0, 1, 3]]).all()
    logits[2] = -np.inf
    assert choose(logits, temperature=temperature)[1].tolist() == [True, True, False, True]


@pytest.mark.parametrize("vocab", [1, 97, 128, 129, 640, 1000])
def test_the_most_probable_is_the_lowest_of_equals_in_a_vocabulary_of_any_size(vocab):
    logits = np.random.default_rng(vocab).integers(0, 4, (50, vocab)).astype(np.float32)
    logits[7] = -np.inf
    tokens, highest = map(np.asarray, jax.jit(most_probable)(logits))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert highest.tolist() == logits.max(-1).tolist()


@pytest.mark.parametrize("shape", [(1, 97), (4, 64), (8, 49152), (32, 640), (50, 640), (64, 1000), (64, 49152)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.nan])
def test_a_bad_logit_is_seen_wherever_it_is_and_however_many_rows_there_are(shape, bad):
    """The maximum itself is NaN at some of these shapes, and not at others."""
    rng = np.random.default_rng(1)
    logits = rng.standard_normal(shape).astype(np.float32)
    marked = rng.random(shape[0]) < 0.5
    logits[marked, rng.integers(0, shape[1], marked.sum())] = bad
    assert np.asarray(jax.jit(usable)(logits)).tolist() == (~marked).tolist()


def test_masked_logits_are_never_drawn():
    row = np.full(V, -np.inf, dtype=np.float32)
    row[[3, V - 1]] = 0.0
    assert kept(row) == {3, V - 1}


def test_rows_that_are_not_used_do_not_make_a_batch_pay():
    text = str(jax.make_jaxpr(choose_tokens)(jnp.zeros((2, V)), _rows(2), jnp.ones(2, bool)))
    head = text[: text.index("cond")]
    assert "exp" not in head.split()
    assert "threefry" not in head


def _rows(count):
    zeros, ones = jnp.zeros(count, jnp.int32), jnp.ones(count)
    return SamplingRows(ones, zeros, ones, ones * 0, jnp.zeros((count, 2), jnp.uint32), zeros, zeros)
