"""The row table: reusable lines, one per running request, as arrays so that a step is planned for all at once.

    row        0        1        2
    request    A        (free)   B          A row has one owner at a time; `generation` counts owners, so a
    generation 4        2        9          result that was launched for an earlier owner is recognised.

Lengths of a row, in KV positions (planned ones are ahead of what the host has committed):

    |<---- planned_len: written, or launched to be written ---->|
    |<---- num_pages * page_size: positions that have a page --------->|
    |<---- promised_pages * page_size: what it may grow to, reserved at admission ------------->|
"""

from __future__ import annotations

import numpy as np

from jaxoverlap.request import Request


class RowTable:
    """Host side of the rows; the device's side is `jaxoverlap.runtime.row_state`."""

    def __init__(self, num_rows: int, pages_per_row: int, no_page: int) -> None:
        self.num_rows = num_rows
        self.no_page = no_page
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.requests = np.full(num_rows, None, dtype=object)
        self.request_ids = np.full(num_rows, -1, dtype=np.int64)
        self.generation = np.zeros(num_rows, dtype=np.int64)
        self.page_table = np.full((num_rows, pages_per_row), no_page, dtype=np.int32)
        self.num_pages = np.zeros(num_rows, dtype=np.int32)
        self.promised_pages = np.zeros(num_rows, dtype=np.int32)
        self.planned_len = np.zeros(num_rows, dtype=np.int32)
        self.planned_outputs = np.zeros(num_rows, dtype=np.int32)
        self.max_outputs = np.zeros(num_rows, dtype=np.int32)
        self.decoding = np.zeros(num_rows, dtype=bool)
        """May be planned for another token: prompt launched, not known to be finished, outputs left."""
        self.finished = np.zeros(num_rows, dtype=bool)
        """Its request is finished; the row waits for the steps in flight that name it."""
        self.in_flight = np.zeros(num_rows, dtype=np.int32)
        """Launched and uncommitted steps that name the row."""

    @property
    def num_running(self) -> int:
        return self.num_rows - len(self.free_rows)

    def take(self, request: Request, promised_pages: int) -> int:
        row = self.free_rows.pop()
        self.requests[row] = request
        self.request_ids[row] = request.request_id
        self.promised_pages[row] = promised_pages
        self.max_outputs[row] = request.max_tokens
        self.planned_outputs[row] = len(request.output_ids)
        return row

    def add_pages(self, row: int, pages: np.ndarray) -> None:
        count = self.num_pages[row]
        self.page_table[row, count : count + len(pages)] = pages
        self.num_pages[row] = count + len(pages)

    def pages_of(self, row: int) -> np.ndarray:
        return self.page_table[row, : self.num_pages[row]].copy()

    def give_back(self, row: int) -> None:
        """Ends an ownership: the line is blank and the generation is the next one's."""
        assert self.requests[row] is not None and self.in_flight[row] == 0, f"row {row} is not ready to be reused"
        self.generation[row] += 1
        self.requests[row] = None
        self.request_ids[row] = -1
        self.page_table[row, : self.num_pages[row]] = self.no_page
        for array in (self.num_pages, self.promised_pages, self.planned_len, self.planned_outputs, self.max_outputs):
            array[row] = 0
        self.decoding[row] = self.finished[row] = False
        self.free_rows.append(row)
