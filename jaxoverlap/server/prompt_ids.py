"""The token ids of a message's prompt."""

from __future__ import annotations

from typing import Any

from jaxoverlap.errors import InvalidRequestError, UnsupportedError
from jaxoverlap.text.tokenizer import Tokenizer
from jaxoverlap.v1 import generate_service_pb2 as pb
from jaxoverlap.wire import requests
from jaxoverlap.wire.requests import ChatPrompt


def encode_prompt(given: pb.Generation | pb.TokenizeRequest, tokenizer: Tokenizer) -> list[int]:
    """Takes time for a long text: not for an event loop.

    Raises:
      InvalidRequestError: there is no prompt, or the tokenizer or the model's chat template refuse it.
      UnsupportedError: a chat, for a model that has no template.
    """
    prompt: Any = requests.prompt_of(given)
    adds_special = given.HasField("add_special_tokens")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt, add_special_tokens=given.add_special_tokens if adds_special else True)
    if adds_special:
        allowed = "it is for text; ids are taken as they are, and a chat's template writes its own"
        raise InvalidRequestError("add_special_tokens", given.add_special_tokens, allowed)
    if isinstance(prompt, ChatPrompt):
        if prompt.continue_final_message:
            raise UnsupportedError("continue_final_message is not supported in this build")
        return tokenizer.apply_chat_template(
            list(prompt.messages),  # type: ignore[arg-type]
            add_generation_prompt=prompt.opens_answer,
            tools=prompt.tools,  # type: ignore[arg-type]
        )
    return prompt
