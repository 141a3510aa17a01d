"""Token ids to text, a few at a time, as if they had been decoded at once.

The rule: the text is what `tokenizer.decode(prompt_ids + ids)` has behind `tokenizer.decode(prompt_ids)`, so a first
token that begins with a word boundary has its space, and loses it exactly where `decode` drops it: if the prompt adds
no text. What ends inside a character at the end of the prompt becomes a character of the text if the outputs complete
it; if they don't, its U+FFFD is the prompt's. No delta ends inside a character. How:

- Byte-level tokenizers: each token is a run of bytes by itself and decoding joins them, so an
  incremental UTF-8 decoder is exact, and the cost of a token does not depend on what came before.
- Others: the tokens of the last delta are decoded again together with the new ones, and the new text
  is what follows. Byte tokens (`<0xE6>`) wait for the end of their run, because one bad byte, however
  late, turns the whole run into U+FFFD; what a run says so far is `tentative`. A run that the prompt ends with is over:
  what was read can't change. Where tokens are bytes and decoding does more than join them, part of a character waits
  for the rest. A U+FFFD that the model itself says waits for nothing.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

import numpy as np

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.text.tokenizer import Tokenizer

_CONTEXT_TOKENS = 4
"""Of the prompt's end: at least the bytes of a character that is not complete."""


class IncrementalDetokenizer:
    """Turns one sequence's output ids into text deltas.

    Args:
      tokenizer: the model's.
      skip_special_tokens: special tokens add no text.
      prompt_ids: what the outputs follow, or its `prompt_end`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        prompt_ids: Sequence[int] | np.ndarray = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skip_special_tokens
        context = prompt_end(tokenizer, prompt_ids, skip_special_tokens)
        self._stream = (_ByteStream if tokenizer.is_byte_level else _WindowStream)(tokenizer, context)

    def add(self, ids: Iterable[int]) -> str:
        """Takes the next ids and returns the text that is certain now, possibly none.

        Raises:
          InvalidRequestError: a negative id; nothing was taken.
        """
        ids = list(ids)
        if any(token_id < 0 for token_id in ids):
            raise InvalidRequestError("ids", min(ids), "token ids are 0 or more")
        adds_text = self._tokenizer.adds_text
        return self._stream.add([i for i in ids if adds_text(i, self._skips_special)])

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


def prompt_end(tokenizer: Tokenizer, prompt_ids: Sequence[int] | np.ndarray, skip_special_tokens: bool) -> list[int]:
    """The end of a prompt, as far as it bears on the text behind it: some tokens of text, and byte tokens after them.

    It may stand for the prompt, so that several samples look for it once: a prompt may end with many hidden tokens.
    Empty exactly if the prompt adds no text.
    """
    context: list[int] = []
    count = 0
    for token_id in map(int, reversed(prompt_ids)):
        if not tokenizer.adds_text(token_id, skip_special_tokens):
            continue
        context.append(token_id)
        count += count > 0 or not tokenizer.is_byte_token(token_id)
        if count == _CONTEXT_TOKENS:
            break
    return context[::-1]


class _ByteStream:
    """Joins the bytes of byte-level tokens."""

    tentative = ""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(_joined(tokenizer, context))
        self._is_in_character = self.is_waiting
        """The prompt's last, and no output has said yet what becomes of it."""

    def add(self, ids: list[int]) -> str:
        return self._own(self._utf8.decode(_joined(self._tokenizer, ids)))

    @property
    def is_waiting(self) -> bool:
        return self._utf8.getstate()[0] != b""

    def finish(self) -> str:
        return self._own(self._utf8.decode(b"", final=True))

    def _own(self, text: str) -> str:
        if self._is_in_character and text:
            self._is_in_character = False
            return text.removeprefix("\ufffd")
        return text


class _WindowStream:
    """Decodes a short window anew for each token; a run of byte tokens at once, when it has ended."""

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        """Follows the bytes of byte-level tokens, to know whether a character is complete."""
        self._half = 0
        """Byte tokens at the end of the prompt that are part of a character; 0 once an output has come."""
        if tokenizer.has_byte_alphabet:
            self._utf8.decode(_joined(tokenizer, context))
        else:
            context, self._half = _with_open_run(tokenizer, context)
        self._window = _Window(tokenizer, context, len(context))
        self._run: _ByteRun | None = None

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
        half, self._half = self._half, 0
        if self._tokenizer.is_byte_token(token_id):
            self._run = self._run or self._begin_run(half, token_id)
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

    def _begin_run(self, half: int, token_id: int) -> _ByteRun:
        """With the half character that the prompt ends with, if the byte continues it."""
        begun = self._window.ids[len(self._window.ids) - half :]
        try:
            codecs.getincrementaldecoder("utf-8")("strict").decode(_joined(self._tokenizer, [*begun, token_id]))
        except UnicodeDecodeError:
            self._window.forget(half)
            begun = []
        return _ByteRun(self._tokenizer, self._window, _joined(self._tokenizer, begun))


def _with_open_run(tokenizer: Tokenizer, context: list[int]) -> tuple[list[int], int]:
    """A context without the whole characters of the byte tokens at its end, which a bad byte behind them would change;
    and how many byte tokens that leaves. Where it has nothing else they stay."""
    size = next((n for n, i in enumerate(reversed(context)) if not tokenizer.is_byte_token(i)), len(context))
    text, run = context[: len(context) - size], context[len(context) - size :]
    utf8 = codecs.getincrementaldecoder("utf-8")("replace")
    utf8.decode(_joined(tokenizer, run))
    half = len(utf8.getstate()[0])
    return (text or run[: size - half]) + run[size - half :], half


def _joined(tokenizer: Tokenizer, ids: Iterable[int]) -> bytes:
    return b"".join(tokenizer.token_bytes(i) or b"" for i in ids)


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
        """The text of the new tokens, which are now shown; with a character that they have completed."""
        before = self._tokenizer.decode(self.ids[: self.shown], skip_special_tokens=False)
        after = self._tokenizer.decode(self.ids, skip_special_tokens=False)
        self.ids = self.ids[self.shown :]
        self.shown = len(self.ids)
        if after.startswith(before):
            return after[len(before) :]
        same = (n for n, (one, other) in enumerate(zip(before, after, strict=False)) if one != other)
        return after[next(same, len(after)) :]

    def forget(self, count: int) -> None:
        """Leaves out so many tokens at the end, which are all shown."""
        self.ids = self.ids[: len(self.ids) - count]
        self.shown = len(self.ids)


class _ByteRun:
    """Byte tokens in a row, read as if no bad byte were to come.

    Args:
      window: where the run begins.
      begun: bytes of a character that is shown as U+FFFD.

    Attributes:
      text: its whole characters; empty once a byte is bad.
    """

    def __init__(self, tokenizer: Tokenizer, window: _Window, begun: bytes) -> None:
        self._tokenizer = tokenizer
        self._window = _Window(tokenizer, window.ids, window.shown)
        self._utf8 = codecs.getincrementaldecoder("utf-8")("strict")
        self._utf8.decode(begun)
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
