"""What a line asks for, and what is wrong with it."""

from __future__ import annotations

import json

import pytest

from jaxoverlap.cli.batch_format import BadLine, ModelNames, error_line, parse_line, read_key, to_request
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.sampling_params import SamplingParams, StructuredOutput

NAMES = ModelNames.of("toy", "models/toy")
CHAT = [{"role": "user", "content": "Hi"}]


def request(defaults=None, **body):
    return to_request({"custom_id": "a", "body": body}, NAMES, defaults or {})


def refused(line) -> BadLine:
    with pytest.raises(BadLine) as caught:
        to_request({"custom_id": "a"} | line, NAMES, {})
    assert caught.value.custom_id == "a" and caught.value.status == 400 and caught.value.line is None
    return caught.value


def test_a_full_line():
    line = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {
            "model": "toy", "messages": CHAT, "max_completion_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
            "min_p": 0.1, "seed": 3, "stop_token_ids": [4], "ignore_eos": True, "skip_special_tokens": False,
        },
    }  # fmt: skip
    parsed = to_request(parse_line(json.dumps(line).encode(), 1), NAMES, {})
    assert (parsed.custom_id, parsed.prompt, parsed.is_chat) == ("a", ChatPrompt(messages=CHAT), True)
    assert parsed.params == SamplingParams(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, max_tokens=9, stop_token_ids=[4], ignore_eos=True,
        skip_special_tokens=False,
    )  # fmt: skip


def test_defaults_are_those_of_openai_or_what_the_command_line_says():
    assert request(prompt="x").params == SamplingParams(temperature=1.0, max_tokens=None)
    defaults = {"max_tokens": 5, "temperature": 0.0}
    assert request(defaults, prompt="x").params == SamplingParams(temperature=0.0, max_tokens=5)
    assert request(defaults, prompt="x", max_tokens=7, temperature=None).params.max_tokens == 7
    assert request(defaults, prompt="x", max_completion_tokens=8).params.max_tokens == 8


@pytest.mark.parametrize(
    ("url", "body", "is_chat"),
    [
        (None, {"messages": CHAT}, True),
        (None, {"prompt": "x"}, False),
        ("/v1/chat/completions", {"messages": CHAT, "prompt": None}, True),
        ("/v1/completions", {"prompt": [1, 2]}, False),
    ],
)
def test_the_url_or_the_body_says_what_is_wanted(url, body, is_chat):
    assert to_request({"custom_id": "a", "url": url, "body": body}, NAMES, {}).is_chat is is_chat


@pytest.mark.parametrize("name", ["toy", "models/toy", "default", None])
def test_names_of_the_model(name):
    assert request(prompt="x", model=name).prompt == "x"


@pytest.mark.parametrize(
    "field",
    [{"n": 1}, {"stream": False}, {"stop": None}, {"stop": []}, {"presence_penalty": 0.0}, {"tools": []},
     {"response_format": {"type": "text"}}, {"logprobs": None}, {"top_p": None}, {"unheard_of": None}, {"echo": False},
     {"tool_choice": "none"}, {"tool_choice": "auto"}, {"parallel_tool_calls": True}, {"user": "me"}, {"metadata": {}},
     {"metadata": {"a": "b"}}, {"store": False}, {"min_tokens": 0}, {"repetition_penalty": 1}, {"top_logprobs": 0}],
)  # fmt: skip
def test_fields_that_ask_for_nothing_are_taken(field):
    assert request(prompt="x", **field).params == SamplingParams()


