"""The synchronisation table: what each boundary of a step costs, how much of it hides, and what could remove it.

A cycle is a turn of the loop and what its caller does until the next one (`StepTimes`). Each boundary is a lap of it.
What is exposed is an upper bound: host work of the cycles in which nobody saw the device busy all the while.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxoverlap.observe.step_times import StepTimes


class Boundary(NamedTuple):
    """A lap of the cycle.

    Attributes:
      lap: its name in `StepTimes`.
      what: happens there; remedy: what could remove it, or its cost.
    """

    lap: str
    what: str
    remedy: str


BOUNDARIES = (
    Boundary("ingest", "messages from front ends are read, requests queued", "fewer, larger messages"),
    Boundary("plan", "rows and pages of the next step are chosen", "lookahead 1 or more hides it"),
    Boundary(
        "launch", "one array is packed and sent, the calls of a step dispatched", "lookahead hides it; fewer calls"
    ),
    Boundary("mask", "constrained rows wait for their last token", "a grammar on the device; no structured output"),
    Boundary(
        "wait", "a step's tokens are read back", "nothing: the device works. A lookahead of 2 hides late wake-ups"
    ),
    Boundary("commit", "tokens go to their requests, pages to the cache", "lookahead 1 or more hides it"),
    Boundary("detokenize", "ids become text", "lookahead hides it; a server does it in another process"),
    Boundary("send", "results are packed and sent to front ends", "lookahead hides it; fewer, larger messages"),
    Boundary("other", "the caller's own time between two steps", "a caller that steps at once, or a thread of its own"),
)


@dataclass(frozen=True)
class Cost:
    """What a boundary came to, over a number of cycles.

    Attributes:
      mean, p99: seconds a cycle; share: of the cycles' time.
      exposed: mean seconds a cycle while the device may have been idle, 0 for the wait.
    """

    boundary: Boundary
    mean: float
    p99: float
    share: float
    exposed: float

    @property
    def verdict(self) -> str:
        """ "device" for the wait, "hidden", "exposed", or how much of it is."""
        if self.boundary.lap == "wait":
            return "device"
        share = self.exposed / self.mean if self.mean else 0.0
        if share < 0.005:
            return "hidden"
        return "exposed" if share > 0.995 else f"{share:.0%} exposed"


def costs(records: Iterable[StepTimes]) -> list[Cost]:
    """By boundary, in the order of a cycle; those that took no time are left out."""
    cycles = [record for record in records if record.launched_rows]
    if not cycles:
        return []
    total = sum(record.cycle for record in cycles)
    hidden = np.array([record.is_hidden for record in cycles])
    found = []
    for boundary in BOUNDARIES:
        seconds = np.array([getattr(record, boundary.lap) for record in cycles])
        if seconds.any():
            exposed = 0.0 if boundary.lap == "wait" else float(seconds[~hidden].sum()) / len(cycles)
            p99 = float(np.percentile(seconds, 99))
            found.append(Cost(boundary, float(seconds.mean()), p99, float(seconds.sum()) / total, exposed))
    return found


def table(records: Iterable[StepTimes]) -> list[dict[str, Any]]:
    """The same as rows of a table, with times in microseconds."""
    return [
        {
            "boundary": cost.boundary.lap,
            "what": cost.boundary.what,
            "mean µs": 1e6 * cost.mean,
            "p99 µs": 1e6 * cost.p99,
            "share": f"{cost.share:.1%}",
            "verdict": cost.verdict,
            "what could remove it": cost.boundary.remedy,
        }
        for cost in costs(records)
    ]
