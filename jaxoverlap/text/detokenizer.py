"""Token ids to text, a few at a time, as if they had been decoded at once.

The rule: the deltas and the rest, joined, are `tokenizer.decode(ids)` of the same ids. The prompt is
no part of it, so a first token that begins with a word boundary loses its space exactly where
`decode` drops it. No delta ends inside a character. How:

- Byte-level tokenizers: each token is a run of bytes by itself and decoding joins them, so an
  incremental UTF-8 decoder is exact, and the cost of a token does not depend on what came before.
- Others: the tokens of the last delta are decoded again together with the new ones, and the new text
  is what follows. Byte tokens (`<0xE6>`) wait for the end of their run, because one bad byte, however
  late, turns the whole run into U+FFFD; what a run says so far is `tentative`. Where tokens are bytes
  and decoding does more than join them, part of a character waits for the rest. A U+FFFD that the
  model itself says waits for nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one sequence's output ids into text deltas.

    Args:
      tokenizer: the model's.
      skip_special_tokens: special tokens add no text.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream = _ByteStream(tokenizer) if tokenizer.is_byte_level else _WindowStream(tokenizer)

    def add(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that is certain now, possibly none.

        Raises:
          InvalidRequestError: a negative id; nothing was taken.
        """
        ids = list(ids)
        if any(token_id < 0 for token_id in ids):
            raise InvalidRequestError("ids", min(ids), "token ids are 0 or more")
        # Ids beyond the vocabulary add no text in `decode` either.
        known = self._tokenizer.token_bytes
        return self._stream.add([i for i in ids if i not in self._hidden and known(i) is not None])

    @property
    def is_waiting(self) -> bool:
        """Ids were taken whose text is not certain: its first character comes with a later id, or at the end."""
        return self._stream.is_waiting

    @property
    def tentative(self) -> str:
        """The whole characters of an open run of byte tokens: what `finish` returns if it comes right after them.

        It grows with the run, and is empty once a byte of it is bad.
        """
        return self._stream.tentative

    def finish(self) -> str:
        """Returns what was held back: half a character becomes U+FFFD, as in `decode`."""
        return self._stream.finish()


class _ByteStream:
    """Joins the bytes of byte-level tokens."""

    tentative = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: list[int]) -> str:
        return self._utf8.decode(b"".join(self._tokenizer.token_bytes(i) or b"" for i in ids))

    @property
    def is_waiting(self) -> bool:
        return self._utf8.getstate()[0] != b""

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowStream:
    """Decodes a short window anew for each token; a run of byte tokens at once, when it has ended."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window = _Window(tokenizer)
        self._run: _ByteRun | None = None
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        """Follows the bytes of byte-level tokens, to know whether a character is complete."""

    def add(self, ids: list[int]) -> str:
        return "".join(self._take(token_id) for token_id in ids)

    @property
    def is_waiting(self) -> bool:
        return self._window.is_waiting

    @property
    def tentative(self) -> str:
        return self._run.text if self._run else ""

    def finish(self) -> str:
        self._run = None
        return self._window.advance()

    def _take(self, token_id: int) -> str:
        if self._tokenizer.is_byte_token(token_id):
            self._run = self._run or _ByteRun(self._tokenizer, self._window)
            self._run.add(token_id)
            self._window.ids.append(token_id)
            return ""
        self._run = None
        self._window.ids.append(token_id)
        if self._tokenizer.has_byte_alphabet:
            self._utf8.decode(self._tokenizer.token_bytes(token_id) or b"")
            if self._utf8.getstate()[0]:
                return ""
        return self._window.advance()


class _Window:
    """The tokens of the last text, then those that have become none yet.

    ids    [ shown tokens | new tokens ]
                          ^ shown
    """

    def __init__(self, tokenizer: Tokenizer, ids: Iterable[int] = (), shown: int = 0) -> None:
        self._tokenizer = tokenizer
        self.ids = list(ids)
        self.shown = shown

    @property
    def is_waiting(self) -> bool:
        return self.shown < len(self.ids)

    def advance(self) -> str:
        """The text of the new tokens, which are now shown."""
        before = self._tokenizer.decode(self.ids[: self.shown], skip_special_tokens=False)
        after = self._tokenizer.decode(self.ids, skip_special_tokens=False)
        self.ids = self.ids[self.shown :]
        self.shown = len(self.ids)
        return after[len(before) :]


class _ByteRun:
    """Byte tokens in a row, read as if no bad byte were to come.

    Args:
      window: where the run begins.

    Attributes:
      text: its whole characters; empty once a byte is bad.
    """

    def __init__(self, tokenizer: Tokenizer, window: _Window) -> None:
        self._tokenizer = tokenizer
        self._window = _Window(tokenizer, window.ids, window.shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._is_bad = False
        self.text = ""

    def add(self, token_id: int) -> None:
        if self._is_bad:
            return
        self._window.ids.append(token_id)
        try:
            if self._utf8.decode(self._tokenizer.token_bytes(token_id) or b""):
                self.text += self._window.advance()
        except UnicodeDecodeError:
            self._is_bad, self.text = True, ""