@pytest.mark.parametrize(
    "field",
    [{"stream": True}, {"stream": 0}, {"tool_choice": "required"}, {"echo": True}, {"suffix": "x"},
     {"parallel_tool_calls": False}, {"guided_json": {}}, {"bad_words": ["x"]}],
)  # fmt: skip
def test_fields_of_other_engines_are_called_unsupported(field):
    [name] = field
    bad = refused({"body": {"prompt": "x"} | field})
    assert bad.code == "unsupported"
    assert f"body.{name} is not supported in this build" in str(bad)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("body", "params"),
    [
        ({"stop": "x"}, {"stop": ["x"]}),
        ({"stop": ["x", "yy"]}, {"stop": ["x", "yy"]}),
        ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
        ({"n": 3, "best_of": 5}, {"n": 3, "best_of": 5}),
        ({"logit_bias": {"7": -100, "8": 2.5}}, {"logit_bias": {7: -100, 8: 2.5}}),
        ({"presence_penalty": 0.5, "frequency_penalty": -1}, {"presence_penalty": 0.5, "frequency_penalty": -1}),
        ({"repetition_penalty": 1.2, "min_tokens": 3}, {"repetition_penalty": 1.2, "min_tokens": 3}),
        ({"allowed_token_ids": [1, 2]}, {"allowed_token_ids": [1, 2]}),
        ({"banned_token_ids": [2]}, {"banned_token_ids": [2]}),
        ({"logprobs": 4, "prompt_logprobs": 0}, {"logprobs": 4, "prompt_logprobs": 0}),
        ({"structured_output": {"regex": "a+"}}, {"structured_output": StructuredOutput(regex="a+")}),
        ({"response_format": {"type": "json_object"}}, {"structured_output": StructuredOutput(any_json=True)}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
         {"structured_output": StructuredOutput(json_schema=SCHEMA)}),
    ],
)  # fmt: skip
def test_what_a_body_asks_for(body, params):
    assert request(prompt="x", **body).params == SamplingParams(**params)


@pytest.mark.parametrize(
    ("body", "logprobs"),
    [
        ({}, None),
        ({"logprobs": False}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 5}, 5),
        ({"logprobs": False, "top_logprobs": 0}, None),
    ],
)
def test_a_chat_asks_for_log_probabilities_in_two_fields(body, logprobs):
    assert request(messages=CHAT, **body).params.logprobs == logprobs


def test_a_body_may_say_no_to_a_default():
    defaults = {"logprobs": 3, "structured_output": StructuredOutput(any_json=True), "priority": 4}
    both = request(defaults, messages=CHAT)
    assert (both.params.logprobs, both.params.structured_output.any_json, both.options.priority) == (3, True, 4)
    none = request(defaults, messages=CHAT, logprobs=False, response_format={"type": "text"}, priority=0)
    assert (none.params.logprobs, none.params.structured_output, none.options.priority) == (None, None, 0)


