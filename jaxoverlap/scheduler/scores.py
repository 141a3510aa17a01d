"""From the words of `jaxoverlap.model.scores` to what requests keep.

words of one token    [0] logprob   [1] rank   [2 … K+1] ids of the K most probable   [K+2 … 2K+1] their logprobs
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxoverlap.outputs import TokenScore
from jaxoverlap.request import Request
from jaxoverlap.sampling_params import MAX_TOP_LOGPROBS
from jaxoverlap.scheduler.plan import StepPlan

_TOP_LOGPROBS = 2 + MAX_TOP_LOGPROBS


def commit_scores(requests: Sequence[Request], token_ids: Sequence[int], scores: np.ndarray) -> None:
    """One score for each request that asks for them; int32 [len(requests), words]."""
    for index, request in enumerate(requests):
        num_top = request.sampling.num_top_logprobs
        if num_top >= 0:
            request.scores.append(_read(token_ids[index], scores[index], num_top))


def commit_prompt_scores(plan: StepPlan, alive: np.ndarray, scores: np.ndarray) -> None:
    """Appends what is new: after a preemption, parts of a prompt are computed again. int32 [prompt tokens, words]."""
    start = 0
    for index, chunk in enumerate(plan.chunks):
        request = chunk.request
        if alive[index] and chunk.scores_prompt:
            num_top = request.sampling.prompt_logprobs
            assert num_top is not None
            known = len(request.prompt_scores) - chunk.start
            for offset, token_id in enumerate(chunk.predicted_ids.tolist()):
                if offset >= known:
                    request.prompt_scores.append(_read(token_id, scores[start + offset], num_top))
        start += len(chunk.token_ids)


def _read(token_id: int, words: np.ndarray, num_top: int) -> TokenScore:
    logprob = float(words[:1].view(np.float32)[0])
    if not num_top:
        return TokenScore(token_id, logprob, int(words[1]))
    ids = words[2 : 2 + num_top].tolist()
    logprobs = words[_TOP_LOGPROBS : _TOP_LOGPROBS + num_top].view(np.float32).tolist()
    return TokenScore(
        token_id, logprob, int(words[1]), tuple(pair for pair in zip(ids, logprobs, strict=True) if pair[0] >= 0)
    )
