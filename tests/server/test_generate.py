"""Answers, whole and streamed, on the toy model whose tokens an oracle knows."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from jaxoverlap.server import generate_service
from jaxoverlap.v1 import common_pb2
from jaxoverlap.v1 import generate_service_pb2 as pb
from tests.fakes import oracle, salt_of
from tests.server.rig import Rig, expected, generation
from tests.server.toy import CONTEXT
from tests.toy_tokenizer import EOS_ID, make_tokenizer

LENGTH, EOS, STOP_TOKEN = (getattr(common_pb2, f"FINISH_REASON_{name}") for name in ("LENGTH", "EOS", "STOP_TOKEN"))


def text_of(ids: list[int]) -> str:
    return make_tokenizer().decode(ids)


def events_of(rig: Rig, given: pb.Generation) -> tuple[pb.Started, list[pb.Delta], list[pb.Finished]]:
    events = list(rig.caller.stream(given))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started" and kinds.count("started") == 1
    deltas = [event.delta for event in events if event.HasField("delta")]
    return events[0].started, deltas, [event.finished for event in events if event.HasField("finished")]


def test_an_answer_is_the_oracles(rig):
    given = generation("Tell me.", stop={"max_tokens": 20})
    answer = rig.caller.answer(given)
    (sequence,) = answer.sequences
    assert list(sequence.token_ids) == expected(given)
    assert sequence.text == text_of(expected(given))
    assert answer.seed == 5
    assert (sequence.usage.prompt_tokens, sequence.usage.completion_tokens) == (8, 20)
    timings = sequence.timings
    assert 0 < timings.queue_seconds <= timings.first_token_seconds <= timings.total_seconds


@pytest.mark.parametrize("fields", [{}, {"stop": {"max_tokens": 1}}, {"stop": {"max_tokens": 300}}])
def test_deltas_joined_are_the_answer(rig, fields):
    given = generation("Stream it", **fields)
    whole = rig.caller.answer(given).sequences[0]
    started, deltas, (finished,) = events_of(rig, given)
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [i for delta in deltas for i in delta.token_ids] == list(whole.token_ids) == expected(given)
    assert finished.finish_reason == whole.finish_reason
    assert finished.matched_token_id == whole.matched_token_id
    assert finished.usage.completion_tokens == whole.usage.completion_tokens == len(whole.token_ids)
    assert started.seed == 5 and started.prompt_tokens == 9


def test_every_end_has_its_reason(rig):
    ids = expected(generation(stop={"max_tokens": 40}))
    stop = next(index for index in range(5, 40) if ids[index] not in ids[:index])
    matched = rig.caller.answer(generation(stop={"max_tokens": 40, "token_ids": [ids[stop]]})).sequences[0]
    assert (matched.finish_reason, matched.matched_token_id) == (STOP_TOKEN, ids[stop])
    assert list(matched.token_ids) == ids[: stop + 1] and matched.text == text_of(ids[:stop])
    # On the very last token the stop counts, not the length.
    last = rig.caller.answer(generation(stop={"max_tokens": stop + 1, "token_ids": [ids[stop]]})).sequences[0]
    assert (last.finish_reason, last.matched_token_id) == (STOP_TOKEN, ids[stop])
    length = rig.caller.answer(generation()).sequences[0]
    assert length.finish_reason == LENGTH and length.WhichOneof("matched") is None


def test_the_models_own_end(rig):
    for seed in range(50):
        given = generation(sampling={"seed": seed}, stop={"max_tokens": 100, "ignore_eos": False})
        if expected(given)[-1] == EOS_ID:
            sequence = rig.caller.answer(given).sequences[0]
            assert (sequence.finish_reason, sequence.matched_token_id) == (EOS, EOS_ID)
            assert list(sequence.token_ids) == expected(given) and sequence.text == text_of(expected(given)[:-1])
            ignored = generation(sampling={"seed": seed}, stop={"max_tokens": 100})
            assert rig.caller.answer(ignored).sequences[0].finish_reason == LENGTH
            return
    raise AssertionError("no seed ends by itself")


def test_without_a_limit_the_context_is_filled(rig):
    given = generation([1] * (CONTEXT - 40))
    given.stop.ClearField("max_tokens")
    sequence = rig.caller.answer(given).sequences[0]
    assert (sequence.finish_reason, len(sequence.token_ids)) == (LENGTH, 40)


def test_a_prompt_is_text_ids_or_a_chat(rig):
    ids = make_tokenizer().encode("abc")
    assert (
        rig.caller.answer(generation("abc")).sequences[0].token_ids
        == rig.caller.answer(generation(ids)).sequences[0].token_ids
    )
    chat = generation(None, chat={"messages": [{"role": "user", "content": "abc"}]})
    rendered = generation("user: abc\nassistant: ")
    assert list(rig.caller.answer(chat).sequences[0].token_ids) == expected(rendered)
    closed = generation(None, chat={"messages": [{"role": "user", "content": "abc"}], "add_generation_prompt": False})
    assert rig.caller.answer(closed).sequences[0].usage.prompt_tokens > 0


def test_only_what_is_asked_for_is_sent(rig):
    both = rig.caller.answer(generation()).sequences[0]
    text = rig.caller.answer(generation(returns={"token_ids": False})).sequences[0]
    ids = rig.caller.answer(generation(returns={"text": False})).sequences[0]
    assert (text.text, list(text.token_ids)) == (both.text, [])
    assert (ids.text, list(ids.token_ids)) == ("", list(both.token_ids))
    assert text.usage.completion_tokens == ids.usage.completion_tokens == 8
    _, deltas, (finished,) = events_of(rig, generation(returns={"text": False}))
    assert [i for delta in deltas for i in delta.token_ids] == list(both.token_ids)
    assert not any(delta.text for delta in deltas) and finished.usage.completion_tokens == 8


def test_a_seed_is_drawn_and_told(rig):
    given = generation()
    given.sampling.ClearField("seed")
    answer = rig.caller.answer(given)
    given.sampling.seed = answer.seed
    assert list(answer.sequences[0].token_ids) == expected(given)
    assert rig.caller.answer(generation(sampling={"seed": 0})).seed == 0


def test_cached_tokens_are_told_with_the_first_token(rig):
    given = generation("The same beginning, again")
    rig.caller.answer(given)
    started, _, (finished,) = events_of(rig, given)
    assert started.cached_prompt_tokens == finished.usage.cached_prompt_tokens == 24
    salted = generation("The same beginning, again", cache_salt="mine")
    assert events_of(rig, salted)[0].cached_prompt_tokens == 0


def test_ids_of_requests_are_never_the_same_though_the_callers_are(rig):
    given = generation(client_request_id="mine")
    answers = [rig.caller.answer(given) for _ in range(3)]
    assert len({answer.request_id for answer in answers}) == 3


def test_many_streams_at_once_are_each_the_oracles(rig):
    wanted = [generation(f"stream {n}", stop={"max_tokens": 5 + n % 40}) for n in range(64)]
    with ThreadPoolExecutor(32) as pool:
        results = list(pool.map(lambda given: events_of(rig, given), wanted))
    for given, (_, deltas, finished) in zip(wanted, results, strict=True):
        assert [i for delta in deltas for i in delta.token_ids] == expected(given)
        assert len(finished) == 1


def test_tokens_and_text_both_ways(rig):
    tokens = rig.caller.generate.Tokenize(pb.TokenizeRequest(text="one two"))
    assert list(tokens.token_ids) == make_tokenizer().encode("one two") and tokens.max_model_len == CONTEXT
    chat = pb.TokenizeRequest(chat={"messages": [{"role": "user", "content": "hi"}]})
    assert list(rig.caller.generate.Tokenize(chat).token_ids) == make_tokenizer().encode("user: hi\nassistant: ")
    text = rig.caller.generate.Detokenize(pb.DetokenizeRequest(token_ids=[*tokens.token_ids, EOS_ID]))
    assert text.text == "one two"
    whole = pb.DetokenizeRequest(token_ids=[*tokens.token_ids, EOS_ID], skip_special_tokens=False)
    assert rig.caller.generate.Detokenize(whole).text == "one two</s>"


def test_a_stop_string_ends_the_text_and_the_request(rig):
    full = rig.caller.answer(generation(stop={"max_tokens": 60})).sequences[0]
    stop = full.text[20:23]
    cut = full.text.index(stop)
    given = generation(stop={"max_tokens": 900, "strings": ["never this", stop]})
    sequence = rig.caller.answer(given).sequences[0]
    assert (sequence.finish_reason, sequence.matched_string) == (common_pb2.FINISH_REASON_STOP_STRING, stop)
    assert sequence.text == full.text[:cut]
    assert list(sequence.token_ids) == list(full.token_ids[: cut + 3])
    _, deltas, (finished,) = events_of(rig, given)
    assert "".join(delta.text for delta in deltas) == sequence.text
    assert [i for delta in deltas for i in delta.token_ids] == list(sequence.token_ids)
    assert (finished.matched_string, finished.usage.completion_tokens) == (stop, cut + 3)
    kept = generation(stop={"max_tokens": 900, "strings": [stop], "include_matched": True})
    assert rig.caller.answer(kept).sequences[0].text == full.text[: cut + 3]


def test_samples_of_one_prompt_come_side_by_side(rig):
    given = generation("Three of them", num_sequences=3, sampling={"temperature": 1.0}, stop={"max_tokens": 20})
    whole = rig.caller.answer(given)
    assert [sequence.index for sequence in whole.sequences] == [0, 1, 2]
    started, deltas, finished = events_of(rig, given)
    assert started.prompt_tokens == 13 and sorted(end.index for end in finished) == [0, 1, 2]
    for sequence in whole.sequences:
        mine = [delta for delta in deltas if delta.index == sequence.index]
        assert "".join(delta.text for delta in mine) == sequence.text
        assert [i for delta in mine for i in delta.token_ids] == list(sequence.token_ids)
        assert sequence.usage.prompt_tokens == 13
        prompt = make_tokenizer().encode("Three of them")
        assert list(sequence.token_ids) == oracle(prompt, 20, [], salt=salt_of(5, sequence.index))[0]


def test_a_message_may_be_continued(rig):
    messages = [{"role": "user", "content": "abc"}, {"role": "assistant", "content": "So"}]
    given = generation(None, chat={"messages": messages, "continue_final_message": True})
    assert list(rig.caller.answer(given).sequences[0].token_ids) == expected(generation("user: abc\nassistant: So"))


def test_a_prompt_that_takes_long_to_read_holds_nobody_up(rig, monkeypatch):
    entered, leave = threading.Event(), threading.Event()
    encode = generate_service.encode_prompt

    def slow_encode(given, *others):
        if given.text == "slow":
            entered.set()
            assert leave.wait(20)
        return encode(given, *others)

    monkeypatch.setattr(generate_service, "encode_prompt", slow_encode)
    slow = rig.caller.generate.Generate.future(pb.GenerateRequest(generation=generation("slow")))
    assert entered.wait(20)
    given = generation("quick", stop={"max_tokens": 30})
    assert list(rig.caller.answer(given).sequences[0].token_ids) == expected(given)
    assert not slow.done()
    leave.set()
    assert list(slow.result().sequences[0].token_ids) == expected(generation("slow"))


def test_a_megabyte_of_text_is_refused_by_its_length(rig):
    with pytest.raises(grpc.RpcError, match="1000000 bytes"):
        rig.caller.answer(generation("x" * 1_000_000))


def test_log_probabilities_of_a_prompt_are_put_together_beside_the_event_loop(rig, monkeypatch):
    threads: list[str] = []
    monkeypatch.setattr(
        "jaxoverlap.server.calls.prompt_logprobs", lambda *_: threads.append(threading.current_thread().name) or []
    )
    given = generation(returns={"prompt_logprobs": True})
    rig.caller.answer(given)
    list(rig.caller.stream(given))
    assert len(threads) == 2 and all(name.startswith("tokenizer") for name in threads)
