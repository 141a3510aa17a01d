"""What is said of a finished prompt, in a line of a batch."""

from __future__ import annotations

import json

import pytest

from jaxoverlap.cli.batch_format import answer_line, read_key
from jaxoverlap.outputs import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput, TokenLogprob
from tests.cli.test_batch_format import CHAT, request


def sample(index=0, reason=FinishReason.LENGTH, **changes):
    values = {"index": index, "text": "é\u2028", "token_ids": [7, 8, 9], "finish_reason": reason}
    return CompletionOutput(**(values | changes))


def output(*samples, **changes):
    values = {"prompt": "p", "prompt_token_ids": [1, 2], "seed": 2**63 + 1, "cached_tokens": 1}
    return RequestOutput(outputs=list(samples), **(values | changes))


def body_of(asked, answered):
    return json.loads(answer_line(asked, answered, "toy"))["response"]["body"]


@pytest.mark.parametrize(
    ("ending", "said", "stop_reason"),
    [
        ({"reason": FinishReason.EOS, "matched_token_id": 2}, "stop", None),
        ({"reason": FinishReason.STOP_TOKEN, "matched_token_id": 9}, "stop", 9),
        ({"reason": FinishReason.STOP_STRING, "matched_string": "END"}, "stop", "END"),
        ({"reason": FinishReason.GRAMMAR_COMPLETE}, "stop", None),
        ({"reason": FinishReason.LENGTH}, "length", None),
    ],
)
def test_an_answer(ending, said, stop_reason):
    answered = output(sample(**ending))
    line = answer_line(request(messages=CHAT), answered, "toy")
    assert line.endswith(b"\n") and line.count(b"\n") == 1 and "é".encode() in line
    assert read_key(line) == ("a", None)
    item = json.loads(line)
    assert item["id"].startswith("batch_req_") and item["error"] is None
    assert item["response"]["status_code"] == 200 and item["response"]["request_id"].startswith("req_")
    body = item["response"]["body"]
    message = {"role": "assistant", "content": "é\u2028"}
    end = {"logprobs": None, "finish_reason": said, "stop_reason": stop_reason}
    assert body["choices"] == [{"index": 0, "message": message} | end]
    cached = {"prompt_tokens_details": {"cached_tokens": 1}}
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5} | cached
    assert (body["object"], body["model"], body["seed"]) == ("chat.completion", "toy", 2**63 + 1)
    assert "prompt_logprobs" not in body

    body = body_of(request(prompt="x"), answered)
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "é\u2028"} | end]


def test_every_sample_is_a_choice_and_all_their_tokens_are_used():
    best_first = output(sample(2, text="b"), sample(0, text="a", token_ids=[7]))
    body = body_of(request(prompt="x", n=2, best_of=3), best_first)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "b"), (1, "a")]
    assert body["usage"]["completion_tokens"] == 4


HALVES = "日".encode()[:2], "日".encode()[2:]


def position(token_bytes, logprob=-0.5, rank=1, *others, text_offset=None):
    top = tuple(TokenLogprob(50 + i, -1.0 - i, i + 1, other) for i, other in enumerate(others))
    return PositionLogprobs(TokenLogprob(40, logprob, rank, token_bytes), top, text_offset)


SCORED = [
    position(b"a ", -0.25, 3, b"a", b"b", text_offset=0),
    position(HALVES[0], text_offset=2),
    position(HALVES[1], float("-inf"), text_offset=2),
    position(b"</s>", text_offset=5),
]


def test_log_probabilities_of_a_chat():
    choice = body_of(request(messages=CHAT), output(sample(text="a 日", logprobs=SCORED)))["choices"][0]
    first, half, rest, end = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    others = [{"token": "a", "logprob": -1.0, "bytes": [97]}, {"token": "b", "logprob": -2.0, "bytes": [98]}]
    assert first == {"token": "a ", "logprob": -0.25, "bytes": [97, 32], "top_logprobs": others}
    assert (half["token"], half["bytes"], half["top_logprobs"]) == ("bytes:\\xe6\\x97", [0xE6, 0x97], [])
    assert rest["logprob"] == -9999.0 and bytes(half["bytes"] + rest["bytes"]).decode() == "日"
    assert end["token"] == "</s>"


def test_log_probabilities_of_a_text():
    choice = body_of(request(prompt="x"), output(sample(text="a 日", logprobs=SCORED)))["choices"][0]
    assert choice["logprobs"] == {
        "tokens": ["a ", "bytes:\\xe6\\x97", "bytes:\\xa5", "</s>"],
        "token_logprobs": [-0.25, -0.5, -9999.0, -0.5],
        "top_logprobs": [
            {"a": -1.0, "b": -2.0, "a ": -0.25},
            {"bytes:\\xe6\\x97": -0.5},
            {"bytes:\\xa5": -9999.0},
            {"</s>": -0.5},
        ],
        "text_offset": [0, 2, 2, 3],
    }


@pytest.mark.parametrize(
    ("chosen", "named"),
    [
        ((68, -2.0), {"token_id:36": -0.5, "A": -2.0, "": -3.0, "token_id:400": -4.0}),
        ((36, -0.5), {"A": -0.5, "token_id:68": -2.0, "": -3.0, "token_id:400": -4.0}),
        ((7, -9.0), {"A": -0.5, "token_id:68": -2.0, "": -3.0, "token_id:400": -4.0, "z": -9.0}),
    ],
)
def test_alternatives_with_the_same_text_are_all_there(chosen, named):
    # As `A` and `<0x41>`, or ids that the tokenizer does not have.
    texts = {36: b"A", 68: b"A", 399: b"", 400: b"", 7: b"z"}
    top = tuple(
        TokenLogprob(token_id, logprob, place + 1, texts[token_id])
        for place, (token_id, logprob) in enumerate([(36, -0.5), (68, -2.0), (399, -3.0), (400, -4.0)])
    )
    came = TokenLogprob(*chosen, 1, texts[chosen[0]])
    choice = body_of(request(prompt="x"), output(sample(text="A", logprobs=[PositionLogprobs(came, top, 0)])))
    logprobs = choice["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [named]
    assert logprobs["top_logprobs"][0][logprobs["tokens"][0]] == logprobs["token_logprobs"][0]


def test_log_probabilities_of_a_prompt():
    unpredicted = PositionLogprobs(TokenLogprob(1, None, 0, b"x"))
    answered = output(sample(), prompt_logprobs=[unpredicted, position(b"y", -3.0, 9, b"z")])
    expected = [
        None,
        {"50": {"logprob": -1.0, "rank": 1, "decoded_token": "z"},
         "40": {"logprob": -3.0, "rank": 9, "decoded_token": "y"}},
    ]  # fmt: skip
    assert body_of(request(messages=CHAT), answered)["prompt_logprobs"] == expected
    body = body_of(request(prompt="x"), answered)
    assert body["choices"][0]["prompt_logprobs"] == expected and "prompt_logprobs" not in body
