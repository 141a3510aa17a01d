"""Prompts in, texts out: the same results as from `LLM`, whichever client and whichever method."""

from __future__ import annotations

import asyncio
import io
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from jaxoverlap import (
    AbortedError,
    AsyncClient,
    ChatPrompt,
    Client,
    EngineError,
    InvalidRequestError,
    RequestOptions,
    SamplingParams,
    display,
)
from jaxoverlap.wire.requests import prompt_of, request_options, sampling_params
from tests.client.fake_server import MAX_MODEL_LEN, FakeServer, answer_to
from tests.test_import_floors import ROOT

CHAT = [{"role": "system", "content": "Be."}, {"role": "user", "content": "Hi"}]
SCORED = SamplingParams(n=2, logprobs=1, prompt_logprobs=2, seed=4)


def test_the_client_comes_without_what_only_an_engine_needs():
    heavy = ("jax", "flax", "transformers", "tokenizers", "torch", "jinja2", "rich", "typer", "jaxoverlap.llm")
    code = f"import jaxoverlap, sys; jaxoverlap.Client; print([m for m in {heavy} if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert found.stdout.strip() == "[]"


def test_a_prompt_of_any_kind(client):
    for prompt in ("abc", [5, 6], CHAT):
        [output] = client.generate(prompt)
        told = ChatPrompt(messages=prompt) if prompt is CHAT else prompt
        expected = answer_to(told, SamplingParams(), output.prompt_tokens, output.request_id)
        assert replace(output, prompt=None) == replace(expected, prompt=None)
        assert output.prompt is prompt
    chat = ChatPrompt(messages=CHAT)
    assert client.generate(chat)[0].prompt is chat
    assert client.chat(CHAT)[0].prompt == chat
    [output] = client.generate(np.array([5, 6]))
    assert output.text == "<5,6>" and output.prompt_token_ids == [5, 6]


def test_answers_come_in_the_order_of_the_prompts(client):
    prompts = ["a" * (i % 9 + 1) + str(i) for i in range(100)]
    assert [output.text for output in client.generate(prompts)] == [f"<{prompt}>" for prompt in prompts]
    assert client.generate([]) == []


def test_parameters_and_options_arrive(client, server):
    params = [SamplingParams(temperature=0.7, stop=["x"], max_tokens=3), SamplingParams(top_k=5, logit_bias={3: 0.1})]
    options = RequestOptions(priority=-2, cache_salt="s")
    outputs = client.generate(["a", "bb"], params, options, client_request_id="mine")
    assert [output.text for output in outputs] == ["<a>", "<bb>"]
    calls = sorted(server.calls, key=lambda call: len(call.generation.text))
    assert [sampling_params(call.generation) for call in calls] == params
    assert all(request_options(call.generation) == options for call in calls)
    assert all(call.generation.client_request_id == "mine" and call.seconds_left is None for call in calls)


def test_a_stream_is_the_unary_answer_in_pieces(client):
    for params in (SamplingParams(), SamplingParams(max_tokens=3), SCORED):
        pieces = list(client.stream("abc", params))
        [unary] = client.generate("abc", params)
        output = pieces[-1].output
        assert output == answer_to("abc", params, 3, output.request_id)
        assert (output.outputs, output.prompt_logprobs) == (unary.outputs, unary.prompt_logprobs)
        assert all(piece.output is None for piece in pieces[:-1])
        for sample in output.outputs:
            mine = [piece for piece in pieces if piece.index == sample.index]
            assert "".join(piece.text for piece in mine) == sample.text
            assert [i for piece in mine for i in piece.token_ids] == sample.token_ids
            if params is SCORED:
                assert [score for piece in mine for score in piece.logprobs] == sample.logprobs


def test_pieces_come_as_they_are_made(client, server):
    server.hold()
    stream = client.stream("abc")
    assert next(stream).text == "<"
    server.release()
    assert "".join(piece.text for piece in stream) == "abc>"


def test_a_stream_begins_with_the_first_piece_that_is_drawn(client, server):
    stream = client.stream("abc")
    assert client.generate("x")[0].text == "<x>"
    assert [call.generation.text for call in server.calls] == ["x"]
    assert len(list(stream)) == 6


def test_chats(client, server):
    assert [output.text for output in client.chat(CHAT)] == ["<Be.|Hi>"]
    told = {"tools": [{"type": "function"}], "documents": [{"text": "x"}], "chat_template_kwargs": {"deep": False}}
    going_on = [*CHAT, {"role": "assistant", "content": "We"}]
    outputs = client.chat([going_on, going_on[1:]], continue_final_message=True, **told)
    assert [output.text for output in outputs] == ["<Be.|Hi|We>", "<Hi|We>"]
    assert prompt_of(server.calls[0].generation) == ChatPrompt(messages=CHAT)
    wanted = ChatPrompt(messages=going_on, continue_final_message=True, **told)
    assert wanted in [prompt_of(call.generation) for call in server.calls[1:]]
    pieces = list(client.stream(ChatPrompt(messages=CHAT, add_generation_prompt=False)))
    assert pieces[-1].output.text == "<Be.|Hi>"
    assert not prompt_of(server.calls[-1].generation).opens_answer
    for wrong in ("Hi", [], None, [["Hi"]]):
        with pytest.raises(InvalidRequestError, match=r"^(prompts\[0\]\.)?messages"):
            client.chat(wrong)


