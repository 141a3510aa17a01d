"""A device whose tokens can be computed by hand, and that notices every page, position or token gone wrong.

The toy model writes one number per KV slot, a hash of (token, position), and its next token is a hash of a
position-weighted sum over *all* slots the row's page table points to. One wrong token, position, page or stale
slot changes everything after it. `oracle` computes the same from the token ids alone, with no pages at all.

`ToyRunner` does not run a step when it is launched but when its result is read (with all earlier ones, in
order). So whatever the host changes too early, arrays of a plan or pages of a finished request, shows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import MAX_STOP_IDS, Request, RequestLimits
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.plan import RowStatus, StepPlan

VOCAB_SIZE = 97
MAX_LEN = 4096
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_WEIGHTS = (np.arange(1, MAX_LEN + 1, dtype=np.uint64) * np.uint64(0xBF58476D1CE4E5B9)) | np.uint64(1)
POISON = np.uint64(0xDEADDEADDEADDEAD)


def _mix(value: int) -> int:
    value = (value ^ (value >> 31)) * _MIX & _MASK
    return value ^ (value >> 29)


def _kv(token: int, position: int) -> int:
    return _mix((token + 1) * 1_000_003 + position)


def _next_token(checksum: int, position: int, salt: int) -> int:
    return _mix(checksum ^ _mix(position + 7919 * salt)) % VOCAB_SIZE


def oracle(
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int],
    user_stop_ids: Sequence[int] = (),
    salt: int = 0,
    window: int | None = None,
) -> tuple[list[int], FinishReason]:
    """The outputs and finish reason of a request that is alone, serial, and has no pages."""
    terms = [_kv(t, p) * int(_WEIGHTS[p]) for p, t in enumerate(prompt)]
    checksum = sum(terms[-(window or 0) :])
    position = len(prompt)
    outputs: list[int] = []
    while True:
        token = _next_token(checksum & _MASK, position, salt)
        outputs.append(token)
        if token in stop_ids:
            return outputs, FinishReason.STOP_TOKEN if token in user_stop_ids else FinishReason.EOS
        if len(outputs) == max_tokens:
            return outputs, FinishReason.LENGTH
        terms.append(_kv(token, position) * int(_WEIGHTS[position]))
        checksum += terms[-1]
        position += 1
        if window is not None and position > window:
            checksum -= terms[position - window - 1]


def salt_of(seed: int, sample_index: int = 0) -> int:
    return (seed + 389 * sample_index) % 1009


class _ToyStep:
    def __init__(self, runner: ToyRunner, plan: StepPlan) -> None:
        self.runner, self.plan, self.result, self.ready_at = runner, plan, None, 0.0

    def read(self) -> np.ndarray:
        return self.runner.finish(self)


class ToyRunner:
    """The device. `step_seconds` makes it take time, as an accelerator would, without using the host.

    `salted` makes the tokens depend on the request's seed, sample index and sampling position as well.
    """

    def __init__(
        self,
        limits: RequestLimits,
        max_running: int,
        *,
        step_seconds: float = 0.0,
        salted: bool = False,
        window: int | None = None,
    ) -> None:
        self.limits, self.step_seconds, self.salted, self.window = limits, step_seconds, salted, window
        size = limits.page_size
        self._offsets = np.arange(size)
        self.kv = np.full(limits.num_pages * size, POISON, dtype=np.uint64)
        columns = -(-limits.max_model_len // size)
        self.page_table = np.full((max_running, columns), limits.num_pages, dtype=np.int64)
        self.last_token = np.zeros(max_running, dtype=np.int64)
        self.seq_len = np.zeros(max_running, dtype=np.int64)
        self.num_outputs = np.zeros(max_running, dtype=np.int64)
        self.max_outputs = np.zeros(max_running, dtype=np.int64)
        self.salt = np.zeros(max_running, dtype=np.int64)
        self.stop_ids = np.full((max_running, MAX_STOP_IDS), -1, dtype=np.int64)
        self.finished = np.ones(max_running, dtype=bool)
        self.launched: deque[_ToyStep] = deque()
        self.num_launches = 0
        self.row_steps: dict[int, int] = {}
        """Decode steps launched per request id."""
        self._device_free_at = 0.0

    def warm_up(self, progress=None) -> None:
        """There is nothing to compile."""

    def launch(self, plan: StepPlan) -> _ToyStep:
        step = _ToyStep(self, plan)
        self.launched.append(step)
        self.num_launches += 1
        for request_id in plan.request_ids[len(plan.chunks) :].tolist():
            self.row_steps[request_id] = self.row_steps.get(request_id, 0) + 1
        if self.step_seconds:
            self._device_free_at = max(self._device_free_at, time.perf_counter()) + self.step_seconds
            step.ready_at = self._device_free_at
        return step

    def catch_up(self) -> None:
        """Runs everything launched: a device that is faster than its reader."""
        while self.launched:
            oldest = self.launched.popleft()
            oldest.result = self._run(oldest.plan)

    def finish(self, step: _ToyStep) -> np.ndarray:
        while step.result is None:
            oldest = self.launched.popleft()
            oldest.result = self._run(oldest.plan)
        remaining = step.ready_at - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)
        return step.result

    def _run(self, plan: StepPlan) -> np.ndarray:
        results = [self._run_chunk(chunk) for chunk in plan.chunks]
        results += [
            self._run_decode(row, page)
            for row, page in zip(plan.decode_rows.tolist(), plan.decode_new_pages.tolist(), strict=True)
        ]
        return np.array(results, dtype=np.int32).reshape(len(plan.rows), 2)

    def _run_chunk(self, chunk) -> tuple[int, int]:
        row = chunk.row
        request: Request = chunk.request
        self.page_table[row] = self.limits.num_pages
        self.page_table[row, : len(chunk.page_table)] = chunk.page_table
        self.num_outputs[row], self.max_outputs[row] = chunk.num_outputs, request.max_tokens
        self.salt[row] = salt_of(request.seed, request.sample_index) if self.salted else 0
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(request.stop_ids)] = request.stop_ids
        self.finished[row] = False
        for offset, token in enumerate(chunk.token_ids.tolist()):
            self._write(row, chunk.start + offset, token)
        self.seq_len[row] = chunk.end
        return self._sample(row) if chunk.publishes else (-1, RowStatus.VOID)

    def _run_decode(self, row: int, new_page: int) -> tuple[int, int]:
        if self.finished[row]:
            return -1, RowStatus.VOID
        position = int(self.seq_len[row])
        if new_page != self.limits.num_pages:
            self.page_table[row, position // self.limits.page_size] = new_page
        self._write(row, position, int(self.last_token[row]))
        self.seq_len[row] += 1
        return self._sample(row)

    def _write(self, row: int, position: int, token: int) -> None:
        size = self.limits.page_size
        page = self.page_table[row, position // size]
        assert page < self.limits.num_pages, f"row {row}: position {position} has no page"
        self.kv[page * size + position % size] = _kv(token, position)

    def _sample(self, row: int) -> tuple[int, int]:
        length, size = int(self.seq_len[row]), self.limits.page_size
        first = 0 if self.window is None else max(0, length - self.window)
        pages = self.page_table[row, first // size : -(-length // size)]
        slots = pages if size == 1 else (pages[:, None] * size + self._offsets).reshape(-1)
        slots = slots[first % size : first % size + length - first]
        checksum = int((self.kv[slots] * _WEIGHTS[first:length]).sum(dtype=np.uint64))
        token = _next_token(checksum, length, int(self.salt[row]))
        self.last_token[row] = token
        self.num_outputs[row] += 1
        if token in self.stop_ids[row]:
            status = RowStatus.STOP
        else:
            status = RowStatus.LENGTH if self.num_outputs[row] >= self.max_outputs[row] else RowStatus.RUNNING
        self.finished[row] = status != RowStatus.RUNNING
        return token, status

    def poison(self, pages: np.ndarray) -> None:
        """What a page holds once nobody owns it."""
        size = self.limits.page_size
        self.kv[(pages.astype(np.int64)[:, None] * size + np.arange(size)).reshape(-1)] = POISON


def toy_sampling(**changes) -> SamplingParams:
    """Greedy unless said otherwise."""
    return SamplingParams(**({"temperature": 0.0} | changes))
