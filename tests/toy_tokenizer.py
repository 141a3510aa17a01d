"""A tokenizer for the toy model: each of its 97 tokens is a character, so that what is decoded can be read off."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from jaxoverlap.text.chat_template import ChatTemplate
from jaxoverlap.text.tokenizer import Tokenizer
from tests.fakes import VOCAB_SIZE

EOS_ID = VOCAB_SIZE - 1
_OPENING = "{% if add_generation_prompt %}assistant: {% endif %}"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}" + _OPENING


def make_tokenizer() -> Tokenizer:
    characters = ["Ġ", *map(chr, range(0x21, 0x7F)), "Ċ"]
    backend = tokenizers.Tokenizer(models.BPE({char: index for index, char in enumerate(characters)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("</s>", special=True)])
    return Tokenizer(backend, eos_token_ids=[EOS_ID], chat_template=ChatTemplate({"default": TEMPLATE}, {}))
