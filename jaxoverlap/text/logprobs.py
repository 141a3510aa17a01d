"""Log-probabilities as callers see them: what the device says of ids, with the bytes that the ids stand for."""

from __future__ import annotations

from collections.abc import Sequence

from jaxoverlap.outputs import PositionLogprobs, TokenLogprob, TokenScore
from jaxoverlap.text.tokenizer import Tokenizer


def position_logprobs(
    tokenizer: Tokenizer, score: TokenScore, num_top: int, text_offset: int | None = None
) -> PositionLogprobs:
    """One position, with `num_top` alternatives (or as many as the device gave)."""

    def of(token_id: int, logprob: float, rank: int) -> TokenLogprob:
        return TokenLogprob(token_id, logprob, rank, tokenizer.token_bytes(token_id) or b"")

    top = tuple(of(token_id, logprob, place + 1) for place, (token_id, logprob) in enumerate(score.top[:num_top]))
    return PositionLogprobs(of(score.token_id, score.logprob, score.rank), top, text_offset)


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], scores: Sequence[TokenScore], num_top: int
) -> list[PositionLogprobs]:
    """Each position of a prompt. Nothing predicts the first token: it has no log-probability, and rank 0.

    Raises:
      ValueError: not one score for each token but the first.
    """
    if len(scores) != len(prompt_ids) - 1:
        raise ValueError(f"{len(scores)} scores for a prompt of {len(prompt_ids)} tokens")
    first = int(prompt_ids[0])
    unpredicted = PositionLogprobs(TokenLogprob(first, None, 0, tokenizer.token_bytes(first) or b""))
    return [unpredicted, *(position_logprobs(tokenizer, score, num_top) for score in scores)]
