"""draw_tokens against a sort in float64: what may be drawn, and which of it a uniform number takes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import draw_tokens
from pallas_kernels.reference import draw_error

IMPLEMENTATIONS = pytest.mark.parametrize("implementation", ["xla", "triton"])
SLACK = 1e-4
"""Of the whole weight: what float32 may be off."""


def draw(implementation, logits, *, temperature, top_k, top_p, min_p, uniform, draws=None):
    rows = len(logits)
    logits = jnp.asarray(logits, jnp.float32)
    floats = [jnp.full(rows, value, jnp.float32) for value in (temperature, top_p, min_p, uniform)]
    draws = jnp.ones(rows, bool) if draws is None else jnp.asarray(draws)
    ks = jnp.full(rows, top_k, jnp.int32)
    return np.asarray(
        draw_tokens(
            logits,
            logits.max(axis=-1),
            floats[0],
            ks,
            *floats[1:],
            draws,
            implementation=implementation,
            interpret=implementation == "triton",
        )
    )


@IMPLEMENTATIONS
@pytest.mark.parametrize("vocab", [97, 4096, 9001])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.5, 0, 0.9, 0.0),
        (1.0, 200, 0.5, 0.0),
        (1.0, 0, 1.0, 0.1),
        (2.0, 40, 0.95, 0.02),
        (1e-3, 10, 0.9, 0.0),
        (1.0, 10**6, 1e-9, 1.0),
    ],
)
def test_a_draw_is_where_the_cumulated_weights_say(implementation, vocab, temperature, top_k, top_p, min_p):
    rng = np.random.default_rng(vocab)
    logits = (3 * rng.standard_normal((6, vocab))).astype(np.float32)
    logits[:, rng.permutation(vocab)[: vocab // 10]] = -np.inf
    uniform = np.array([0.0, 0.2, 0.5, 0.77, 0.999, 1 - 2**-24], np.float32)
    limits = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    tokens = draw(implementation, logits, **limits, uniform=uniform)
    for line, token, share in zip(logits, tokens, uniform, strict=True):
        assert draw_error(token, line, **limits, uniform=share) <= SLACK


@IMPLEMENTATIONS
def test_ties_with_the_last_are_kept_and_others_have_no_say(implementation):
    logits = np.array([[0.0, 1.0, 1.0, 1.0, -5.0], [9.0, -np.inf, -np.inf, -np.inf, -np.inf]], np.float32)
    for share in (0.0, 0.4, 0.9):
        drawn = draw(implementation, logits, temperature=1, top_k=2, top_p=1, min_p=0, uniform=share)
        assert drawn.tolist() == [1 + int(3 * share), 0]


@IMPLEMENTATIONS
def test_a_row_depends_on_itself_alone(implementation):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((5, 300)).astype(np.float32)
    rows = {
        "temperature": np.array([0.5, 1, 2, 1, 0.0]),
        "top_k": np.array([0, 7, 0, 50, 1]),
        "top_p": np.array([1, 0.8, 0.3, 1, 1]),
        "min_p": np.array([0, 0, 0, 0.2, 0]),
        "uniform": rng.random(5),
    }
    draws = np.array([True, True, True, True, False])  # the last one is greedy: its temperature is none
    together = draw(implementation, logits, **rows, draws=draws)
    for row in range(4):
        alone = draw(implementation, logits[row : row + 1], **{name: values[row] for name, values in rows.items()})
        assert alone[0] == together[row]


@IMPLEMENTATIONS
@pytest.mark.parametrize("top_p", [1e-37, 1e-40, 1e-50, 0.0])
def test_the_most_probable_is_kept_however_small_top_p_is(implementation, top_p):
    logits = np.full((3, 64), -np.inf, np.float32)
    logits[:, 7:10] = [[0, 2, 1], [3, 2, 1], [-1e30, -2e30, 3e-40]]
    tokens = draw(implementation, logits, temperature=1, top_k=0, top_p=top_p, min_p=0, uniform=0.99)
    assert tokens.tolist() == [8, 7, 9]


@IMPLEMENTATIONS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_a_highest_logit_gives_an_id_and_disturbs_no_other(implementation, bad):
    logits = np.zeros((2, 300), np.float32)
    logits[0] = bad
    logits[1, 299] = 50.0
    tokens = draw(implementation, logits, temperature=1, top_k=5, top_p=0.9, min_p=0.1, uniform=0.5)
    assert 0 <= tokens[0] < 300 and tokens[1] == 299


def test_an_implementation_that_is_none_is_refused():
    with pytest.raises(ValueError, match="implementation: got 'sort'"):
        draw("sort", np.zeros((1, 8)), temperature=1, top_k=0, top_p=1, min_p=0, uniform=0)
