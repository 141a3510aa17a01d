"""The last steps, always on: what was launched, for whom, where it wrote, and what came of it.

A record keeps references to the plan's frozen arrays and copies of a few columns; words are made of it only when
somebody asks. No request is kept alive by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

CAPACITY = 1000


class ChunkRecord(NamedTuple):
    """Prompt tokens of a step: positions `start` to `end` of a request, and its pages up to there, int32 [pages]."""

    request_id: int
    start: int
    end: int
    publishes: bool
    page_table: np.ndarray


class FinishRecord(NamedTuple):
    """A request that has ended. Times are seconds of the scheduler's clock; None for what never came."""

    request_id: int
    reason: str
    arrival: float | None
    admitted: float | None
    first_token: float | None
    finished: float | None


class StepRecord:
    """One step, as it was when it was planned; the rest is added when it is launched, ready and committed.

    Attributes:
      turn: of the loop, from 0; step_id: of the plan.
      rows, generations, request_ids: int [n], of the chunks first, then of the rows that decode.
      chunks: prompts in the step.
      new_pages: int32 [decoding rows], the page that a row's next position starts, or `no_page`.
      last_pages: int32 [decoding rows], the page that the row writes to.
      committed_len, planned_len: int32 [n], positions written by committed steps / after this step.
      num_pages: int [n], allocated pages of each row, of `page_size` tokens.
      running, waiting: requests; pages_used: of all pages; in_flight: steps that the device still had.
      launched, ready, read, committed: seconds of `perf_counter`, None for what has not happened. A step is ready when
        a timeline's thread sees that it is, which may be late, and read when the host has its result.
      shape: of the compiled step that ran it, as `StepShape` says it. It and `ready` are taken only while a timeline is
        recorded.
      finished: requests of which its commit brought the end.
    """

    __slots__ = (
        "chunks",
        "committed",
        "committed_len",
        "finished",
        "generations",
        "in_flight",
        "last_pages",
        "launched",
        "new_pages",
        "no_page",
        "num_pages",
        "page_size",
        "pages_used",
        "planned_len",
        "read",
        "ready",
        "request_ids",
        "rows",
        "running",
        "shape",
        "step_id",
        "turn",
        "waiting",
    )

    def __init__(
        self,
        turn: int,
        step_id: int,
        rows: np.ndarray,
        generations: np.ndarray,
        request_ids: np.ndarray,
        chunks: tuple[ChunkRecord, ...],
        new_pages: np.ndarray,
        last_pages: np.ndarray,
        committed_len: np.ndarray,
        planned_len: np.ndarray,
        num_pages: np.ndarray,
        page_size: int,
        no_page: int,
        running: int,
        waiting: int,
        pages_used: int,
        in_flight: int,
    ) -> None:
        self.turn, self.step_id = turn, step_id
        self.rows, self.generations, self.request_ids, self.chunks = rows, generations, request_ids, chunks
        self.new_pages, self.last_pages, self.no_page = new_pages, last_pages, no_page
        self.committed_len, self.planned_len = committed_len, planned_len
        self.num_pages, self.page_size = num_pages, page_size
        self.running, self.waiting, self.pages_used, self.in_flight = running, waiting, pages_used, in_flight
        self.launched: float | None = None
        self.ready: float | None = None
        self.read: float | None = None
        self.committed: float | None = None
        self.shape: str | None = None
        self.finished: tuple[FinishRecord, ...] = ()

    @property
    def kind(self) -> str:
        """ "prefill", "decode", or "mixed" for both."""
        if not self.chunks:
            return "decode"
        return "prefill" if len(self.chunks) == len(self.rows) else "mixed"

    @property
    def num_tokens(self) -> int:
        return sum(chunk.end - chunk.start for chunk in self.chunks) + len(self.rows) - len(self.chunks)

    @property
    def state(self) -> str:
        """ "planned", "in flight" or "committed"."""
        return "committed" if self.committed is not None else "planned" if self.launched is None else "in flight"

    def slots(self) -> list[list[int]]:
        """Where each row writes, in the order of `rows`: ids of KV slots."""
        size = self.page_size
        written = []
        for chunk in self.chunks:
            positions = np.arange(chunk.start, chunk.end)
            written.append((chunk.page_table[positions // size] * size + positions % size).tolist())
        positions = self.planned_len[len(self.chunks) :] - 1
        return written + [[slot] for slot in (self.last_pages * size + positions % size).tolist()]

    def pages(self) -> list[list[int]]:
        """The pages that each row gets in this step."""
        given = [chunk.page_table[-(-chunk.start // self.page_size) :].tolist() for chunk in self.chunks]
        return given + [[page] if page != self.no_page else [] for page in self.new_pages.tolist()]

    def to_dict(self) -> dict[str, Any]:
        """For JSON. `slots` are pairs, first and last, of runs of consecutive ones."""
        return {
            "turn": self.turn,
            "step_id": self.step_id,
            "kind": self.kind,
            "state": self.state,
            "tokens": self.num_tokens,
            "shape": self.shape,
            "request_ids": self.request_ids.tolist(),
            "rows": self.rows.tolist(),
            "generations": self.generations.tolist(),
            "chunks": [[chunk.start, chunk.end] for chunk in self.chunks],
            "committed_len": self.committed_len.tolist(),
            "allocated_len": (self.num_pages * self.page_size).tolist(),
            "new_pages": self.pages(),
            "slots": [_runs(slots) for slots in self.slots()],
            "running": self.running,
            "waiting": self.waiting,
            "pages_used": self.pages_used,
            "in_flight": self.in_flight,
            "launched": self.launched,
            "ready": self.ready,
            "read": self.read,
            "committed": self.committed,
            "finished": {str(finish.request_id): finish.reason for finish in self.finished},
        }

    def describe(self) -> str:
        """One line."""
        return describe_step(self.to_dict())


class StepLog:
    """The last `capacity` steps, the oldest first. Written by the thread of the loop; any thread may read it."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._records: deque[StepRecord] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._records)

    @property
    def newest(self) -> StepRecord | None:
        return self._records[-1] if self._records else None

    def add(self, record: StepRecord) -> None:
        self._records.append(record)

    def find(self, step_id: int) -> StepRecord | None:
        """By its id, if it is still here."""
        records = self._records
        if not records:
            return None
        index = step_id - records[-1].step_id - 1  # from the end, where steps in flight are
        return records[index] if -len(records) <= index < 0 else None

    def last(self, count: int | None = None) -> list[StepRecord]:
        """The last `count`, the oldest first."""
        records = list(self._records)
        return records if count is None else records[max(0, len(records) - count) :]

    def describe(self, count: int = 20) -> str:
        """A line for each of the last steps."""
        return "\n".join(record.describe() for record in self.last(count))


def brief(record: Mapping[str, Any]) -> dict[str, str]:
    """What `StepRecord.to_dict` gives, in words, with long lists cut."""
    shape = record.get("shape")
    compiled = f", compiled for {shape}" if shape else ""
    words = {
        "tokens": f"{record['tokens']} of {len(record['rows'])} rows{compiled}",
        "requests": _some(record["request_ids"]),
        "rows": _some(record["rows"]),
        "committed": _some(record["committed_len"]),
        "allocated": _some(record["allocated_len"]),
        "pages": f"{sum(map(len, record['new_pages']))} new, {record['pages_used']} used",
        "queue": f"{record['running']} running, {record['waiting']} waiting, {record['in_flight']} in flight",
    }
    if record["finished"]:
        words["finished"] = ", ".join(f"{request_id} {reason}" for request_id, reason in record["finished"].items())
    return words


def describe_step(record: Mapping[str, Any]) -> str:
    """One line for what `StepRecord.to_dict` gives."""
    head = f"turn {record['turn']} step {record['step_id']} {record['kind']} {record['state']}"
    parts = [head, *(f"{name} {words}" for name, words in brief(record).items())]
    if record["committed"] is not None and record["launched"] is not None:
        parts.append(f"{1e3 * (record['committed'] - record['launched']):.1f} ms from launch to commit")
    return " · ".join(parts)


def _runs(slots: list[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for slot in slots:
        if runs and slot == runs[-1][1] + 1:
            runs[-1][1] = slot
        else:
            runs.append([slot, slot])
    return runs


def _some(values: Iterable[Any], most: int = 8) -> str:
    shown = [str(value) for value in islice(values, most + 1)]
    return ",".join(shown[:most]) + ("…" if len(shown) > most else "")
