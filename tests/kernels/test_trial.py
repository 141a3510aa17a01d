"""A trial notices kernels that are wrong, and lets right ones pass."""

import jax
import jax.numpy as jnp
import pytest

import pallas_kernels as pk
from pallas_kernels import AttentionShape, trial, triton

SHAPE = AttentionShape(3, 1, 16, 8, jnp.float32)


def test_right_kernels_pass():
    assert trial.disagreement("triton", SHAPE, interpret=True) is None
    assert trial.disagreement("xla", SHAPE) is None


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("decode_attention", "decode attention"),
        ("extend_attention", "extend attention"),
        ("rope_and_write_kv", "write"),
    ],
)
def test_a_wrong_kernel_is_named(monkeypatch, name, what):
    def wrong(*arguments, interpret, **options):
        def spoilt(x: jax.Array) -> jax.Array:
            place = x.size // 100 * (99 if name == "decode_attention" else 80)  # rows that decode are the last
            return jnp.where(jnp.arange(x.size).reshape(x.shape) == place, jnp.nan, x)

        right = getattr(pk.xla, name)(*(arguments[:5] if name == "decode_attention" else arguments), **options)
        if name == "decode_attention":
            return spoilt(right), arguments[5]
        return spoilt(right) if name == "extend_attention" else (right[0], spoilt(right[1]), right[2])

    for each in ("decode_attention", "extend_attention", "rope_and_write_kv"):
        monkeypatch.setattr(triton, each, right_one(each) if each != name else wrong)
    assert what in (trial.disagreement("triton", SHAPE, interpret=True) or "")


def right_one(name):
    def call(*arguments, interpret, **options):
        right = getattr(pk.xla, name)(*(arguments[:5] if name == "decode_attention" else arguments), **options)
        return (right, arguments[5]) if name == "decode_attention" else right

    return call


def test_a_kernel_that_does_not_compile_is_told_and_raises_nothing(monkeypatch):
    def fails(*arguments, **options):
        raise RuntimeError("ptxas: out of registers\nand more")

    monkeypatch.setattr(triton, "rope_and_write_kv", fails)
    assert trial.disagreement("triton", SHAPE) == "RuntimeError: ptxas: out of registers"
