"""The whole engine on the kernels, interpreted: tokens, drawn ones too, are those of plain XLA."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import pytest

from jaxoverlap.engine.engine import Engine
from jaxoverlap.runtime.runner import DeviceRunner
from tests.tiny import CONFIG, EOS_ID, drain, random_requests, scheduler_config, weights


def outputs(attention: str, model, kv_dtype: str, **changes) -> list[list[int]]:
    config = scheduler_config(**changes)
    runner = DeviceRunner(model, weights(), config, dtype=jnp.float32, kv_dtype=kv_dtype, attention=attention)
    assert runner.step.interpret == (attention == "triton")
    engine = Engine(config, runner, lookahead=1, eos_token_ids=(EOS_ID,))
    requests = random_requests(engine, seed=3, count=3, max_tokens=5)
    requests += random_requests(engine, seed=4, count=2, max_tokens=5, temperature=0.8, top_k=30, top_p=0.9)
    drain(engine)
    return [list(request.output_ids) for request in requests]


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_kernels_give_the_tokens_of_plain_xla(kv_dtype):
    model = replace(CONFIG, windows=(24, None))
    small = {"max_running": 2, "max_batched_tokens": 8}  # few shapes of steps: what is interpreted compiles slowly
    assert outputs("triton", model, kv_dtype, **small) == outputs("xla", model, kv_dtype, **small)
