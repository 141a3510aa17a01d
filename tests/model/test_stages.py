"""A model in stages is the model."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxoverlap.engine.engine import Engine
from jaxoverlap.model.decoder import random_weights
from jaxoverlap.model.stages import split_config, split_weights, stage_sizes
from tests.tiny import CONFIG, EOS_ID, drain, make_runner, random_requests, scheduler_config


@pytest.mark.parametrize(
    ("layers", "most", "sizes"),
    [
        (30, 8, (5,) * 6),
        (28, 8, (4,) * 7),
        (32, 8, (4,) * 8),
        (22, 8, (3,) * 7 + (1,)),
        (31, 8, (5,) * 6 + (1,)),
        (2, 8, (1, 1)),
        (1, 8, (1,)),
        (30, 1, (30,)),
    ],
)
def test_stages_are_equal_but_for_the_last_and_as_small_as_may_be(layers, most, sizes):
    assert stage_sizes(layers, most) == sizes


def test_every_layer_is_in_one_stage_with_its_window_and_its_weights():
    config = replace(CONFIG, num_layers=5, windows=(None, 8, None, 8, 4), qk_norm=True)
    weights, sizes = random_weights(config, np.float32), (2, 2, 1)
    stages, parts = split_config(config, sizes), split_weights(weights, sizes)
    assert [stage.windows for stage in stages] == [(None, 8), (None, 8), (4,)]
    assert stages[0] == stages[1] != stages[2]
    layers = [
        part["params"][f"layers_{index}"] for part, size in zip(parts, sizes, strict=True) for index in range(size)
    ]
    assert all(layer is weights["params"][f"layers_{index}"] for index, layer in enumerate(layers))
    for name in ("norms", "qk_norms"):
        joined = np.concatenate([part["params"][name] for part in parts])
        np.testing.assert_array_equal(joined, weights["params"][name])
    assert all(part["params"]["embedding"] is weights["params"]["embedding"] for part in parts)


FEW = {"max_running": 1, "max_batched_tokens": 16}


def test_a_step_in_stages_does_what_it_does_as_one_function(monkeypatch):
    outcomes = []
    for max_stages in (8, 1):
        monkeypatch.setattr("jaxoverlap.runtime.runner.MAX_STAGES", max_stages)
        runner = make_runner(**FEW)
        runner.executables._compiled = {}  # not those of other tests
        engine = Engine(scheduler_config(**FEW), runner, lookahead=1, eos_token_ids=(EOS_ID,), clock=lambda: 0.0)
        assert len(runner.step.stages) == min(max_stages, CONFIG.num_layers)
        requests = random_requests(engine, 3, 6)
        drain(engine)
        pools = [np.concatenate([getattr(kv, name) for kv in runner._kv]) for name in ("k", "v")]
        outcomes.append(([request.output_ids for request in requests], pools, jax.device_get(runner._state)))
    (tokens, pools, state), (whole_tokens, whole_pools, whole_state) = outcomes
    assert tokens == whole_tokens
    for pool, whole in zip(pools, whole_pools, strict=True):
        np.testing.assert_allclose(pool, whole, atol=1e-4)
    for name in state.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(state, name), getattr(whole_state, name), err_msg=name)
