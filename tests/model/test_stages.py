"""A model in stages is the model."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxoverlap.engine.engine import Engine
from jaxoverlap.model.decoder import random_weights
from jaxoverlap.model.stages import split_config, split_weights, stage_sizes
from jaxoverlap.runtime.row_state import KVPages, stages_for_pool
from jaxoverlap.runtime.runner import DeviceRunner
from pallas_kernels.pages import is_addressable
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


@pytest.mark.parametrize(
    ("dtype", "pages", "sizes"),
    [
        # Of 32 layers of a page of 16 x 8 x 128: 2**31 codes are 4096 pages.
        (np.int8, 4096, (32,)),
        (np.int8, 4097, (16, 16)),
        (np.int8, 8192, (16, 16)),
        (np.int8, 8193, (32,)),
        ("float8_e4m3fn", 6000, (16, 16)),
        ("bfloat16", 6000, (32,)),
        (np.float32, 6000, (32,)),
    ],
)
def test_a_pool_that_kernels_can_not_address_is_divided_among_stages(dtype, pages, sizes):
    config = replace(CONFIG, num_layers=32, windows=(), num_heads=8, num_kv_heads=8, head_dim=128)
    assert stage_sizes(32, stages_for_pool(config, pages, 16, dtype)) == sizes


@pytest.mark.parametrize("layers", range(2, 40))
def test_two_layers_and_more_can_be_divided_so_that_all_is_in_reach(layers):
    config = replace(CONFIG, num_layers=layers, windows=())
    most = 2**32 // (layers * 16 * config.num_kv_heads * config.head_dim)
    for pages in (most // 2 + 1, most * 3 // 4, most - 1, most):
        sizes = stage_sizes(layers, stages_for_pool(config, pages, 16, np.int8))
        for stage in split_config(config, sizes):
            assert is_addressable(KVPages.abstract(stage, pages, 16, np.int8))


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


def test_beside_kernels_a_step_in_stages_is_one_function(monkeypatch):
    """Its pools are several, its launch is one."""
    outcomes = []
    for stages in (2, 1):
        monkeypatch.setattr("jaxoverlap.runtime.runner.stages_for_pool", lambda *_, stages=stages: stages)
        config, options = scheduler_config(**FEW), {"dtype": np.float32, "attention": "triton"}
        runner = DeviceRunner(CONFIG, random_weights(CONFIG, np.float32), config, **options)
        engine = Engine(config, runner, lookahead=1, eos_token_ids=(EOS_ID,), clock=lambda: 0.0)
        assert len(runner.step.stages) == len(runner._kv) == stages
        assert all(len(runner.executables[shape].calls) == 1 for shape in runner.buckets)
        requests = random_requests(engine, 2, 6)
        drain(engine)
        outcomes.append([request.output_ids for request in requests])
    assert outcomes[0] == outcomes[1]
