"""Which kind of step comes next, as pure functions over numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PolicyView:
    """What the policy may look at.

    Attributes:
      can_prefill: some prompt can go on, or can be admitted, now.
      can_decode: some row can decode now.
      prefill_streak: prefill steps planned since the last decode step.
    """

    can_prefill: bool
    can_decode: bool
    prefill_streak: int


def prefill_is_next(view: PolicyView, max_prefill_streak: int) -> bool:
    """Prompts first, because a fuller batch makes every later decode step worth more; but never more than
    `max_prefill_streak` prefill steps between two decode steps of a row that is decoding."""
    if not view.can_prefill:
        return False
    return not view.can_decode or view.prefill_streak < max_prefill_streak