def test_what_the_template_is_told():
    chat = {
        "messages": [*CHAT, {"role": "assistant", "content": "Well", "name": "me"}],
        "tools": [{"type": "function"}],
        "documents": [{"text": "d"}],
        "continue_final_message": True,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert request(**chat).prompt == ChatPrompt(**chat)
    assert not request(messages=CHAT, add_generation_prompt=False).prompt.opens_answer


def test_arguments_of_tool_calls_are_decoded():
    def read(arguments):
        call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [*CHAT, {"role": "assistant", "content": None, "tool_calls": [call]}]
        (read,) = request(messages=messages).prompt.messages[1]["tool_calls"]
        assert {**read, "function": {"name": "f", "arguments": arguments}} == call
        return read["function"]["arguments"]

    assert read('{"city": "Paris", "days": [1]}') == {"city": "Paris", "days": [1]}
    for other in ({"city": "Paris"}, "", "no JSON", "[1]", '"x"', "[" * 100_000, None, 3):
        assert read(other) == other
    for calls in ("f", ["f"], [{"function": "f"}]):
        message = {"role": "assistant", "content": "", "tool_calls": calls}
        assert request(messages=[message]).prompt.messages == [message]


@pytest.mark.parametrize(
    ("line", "param", "said"),
    [
        (
            {"body": {"prompt": "x", "temprature": 1}},
            "body.temprature",
            "no such field; known are model, prompt",
        ),
        ({"body": {"prompt": "x"}, "extra": 1}, "extra", "known are custom_id, method, url, body"),
        ({"body": {"prompt": "x"}, "method": "GET"}, "method", "'POST'"),
        ({"body": {"prompt": "x"}, "url": "/v1/embeddings"}, "url", "/v1/completions"),
        ({"body": {"prompt": "x"}, "url": "/v1/chat/completions"}, "body.prompt", "messages"),
        ({"body": {"messages": CHAT}, "url": "/v1/completions"}, "body.messages", "prompt"),
        ({"body": {"messages": CHAT, "prompt": "x"}}, "body.prompt", "messages"),
        ({"body": {}}, "body.prompt", "messages or prompt is needed"),
        ({"body": {}, "url": "/v1/chat/completions"}, "body.messages", "messages is needed"),
        ({"body": []}, "body", "messages or prompt"),
        ({}, "body", "messages or prompt"),
        ({"body": {"prompt": "x", "model": "gpt-4"}}, "body.model", "served is toy, models/toy, default"),
        ({"body": {"prompt": "x", "model": ["toy"]}}, "body.model", "served is"),
        ({"body": {"prompt": "x", "max_tokens": 0}}, "body.max_tokens", "integer from 1"),
        ({"body": {"prompt": "x", "max_completion_tokens": -1}}, "body.max_completion_tokens", "integer from 1"),
        ({"body": {"prompt": "x", "max_completion_tokens": 1, "max_tokens": 1}}, "body.max_tokens", "as well"),
        ({"body": {"prompt": "x", "max_tokens": 1.5}}, "body.max_tokens", "integer"),
        ({"body": {"prompt": "x", "top_p": 0}}, "body.top_p", "(0, 1]"),
        ({"body": {"prompt": "x", "temperature": -0.1}}, "body.temperature", "≥ 0"),
        ({"body": {"prompt": "x", "temperature": "hot"}}, "body.temperature", "≥ 0"),
        ({"body": {"prompt": "x", "temperature": 10**400}}, "body.temperature", "≥ 0"),
        ({"body": {"prompt": "x", "temperature": float("nan")}}, "body.temperature", "≥ 0"),
        ({"body": {"prompt": "x", "seed": -1}}, "body.seed", "2**64"),
        ({"body": {"prompt": "x", "stop_token_ids": [1, "2"]}}, "body.stop_token_ids[1]", "integer"),
        ({"body": {"prompt": "x", "ignore_eos": 1}}, "body.ignore_eos", "true or false"),
        ({"body": {"prompt": {"a": 1}}}, "body.prompt", "text or a list of token ids"),
        ({"body": {"prompt": [{"role": "user", "content": "x"}]}}, "body.prompt[0]", "integers"),
        ({"body": {"prompt": [1, True]}}, "body.prompt[1]", "integers"),
        ({"body": {"messages": []}}, "body.messages", "at least one"),
        ({"body": {"messages": "Hi"}}, "body.messages", "at least one"),
        ({"body": {"messages": ["Hi"]}}, "body.messages[0]", "role and content"),
        ({"body": {"messages": [{"role": "user"}]}}, "body.messages[0].content", "text"),
        ({"body": {"messages": [{"role": 1, "content": "x"}]}}, "body.messages[0].role", "role"),
        ({"body": {"messages": CHAT, "tools": "f"}}, "body.tools", "list"),
        ({"body": {"messages": CHAT, "add_generation_prompt": 1}}, "body.add_generation_prompt", "true or false"),
        (
            {"body": {"messages": CHAT, "add_generation_prompt": True, "continue_final_message": True}},
            "body.add_generation_prompt",
            "last message",
        ),
        ({"body": {"messages": CHAT, "chat_template_kwargs": {"tools": 1}}}, "body.chat_template_kwargs.tools", "own"),
        ({"body": {"prompt": "x", "tools": [{}]}}, "body.tools", "it is a field of chats"),
        ({"body": {"prompt": "x", "continue_final_message": True}}, "body.continue_final_message", "chats"),
        ({"body": {"prompt": "x", "top_logprobs": 2}}, "body.top_logprobs", "it is a field of chats"),
        ({"body": {"prompt": "x", "logprobs": True}}, "body.logprobs", "integer from 0 to 20"),
        ({"body": {"messages": CHAT, "logprobs": 3}}, "body.logprobs", "true or false"),
        ({"body": {"messages": CHAT, "top_logprobs": 3}}, "body.top_logprobs", "it needs logprobs: true"),
        ({"body": {"messages": CHAT, "top_logprobs": 21, "logprobs": True}}, "body.top_logprobs", "from 0 to 20"),
        ({"body": {"prompt": "x", "n": True}}, "body.n", "from 1 to 128"),
        ({"body": {"prompt": "x", "n": 3, "best_of": 2}}, "body.best_of", "from n"),
        ({"body": {"prompt": "x", "stop": [""]}}, "body.stop[0]", "1 to 1024"),
        ({"body": {"prompt": "x", "logit_bias": {"x": 1}}}, "body.logit_bias['x']", "token id"),
        ({"body": {"prompt": "x", "logit_bias": [1]}}, "body.logit_bias", "mapping"),
        ({"body": {"prompt": "x", "min_tokens": 3, "max_tokens": 2}}, "body.min_tokens", "max_tokens"),
        ({"body": {"prompt": "x", "structured_output": {"regex": ""}}}, "body.structured_output.regex", "not empty"),
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(line, param, said):
    bad = refused(line)
    assert (bad.code, bad.param) == ("invalid_request", param)
    assert str(bad).startswith(f"{param}: ") and said in str(bad)


@pytest.mark.parametrize(
    ("response_format", "param", "said"),
    [
        ("json", "", "json_schema"),
        ({"type": "xml"}, "", "json_schema"),
        ({"type": "json_object", "schema": {}}, ".schema", "no such field"),
        ({"type": "json_schema"}, ".json_schema", "schema is needed"),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "x": 1}}, ".json_schema.x", "known are name"),
        ({"type": "json_schema", "json_schema": {"schema": False}}, ".json_schema.schema", "no text"),
    ],
)
def test_a_bad_response_format(response_format, param, said):
    bad = refused({"body": {"prompt": "x", "response_format": response_format}})
    assert (bad.code, bad.param) == ("invalid_request", f"body.response_format{param}") and said in str(bad)


