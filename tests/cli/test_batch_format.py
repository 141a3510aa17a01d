"""What a line asks for, and what is wrong with it."""

from __future__ import annotations

import json

import pytest

from jaxoverlap.cli.batch_format import BadLine, ModelNames, answer_line, error_line, parse_line, read_key, to_request
from jaxoverlap.outputs import FinishReason
from jaxoverlap.sampling_params import SamplingParams

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
    assert (parsed.custom_id, parsed.prompt, parsed.is_chat) == ("a", CHAT, True)
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
     {"response_format": {"type": "text"}}, {"logprobs": None}, {"top_p": None}, {"unheard_of": None}],
)  # fmt: skip
def test_fields_that_ask_for_nothing_are_taken(field):
    assert request(prompt="x", **field).params == SamplingParams()


@pytest.mark.parametrize(
    "field",
    [{"n": 2}, {"n": True}, {"stream": True}, {"stream": 0}, {"stop": ["x"]}, {"stop": "x"}, {"logprobs": 0},
     {"logprobs": False}, {"tools": [{}]}, {"tool_choice": "auto"}, {"response_format": {"type": "json_object"}},
     {"presence_penalty": 0.1}, {"repetition_penalty": 1.1}, {"echo": True}, {"user": "me"}, {"min_tokens": 1}],
)  # fmt: skip
def test_fields_of_other_engines_are_called_unsupported(field):
    [name] = field
    bad = refused({"body": {"prompt": "x"} | field})
    assert bad.code == "unsupported"
    assert f"body.{name} is not supported in this build" in str(bad)


@pytest.mark.parametrize(
    ("line", "param", "said"),
    [
        ({"body": {"prompt": "x", "temprature": 1}}, "body.temprature", "no such field; known are model, messages"),
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
    ],
)
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(line, param, said):
    bad = refused(line)
    assert (bad.code, bad.param) == ("invalid_request", param)
    assert str(bad).startswith(f"{param}: ") and said in str(bad)


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
    assert read_key(error_line(caught.value)) == (12, True)


def test_a_byte_order_mark_and_carriage_returns_are_no_matter():
    assert parse_line(b'\xef\xbb\xbf{"custom_id": "a"}\r\n', 1) == {"custom_id": "a"}


def output(reason: FinishReason):
    from jaxoverlap.llm import RequestOutput

    return RequestOutput("p", [1, 2], "é\u2028", [7, 8, 9], reason, None, 2**63 + 1, None, 1, 0, 0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("reason", "said"), [(FinishReason.EOS, "stop"), (FinishReason.STOP_TOKEN, "stop"), (FinishReason.LENGTH, "length")]
)
def test_an_answer(reason, said):
    line = answer_line(request(messages=CHAT), output(reason), "toy")
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and "é".encode() in line
    assert read_key(line) == ("a", False)
    item = json.loads(line)
    assert item["id"].startswith("batch_req_") and item["error"] is None
    assert item["response"]["status_code"] == 200 and item["response"]["request_id"].startswith("req_")
    body = item["response"]["body"]
    message = {"role": "assistant", "content": "é\u2028"}
    assert body["choices"] == [{"index": 0, "message": message, "logprobs": None, "finish_reason": said}]
    cached = {"prompt_tokens_details": {"cached_tokens": 1}}
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5} | cached
    assert (body["object"], body["model"], body["seed"]) == ("chat.completion", "toy", 2**63 + 1)

    body = json.loads(answer_line(request(prompt="x"), output(reason), "toy"))["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "é\u2028", "logprobs": None, "finish_reason": said}]


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
    assert read_key(line) == ("\ud800", True)


@pytest.mark.parametrize("line", [b"", b"{}\n", b"hello\n", b'{"custom_id": "a", "error": null}\n', b"[]\n", b"\xff\n"])
def test_lines_that_are_no_output_of_ours(line):
    with pytest.raises(ValueError, match=r"."):
        read_key(line)
