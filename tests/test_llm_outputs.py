"""What a caller gets of what the engine computes: stops, samples, chats. On the toy device; tokens are words."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from jaxoverlap import LLM, FinishReason, InvalidRequestError, RequestOptions, SamplingParams, StructuredOutput
from jaxoverlap import llm as llm_module
from jaxoverlap.errors import QueueFullError, UnsupportedError
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.request import RequestStatus
from jaxoverlap.text.chat_template import ChatTemplate
from tests.cli import toy
from tests.fakes import VOCAB_SIZE, oracle, salt_of
from tests.test_llm import GREEDY, llm, toy_build, words  # noqa: F401, a fixture

LONG = 60


def params(**changes) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "seed": 1, "max_tokens": LONG, "ignore_eos": True} | changes))


def expected(prompt, count=LONG, sample_index=0, seed=1) -> list[int]:
    return oracle(prompt, count, (), salt=salt_of(seed, sample_index))[0]


def streamed(llm, prompt, sampling, options=None):  # noqa: F811
    """Pieces of each sample joined, and the output."""
    texts, ids = [""] * sampling.n, [[] for _ in range(sampling.n)]
    deltas = list(llm.stream(prompt, sampling, options))
    for delta in deltas:
        texts[delta.index] += delta.text
        ids[delta.index] += delta.token_ids
    assert [delta.output is None for delta in deltas] == [True] * (len(deltas) - 1) + [False]
    output = deltas[-1].output
    assert texts == [one.text for one in output.outputs] and ids == [one.token_ids for one in output.outputs]
    return output


# ---------------------------------------------------------------- stop strings


def stop_at(tokens: list[int], number: int) -> tuple[str, str]:
    """A stop in the middle of token `number` and of the one before, and the text before it."""
    text, end = words(tokens[:number]), len(words(tokens[: number + 1]))
    stop = words(tokens[: number + 1])[len(text) - 2 : end]
    shown = words(tokens)[: words(tokens).index(stop)]
    assert shown == text[:-2], "the stop is to be found there, and not before"
    return stop, shown


@pytest.mark.parametrize("lookahead", [0, 1, 2, 4])
def test_a_stop_string_ends_a_request_at_once(monkeypatch, lookahead):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    with LLM(max_running=4, lookahead=lookahead, progress=False) as llm:  # noqa: F811
        tokens = expected([3, 4])
        stop, shown = stop_at(tokens, 20)
        sampling = params(stop=["never", stop])
        beside = params(max_tokens=50)
        ended, other = llm.generate([[3, 4], [9]], [sampling, beside])
        assert (ended.text, ended.token_ids) == (shown, tokens[:21])
        assert (ended.finish_reason, ended.matched_string, ended.matched_token_id) == ("stop_string", stop, None)
        assert other.token_ids == expected([9], 50)
        # The first token is the prompt's, so the one that completes the stop takes 20 decode steps.
        assert llm.runner.row_steps[0] <= 20 + lookahead
        again = streamed(llm, [3, 4], sampling)
        assert (again.text, again.token_ids, again.matched_string) == (shown, tokens[:21], stop)
        kept = llm.generate([3, 4], params(stop=stop, include_stop_str_in_output=True))[0]
        assert (kept.text, kept.token_ids) == (shown + stop, tokens[:21])
        assert not llm.engine.has_work
        memory = llm.engine.loop.scheduler.state.memory
        assert memory.num_available == memory.pool.num_pages


def test_a_stop_string_wins_over_an_end_in_the_same_step(llm):  # noqa: F811
    tokens = expected([3])
    stop, shown = stop_at(tokens, 9)
    output = streamed(llm, [3], params(stop=stop, max_tokens=10))
    assert (output.finish_reason, output.text) == ("stop_string", shown)
    # The text of the id that ends a request is not looked at.
    end = tokens[9]
    first = tokens.index(end)
    for include in (False, True):
        sampling = params(stop=f"w{end}", stop_token_ids=[end], include_stop_str_in_output=include)
        output = streamed(llm, [3], sampling)
        assert (output.finish_reason, output.matched_token_id) == ("stop_token", end)
        assert output.text == words(tokens[: first + include]) and output.token_ids == tokens[: first + 1]


def test_each_way_to_end_has_its_reason(llm):  # noqa: F811
    tokens = expected([3], 200)
    end = tokens[7]
    needed = tokens.index(end) + 1
    eos = min(tokens.index(5), tokens.index(17)) if {5, 17} <= set(tokens) else tokens.index(5)
    stop, _ = stop_at(tokens, 4)
    cases = [
        (params(ignore_eos=False, max_tokens=200), "eos", eos + 1),
        (params(ignore_eos=False, max_tokens=eos + 1), "eos", eos + 1),  # on the last token that was allowed
        (params(stop_token_ids=[end]), "stop_token", needed),
        (params(stop_token_ids=[end], max_tokens=needed), "stop_token", needed),
        (params(stop=stop), "stop_string", 5),
        (params(max_tokens=7), "length", 7),
        (params(max_tokens=None), "length", 255),
    ]
    outputs = llm.generate([[3]] * len(cases), [sampling for sampling, _, _ in cases])
    for output, (_, reason, count) in zip(outputs, cases, strict=True):
        assert (output.finish_reason, len(output.token_ids)) == (reason, count)


def test_a_stop_that_the_text_ends_in_the_middle_of_is_shown(llm):  # noqa: F811
    tokens = expected([3], 6)
    output = streamed(llm, [3], params(max_tokens=6, stop=words(tokens)[-4:] + "…"))
    assert (output.text, output.finish_reason) == (words(tokens), "length")


def test_stops_of_streams_in_several_threads(llm):  # noqa: F811
    results = {}

    def work(index):
        stop, shown = stop_at(expected([index, index]), 12)
        results[index] = streamed(llm, [index, index], params(stop=stop)).text == shown

    threads = [threading.Thread(target=work, args=(i,)) for i in range(10, 18)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == dict.fromkeys(range(10, 18), True)


def test_stop_is_nothing_to_who_has_finished(llm):  # noqa: F811
    request = llm.engine.add([3], params(max_tokens=2))
    waiting = [llm.engine.add([4], params()) for _ in range(6)]  # more than run together
    while request.status != RequestStatus.FINISHED:
        llm.engine.step()
    assert not llm.engine.stop(request) and request.finish_reason == FinishReason.LENGTH
    assert all(llm.engine.stop(one) for one in waiting)
    ended = []
    while llm.engine.has_work:
        ended += llm.engine.step().finished
    assert ended == waiting and {one.finish_reason for one in waiting} == {"stop_string"}


# ---------------------------------------------------------------- grammars that take their time


def test_inputs_behind_a_slow_grammar_go_on(llm):  # noqa: F811
    slow: Future = Future()

    class Compiler:
        def submit(self, sampling):
            return slow

        def close(self): ...

    llm.engine.constraints = Compiler()
    structured = params(structured_output=StructuredOutput(regex="a"))
    inputs = [([1], params(max_tokens=3)), ([2], structured), *(([i], params(max_tokens=3)) for i in range(3, 9))]
    done = []
    for index, result in llm.generate_each(iter(inputs), window=2):
        done.append((index, isinstance(result, InvalidRequestError)))
        if len(done) == 5:
            slow.set_exception(InvalidRequestError("structured_output.regex", "a", "too slow"))
    assert [index for index, failed in done if failed] == [1]
    assert sorted(index for index, _ in done) == list(range(8))
    assert [index for index, _ in done[:5]] == [0, 2, 3, 4, 5]


def test_a_grammar_that_is_all_there_is_gets_waited_for(llm):  # noqa: F811
    slow: Future = Future()
    llm.engine.constraints = SimpleNamespace(submit=lambda sampling: slow, close=lambda: None)
    threading.Timer(0.05, slow.set_exception, [InvalidRequestError("structured_output.regex", "a", "bad")]).start()
    structured = params(structured_output=StructuredOutput(regex="a"))
    [(index, error)] = llm.generate_each([([1], structured)])
    assert index == 0 and error.field == "structured_output.regex"
    for call in (llm.generate, llm.stream):
        with pytest.raises(InvalidRequestError, match=r"structured_output\.regex"):
            call([1], structured)
    assert llm.runner.num_launches == 0


# ---------------------------------------------------------------- samples


def test_samples_come_in_order_and_again_with_their_seed(llm):  # noqa: F811
    sampling = [params(n=n, seed=n, max_tokens=5 + n) for n in (1, 3, 7)]
    prompts = [[3], [4, 5], [6]]
    outputs = llm.generate(prompts, sampling)
    for prompt, one, output in zip(prompts, sampling, outputs, strict=True):
        assert [sample.index for sample in output.outputs] == list(range(one.n))
        for index, sample in enumerate(output.outputs):
            assert sample.token_ids == expected(prompt, one.max_tokens, index, seed=one.n)
            assert sample.text == words(sample.token_ids)
        assert output.seed == one.n and output.text == output.outputs[0].text
    drawn = llm.generate([3], params(n=2, seed=None))[0]
    again = llm.generate([3], params(n=2, seed=drawn.seed))[0]
    assert [one.token_ids for one in drawn.outputs] == [one.token_ids for one in again.outputs]


def test_samples_stream_by_their_index(llm):  # noqa: F811
    stops = [stop_at(expected([8], LONG, index, seed=4), 10 + index)[0] for index in range(3)]
    output = streamed(llm, [8], params(n=3, seed=4, stop=stops))
    for index, sample in enumerate(output.outputs):
        assert sample.matched_string in stops and sample.finish_reason == "stop_string"
        tokens = expected([8], LONG, index, seed=4)
        assert sample.text == words(tokens)[: min(i for stop in stops if (i := words(tokens).find(stop)) >= 0)]
    order = [delta.index for delta in llm.stream([8], params(n=3, seed=4))]
    assert len(list(itertools.groupby(order))) > 20, "in turn, not one after the other"


def test_samples_know_their_leader(llm):  # noqa: F811
    samples = llm.engine.add_samples([3], params(n=3), RequestOptions(priority=2))
    assert [one.sample_index for one in samples] == [0, 1, 2]
    assert [one.leader for one in samples] == [None, samples[0], samples[0]]
    assert {(one.seed, one.priority) for one in samples} == {(1, 2)}
    with pytest.raises(ValueError, match="3 samples"):
        llm.engine.add([3], params(n=3))
    for one in samples:
        llm.engine.abort(one)
    while llm.engine.has_work:
        llm.engine.step()


def test_a_full_queue_takes_all_samples_or_none(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    with LLM(max_running=2, max_queue=3, progress=False) as llm:  # noqa: F811
        assert len(llm.engine.add_samples([3], params(n=5))) == 5
        with pytest.raises(QueueFullError):
            llm.engine.add_samples([3], params(n=2))
        assert llm.engine.loop.scheduler.num_waiting == 5
        while llm.engine.has_work:
            llm.engine.step()
        outputs = llm.generate([[i] for i in range(12)], params(n=4, max_tokens=3))
        assert all(len(output.outputs) == 4 for output in outputs)
        each = dict(llm.generate_each((([i], params(n=4, max_tokens=3)) for i in range(12)), window=2))
        assert [each[i].token_ids for i in range(12)] == [output.token_ids for output in outputs]


def test_a_stream_of_samples_left_early_leaves_nothing(llm):  # noqa: F811
    stream = llm.stream([3], params(n=6))
    next(stream)
    stream.close()
    assert llm.generate([3], GREEDY)[0].finish_reason == "length"


def test_the_best_can_not_be_streamed(llm):  # noqa: F811
    with pytest.raises(InvalidRequestError, match=r"best_of: 3 .* not known before the end"):
        llm.stream([3], params(n=2, best_of=3))
    assert len(streamed(llm, [3], params(n=2, best_of=2)).outputs) == 2


# ---------------------------------------------------------------- chats, and prompts before there is a warm engine


@pytest.fixture
def chatty(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", toy.build_engine)
    with LLM(max_running=4, progress=False) as llm:  # noqa: F811
        yield llm


USER = [{"role": "user", "content": "Hi"}]


def test_a_chat_goes_through_the_template(chatty):
    (output,) = chatty.chat(USER, params(max_tokens=5))
    assert output.prompt_token_ids == chatty.tokenizer.encode("user: Hi\nassistant: ")
    both = chatty.chat([USER, [*USER, *USER]], params(max_tokens=5))
    assert both[0].token_ids == output.token_ids and len(both) == 2
    (bare,) = chatty.chat(USER, params(max_tokens=5), add_generation_prompt=False)
    assert bare.prompt_token_ids == chatty.tokenizer.encode("user: Hi\n")
    beginning = {"role": "assistant", "content": "Well, "}
    (goes_on,) = chatty.chat([*USER, beginning], params(max_tokens=5), continue_final_message=True)
    assert goes_on.prompt_token_ids == chatty.tokenizer.encode("user: Hi\nassistant: Well, ")
    prompt = ChatPrompt(messages=[*USER, beginning], continue_final_message=True)
    assert chatty.generate(prompt, params(max_tokens=5))[0].token_ids == goes_on.token_ids
    assert streamed(chatty, prompt, params(max_tokens=5)).token_ids == goes_on.token_ids
    assert [one.token_ids for one in chatty.generate([prompt, USER], params(max_tokens=5))] == [
        goes_on.token_ids,
        output.token_ids,
    ]


def test_tools_documents_and_variables_reach_the_template(chatty):
    template = "{{ tools | tojson }}{{ documents | tojson }}{{ mood }}"
    chatty.tokenizer._chat_template = ChatTemplate({"default": template}, {})
    (output,) = chatty.chat(
        USER,
        params(max_tokens=1),
        tools=[{"name": "f"}],
        documents=[{"text": "d"}],
        chat_template_kwargs={"mood": "calm"},
    )
    assert chatty.tokenizer.decode(output.prompt_token_ids) == '[{"name": "f"}][{"text": "d"}]calm'


def test_special_tokens_are_shown_to_who_has_given_tools(chatty):
    given = {"seed": 3, "max_tokens": 200, "temperature": 1.0, "ignore_eos": True}
    for tools, skips, hidden in (
        (None, None, True),
        ([], None, True),
        ([{"name": "f"}], None, False),
        ([{"name": "f"}], True, True),
        (None, False, False),
    ):
        sampling = params(skip_special_tokens=skips, **given)
        prompt = ChatPrompt(messages=USER, tools=tools)
        outputs = [*chatty.generate(prompt, sampling), streamed(chatty, prompt, sampling)]
        outputs += [output for _, output in chatty.generate_each([(prompt, sampling)])]
        for output in outputs:
            assert toy.EOS_ID in output.token_ids
            assert output.text == chatty.tokenizer.decode(output.token_ids, skip_special_tokens=hidden)
    prompt = ChatPrompt(messages=USER, tools=[{"name": "f"}])
    assert chatty.check(prompt, params(stop="a</s>"))  # which can be found where the token is shown


def test_a_bad_chat_is_refused_before_anything_runs(chatty):
    for messages, options, field in (
        ([], {}, "messages"),
        ([*USER, {"role": "user"}], {}, r"messages\[1\].content"),
        ([USER, [*USER, {"role": "user"}]], {}, r"prompts\[1\].messages\[1\].content"),
        ([USER, 5], {}, r"prompts\[1\].messages: 5"),
        (5, {}, "messages: 5"),
        ("hello", {}, "messages: 'hello'"),
        (USER, {"tools": "f"}, "tools"),
        (USER, {"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
    ):
        with pytest.raises(InvalidRequestError, match=f"^{field}"):
            chatty.chat(messages, params(), **options)
    chatty.tokenizer._chat_template = None
    with pytest.raises(UnsupportedError, match="no chat template"):
        chatty.chat(USER, params())
    with pytest.raises(InvalidRequestError, match="hides '</s>'"):
        chatty.generate("x", params(stop="a</s>"))
    assert chatty.runner.num_launches == 0


def test_prompts_can_be_checked_before_the_warm_up(monkeypatch):
    monkeypatch.setattr(llm_module, "build_engine", toy_build)
    with LLM(max_running=2, progress=False, warm_up=False) as llm:  # noqa: F811
        warmed = []
        llm.runner.warm_up = lambda: warmed.append(True)
        with pytest.raises(InvalidRequestError):
            llm.generate([[1], [VOCAB_SIZE]], GREEDY)
        stream = llm.stream([1], GREEDY)
        assert warmed == []
        next(stream)
        llm.warm_up()
        stream.close()
        assert llm.generate([1], GREEDY) and warmed == [True]
