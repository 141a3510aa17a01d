"""What the host packs is what the device unpacks."""

from __future__ import annotations

import numpy as np

from jaxoverlap.runtime.buckets import StepShape
from jaxoverlap.runtime.packing import NO_STOP_ID, pack, read_row_params, unpack
from jaxoverlap.sampling_params import SamplingParams
from tests.tiny import make_engine


def test_a_prefill_plan_survives_the_journey():
    engine, _runner = make_engine()
    sampling = SamplingParams(
        temperature=0.7, top_k=11, top_p=0.8, min_p=0.1, seed=2**63 + 12345, max_tokens=9, stop_token_ids=[8, 9]
    )
    engine.add([1, 2, 3, 4, 5], sampling)
    engine.add([6, 7], SamplingParams(max_tokens=2, seed=3))
    plan = engine.loop.scheduler.plan()
    shape = StepShape(16, 4, 0, 4)
    step = unpack(pack(plan, shape, 4, 8), shape, 8)
    assert step.token_ids.tolist()[:7] == [1, 2, 3, 4, 5, 6, 7]
    assert step.cu_q_lens.tolist() == [0, 5, 7, 7, 7]
    assert step.chunk_rows.tolist()[2:] == [4, 4]
    assert step.publishes.tolist() == [1, 1, 0, 0]
    assert (step.page_tables[:2, 1:] == plan.no_page).all()
    params = {name: np.asarray(value) for name, value in read_row_params(step.row_params).items()}
    assert params["seed"][0].tolist() == [12345, 2**31]
    np.testing.assert_array_equal(params["temperature"][:2], np.float32([0.7, 1.0]))
    np.testing.assert_array_equal(params["top_p"][:2], np.float32([0.8, 1.0]))
    assert params["min_p"][0] == np.float32(0.1)
    assert params["top_k"].tolist()[:2] == [11, 0]
    assert params["max_outputs"].tolist()[:2] == [9, 2]
    assert params["stop_ids"][0].tolist() == [8, 9, 5] + [NO_STOP_ID] * 13


def test_padding_is_out_of_range_and_never_negative():
    engine, _runner = make_engine()
    for _ in range(3):
        engine.add([1], SamplingParams(max_tokens=4, ignore_eos=True, temperature=0))
    engine.step()
    plan = engine.loop.scheduler.plan()
    shape = StepShape(0, 0, 4, 4)
    step = unpack(pack(plan, shape, 4, 8), shape, 8)
    assert step.decode_rows.tolist()[3] == 4
    assert step.new_pages.tolist() == [plan.no_page] * 4
