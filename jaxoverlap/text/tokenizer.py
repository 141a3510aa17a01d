"""Text to token ids and back.

A `Tokenizer` wraps a `tokenizers.Tokenizer` and knows which ids are special, which begin and end a
sequence, and how a chat becomes a prompt. It comes from a model folder or from GGUF metadata.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders

from jaxoverlap.errors import InvalidRequestError, ModelError, UnsupportedError
from jaxoverlap.prompts import ChatPrompt
from jaxoverlap.text.chat_template import ChatTemplate

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """Immutable once made; safe to share between threads.

    Attributes:
      backend: the wrapped tokenizer, for grammars.
      vocab_size: one more than the highest id (the model's table may be larger, or smaller).
      bos_token_id: the id that begins a sequence, or None.
      adds_bos: `encode` puts it before a text.
      eos_token_ids: the ids that the tokenizer itself calls ends; `engine.build.end_ids` adds those of the
        model's configuration.
      special_ids: ids that `skip_special_tokens` hides; special_tokens: the same by how they are written.
      has_byte_alphabet: every token stands for bytes by itself; is_byte_level: and decoding joins these, no more.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        # Settings left over from training: a silently cut prompt, or one filled up with padding.
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.backend = backend
        self.vocab_size = max([backend.get_vocab_size(with_added_tokens=False), *(i + 1 for i in added)])
        self.bos_token_id = bos_token_id
        self.adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.special_tokens = {token.content: token_id for token_id, token in added.items() if token.special}
        self.special_ids = frozenset(self.special_tokens.values())
        self.is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self.has_byte_alphabet = "ByteLevel(" in repr(backend.decoder)
        self._chat_template = chat_template
        self._bytes_of_id: dict[int, bytes | None] = {}

    @classmethod
    def from_source(cls, source: Path | str | Mapping[str, Any]) -> Tokenizer:
        """From a model's `tokenizer_source`: a folder or GGUF metadata.

        Raises:
          ModelError: the tokenizer can't be built.
        """
        return cls.from_gguf(source) if isinstance(source, Mapping) else cls.from_folder(source)

    @classmethod
    def from_folder(cls, folder: Path | str) -> Tokenizer:
        """From tokenizer.json (or, through transformers, an older form) and tokenizer_config.json.

        Raises:
          ModelError: files are missing or unreadable.
        """
        from jaxoverlap.text.tokenizer_files import from_folder

        return from_folder(Path(folder))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Tokenizer:
        """From the `tokenizer.*` keys of a GGUF file.

        Raises:
          ModelError: a tokenizer model or pre-tokenizer that can't be rebuilt exactly.
        """
        from jaxoverlap.text.tokenizer_gguf import from_gguf

        return from_gguf(metadata)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text.

        Args:
          text: may contain special tokens in writing; they become their ids.
          add_special_tokens: adds what the model's tokenizer adds, usually a BOS or nothing. A text that
            starts with a written BOS keeps one, where transformers would give two.

        Raises:
          InvalidRequestError: not a text, or one that is not valid Unicode.
        """
        if not isinstance(text, str):
            raise InvalidRequestError("prompt", text, "text is needed")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidRequestError("prompt", text, f"valid Unicode is needed: {error.reason}") from error
        # Unlike `encode`, the batch form lets other threads run: a long prompt takes seconds.
        (encoding,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids = encoding.ids
        doubled = add_special_tokens and self.adds_bos and ids[:2] == [self.bos_token_id] * 2
        return ids[1:] if doubled else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some ids. Ids beyond the tokenizer's vocabulary (a padded table's) add nothing.

        The spaces that transformers' `clean_up_tokenization_spaces` would remove are kept: removing
        them depends on text to come, which a stream does not have.

        Raises:
          InvalidRequestError: a negative id.
        """
        if any(token_id < 0 for token_id in ids):
            raise InvalidRequestError("ids", min(ids), "token ids are 0 or more")
        try:
            return self.backend.decode(ids, skip_special_tokens=skip_special_tokens)
        except OverflowError:  # an id beyond 32 bits
            return self.decode([token_id for token_id in ids if token_id < 2**32], skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """The bytes one token stands for inside a text, or None beyond the vocabulary.

        Tokens of byte-level and byte-fallback tokenizers can hold part of a character; their text alone
        would be U+FFFD.
        """
        if token_id not in self._bytes_of_id:
            self._bytes_of_id[token_id] = self._find_bytes(token_id)
        return self._bytes_of_id[token_id]

    def adds_text(self, token_id: int, skip_special_tokens: bool) -> bool:
        """False for a special token that is hidden, and for an id beyond the vocabulary."""
        hidden = skip_special_tokens and token_id in self.special_ids
        return not hidden and self.token_bytes(token_id) is not None

    def is_byte_token(self, token_id: int) -> bool:
        """The token is one byte in writing, such as `<0x0A>` (tokenizers with byte fallback)."""
        token = self._token(token_id)
        return not self.has_byte_alphabet and token is not None and _BYTE_TOKEN.fullmatch(token) is not None

    def apply_chat_template(self, chat: ChatPrompt) -> list[int]:
        """The prompt ids of a chat, equal to transformers' `apply_chat_template(tokenize=True)`.

        A BOS is what the template writes; the tokenizer adds none.

        Raises:
          InvalidRequestError: messages refused by the template.
          UnsupportedError: the model has no chat template.
        """
        return self.encode(self.chat_text(chat), add_special_tokens=False)

    def chat_text(self, chat: ChatPrompt) -> str:
        """The text of a chat as the model's template writes it; raises as `apply_chat_template`."""
        if self._chat_template is None:
            raise UnsupportedError("this model has no chat template; give the prompt as text or token ids")
        return self._chat_template.render(chat)

    def _token(self, token_id: int) -> str | None:
        """None beyond the vocabulary."""
        return self.backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def _find_bytes(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        if token is None:
            return None
        if self.has_byte_alphabet:
            # As the byte-level decoder does it: a token with any character outside the alphabet is plain text.
            mapped = [_BYTE_OF_CHAR.get(char) for char in token]
            return token.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("▁", " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for each byte: itself where printable, else a character from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(rest)}


_BYTE_OF_CHAR = _byte_alphabet()


def named_template(templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """A `ChatTemplate`, or None for a model that has none."""
    return ChatTemplate(templates, special_tokens) if templates else None


def unreadable(where: str, error: Exception) -> ModelError:
    """The error for tokenizer data that the tokenizers library refuses."""
    return ModelError(f"{where}: the tokenizer can't be built: {error}")
