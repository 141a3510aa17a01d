"""What is said of a finished prompt in JSON: OpenAI's shapes, and vLLM's where OpenAI has none."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from jaxoverlap.outputs import CompletionOutput, FinishReason, PositionLogprobs, RequestOutput, TokenLogprob

_FINISH = {
    FinishReason.EOS: "stop",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
    FinishReason.GRAMMAR_COMPLETE: "stop",
    FinishReason.LENGTH: "length",
}
_LEAST_LOGPROB = -9999.0
"""JSON has no infinity; this is what others write for it."""


def completion(output: RequestOutput, *, is_chat: bool, model: str) -> dict[str, Any]:
    """A chat completion or a text completion, and the seed, with which it comes out again.

    All samples must have ended as asked. vLLM's `stop_reason` says which stop string or stop id ended one, and is null
    otherwise; its `prompt_logprobs` stand beside a chat's choices, and in each choice of a text completion.
    """
    scored = {} if output.prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs(output.prompt_logprobs)}
    describe = _chat_choice if is_chat else _text_choice
    choices = [describe(place, one) | ({} if is_chat else scored) for place, one in enumerate(output.outputs)]
    return {
        "id": ("chatcmpl-" if is_chat else "cmpl-") + secrets.token_hex(12),
        "object": "chat.completion" if is_chat else "text_completion",
        "created": int(time.time()),
        "model": model,
        "choices": choices,
        "usage": usage(output, output.outputs),
        "seed": output.seed,
        **(scored if is_chat else {}),
    }


def usage(output: RequestOutput, samples: Sequence[CompletionOutput]) -> dict[str, Any]:
    """Tokens of the prompt, and those delivered of some of its samples."""
    prompt_tokens = output.prompt_tokens
    completion_tokens = sum(len(sample.token_ids) for sample in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": output.cached_tokens},
    }


def stop_reason(sample: CompletionOutput) -> str | int | None:
    by_caller = sample.finish_reason == FinishReason.STOP_TOKEN
    return sample.matched_string or (sample.matched_token_id if by_caller else None)


def token_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any]]:
    """As a chat has them: each token with its bytes, and the alternatives."""
    return [_token(one.chosen) | {"top_logprobs": [_token(other) for other in one.top]} for one in positions]


def prompt_logprobs(positions: Sequence[PositionLogprobs]) -> list[dict[str, Any] | None]:
    """As vLLM has them: null for the first token, then by id the alternatives and the token that is there."""
    return [None, *({str(other.token_id): _ranked(other) for other in (*one.top, one.chosen)} for one in positions[1:])]


def _chat_choice(place: int, sample: CompletionOutput) -> dict[str, Any]:
    logprobs = None if sample.logprobs is None else {"content": token_logprobs(sample.logprobs), "refusal": None}
    message = {"role": "assistant", "content": sample.text}
    return {"index": place, "message": message, "logprobs": logprobs, **_ending(sample)}


def _text_choice(place: int, sample: CompletionOutput) -> dict[str, Any]:
    logprobs = None if sample.logprobs is None else _text_logprobs(sample.logprobs, sample.text)
    return {"index": place, "text": sample.text, "logprobs": logprobs, **_ending(sample)}


def _ending(sample: CompletionOutput) -> dict[str, Any]:
    return {"finish_reason": _FINISH[sample.finish_reason], "stop_reason": stop_reason(sample)}


def _text_logprobs(positions: Sequence[PositionLogprobs], text: str) -> dict[str, Any]:
    """As a text completion has them: a list for each thing. The token that came is among its alternatives, always.

    An offset is the number of characters before the token; tokens past the end of the text, such as the one that ended
    it, have the end's.
    """
    chosen = [one.chosen for one in positions]
    return {
        "tokens": [_text(token) for token in chosen],
        "token_logprobs": [_logprob(token) for token in chosen],
        "top_logprobs": [_by_text(one) for one in positions],
        "text_offset": [min(one.text_offset or 0, len(text)) for one in positions],
    }


def _by_text(position: PositionLogprobs) -> dict[str, float | None]:
    """Those of a position. Of tokens with the same text (`<0x41>` and `A`) the one that came has it for a name, or else
    the most probable one; the others are told by their ids."""
    chosen = position.chosen
    owners, named = {_text(chosen): chosen.token_id}, {}
    for token in (*position.top, chosen):
        is_first = owners.setdefault(_text(token), token.token_id) == token.token_id
        named[_text(token) if is_first else f"token_id:{token.token_id}"] = _logprob(token)
    return named


def _token(token: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(token), "logprob": _logprob(token), "bytes": list(token.token_bytes)}


def _ranked(token: TokenLogprob) -> dict[str, Any]:
    return {"logprob": _logprob(token), "rank": token.rank, "decoded_token": _text(token)}


def _logprob(token: TokenLogprob) -> float | None:
    return None if token.logprob is None else max(token.logprob, _LEAST_LOGPROB)


def _text(token: TokenLogprob) -> str:
    """Its text, or if that is part of a character its bytes in writing, so that no two tokens look alike."""
    try:
        return token.token_bytes.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.token_bytes)
