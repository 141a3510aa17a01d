"""A model's token ids as grammars see them: bytes, and sets of ids as packed words.

A grammar's promise is about text, and the text is what `IncrementalDetokenizer` gives. So an id is for grammars only if
its bytes are what it adds to a text, wherever it stands; and if a tokenizer drops a space at the beginning of a text,
the ids that would lose theirs may not come first, where the prompt has no text that they stand behind. Packed words
have llguidance's layout: int32, id i is bit ``i % 32`` of word ``i // 32``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import llguidance
import numpy as np

from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.text.grammar_trial import token_index
from jaxoverlap.text.tokenizer import Tokenizer


class GrammarVocabulary:
    """Immutable; safe to share between threads.

    Args:
      tokenizer: the model's.
      vocab_size: rows of the model's table, the width of its logits. Ids without a token are never allowed.
      eos_token_ids: all that end a text of this model.

    Attributes:
      tokens: bytes of each id; special_ids: those that come only where a grammar names them.
      num_words: int32 words of a mask; num_matcher_words: of llguidance's, which knows one id more.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self.vocab_size = vocab_size
        self.num_words = -(-vocab_size // 32)
        self.num_matcher_words = -(-(vocab_size + 1) // 32)
        self._eos_ids = frozenset(eos_token_ids)
        self.special_ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < vocab_size)
        tokens = [tokenizer.token_bytes(token_id) or b"" for token_id in range(vocab_size)]
        self._tokenizer = tokenizer
        self._whole_alone: np.ndarray | None = None
        """Ids that add their bytes also if there is no text before them; None is all."""
        if not tokenizer.is_byte_level:
            self._leave_out_inexact(tokenizer, tokens)
        self.tokens = tokens
        self._known = self.words_of(token_id for token_id, token in enumerate(tokens) if token)

    @functools.cached_property
    def index(self) -> llguidance.LLTokenizer:
        return token_index(self.tokens, self.special_ids)

    def beginnings(self, prompt_ids: Sequence[int] | np.ndarray, sampling: SamplingParams) -> np.ndarray | None:
        """Ids that may come first behind a prompt, or None for all: int32 [num_words]."""
        hides, adds_text = sampling.hides_special_tokens, self._tokenizer.adds_text
        if self._whole_alone is None or any(adds_text(int(token_id), hides) for token_id in prompt_ids):
            return None
        return self._whole_alone

    def words_of(self, ids: Iterable[int]) -> np.ndarray:
        """A set of ids as int32 [num_words]; those beyond the table never come in any case."""
        bits = np.zeros(32 * self.num_words, dtype=np.uint8)
        bits[[token_id for token_id in ids if token_id < self.vocab_size]] = 1
        return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)

    def end_ids(self, sampling: SamplingParams) -> frozenset[int]:
        """Ids that end a request's text without being part of it."""
        stops = frozenset(i for i in sampling.stop_token_ids if i in self._eos_ids or i in self._textless)
        return stops if sampling.ignore_eos else stops | self._eos_ids

    def allowed_words(self, sampling: SamplingParams, end_ids: frozenset[int]) -> tuple[np.ndarray, np.ndarray]:
        """Ids that may come as text, and ids that may end it: each int32 [num_words], by the parameters' word."""
        texts = self._known & ~self.words_of(self._eos_ids | end_ids)
        ends = self.words_of(end_ids)
        permitted = None
        if sampling.allowed_token_ids is not None:
            permitted = self.words_of(sampling.allowed_token_ids)
        if sampling.banned_token_ids:
            banned = ~self.words_of(sampling.banned_token_ids)
            permitted = banned if permitted is None else permitted & banned
        return (texts, ends) if permitted is None else (texts & permitted, ends & permitted)

    @functools.cached_property
    def _textless(self) -> frozenset[int]:
        return frozenset(self.special_ids).union(i for i, token in enumerate(self.tokens) if not token)

    def _leave_out_inexact(self, tokenizer: Tokenizer, tokens: list[bytes]) -> None:
        """Empties tokens that don't add their bytes to a text, and finds those that do so but at its beginning."""
        # Part of a character is U+FFFD in both; in a text such parts are joined by their bytes.
        texts = {token_id: token.decode(errors="replace") for token_id, token in enumerate(tokens)}
        ids = [token_id for token_id, text in texts.items() if text]
        anchor = next((i for i in ids if texts[i].isascii() and texts[i].isalpha()), None)
        if anchor is None:
            return

        def decode(sequences: list[list[int]]) -> list[str]:
            return tokenizer.backend.decode_batch(sequences, skip_special_tokens=False)

        (before,) = decode([[anchor]])
        after = decode([[anchor, token_id] for token_id in ids])
        alone = decode([[token_id] for token_id in ids])
        cut = []
        for token_id, behind, first in zip(ids, after, alone, strict=True):
            if behind != before + texts[token_id]:
                tokens[token_id] = b""
            elif first != texts[token_id]:
                cut.append(token_id)
        if cut:
            self._whole_alone = ~self.words_of(cut)
