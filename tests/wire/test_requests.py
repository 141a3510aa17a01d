"""What is written into a message and read again is what it was."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.request import RequestOptions
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput
from jaxoverlap.v1 import common_pb2, generate_service_pb2
from jaxoverlap.wire.requests import (
    Generation,
    generation,
    prompt_of,
    request_options,
    sampling_params,
    set_prompt,
)

NO_OPTIONS = RequestOptions()
HI = {"role": "user", "content": "Hi"}
CHAT = [HI]


def floats(low, high):
    return st.decimals(low, high, places=4).map(float)


ids = st.lists(st.integers(0, 2**31 - 1), max_size=5, unique=True).map(tuple)
texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
structures = st.one_of(
    st.just(StructuredOutput(any_json=True)),
    st.builds(lambda text: StructuredOutput(regex=text), texts),
    st.builds(lambda text: StructuredOutput(grammar=text), texts),
    st.builds(lambda text: StructuredOutput(json_schema=text), texts),
    st.builds(lambda choices: StructuredOutput(choices=choices), st.lists(texts, min_size=1, max_size=3)),
)
top = st.none() | st.integers(0, 20)


@st.composite
def params_of_any_kind(draw):
    n = draw(st.integers(1, 4))
    max_tokens = draw(st.none() | st.integers(1, 2**31 - 1))
    logprobs, prompt_logprobs = draw(top), draw(top)
    if logprobs is not None and prompt_logprobs is not None:
        prompt_logprobs = logprobs  # one number on the wire: see below
    return SamplingParams(
        n=n,
        best_of=draw(st.none() | st.integers(n, 8)),
        temperature=draw(floats(0, 100)),
        top_p=draw(floats(0, 1).filter(bool)),
        top_k=draw(st.integers(0, 2**31 - 1)),
        min_p=draw(floats(0, 1)),
        repetition_penalty=draw(floats(0, 10).filter(bool)),
        presence_penalty=draw(floats(-2, 2)),
        frequency_penalty=draw(floats(-2, 2)),
        logit_bias=draw(st.none() | st.dictionaries(st.integers(0, 2**31 - 1), floats(-100, 100), min_size=1)),
        allowed_token_ids=draw(st.none() | ids.filter(bool)),
        seed=draw(st.none() | st.integers(0, 2**64 - 1)),
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, min(max_tokens or 9, 9))),
        stop=draw(st.lists(texts, max_size=3)),
        stop_token_ids=draw(ids),
        ignore_eos=draw(st.booleans()),
        include_stop_str_in_output=draw(st.booleans()),
        skip_special_tokens=draw(st.none() | st.booleans()),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        structured_output=draw(st.none() | structures),
    )


@given(params_of_any_kind())
def test_parameters_come_back(params):
    message = Generation.FromString(generation("x", params, NO_OPTIONS).SerializeToString())
    assert sampling_params(message) == params


def test_defaults_are_those_of_the_types():
    assert sampling_params(Generation(text="x")) == SamplingParams()
    assert request_options(Generation(text="x")) == RequestOptions()


def test_what_is_left_out_is_the_models_own():
    recommended = {"temperature": 0.6, "top_k": 20, "min_p": 0.1}
    assert sampling_params(Generation(text="x"), recommended) == SamplingParams(**recommended)
    assert sampling_params(generation("x", None, NO_OPTIONS), recommended) == SamplingParams(**recommended)
    params = SamplingParams(top_p=0.5)
    assert sampling_params(generation("x", params, NO_OPTIONS), recommended) == params


@pytest.mark.parametrize("name", ["temperature", "max_tokens", "repetition_penalty", "n"])
def test_a_zero_is_a_zero(name):
    message = Generation(text="x")
    if name == "n":
        message.num_sequences = 0
    elif name == "max_tokens":
        message.stop.max_tokens = 0
    else:
        setattr(message.sampling, name, 0.0)
    if name == "temperature":
        assert sampling_params(message).temperature == 0.0
        return
    with pytest.raises(InvalidRequestError, match=rf"^{name}: 0"):
        sampling_params(message)


def test_numbers_are_shown_as_they_were_given():
    params = SamplingParams(temperature=0.7, top_p=0.9, logit_bias={3: 0.1})
    assert sampling_params(generation("x", params, NO_OPTIONS)) == params


def test_the_larger_number_of_alternatives_is_asked_for():
    message = generation("x", SamplingParams(logprobs=2, prompt_logprobs=5), NO_OPTIONS)
    assert (message.returns.top_logprobs, message.returns.logprobs, message.returns.prompt_logprobs) == (5, True, True)
    message = generation("x", SamplingParams(prompt_logprobs=5), NO_OPTIONS)
    assert (message.returns.top_logprobs, message.returns.logprobs) == (5, False)


def test_alternatives_of_nothing_are_refused():
    message = Generation(text="x", returns=common_pb2.ReturnOptions(top_logprobs=3))
    with pytest.raises(InvalidRequestError, match=r"^generation\.returns\.top_logprobs: 3"):
        sampling_params(message)


def test_both_text_and_ids_are_asked_for():
    returns = generation("x", SamplingParams(), NO_OPTIONS).returns
    assert returns.text and returns.token_ids and not returns.logprobs


def test_options_come_back_and_the_timeout_stays_out_of_the_message():
    options = RequestOptions(priority=-5, timeout=3.0, cache_salt="tenant")
    message = generation("x", SamplingParams(), options, model="m", client_request_id="mine")
    assert request_options(message, timeout=3.0) == options
    assert (message.model, message.client_request_id) == ("m", "mine")
    assert request_options(message).timeout is None


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("", ""),
        ("Grüße", "Grüße"),
        ([], []),
        ([1, 2, 2**32 - 1], [1, 2, 2**32 - 1]),
        (np.array([5, 6], dtype=np.int32), [5, 6]),
        (CHAT, ChatPrompt(messages=CHAT)),
    ],
)
def test_prompts_come_back(prompt, read):
    message = Generation.FromString(generation(prompt, SamplingParams(), NO_OPTIONS).SerializeToString())
    assert prompt_of(message) == read


def test_chats_come_back_with_all_their_fields():
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    chat = ChatPrompt(
        messages=[
            *CHAT,
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "", "tool_call_id": "a"},
        ],
        tools=[{"type": "function"}],
        documents=[],
        chat_template_kwargs={"enable_thinking": False, "depth": [1, None]},
        add_generation_prompt=False,
    )
    assert prompt_of(generation(chat, SamplingParams(), NO_OPTIONS)) == chat
    going_on = ChatPrompt(messages=[*CHAT, {"role": "assistant", "content": "Well"}], continue_final_message=True)
    assert prompt_of(generation(going_on, SamplingParams(), NO_OPTIONS)) == going_on
    assert not going_on.opens_answer and ChatPrompt(messages=CHAT).opens_answer and not chat.opens_answer


def test_a_message_without_content_is_empty_unless_it_calls_tools():
    messages = [{"role": "user"}, {"role": "assistant", "extra_json": '{"tool_calls": [{"name": "f"}]}'}]
    read = prompt_of(Generation(chat=common_pb2.Chat(messages=messages)))
    assert read.messages == [
        {"role": "user", "content": ""},
        {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
    ]


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (None, r"^prompt: None"),
        (7, r"^prompt: 7"),
        (b"abc", r"^prompt: b'abc'"),
        ("\ud800", r"^prompt: .*valid Unicode"),
        ([1, -1], r"^prompt\[1\]: -1"),
        ([2**32], r"^prompt\[0\]: 4294967296"),
        ([2**70], r"^prompt: "),
        ([1.5], r"^prompt: \[1\.5\]"),
        ([[1]], r"^prompt: \[\[1\]\]"),
        ([{"role": "user"}], r"^messages\[0\]\.content: None"),
        ([{"role": "user", "content": "x"}, "y"], r"^messages\[1\]: 'y'"),
        ([{"role": "user", "content": "\ud800"}], r"^messages\[0\]\.content: "),
        ([{"role": "user", "content": "x", "extra": {1, 2}}], r"^messages\[0\]: .*JSON"),
    ],
)
def test_prompts_that_no_message_can_hold(prompt, said):
    with pytest.raises(InvalidRequestError, match=said):
        generation(prompt, SamplingParams(), NO_OPTIONS)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            SamplingParams(structured_output=StructuredOutput(choices=["a", "\ud800"])),
            r"^structured_output\.choices\[1",
        ),
        (
            SamplingParams(structured_output=StructuredOutput(json_schema={"x": {1}})),
            r"^structured_output\.json_schema",
        ),
    ],
)
def test_parameters_that_no_message_can_hold(params, said):
    with pytest.raises(InvalidRequestError, match=said):
        generation("x", params, NO_OPTIONS)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (Generation(), "^prompt: None .* a prompt is needed"),
        (Generation(chat=common_pb2.Chat()), r"^messages: \[\]"),
        (Generation(chat=common_pb2.Chat(messages=[{"role": "", "content": "x"}])), r"^messages\[0\]\.role: ''"),
        (
            Generation(chat=common_pb2.Chat(messages=[{"role": "u", "extra_json": "["}])),
            r"^messages\[0\]\.extra_json: '\['",
        ),
        (Generation(chat=common_pb2.Chat(messages=[{"role": "u", "extra_json": '{"role": 1}'}])), "extra_json"),
        (Generation(chat=common_pb2.Chat(messages=[{"role": "u", "content": "x"}], tools_json="{}")), "^tools: '{}'"),
        (Generation(chat=common_pb2.Chat(messages=[HI], documents_json="1")), "^documents: '1'"),
        (Generation(chat=common_pb2.Chat(messages=[HI], template_variables_json="[]")), "^chat_template_kwargs: "),
    ],
)
def test_messages_that_are_no_prompt(message, said):
    with pytest.raises(InvalidRequestError, match=said):
        prompt_of(message)


def test_a_constraint_without_a_kind_is_refused():
    with pytest.raises(InvalidRequestError, match=r"^structured_output: None"):
        sampling_params(Generation(text="x", constraint=common_pb2.OutputConstraint()))
    with pytest.raises(InvalidRequestError, match=r"^structured_output: None .*exactly one"):
        sampling_params(Generation(text="x", constraint=common_pb2.OutputConstraint(any_json=False)))


def test_only_texts_and_messages_are_tokenized():
    message = generate_service_pb2.TokenizeRequest()
    set_prompt(message, "abc")
    assert prompt_of(message) == "abc"
    with pytest.raises(InvalidRequestError, match=r"^prompt: \[1\] .*text or messages"):
        set_prompt(message, [1])


def test_a_chat_is_either_continued_or_answered():
    with pytest.raises(InvalidRequestError, match=r"^add_generation_prompt: True"):
        ChatPrompt(messages=CHAT, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(InvalidRequestError, match=r"^messages: 'Hi'"):
        ChatPrompt(messages="Hi")  # type: ignore[arg-type]
