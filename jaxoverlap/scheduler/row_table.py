"""The row table: reusable lines, one per running request, as arrays so that a step is planned for all at once.

    row        0        1        2
    request    A        (free)   B          A row has one owner at a time. A `generation` ends when the owner is
    generation 4        2        9          finished, at the latest when it leaves: a result that was launched in
                                            an earlier one is nobody's.

Lengths of a row, in KV positions:

    |<---- written_len: committed steps wrote them ---->|
    |<---- planned_len: written, or launched to be written ----------->|
    |<---- promised_len: pages for so many are kept from its admission on ------------>|
    |<---- max_len: prompt and outputs at most, but for the last token, whose KV is never written ---->|

Index arrays are of numpy's own index type: any other is converted with each use, which costs more than the use.
"""

from __future__ import annotations

import numpy as np

from jaxoverlap.request import Request


class RowTable:
    """Host side of the rows; the device's side is `jaxoverlap.runtime.row_state`."""

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.requests = np.full(num_rows, None, dtype=object)
        self.request_ids = np.full(num_rows, -1, dtype=np.int64)
        self.generation = np.zeros(num_rows, dtype=np.int64)
        self.written_len = np.zeros(num_rows, dtype=np.int32)
        self.planned_len = np.zeros(num_rows, dtype=np.int32)
        self.promised_len = np.zeros(num_rows, dtype=np.int32)
        self.max_len = np.zeros(num_rows, dtype=np.int32)
        self.decoding = np.zeros(num_rows, dtype=bool)
        """May be planned for another token: prompt launched, not leaving, `max_len` not reached."""
        self.leaving = np.zeros(num_rows, dtype=bool)
        """Finished or preempted: it is not planned any more and waits for the steps in flight that name it."""
        self.finished = np.zeros(num_rows, dtype=bool)
        """Leaving, because its request is finished."""
        self.last_step = np.full(num_rows, -1, dtype=np.int64)
        """The last launched step that names the row."""
        self.committed_step = -1
        """The last committed step; they are committed in order."""
        self.scored: set[int] = set()
        """Rows whose requests ask for log-probabilities."""
        self.constrained: set[int] = set()
        """Rows whose requests' texts must follow a grammar."""
        self.last_progress = np.zeros(num_rows)
        """Of `SchedulerState.patience`: at admission, or the last committed token or chunk."""

    @property
    def num_running(self) -> int:
        return self.num_rows - len(self.free_rows)

    @property
    def in_flight(self) -> np.ndarray:
        """Rows that an uncommitted step names, bool [num_rows]."""
        return self.last_step > self.committed_step

    def take(self, row: int, request: Request, cached_len: int, promised_len: int, patience: float) -> None:
        assert self.free_rows[-1] == row, "rows are taken from the end of the free list"
        self.free_rows.pop()
        self.requests[row] = request
        self.request_ids[row] = request.request_id
        self.written_len[row] = self.planned_len[row] = cached_len
        self.promised_len[row] = promised_len
        self.max_len[row] = request.max_len
        if request.sampling.num_top_logprobs >= 0:
            self.scored.add(row)
        if request.constraint is not None:
            self.constrained.add(row)
        self.last_progress[row] = patience

    def finish(self, row: int) -> None:
        """Its request is finished: tokens that still come for it are nobody's."""
        self.finished[row] = True
        self.generation[row] += 1

    def give_back(self, row: int) -> None:
        """Ends an ownership: the line is blank and the generation is the next one's."""
        ready = self.requests[row] is not None and self.last_step[row] <= self.committed_step
        assert ready, f"row {row} is not ready to be reused"
        self.generation[row] += 1
        self.requests[row] = None
        self.request_ids[row] = -1
        self.written_len[row] = self.planned_len[row] = self.promised_len[row] = self.max_len[row] = 0
        self.decoding[row] = self.leaving[row] = self.finished[row] = False
        self.scored.discard(row)
        self.constrained.discard(row)
        self.free_rows.append(row)

    def check_integrity(self) -> None:
        """Raises AssertionError when the columns contradict each other."""
        taken = self.request_ids >= 0
        some = np.count_nonzero
        assert taken.tolist() == [request is not None for request in self.requests.tolist()], "a row of nobody"
        assert sorted(self.free_rows) == (~taken).nonzero()[0].tolist(), "row pool and rows disagree"
        assert not some(self.decoding & (self.leaving | ~taken)), "a leaving or free row would decode"
        assert not some(self.finished & ~self.leaving), "a finished row that is not leaving"
        assert not some(self.in_flight & ~taken), "a free row is in flight"
        assert not some(self.planned_len > self.max_len), "more tokens planned than allowed"
        assert not some(self.written_len > self.planned_len), "more is written than was planned"