def test_structure_is_asked_for_once():
    both = {"response_format": {"type": "json_object"}, "structured_output": {"regex": "a"}}
    assert refused({"body": {"prompt": "x"} | both}).param == "body.structured_output"


def test_several_prompts_in_a_line_are_unsupported():
    for prompt in (["a", "b"], [[1], [2]]):
        assert refused({"body": {"prompt": prompt}}).code == "unsupported"


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object but list"),
        (b"null", "not a JSON object"),
        (b'{"custom_id": "\xff"}', "not valid UTF-8"),
        ('{"custom_id": "a"}'.encode("utf-16"), "not valid UTF-8"),
        (b"\x00\x00", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"custom_id": "a", "n": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"body": {}}', "custom_id: None"),
        (b'{"custom_id": ""}', "custom_id: ''"),
        (b'{"custom_id": 7}', "custom_id: 7"),
    ],
)
def test_lines_that_are_no_request_are_told_by_their_number(raw, said):
    with pytest.raises(BadLine, match=r"line 12: ") as caught:
        parse_line(raw, 12)
    assert said in str(caught.value)
    written = json.loads(error_line(caught.value))
    assert written["custom_id"] is None and written["response"] is None
    assert written["error"] == {"code": "invalid_line", "message": str(caught.value), "line": 12}
    assert read_key(error_line(caught.value)) == (12, "invalid_line")


def test_a_byte_order_mark_and_carriage_returns_are_no_matter():
    assert parse_line(b'\xef\xbb\xbf{"custom_id": "a"}\r\n', 1) == {"custom_id": "a"}


def test_an_error_has_the_body_a_server_would_have_sent():
    item = json.loads(error_line(refused({"body": {"prompt": "x", "top_p": 2}})))
    message = "body.top_p: 2 is not allowed; use a number in (0, 1]"
    assert item["error"] == {"code": "invalid_request", "message": message}
    assert item["response"]["status_code"] == 400
    assert item["response"]["body"]["error"] == {
        "message": message, "type": "invalid_request_error", "param": "body.top_p", "code": "invalid_request",
    }  # fmt: skip


def test_a_custom_id_that_utf8_can_not_say():
    line = error_line(BadLine("invalid_request", "no", custom_id="\ud800"))
    assert read_key(line) == ("\ud800", "invalid_request")


@pytest.mark.parametrize("line", [b"", b"{}\n", b"hello\n", b'{"custom_id": "a", "error": null}\n', b"[]\n", b"\xff\n"])
def test_lines_that_are_no_output_of_ours(line):
    with pytest.raises(ValueError, match=r"."):
        read_key(line)


def test_tools_are_left_out_of_the_prompt_if_none_may_be_chosen():
    tools = [{"type": "function", "function": {"name": "look"}}]
    for choice, shown in (("none", None), ("auto", tools), (None, tools)):
        assert request(messages=CHAT, tools=tools, tool_choice=choice).prompt.tools == shown


def test_content_parts_are_one_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert request(messages=[{"role": "user", "content": parts}]).prompt.messages[0]["content"] == "a\nb"
    with pytest.raises(BadLine, match=r"body\.messages\[0\]\.content\[0\]\.type: 'image_url' is not allowed"):
        request(messages=[{"role": "user", "content": [{"type": "image_url"}]}])


def test_what_is_the_callers_own_has_its_kind():
    with pytest.raises(BadLine, match=r"body\.user: 3 is not allowed; text is needed"):
        request(messages=CHAT, user=3)
