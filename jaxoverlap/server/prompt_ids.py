"""The token ids of a message's prompt."""

from __future__ import annotations

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.server.text_bound import TextBound
from jaxoverlap.text.tokenizer import Tokenizer
from jaxoverlap.v1 import generate_service_pb2 as pb
from jaxoverlap.wire import requests


def encode_prompt(
    given: pb.Generation | pb.TokenizeRequest, tokenizer: Tokenizer, bound: TextBound | None, most: int
) -> list[int]:
    """Takes time for a long text: not for an event loop. One of more than `most` tokens is refused beforehand, if
    `bound` knows that it is.

    Raises:
      InvalidRequestError: there is no prompt, or the tokenizer or the model's chat template refuse it.
      UnsupportedError: a chat, for a model that has no template.
    """
    prompt = requests.prompt_of(given)
    adds_special = given.HasField("add_special_tokens")
    if isinstance(prompt, str):
        if bound is not None:
            bound.check(prompt, most)
        return tokenizer.encode(prompt, add_special_tokens=given.add_special_tokens if adds_special else True)
    if adds_special:
        allowed = "it is for text; ids are taken as they are, and a chat's template writes its own"
        raise InvalidRequestError("add_special_tokens", given.add_special_tokens, allowed)
    if isinstance(prompt, ChatPrompt):
        text = tokenizer.chat_text(prompt)
        if bound is not None:
            bound.check(text, most)
        return tokenizer.encode(text, add_special_tokens=False)
    return prompt
