"""What the samples of a prompt come to, from requests as the engine leaves them."""

from __future__ import annotations

import numpy as np

from jaxoverlap import FinishReason
from jaxoverlap.engine.collector import PromptCollector
from jaxoverlap.errors import EngineError
from jaxoverlap.outputs import TokenScore
from jaxoverlap.request import Request, RequestStatus
from tests.cli import toy
from tests.test_llm_outputs import params


def finished_request(sample_index, tokens, logprob, sampling, **changes) -> Request:
    request = Request(
        request_id=sample_index,
        prompt_ids=np.array([3, 4, 5]),
        sampling=sampling,
        max_tokens=9,
        stop_ids=(),
        seed=7,
        sample_index=sample_index,
    )
    request.output_ids, request.scores = list(tokens), [TokenScore(token, logprob, 1) for token in tokens]
    request.arrival_time = request.finish_time = 0.0
    request.status, request.finish_reason = RequestStatus.FINISHED, FinishReason.LENGTH
    for name, value in changes.items():
        setattr(request, name, value)
    return request


def collected(requests):
    collector = PromptCollector("p", requests, toy.make_tokenizer(), streams=False)
    for request in requests:
        collector.take(request)
    assert collector.is_finished
    return collector.output()


def test_the_best_samples_come_first():
    sampling = params(n=2, best_of=4, stop="!")
    mark = toy.make_tokenizer().encode("!")[0]
    requests = [
        finished_request(0, [40, 41], -2.0, sampling),
        finished_request(1, [42, 43], -0.5, sampling),
        # Only what is shown counts: the two after the stop would have made it the worst.
        finished_request(2, [44, mark, 46, 47], -0.75, sampling),
        finished_request(3, [48], -0.1, sampling, finish_reason=FinishReason.ERROR, error=EngineError("broken")),
    ]
    best = collected(requests)
    assert [one.index for one in best.outputs] == [1, 2]
    assert [one.cumulative_logprob for one in best.outputs] == [-1.0, -1.5]
    assert all(one.logprobs is None for one in best.outputs), "not asked for"
    # One that broke off is better than none, and last.
    everything = collected([finished_request(i, [40], -1.0 - i, params(n=4, best_of=5)) for i in (0, 1, 2, 3)][:4])
    assert [one.index for one in everything.outputs] == [0, 1, 2, 3]


def test_the_best_come_first_also_where_all_are_kept():
    sampling = params(n=3, best_of=3)
    assert sampling.num_top_logprobs == 0  # they are asked for
    output = collected([finished_request(i, [40], [-2.0, -0.5, -1.0][i], sampling) for i in range(3)])
    assert [one.index for one in output.outputs] == [1, 2, 0]
    assert params(n=1, best_of=1).num_top_logprobs == params(n=3).num_top_logprobs == -1


def test_a_sample_that_breaks_off_says_so_alone():
    error = EngineError("no token")
    sampling = params(n=2)
    output = collected(
        [
            finished_request(0, [40], -1.0, sampling),
            finished_request(1, [41], -1.0, sampling, finish_reason=FinishReason.ERROR, error=error),
        ]
    )
    assert [(one.finish_reason, one.error) for one in output.outputs] == [("length", None), ("error", error)]


def test_log_probabilities_of_prompt_and_outputs():
    sampling = params(logprobs=1, prompt_logprobs=2)
    top = ((40, -0.1), (41, -3.0), (42, -4.0))
    request = finished_request(0, [40], -0.1, sampling)
    request.scores = [TokenScore(40, -0.1, 1, top)]
    request.prompt_scores = [TokenScore(4, -2.0, 9, top), TokenScore(5, -1.0, 2, top)]
    output = collected([request])
    [position] = output.logprobs
    assert (position.chosen.logprob, len(position.top), output.outputs[0].cumulative_logprob) == (-0.1, 1, -0.1)
    first, second, third = output.prompt_logprobs
    assert (first.chosen.token_id, first.chosen.logprob) == (3, None)
    assert (second.chosen.token_id, second.chosen.rank, len(second.top)) == (4, 9, 2)
    assert third.chosen.logprob == -1.0
    # Ended before its prompt was read: there is nothing to say of it.
    aborted = finished_request(0, [], -0.1, sampling, finish_reason=FinishReason.ABORTED)
    assert collected([aborted]).prompt_logprobs is None
