"""A model with a sliding window gives the same tokens through pages as without them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.tiny import CONFIG, WINDOWED, dense_greedy, drain, make_engine, random_requests

SEED, COUNT = 2, 8
GAP = 3e-3
"""As in test_equality: no greedy token of the seed is a near-tie, in either model."""

MODELS = {"all layers": WINDOWED, "one layer": replace(CONFIG, windows=(None, 24))}


@pytest.fixture(scope="module")
def dense():
    """name of the model → the greedy tokens of every request of `random_requests(SEED)`."""
    scratch, _ = make_engine()
    wanted = {}
    for name, model in MODELS.items():
        wanted[name] = []
        for request in random_requests(scratch, SEED, COUNT, ignore_eos=True):
            tokens, gaps = dense_greedy(request.prompt_ids.tolist(), request.sampling.max_tokens, model)
            assert min(gaps) > GAP
            wanted[name].append(tokens)
    return wanted


@pytest.mark.parametrize(
    ("name", "chunk"), [("all layers", 1), pytest.param("all layers", 100, marks=pytest.mark.slow), ("one layer", 7)]
)
def test_greedy_tokens_equal_the_dense_decoder_across_chunk_sizes(dense, name, chunk):
    engine, _ = make_engine(model=MODELS[name], max_batched_tokens=chunk)
    requests = random_requests(engine, SEED, COUNT, ignore_eos=True)
    drain(engine)
    assert [request.output_ids for request in requests] == dense[name]


def test_the_window_changes_the_tokens(dense):
    engine, _ = make_engine()
    requests = random_requests(engine, SEED, COUNT, ignore_eos=True)
    drain(engine)
    everything = [request.output_ids for request in requests]
    assert everything != dense["all layers"] != dense["one layer"] != everything
