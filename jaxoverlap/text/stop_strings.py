"""Stop strings: finding the first of some texts in a text that comes a few characters at a time.

The first match is the one that ends first, since nothing that comes later can undo it; among matches that end
together, the longest, which begins first. So of the stops "ab" and "abc" the second never matches, wherever the text
is cut.

All stops are looked for at once (Aho and Corasick, 1975). The automaton's state is the longest end of the text so far
that a stop begins with: exactly what must be held back, and no more.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence

from jaxoverlap.errors import InvalidRequestError
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.text.tokenizer import Tokenizer


class StopStrings:
    """An automaton over some stops. It does not change; whoever reads a text keeps the state, which begins as 0.

    Attributes:
      held: by state, how many of the last characters could still become a stop.
      matched: by state, the stop that has just ended, or None.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.held: list[int] = [0]
        self.matched: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        self._shorter: list[int] = [0]
        """By state, that of the next shorter end which a stop begins with."""
        for stop in stops:
            self._insert(stop)
        self._link()

    def scan(self, state: int, text: str) -> tuple[int, int, str | None]:
        """Reads on to the end of the text or of the first match: the state then, the characters read, the match."""
        following, shorter, matched = self._next, self._shorter, self.matched
        for count, char in enumerate(text, start=1):
            while (target := following[state].get(char)) is None and state:
                state = shorter[state]
            state = target or 0
            if matched[state] is not None:
                return state, count, matched[state]
        return state, len(text), None

    def skip(self, state: int, text: str) -> int:
        """Reads a text in which no match counts; the state then, in which nothing is held that can't go on."""
        while text:
            state, read, _ = self.scan(state, text)
            text = text[read:]
        while state and not self._next[state]:
            state = self._shorter[state]
        return state

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.held.append(self.held[state] + 1)
                self.matched.append(None)
            state = self._next[state][char]
        self.matched[state] = stop

    def _link(self) -> None:
        """From the shortest ends to the longest, so that the shorter ones are linked already."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            for char, target in self._next[state].items():
                self._shorter[target], _, _ = self.scan(self._shorter[state], char)
                if self.matched[target] is None:
                    self.matched[target] = self.matched[self._shorter[target]]
                states.append(target)


@functools.lru_cache(maxsize=64)
def automaton(stops: tuple[str, ...]) -> StopStrings:
    """The samples of a prompt, and most requests of one caller, have the same stops."""
    return StopStrings(stops)


def special_stops(tokenizer: Tokenizer, sampling: SamplingParams) -> dict[int, str]:
    """Stops that are special tokens, by their ids.

    Raises:
      InvalidRequestError: a stop has a token that `skip_special_tokens` keeps out of the text beside other text. It
        could be found neither in the text, which does not show the token, nor by an id.
    """
    if not sampling.stop:
        return {}
    special = tokenizer.special_tokens
    if sampling.hides_special_tokens:
        found = _tokens_within(tuple(sampling.stop), tuple(special))
        for index, (stop, within) in enumerate(zip(sampling.stop, found, strict=True)):
            if within is not None:
                raise InvalidRequestError(
                    f"stop[{index}]",
                    stop,
                    f"skip_special_tokens hides {within!r}; use it alone, or skip_special_tokens=False",
                )
    return {special[stop]: stop for stop in sampling.stop if stop in special}


def prepare_stops(tokenizer: Tokenizer, sampling: SamplingParams) -> None:
    """Raises as `special_stops`, and does what takes a while for many long stops; it is kept for who comes next."""
    special_stops(tokenizer, sampling)
    automaton(tuple(sampling.stop))


@functools.lru_cache(maxsize=64)
def _tokens_within(stops: tuple[str, ...], special: tuple[str, ...]) -> list[str | None]:
    """Of each stop, a special token that it has beside other text; None of those that have or are none."""
    tokens, known = _special_automaton(special), set(special)
    return [None if stop in known else tokens.scan(0, stop)[2] for stop in stops]


@functools.lru_cache(maxsize=4)
def _special_automaton(special: tuple[str, ...]) -> StopStrings:
    return StopStrings([token for token in special if token])
