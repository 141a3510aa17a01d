"""What comes next and who gives way, as pure functions over numbers. All times in seconds.

The bounds they keep, for a step that takes at most ``t``:

    gap between two tokens of a decoding row     ≤ max_decode_wait + 2 t       (steps not mixed)
                                                 ≤ t, of a step with mixed_budget prompt tokens   (mixed)
    wait of the first in the queue               ≤ max_prompt_wait + turn + (lookahead + 1) t,
                                                   turn: until some younger row has had its turn
    tokens that a request gets from an admission ≥ min(headroom · 2^min(preemptions, 3), what it lacks)

The last is what keeps preemption from thrashing: a request is preempted at most ``max_tokens / (8 headroom) + 3``
times, so it runs its prompt and outputs at most so often. The doubling ends there because an older row that is out
of pages waits until a younger one has had so many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

_READING = 12
"""Tokens whose attention takes as long as reading the context for any number of them (docs/benchmarks.md)."""
_WORTHWHILE = 8
"""Tokens of a chunk for which reading what is before it is not most of the work."""


class StepView(NamedTuple):
    """What decides the kind of the next step.

    Attributes:
      can_prefill: some prompt can go on, or may be admitted, now.
      can_decode: some row can decode now.
      prefill_streak: prefill steps planned since the last step with decoding rows.
      decode_waited: time since the last step with decoding rows.
    """

    can_prefill: bool
    can_decode: bool
    prefill_streak: int
    decode_waited: float


class StepKind(NamedTuple):
    prefill: bool
    decode: bool


def choose_step(
    view: StepView, *, mixed_steps: bool, max_prefill_streak: int | None, max_decode_wait: float
) -> StepKind:
    """Mixed: everything that can go, goes. Else prompts first, because a fuller batch makes every later decode
    step worth more, until the decoding rows have waited long enough by either measure."""
    if mixed_steps or not (view.can_prefill and view.can_decode):
        return StepKind(view.can_prefill, view.can_decode)
    in_streak = max_prefill_streak is None or view.prefill_streak < max_prefill_streak
    # One prefill step after a decode step in any case: where a step alone takes max_decode_wait, prompts would starve.
    prefill = view.prefill_streak == 0 or (in_streak and view.decode_waited < max_decode_wait)
    return StepKind(prefill, not prefill)


def chunk_cost(length: int, start: int, context_per_token: float | None) -> float:
    """What a chunk from position `start` on costs, in prompt tokens that have nothing before them.

    Its attention to what is before it comes on top: of each token, ``start / context_per_token``, and as much as that
    of `_READING` tokens for reading it at all. None counts every token as 1.
    """
    return length if context_per_token is None else length + (length + _READING) * start / context_per_token


def chunk_len(
    remaining: int, start: int, budget: float, context_per_token: float | None, sizes: Sequence[int] = ()
) -> int:
    """Prompt tokens from position `start` on that a budget pays for by `chunk_cost`, at least 1.

    A chunk that what is before it makes shorter has one of `sizes`, if there are any: attention is computed for as
    many tokens as the step has room for, so a step with a token fewer would not cost less.
    """
    most = max(1, min(remaining, int(budget)))
    if context_per_token is None:
        return most
    share = start / context_per_token
    length = min(most, max(1, int((budget - _READING * share) / (1.0 + share))))
    if length == most or not sizes:
        return length
    return max((size for size in sizes if size <= length), default=min(sizes[0], most))


def is_worthwhile(remaining: int, start: int, budget: float, context_per_token: float | None) -> bool:
    """A budget pays for all tokens that remain, for as many as it would at the beginning of a prompt, or for enough of
    them that reading what is before them is not most of the work."""
    wanted = max(1, min(remaining, int(budget), _WORTHWHILE))
    return chunk_cost(wanted, start, context_per_token) <= max(1.0, budget)


class PromptView(NamedTuple):
    """A prompt under way.

    Attributes:
      remaining: tokens that are to be computed, from position `start` on.
      last_step: in which it was computed before.
    """

    remaining: int
    start: int
    last_step: int


def choose_sharers(prompts: Sequence[PromptView], budget: float, context_per_token: float | None) -> list[int]:
    """Which of several equal prompts share a step's budget, as indices, those with the least that remains first: all,
    or as many as get a worthwhile chunk for an equal share, those whose last turn is longest ago. May be none.

    Far into long prompts, chunks of a token or two for each of them would cost all the reading and bring nothing.
    """
    by_turn = sorted(range(len(prompts)), key=lambda index: prompts[index].last_step)
    for count in range(len(prompts), 0, -1):
        chosen = by_turn[:count]
        if all(
            is_worthwhile(prompt.remaining, prompt.start, budget / count, context_per_token)
            for prompt in (prompts[index] for index in chosen)
        ):
            return sorted(chosen, key=lambda index: prompts[index].remaining)
    return []


def promised_tokens(known_len: int, max_len: int, headroom: int, num_preemptions: int) -> int:
    """KV positions kept for a request when it is admitted: its known tokens and room to go on, doubled by each
    of the first three preemptions. The last token's KV is never written, so `max_len` is all tokens less one."""
    return min(known_len + (headroom << min(num_preemptions, 3)), max_len)


class RunningView(NamedTuple):
    """A running row, as a possible victim.

    Attributes:
      row: its number.
      priority, request_id: a lower priority value is served first; ids grow with arrival.
      pages: that would be available without it.
      had_its_turn: it has used what was promised at its admission.
    """

    row: int
    priority: int
    request_id: int
    pages: int
    had_its_turn: bool


def choose_victims(
    running: Sequence[RunningView], pages: int, *, rows: int = 0, at_least_priority: int | None = None
) -> list[int]:
    """Rows to preempt so that `pages` pages and `rows` rows come free: the youngest of the lowest priority first,
    no more than needed, the oldest of the highest priority never. Fewer when there are not so many.

    Args:
      at_least_priority: spares requests that are served before this priority.
    """
    if not running:
        return []
    spared = min(running, key=lambda view: (view.priority, view.request_id)).row
    victims: list[int] = []
    for view in sorted(running, key=lambda view: (-view.priority, -view.request_id)):
        if pages <= 0 and rows <= 0:
            break
        too_good = at_least_priority is not None and view.priority < at_least_priority
        if view.row != spared and view.had_its_turn and not too_good:
            victims.append(view.row)
            pages -= view.pages
            rows -= 1
    return victims


def order_by_prefix(cached_lens: Iterable[int], head_waited: float, max_head_wait: float) -> list[int]:
    """Which of the first requests of the queue to admit first, as indices: the longest cached prefix, and among
    equals the first. Once the head has waited `max_head_wait`, the queue's own order."""
    lens = list(cached_lens)
    if head_waited >= max_head_wait:
        return list(range(len(lens)))
    return sorted(range(len(lens)), key=lambda index: -lens[index])