def test_tokens_and_text(client):
    assert client.tokenize("ab") == [1, 97, 98]
    assert client.tokenize("ab", add_special_tokens=False) == [97, 98]
    assert client.tokenize(CHAT)[:4] == [1, ord("B"), ord("e"), ord(".")]
    assert client.detokenize([1, 97, 98]) == "ab"
    assert client.detokenize(np.array([1, 97]), skip_special_tokens=False) == "\x01a"
    with pytest.raises(InvalidRequestError, match=r"^token_ids\[1\]: -1"):
        client.detokenize([1, -1])
    with pytest.raises(InvalidRequestError, match=r"^prompt: \[1\]"):
        client.tokenize([1])


def test_nothing_is_sent_when_one_of_the_prompts_is_none(client, server):
    for prompts, said in (
        (["a", "\ud800"], r"^prompts\[1\]: "),
        ([[1], [2, -3]], r"^prompts\[1\]\[1\]: -3"),
        (7, r"^prompt: 7"),
        (["a", 7], r"^prompts\[1\]: 7"),
    ):
        with pytest.raises(InvalidRequestError, match=said):
            client.generate(prompts)
    with pytest.raises(InvalidRequestError, match=r"^options: '1 of them'"):
        client.generate(["a", "b"], None, [RequestOptions()])
    with pytest.raises(InvalidRequestError, match=r"^prompt: None"):
        client.stream(None)
    assert server.calls == []


def test_what_the_service_refuses_is_named_as_here(client):
    with pytest.raises(InvalidRequestError) as caught:
        client.generate(["abc", "x" * MAX_MODEL_LEN])
    assert (caught.value.field, caught.value.value) == ("prompts[1]", "64 tokens")
    with pytest.raises(InvalidRequestError, match=r"^prompt: '64 tokens' is not allowed; use 1 to 63 tokens$"):
        list(client.stream("x" * MAX_MODEL_LEN))


def test_the_model_may_be_named(connect, server):
    assert connect(server.target, model="fake").generate("a")[0].text == "<a>"
    with pytest.raises(InvalidRequestError, match=r"^model: 'gpt' is not allowed; served is fake$"):
        connect(server.target, model="gpt").generate("a")


def test_a_closed_client_says_so(client):
    client.generate("a")
    client.close()
    client.close()
    for work in (lambda: client.generate("a"), client.load, lambda: next(client.stream("a"))):
        with pytest.raises(EngineError, match="closed"):
            work()


def test_closing_a_client_aborts_its_calls(server):
    server.hold()

    async def main() -> None:
        for work in (lambda c: c.generate("abc"), lambda c: c.generate(["abc", "def"]), _whole_stream):
            server.calls.clear()
            client = AsyncClient(server.target, progress=False)
            task = asyncio.create_task(work(client))
            await asyncio.to_thread(server.wait_for_calls, 1)
            await client.close()
            with pytest.raises(AbortedError, match="closed"):
                await task

    async def _whole_stream(client: AsyncClient) -> None:
        async for _ in client.stream("abc"):
            ...

    asyncio.run(main())


def test_a_task_that_is_cancelled_when_its_client_closes_is_cancelled(server):
    server.hold()

    async def main() -> None:
        client = AsyncClient(server.target, progress=False)
        task = asyncio.create_task(client.generate("abc"))
        await asyncio.to_thread(server.wait_for_calls, 1)
        task.cancel()
        await client.close()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_threads_share_a_client(server):
    with Client(server.target, progress=False) as client:
        texts: dict[int, str] = {}

        def work(number: int) -> None:
            texts[number] = "".join(piece.text for piece in client.stream(f"t{number}"))

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert texts == {number: f"<t{number}>" for number in range(8)}


def test_a_unix_socket(connect, tmp_path):
    server = FakeServer(f"unix:{tmp_path}/s")
    assert connect(server.target, token="t").generate("a")[0].text == "<a>"
    server.stop()


def test_progress_is_shown_if_wanted(client, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(display, "console", Console(file=screen, force_terminal=True, width=100))
    client.generate(["a", "b"], progress=False)
    assert screen.getvalue() == ""
    client.generate(["a", "b"], progress=True)
    assert "decoding" in screen.getvalue() and "2/2" in screen.getvalue()


def test_inputs_of_a_wrong_form_are_answered_with_what_is_wrong(client, server):
    inputs = ["hello", ("abc", {"temperature": 0}), ("abc", None, 3), ("abc", None)]
    results = dict(client.generate_each(inputs))
    assert [getattr(results[index], "field", None) for index in range(4)] == [
        "input",
        "sampling_params",
        "options",
        None,
    ]
    assert len(server.calls) == 1
    with pytest.raises(InvalidRequestError, match="window: -1"):
        list(client.generate_each(inputs, window=-1))
    with pytest.raises(InvalidRequestError, match=r"sampling_params: \{'temperature': 0\}"):
        client.stream("abc", {"temperature": 0})


def test_in_another_event_loop_a_client_says_whose_it_is(server):
    client = AsyncClient(server.target, progress=False)
    first, second = asyncio.new_event_loop(), asyncio.new_event_loop()
    try:
        assert first.run_until_complete(client.generate("abc"))[0].text == "<abc>"
        for _ in range(2):
            with pytest.raises(EngineError, match="event loop in which it was first used"):
                second.run_until_complete(client.generate("abc"))
        assert first.run_until_complete(client.generate("abc"))[0].text == "<abc>"
        first.run_until_complete(client.close())
    finally:
        first.close()
        second.close()
