"""The real engine behind the service, as processes: what `LLM` gives in this process comes out of the socket."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from jaxoverlap import LLM, RequestOutput, SamplingParams, StructuredOutput
from jaxoverlap.request import RequestOptions
from jaxoverlap.v1 import admin_service_pb2 as admin
from jaxoverlap.v1 import common_pb2
from jaxoverlap.v1 import generate_service_pb2 as pb
from jaxoverlap.wire import answers, requests
from tests.server.fuzz import random_message
from tests.server.processes import Served
from tests.server.test_abuse import outcome
from tests.server.test_statuses import failure_of, field_of
from tests.server.tiny_folder import write_tiny_model

PROMPTS = ["Hello, world", [5, 6, 7, 8, 9], [{"role": "user", "content": "Name a prime."}]]
RECOMMENDED = {"temperature": 0.5, "top_k": 5}
SETTINGS: dict[str, Any] = {
    "max_running": 4,
    "max_batched_tokens": 16,
    "max_model_len": 128,
    "page_size": 8,
    "num_pages": 64,
    "deterministic": True,  # equal to the last bit, and few shapes to compile
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_tiny_model(tmp_path_factory.mktemp("tiny"))
    (folder / "generation_config.json").write_text(json.dumps(RECOMMENDED))
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, compile_cache=folder / "cache", **SETTINGS) as llm:
        yield llm


@pytest.fixture(scope="module")
def served(folder: Path, llm: LLM) -> Iterator[Served]:
    """After `llm`, which has compiled the same steps into the cache."""
    flags = [f"--{name.replace('_', '-')}" + ("" if value is True else f"={value}") for name, value in SETTINGS.items()]
    flags += ["--model", str(folder), "--compile-cache", str(folder / "cache"), "--profile-dir", str(folder / "trace")]
    with Served(*flags, module="jaxoverlap.cli.main") as served:
        yield served.wait_ready()


def over_the_wire(served: Served, prompt: Any, params: SamplingParams) -> tuple[RequestOutput, RequestOutput]:
    """The answer of a unary call, and that of a stream, put together from its deltas."""
    caller = served.caller()
    given = requests.generation(prompt, params, RequestOptions())
    whole = answers.request_output(caller.answer(given), prompt, params)
    reader = answers.StreamReader(prompt, params)
    for event in caller.stream(given):
        reader.take(event)
    output = reader.finish().output
    assert output is not None
    return whole, output


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, seed=11, max_tokens=24),
    "penalties": SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.5, max_tokens=24),
    "biased": SamplingParams(temperature=0, logit_bias={40: 3.5}, banned_token_ids=[41], min_tokens=5, max_tokens=9),
    "logprobs": SamplingParams(temperature=0, logprobs=3, prompt_logprobs=3, max_tokens=8),
    "samples": SamplingParams(n=3, temperature=1.0, seed=3, max_tokens=12),
    "choices": SamplingParams(
        temperature=0, structured_output=StructuredOutput(choices=["yes", "no", "maybe"]), max_tokens=9
    ),
}


@pytest.mark.parametrize("name", PARAMS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=["text", "ids", "chat"])
def test_the_service_answers_as_the_offline_api_does(llm, served, name, prompt):
    params = PARAMS[name]
    (offline,) = llm.generate(prompt, params)
    for online in over_the_wire(served, prompt, params):
        for ours, theirs in zip(online.outputs, offline.outputs, strict=True):
            assert ours.token_ids == theirs.token_ids
            assert ours.text == theirs.text
            assert ours.finish_reason == theirs.finish_reason
            assert ours.matched_token_id == theirs.matched_token_id
            if params.logprobs is not None:
                assert _logprobs(ours.logprobs) == pytest.approx(_logprobs(theirs.logprobs))
                assert len(ours.logprobs) == len(ours.token_ids)
        if params.prompt_logprobs is not None:
            assert len(online.prompt_logprobs) == online.prompt_tokens == len(offline.prompt_token_ids)
            assert _logprobs(online.prompt_logprobs[1:]) == pytest.approx(_logprobs(offline.prompt_logprobs[1:]))
        assert online.prompt_tokens == len(offline.prompt_token_ids)


def _logprobs(positions: Any) -> list[float]:
    return [token.logprob for position in positions for token in (position.chosen, *position.top)]


def test_the_best_of_several_comes_first(llm, served):
    params = SamplingParams(n=2, best_of=4, temperature=1.0, seed=9, max_tokens=10)
    (offline,) = llm.generate("best", params)
    caller = served.caller()
    given = requests.generation("best", params, RequestOptions())
    online = answers.request_output(caller.answer(given), "best", params)
    assert [one.token_ids for one in online.outputs] == [one.token_ids for one in offline.outputs]
    sums = [one.cumulative_logprob for one in offline.outputs]
    assert None not in sums and [one.cumulative_logprob for one in online.outputs] == pytest.approx(sums)


def test_a_best_of_that_leaves_nothing_out_is_streamed(llm, served):
    params = SamplingParams(n=3, best_of=3, temperature=1.0, seed=9, max_tokens=10)
    (offline,) = llm.generate("best", params)
    *_, streamed = llm.stream("best", params)
    for outputs in (streamed.output.outputs, *(online.outputs for online in over_the_wire(served, "best", params))):
        assert [(one.index, one.text) for one in outputs] == [(one.index, one.text) for one in offline.outputs]
        sums = [one.cumulative_logprob for one in offline.outputs]
        assert [one.cumulative_logprob for one in outputs] == pytest.approx(sums)


def test_a_stop_string_cuts_as_offline(llm, served):
    text = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=24))[0].text
    params = SamplingParams(temperature=0, max_tokens=24, stop=[text[8:10]])
    (offline,) = llm.generate("Hello", params)
    for online in over_the_wire(served, "Hello", params):
        assert (online.text, online.token_ids) == (offline.text, offline.token_ids)
        assert online.outputs[0].matched_string == text[8:10]


def test_a_wrong_grammar_is_refused_by_its_field(served):
    given = requests.generation(
        "x", SamplingParams(structured_output=StructuredOutput(regex="(unclosed")), RequestOptions()
    )
    assert field_of(failure_of(served.caller().answer, given)) == "generation.constraint.regex"


def test_a_model_says_what_it_is_and_a_profile_is_written(served, folder):
    caller = served.caller()
    info = caller.admin.GetModelInfo(admin.GetModelInfoRequest())
    assert (info.architecture, info.dtype, info.max_model_len) == ("llama", "float32", 128)
    assert {"logprobs", "structured_output", "n", "stop"} <= set(info.capabilities)
    server = caller.admin.GetServerInfo(admin.GetServerInfoRequest())
    assert server.devices and server.kv_cache_dtype == "float32"
    assert caller.admin.StartProfile(admin.StartProfileRequest(steps=5)).trace_dir == str(folder / "trace")
    over_the_wire(served, "profile me", PARAMS["greedy"])
    error = failure_of(caller.admin.StopProfile, admin.StopProfileRequest())  # its steps are over
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert list((folder / "trace").rglob("*.xplane.pb"))
    assert json.loads(caller.admin.GetMemorySnapshot(admin.GetMemorySnapshotRequest()).json)["page_size"] == 8


def test_whatever_follows_the_proto_is_answered_or_refused(served):
    rng, caller = random.Random(3), served.caller()
    codes: Counter[str] = Counter()
    for number in range(150):
        wild = number % 3 == 0
        given = random_message(pb.Generation(), rng, wild=wild, leave_out=frozenset() if wild else frozenset({"model"}))
        if not wild:
            given.text = "abc"
            given.ClearField("constraint" if number % 2 else "returns")
        for name in ("num_sequences", "best_of"):  # what is only long takes its time and shows nothing
            if 4 < getattr(given, name) <= 128:
                setattr(given, name, 4)
        if not given.stop.HasField("max_tokens") or given.stop.max_tokens > 6:
            given.stop.max_tokens = 6
        call = caller.answer if number % 2 else caller.stream
        codes[outcome(lambda call=call, given=given: call(given, timeout=20)).name] += 1
    assert set(codes) <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}, codes
    assert codes["OK"] > 5 and codes["INVALID_ARGUMENT"] > 5, codes
    assert "Traceback" not in served.log()


def test_what_a_message_leaves_out_is_what_the_model_recommends(served: Served, llm: LLM) -> None:
    def ids(**sampling: Any) -> list[int]:
        given = pb.Generation(text="Hello", sampling=common_pb2.SamplingOptions(seed=4, **sampling))
        given.stop.max_tokens, given.stop.ignore_eos, given.returns.token_ids = 20, True, True
        return list(served.caller().answer(given).sequences[0].token_ids)

    def of_llm(**sampling: Any) -> list[int]:
        params = SamplingParams(seed=4, max_tokens=20, ignore_eos=True, **sampling)
        return llm.generate("Hello", params)[0].outputs[0].token_ids

    assert ids() == of_llm(**RECOMMENDED) != of_llm()
    assert ids(top_k=0, temperature=1.0) == of_llm()
    assert ids(temperature=0.0) == of_llm(temperature=0)
    info = served.caller().admin.GetModelInfo(admin.GetModelInfoRequest())
    assert dict(info.sampling_defaults) == RECOMMENDED
    assert llm.default_sampling_params == SamplingParams(**RECOMMENDED)
