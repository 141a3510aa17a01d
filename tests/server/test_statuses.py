"""Every failure is a status, of the code and with the details that docs/operations.md promises."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.v1 import admin_service_pb2 as admin
from jaxoverlap.v1 import generate_service_pb2 as pb
from tests.server.rig import PATIENCE, Caller, eventually, generation, running
from tests.server.toy import BREAKS, CONTEXT

INVALID = grpc.StatusCode.INVALID_ARGUMENT


def failure_of(call: Any, *args: Any, **kwargs: Any) -> grpc.RpcError:
    """The error of a call, whole or streamed."""
    try:
        answer = call(*args, **kwargs)
        if hasattr(answer, "code"):
            list(answer)
    except grpc.RpcError as error:
        return error
    raise AssertionError("it succeeded")


def details_of(error: grpc.RpcError, kind: Any) -> Any:
    status = rpc_status.from_call(error)
    assert status is not None and status.message == error.details()
    for detail in status.details:
        message = kind()
        if detail.Unpack(message):
            return message
    return None


def field_of(error: grpc.RpcError) -> str:
    assert error.code() == INVALID, error
    (violation,) = details_of(error, error_details_pb2.BadRequest).field_violations
    assert violation.description
    return violation.field


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (generation(sampling={"temperature": -1.0}), "sampling.temperature"),
        (generation(sampling={"temperature": float("nan")}), "sampling.temperature"),
        (generation(sampling={"top_p": 0.0}), "sampling.top_p"),
        (generation(sampling={"top_p": 1.5}), "sampling.top_p"),
        (generation(sampling={"top_k": 2**32 - 1}), "sampling.top_k"),
        (generation(sampling={"min_p": float("inf")}), "sampling.min_p"),
        (generation(sampling={"presence_penalty": 3.0}), "sampling.presence_penalty"),
        (generation(sampling={"repetition_penalty": 0.0}), "sampling.repetition_penalty"),
        (generation(sampling={"logit_bias": {3: 101.0}}), "sampling.logit_bias[3]"),
        (generation(stop={"max_tokens": 0}), "stop.max_tokens"),
        (generation(stop={"min_tokens": 9}), "stop.min_tokens"),
        (generation(stop={"token_ids": [97]}), "stop.token_ids[0]"),
        (generation(stop={"token_ids": list(range(90))}), "stop.token_ids"),
        (generation(stop={"strings": [""]}), "stop.strings[0]"),
        (generation(stop={"strings": ["a"]}, returns={"text": False}), "stop.strings"),
        (generation(returns={"logprobs": True, "top_logprobs": 21}), "returns.top_logprobs"),
        (generation(returns={"top_logprobs": 2}), "returns.top_logprobs"),
        (generation(num_sequences=0), "num_sequences"),
        (generation(num_sequences=129), "num_sequences"),
        (generation(num_sequences=3, best_of=2), "best_of"),
        (generation(constraint={}), "constraint"),
        (generation(constraint={"choices": {}}), "constraint.choices"),
        (generation(None), "prompt"),
        (generation(""), "prompt"),
        (generation([]), "prompt"),
        (generation([97]), "prompt[0]"),
        (generation([1, 2**32 - 1]), "prompt[1]"),
        (generation([1] * CONTEXT), "prompt"),
        (generation([1], add_special_tokens=True), "add_special_tokens"),
        (generation(None, chat={}), "chat.messages"),
        (generation(None, chat={"messages": [{"content": "x"}]}), "chat.messages[0].role"),
        (
            generation(None, chat={"messages": [{"role": "user", "extra_json": "{"}]}),
            "chat.messages[0].extra_json",
        ),
        (generation(None, chat={"messages": [{"role": "user"}], "tools_json": "{}"}), "chat.tools_json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("kind", ["answer", "stream"])
def test_bad_input_is_refused_by_the_fields_own_name(rig, kind, given, field):
    error = failure_of(getattr(rig.caller, kind), given)
    assert field_of(error).removeprefix("generation.") == field
    assert "Traceback" not in str(error.details())


def test_a_stream_takes_a_best_of_that_leaves_nothing_out(rig):
    for count in (1, 2):
        rig.caller.stream(generation(num_sequences=count, best_of=count))
    assert field_of(failure_of(rig.caller.stream, generation(best_of=2))) == "generation.best_of"


def test_prompts_up_to_the_contexts_end(rig):
    for length, outputs in ((CONTEXT - 2, 2), (CONTEXT - 1, 1)):
        sequence = rig.caller.answer(generation([1] * length, stop={"max_tokens": 50})).sequences[0]
        assert len(sequence.token_ids) == outputs
    for length in (CONTEXT, CONTEXT + 1):
        assert field_of(failure_of(rig.caller.answer, generation([1] * length))) == "generation.prompt"


def test_what_could_never_fit_the_pool_is_refused_and_nobody_waits_behind_it():
    with running({"num_pages": 8, "page_size": 16}) as small:
        error = failure_of(small.caller.answer, generation([1] * 200))
        assert field_of(error) == "generation.prompt"
        assert details_of(error, error_details_pb2.RetryInfo) is None
        small.check_probe()


def test_an_unknown_model_is_not_found(rig):
    error = failure_of(rig.caller.answer, generation(model="other"))
    assert error.code() == grpc.StatusCode.NOT_FOUND and "'toy'" in error.details()
    assert len(rig.caller.answer(generation(model="toy")).sequences) == 1
    for call, request in (
        (rig.caller.generate.Tokenize, pb.TokenizeRequest(model="other", text="a")),
        (rig.caller.generate.Detokenize, pb.DetokenizeRequest(model="other")),
    ):
        assert failure_of(call, request).code() == grpc.StatusCode.NOT_FOUND


def test_tokenize_and_detokenize_name_their_own_fields(rig):
    assert field_of(failure_of(rig.caller.generate.Tokenize, pb.TokenizeRequest())) == "prompt"
    chat = pb.TokenizeRequest(chat={"messages": [{"content": "x"}]})
    assert field_of(failure_of(rig.caller.generate.Tokenize, chat)) == "chat.messages[0].role"
    wrong = pb.DetokenizeRequest(token_ids=[1, 97])
    assert field_of(failure_of(rig.caller.generate.Detokenize, wrong)) == "token_ids[1]"


def test_an_error_with_a_long_text_arrives_as_what_it_is(rig, monkeypatch):
    class Talkative:
        def submit(self, sampling):
            refused = Future()
            refused.set_exception(InvalidRequestError("structured_output.grammar", "é" * 60_000, "é" * 60_000))
            return refused

    monkeypatch.setattr(rig.engine, "constraints", Talkative())
    error = failure_of(rig.caller.answer, generation(constraint={"lark_grammar": "start: é"}))
    assert field_of(error) == "generation.constraint.lark_grammar"
    assert field_of(failure_of(rig.caller.answer, generation(stop={"strings": ["😀" * 1100]}))).endswith("strings[0]")


def test_a_beginning_that_can_not_be_put_together_ends_its_call_alone(rig, monkeypatch):
    def fails(*_):
        raise ValueError("no such token")

    monkeypatch.setattr("jaxoverlap.server.calls.prompt_logprobs", fails)
    given = generation(returns={"prompt_logprobs": True})
    for call in (rig.caller.answer, rig.caller.stream):
        assert failure_of(call, given).code() == grpc.StatusCode.INTERNAL
    rig.check_probe()


def test_what_is_not_built_is_unimplemented(rig):
    """The toy engine has no compiler for grammars."""
    capabilities = set(rig.caller.admin.GetModelInfo(admin.GetModelInfoRequest()).capabilities)
    assert "structured_output" not in capabilities
    error = failure_of(rig.caller.answer, generation(constraint={"regex": "a+"}))
    assert error.code() == grpc.StatusCode.UNIMPLEMENTED and "structured_output" in error.details()


def test_a_full_queue_says_when_to_come_back():
    with running({"max_running": 1, "max_queue": 2}) as small:
        small.hold()
        calls = [small.caller.stream(generation("running", stop={"max_tokens": 100}))]
        small.wait_queued(1)
        calls += [small.caller.stream(generation(f"waiting {n}")) for n in range(2)]
        small.wait_queued(3)
        refused = small.caller.stream(generation("one too many"))
        small.step_until(refused.done)
        error = failure_of(list, refused)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert details_of(error, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() > 0
        small.device.allow(None)
        assert all(list(call) for call in calls)
        small.wait_idle()


def test_an_operators_abort_is_aborted(rig):
    rig.hold()
    calls = [rig.caller.stream(generation(f"call {n}", stop={"max_tokens": 900})) for n in range(2)]
    rig.wait_queued(2)
    wanted = f"toy-0-{rig.client.calls()[0].samples[0].key}"
    answer = rig.caller.admin.AbortRequests.future(admin.AbortRequestsRequest(request_ids=[wanted, "toy-0-9999", "x"]))
    rig.step_until(answer.done)
    assert list(answer.result().aborted_ids) == [wanted]
    assert sorted(answer.result().unknown_ids) == ["toy-0-9999", "x"]
    everything = rig.caller.admin.AbortRequests.future(admin.AbortRequestsRequest(all=True))
    rig.step_until(everything.done)
    assert len(everything.result().aborted_ids) == 1
    rig.device.allow(None)
    for call in calls:
        assert failure_of(list, call).code() == grpc.StatusCode.ABORTED
    assert field_of(failure_of(rig.caller.admin.AbortRequests, admin.AbortRequestsRequest())) == "request_ids"


def test_an_error_of_one_request_is_its_own():
    """A row whose logits are NaN."""
    with running() as small:
        original = small.device._run_chunk

        def broken(chunk: Any, *allowed: Any) -> Any:
            token, status = original(chunk, *allowed)
            return (token, 3) if chunk.request.seed == 13 and chunk.publishes else (token, status)

        small.device._run_chunk = broken
        error = failure_of(small.caller.answer, generation(sampling={"seed": 13}))
        assert error.code() == grpc.StatusCode.INTERNAL and "NaN" in error.details()
        small.check_probe()


def test_an_unforeseen_error_tells_the_log_and_not_the_caller(rig, monkeypatch, caplog):
    def explode(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr("jaxoverlap.server.generate_service.encode_prompt", explode)
    error = failure_of(rig.caller.answer, generation())
    monkeypatch.undo()
    assert error.code() == grpc.StatusCode.INTERNAL
    assert "secret" not in error.details() and "Traceback" not in error.details()
    assert "secret" in caplog.text


def test_an_engine_that_breaks_ends_every_call_as_unavailable():
    with running() as broken:
        broken.hold()
        call = broken.caller.stream(generation("innocent", stop={"max_tokens": 100}))
        broken.wait_queued(1)
        guilty = Caller(broken.target)
        doomed = guilty.generate.Generate.future(pb.GenerateRequest(generation=generation(BREAKS)))
        eventually(lambda: len(broken.client.calls()) == 2)
        broken.device.allow(None)
        assert failure_of(list, call).code() == grpc.StatusCode.UNAVAILABLE
        assert doomed.exception(PATIENCE).code() == grpc.StatusCode.UNAVAILABLE
        guilty.close()
        eventually(lambda: broken.exit_code is not None)
        assert broken.exit_code == 1


def test_a_front_end_that_breaks_ends_every_call_as_unavailable(monkeypatch, caplog):
    with running() as broken:
        broken.hold()
        call = broken.caller.stream(generation("innocent", stop={"max_tokens": 100}))
        broken.wait_queued(1)
        monkeypatch.setattr(broken.frontend._gatekeeper, "refresh", lambda: 1 / 0)
        assert failure_of(list, call).code() == grpc.StatusCode.UNAVAILABLE
        eventually(lambda: broken.exit_code is not None)
        assert broken.exit_code == 1 and "ZeroDivisionError" in caplog.text


def test_outputs_that_cannot_be_put_together_end_their_call_alone(rig, monkeypatch, caplog):
    monkeypatch.setattr("jaxoverlap.server.calls.OutputAssembler.add", lambda *_: 1 / 0)
    monkeypatch.setattr("jaxoverlap.server.calls.OutputAssembler.finish", lambda *_, **__: 1 / 0)
    error = failure_of(rig.caller.answer, generation("unlucky"))
    monkeypatch.undo()
    assert error.code() == grpc.StatusCode.INTERNAL and "division" not in error.details()
    assert "ZeroDivisionError" in caplog.text
