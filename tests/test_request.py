"""Sampling parameters at the door."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxoverlap import InvalidRequestError, SamplingParams, StructuredOutput, UnsupportedError


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.0001),
        ("top_p", -1),
        ("top_p", None),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", 2.0),
        ("stop", ["x", "\ud83d"]),
        ("stop_token_ids", "12"),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", ["a"]),
        ("ignore_eos", 1),
        ("skip_special_tokens", "no"),
    ],
)
def test_a_bad_value_names_field_value_and_what_is_allowed(field, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.field.startswith(field)
    assert caught.value.allowed
    assert str(caught.value).startswith(field)


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty"])
@pytest.mark.parametrize("value", [1e-39, 1e-46, np.float32(1e-40), np.float64(1e39), 10**39, 10**400])
def test_a_number_that_a_32_bit_float_can_not_hold_is_refused(field, value):
    with pytest.raises(InvalidRequestError, match=f"^{field}: "):
        SamplingParams(**{field: value})
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        SamplingParams(logit_bias={3: value})


def test_the_edges_are_allowed():
    smallest, largest = 2.0**-126, float(np.finfo(np.float32).max)
    for value in (smallest, largest, 1.1754944e-38, 3.4028235e38, np.float16(0.5), 10**38):
        SamplingParams(temperature=value, repetition_penalty=value)
    SamplingParams(top_p=smallest, min_p=smallest, presence_penalty=-smallest, frequency_penalty=0, logit_bias={1: 0})
    SamplingParams(temperature=0, top_p=1e-9, top_k=-1, min_p=1, seed=2**64 - 1, max_tokens=1, stop_token_ids=[0])
    SamplingParams(temperature=np.float32(0.5), top_k=np.int64(3), stop_token_ids=np.array([1, 2]))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stop", ["fine", "never \udcff"]),
        ("stop_token_ids", np.array(3)),
        ("banned_token_ids", np.array([[3]])),
        ("allowed_token_ids", np.array(0.5)),
    ],
)
def test_texts_that_are_none_and_arrays_that_are_no_lists_are_refused(field, value):
    with pytest.raises(InvalidRequestError, match=f"^{field}"):
        SamplingParams(**{field: value})


def test_from_dict_tells_unknown_from_not_built():
    with pytest.raises(InvalidRequestError, match="temprature"):
        SamplingParams.from_dict({"temprature": 1})
    with pytest.raises(UnsupportedError, match="bad_words"):
        SamplingParams.from_dict({"bad_words": ["x"]})
    assert SamplingParams.from_dict({"top_k": 3, "seed": None}, max_tokens=7) == SamplingParams(top_k=3, max_tokens=7)


def test_a_null_means_not_given_wherever_it_is():
    structure = {"json_schema": {"type": "object"}, "any_json": None, "regex": None, "grammar": None, "choices": None}
    given = SamplingParams.from_dict({"structured_output": structure, "stop": None, "n": None})
    assert given == SamplingParams(structured_output=StructuredOutput(json_schema={"type": "object"}))
    with pytest.raises(InvalidRequestError, match="use exactly one of"):
        SamplingParams.from_dict({"structured_output": {"regex": None}})
    nothing = SamplingParams(stop=None, stop_token_ids=None, banned_token_ids=None)
    assert nothing == SamplingParams() and (nothing.stop, nothing.stop_token_ids) == ((), ())
