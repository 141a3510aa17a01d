"""The client and the service together: what `LLM` would have answered, and every failure under its own name."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest
import trustme

from jaxoverlap import (
    AbortedError,
    AccessDeniedError,
    AsyncClient,
    Client,
    ConflictError,
    DeadlineError,
    InvalidRequestError,
    RequestOptions,
    SamplingParams,
    ServerUnavailableError,
)
from jaxoverlap.client import Health
from jaxoverlap.prompts import ChatPrompt
from tests.server import rig as rigs
from tests.server import toy

CHAT = [{"role": "user", "content": "Hi"}]
PARAMS = SamplingParams(temperature=0, seed=5, max_tokens=12)


@pytest.fixture(scope="module")
def rig() -> Iterator[rigs.Rig]:
    with rigs.running() as rig:
        yield rig
        rig.wait_idle()
        rig.check_probe()


@pytest.fixture
def client(rig: rigs.Rig) -> Iterator[Client]:
    with Client(rig.target, progress=False) as client:
        yield client
    rig.wait_idle()


def answer_to(prompt: list[int], seed: int = 5, max_tokens: int = 12) -> list[int]:
    return rigs.oracle(prompt, max_tokens, [toy.EOS_ID], salt=seed % 1009)[0]


def test_answers_are_the_models(client):
    tokenizer = toy.make_tokenizer()
    ids = tokenizer.encode("Once upon")
    chat_ids = tokenizer.encode("user: Hi\nassistant: ")
    text, by_ids, chat = client.generate(["Once upon", ids, CHAT], PARAMS)
    assert text.token_ids == by_ids.token_ids == answer_to(ids)
    assert chat.token_ids == answer_to(chat_ids)
    assert client.chat(CHAT, PARAMS)[0].token_ids == chat.token_ids
    assert text.text == tokenizer.decode(text.token_ids) and text.seed == 5 and text.prompt_tokens == len(ids)
    assert text.request_id != by_ids.request_id
    assert 0 <= text.queue_seconds <= text.first_token_seconds <= text.total_seconds
    assert client.tokenize("Once upon") == ids and client.detokenize(ids) == "Once upon"
    assert client.tokenize(CHAT) == chat_ids


def test_a_stream_is_the_unary_answer(client):
    for params in (PARAMS, SamplingParams(n=3, seed=7, max_tokens=20), SamplingParams(seed=8, stop="e", max_tokens=99)):
        pieces = list(client.stream("Once upon", params))
        streamed, [unary] = pieces[-1].output, client.generate("Once upon", params)
        for mine, whole in zip(streamed.outputs, unary.outputs, strict=True):
            assert (mine.text, mine.token_ids, mine.finish_reason) == (whole.text, whole.token_ids, whole.finish_reason)
            assert (mine.matched_string, mine.matched_token_id) == (whole.matched_string, whole.matched_token_id)
        assert len(unary.outputs) == params.n and streamed.seed == unary.seed


def test_special_tokens_are_shown_to_who_has_given_tools(client):
    tokenizer = toy.make_tokenizer()
    for tools, skips, hidden in ((None, None, True), ([{"name": "f"}], None, False), ([{"name": "f"}], True, True)):
        params = SamplingParams(seed=7, max_tokens=600, ignore_eos=True, skip_special_tokens=skips)
        prompt = ChatPrompt(messages=CHAT, tools=tools)
        for output in (*client.generate(prompt, params), list(client.stream(prompt, params))[-1].output):
            assert tokenizer.eos_token_ids[0] in output.token_ids
            assert output.text == tokenizer.decode(output.token_ids, skip_special_tokens=hidden)


def test_drawn_seeds_are_told(client):
    [first] = client.generate("Once", SamplingParams(max_tokens=9))
    [again] = client.generate("Once", SamplingParams(max_tokens=9, seed=first.seed))
    assert again.token_ids == first.token_ids


@pytest.mark.parametrize(
    ("prompt", "params", "said"),
    [
        ("", PARAMS, r"^prompt: ''"),
        ([97], PARAMS, r"^prompt\[0\]: 97 is not allowed; token ids go from 0 to 96"),
        ("x" * 1024, PARAMS, r"^prompt: '1024 tokens'"),
        ("x", SamplingParams(stop_token_ids=[3, 97]), r"^stop_token_ids\[1\]: 97"),
    ],
)
def test_what_is_refused_is_named(client, prompt, params, said):
    with pytest.raises(InvalidRequestError, match=said):
        list(client.stream(prompt, params))
    in_list = said.replace("^prompt", r"^prompts\[0\]") if "prompt" in said else said.replace("^", r"^prompts\[0\]\.")
    with pytest.raises(InvalidRequestError, match=in_list):
        client.generate([prompt], params)
    with pytest.raises(InvalidRequestError, match=said):
        client.generate(prompt, params)


def test_another_model_is_refused(rig):
    with Client(rig.target, model="gpt", progress=False) as client:
        with pytest.raises(InvalidRequestError, match=r"^model: 'gpt' is not allowed; 'toy' is served"):
            client.generate("x")
        with pytest.raises(InvalidRequestError, match=r"^model: 'gpt'"):
            client.tokenize("x")


def test_streams_can_not_know_the_best(client):
    with pytest.raises(InvalidRequestError, match=r"^best_of: 3"):
        list(client.stream("x", SamplingParams(best_of=3)))


def test_more_prompts_than_the_engine_has_rows(client):
    prompts = [f"prompt {number}" for number in range(60)]
    tokenizer = toy.make_tokenizer()
    outputs = client.generate(prompts, PARAMS)
    assert [output.token_ids for output in outputs] == [answer_to(tokenizer.encode(prompt)) for prompt in prompts]
    found = dict(client.generate_each([(prompt, PARAMS) for prompt in prompts], window=7))
    assert [found[number].token_ids for number in range(60)] == [output.token_ids for output in outputs]


def test_an_asynchronous_client(rig):
    async def main():
        async with AsyncClient(rig.target, progress=False) as client:
            texts = [f"prompt {number}" for number in range(8)]
            unary = await asyncio.gather(*(client.generate(text, PARAMS) for text in texts))
            pieces = [piece async for piece in client.stream(texts[0], PARAMS)]
            assert pieces[-1].output.token_ids == unary[0][0].token_ids
            return [outputs[0].token_ids for outputs in unary]

    encode = toy.make_tokenizer().encode
    assert asyncio.run(main()) == [answer_to(encode(f"prompt {number}")) for number in range(8)]
    rig.wait_idle()


def test_a_stream_that_is_left_leaves_the_engine(client, rig):
    rig.hold()
    stream = client.stream("Once", SamplingParams(ignore_eos=True, seed=1))
    rig.device.allow(3)
    next(stream)
    stream.close()
    rig.wait_idle()


def test_a_deadline_ends_a_request(client, rig):
    rig.hold()
    with pytest.raises(DeadlineError):
        client.generate("Once", PARAMS, RequestOptions(timeout=0.2))


def test_operators_end_requests(client, rig, monkeypatch):
    monkeypatch.setattr(rig.device, "step_seconds", 0.02)
    endless = SamplingParams(ignore_eos=True)
    ended: list[tuple[int, object]] = []
    thread = threading.Thread(target=lambda: ended.extend(client.generate_each([("a", endless), ("b", endless)])))
    thread.start()
    rigs.eventually(lambda: len(rig.requests()) == 2)
    load = client.load()
    assert load.running + load.queued == 2
    with pytest.raises(ConflictError):
        client.flush_cache()
    aborted = client.abort(all_requests=True)
    thread.join(20)
    assert len(aborted.aborted_ids) == 2
    assert sorted((index, type(error)) for index, error in ended) == [(0, AbortedError), (1, AbortedError)]
    assert client.abort(["nobody"]).unknown_ids == ("nobody",)


def test_what_the_service_says_of_itself(client, rig):
    info = client.model_info()
    assert (info.served_name, info.vocab_size, info.max_model_len, info.eos_token_ids) == ("toy", 97, 1024, (96,))
    assert client.server_info().num_pages == 600 and client.server_info().instance_id == "toy"
    assert client.health() == Health(live=True, ready=True)
    rig.wait_idle()
    client.flush_cache()
    snapshot = client.memory_snapshot()
    assert len(snapshot.pages) == snapshot.free == 600 and snapshot.to_svg().startswith("<svg")
    with pytest.raises(ConflictError, match="--profile-dir"):
        client.start_profile()


def test_a_service_with_tls_and_tokens(tmp_path):
    authority, token = trustme.CA(), tmp_path / "tokens"
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tmp_path / "key"))
    certificate.cert_chain_pems[0].write_to_path(str(tmp_path / "cert"))
    token.write_text("secret\n")
    tls = {"tls_cert": str(tmp_path / "cert"), "tls_key": str(tmp_path / "key")}
    root = authority.cert_pem.bytes()
    with rigs.running(**tls, token_file=str(token)) as rig:
        with Client(rig.target, root_certificates=root, token="secret", progress=False) as client:
            assert client.generate("Once", PARAMS)[0].token_ids == answer_to(toy.make_tokenizer().encode("Once"))
            with pytest.raises(AccessDeniedError):
                client.load()  # there are no operators' tokens
        with (
            Client(rig.target, root_certificates=root, token="guess", progress=False) as client,
            pytest.raises(AccessDeniedError),
        ):
            client.generate("Once", PARAMS)
        with Client(rig.target, progress=False, max_retries=0) as client, pytest.raises(ServerUnavailableError):
            client.generate("Once", PARAMS)


def test_numbers_that_no_message_holds_are_refused_by_name(connect, server):
    client = connect(server.target)
    for work, name in (
        (lambda: client.step_log(-1), "last"),
        (lambda: client.start_profile(2**32), "steps"),
        (lambda: client.start_trace(0.5), "max_steps"),
        (lambda: client.drain(float("nan")), "timeout"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{name}: "):
            work()
