"""A device whose tokens can be computed by hand, and that notices every page, position or token gone wrong.

The toy model writes one number per KV slot, made of token and position, and its next token is a hash of the
checksum (CRC-32) over *all* slots the row's page table points to, in order. One wrong token, position, page or
stale slot changes everything after it. `oracle` computes the same from the token ids alone, with no pages at all.

`ToyRunner` does not run a step when it is launched but when its result is read (with all earlier ones, in
order). So whatever the host changes too early, arrays of a plan or pages of a finished request, shows.
"""

from __future__ import annotations

import sys
import time
import zlib
from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np

from jaxoverlap.constraint import TokenConstraint
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import MAX_STOP_IDS, Request, RequestLimits
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.plan import RowStatus, StepPlan, StepResult

VOCAB_SIZE = 97
MAX_LEN = 4096
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
POISON = 0xDEADDEAD


def _kv(token: int, position: int) -> int:
    """What a slot holds: 32 bits, and never the same for another token or position."""
    return (token + 12) * MAX_LEN + position


def _next_token(checksum: int, position: int, salt: int) -> int:
    mixed = 0
    for word in (position + 7919 * salt, checksum):
        mixed ^= word
        mixed = (mixed ^ (mixed >> 31)) * _MIX & _MASK
        mixed ^= mixed >> 29
    return mixed % VOCAB_SIZE


def _ids_in(masks: np.ndarray) -> list[np.ndarray]:
    """Of each mask, int32 [rows, words], the ids that may come, lowest first."""
    bits = np.unpackbits(masks.view(np.uint8), axis=1, count=VOCAB_SIZE, bitorder="little")
    return [np.flatnonzero(row) for row in bits]


def oracle(
    prompt: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int],
    user_stop_ids: Sequence[int] = (),
    salt: int = 0,
    window: int | None = None,
    constraint: TokenConstraint | None = None,
) -> tuple[list[int], FinishReason]:
    """The outputs and finish reason of a request that is alone, serial, and has no pages."""
    mask = np.zeros((1, -(-VOCAB_SIZE // 32)), np.int32)
    slots = np.array([_kv(token, position) for position, token in enumerate(prompt)], dtype=np.uint32).tobytes()
    first = 0 if window is None else 4 * max(0, len(prompt) - window)
    checksum = zlib.crc32(slots[first:])
    position = len(prompt)
    outputs: list[int] = []
    while True:
        token = _next_token(checksum, position, salt)
        if constraint is not None:
            constraint.fill_mask(mask[0])
            (allowed,) = _ids_in(mask)
            token = int(allowed[token % len(allowed)])
        outputs.append(token)
        if token in stop_ids:
            return outputs, FinishReason.STOP_TOKEN if token in user_stop_ids else FinishReason.EOS
        if constraint is not None:
            constraint.advance(token)
            if constraint.error is not None:
                return outputs, FinishReason.ERROR
            if constraint.is_complete:
                return outputs, FinishReason.GRAMMAR_COMPLETE
        if len(outputs) == max_tokens:
            return outputs, FinishReason.LENGTH
        slot = _kv(token, position).to_bytes(4, sys.byteorder)
        position += 1
        if window is None:
            checksum = zlib.crc32(slot, checksum)
        else:
            slots += slot
            checksum = zlib.crc32(slots[4 * max(0, position - window) :])


def salt_of(seed: int, sample_index: int = 0) -> int:
    return (seed + 389 * sample_index) % 1009


def count_steps(counts: dict[int, int], request_ids: np.ndarray, most: int = 1000) -> None:
    """One more for each; of the requests only the last ones are kept, so that a toy can run for hours."""
    for request_id in request_ids.tolist():
        counts[request_id] = counts.get(request_id, 0) + 1
    while len(counts) > most:
        del counts[next(iter(counts))]


class _ToyStep:
    def __init__(self, runner: ToyRunner, plan: StepPlan) -> None:
        self.runner, self.plan, self.result, self.ready_at = runner, plan, None, 0.0
        self.allowed: list[np.ndarray | None] = [None] * len(plan.rows)
        self.may_run = not plan.is_constrained

    def sample(self, allowed: np.ndarray) -> None:
        self.allowed = _ids_in(allowed)
        self.may_run = True

    def read(self) -> StepResult:
        return StepResult(self.runner.finish(self))


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
        # All of it is read and written one by one, where lists are quicker than numpy's arrays.
        self.kv = [self._poisoned() for _ in range(limits.num_pages)]
        self._no_pages = [limits.num_pages] * -(-limits.max_model_len // limits.page_size)
        self.page_table = [self._no_pages] * max_running
        self.last_token = [0] * max_running
        self.seq_len = [0] * max_running
        self.num_outputs = [0] * max_running
        self.max_outputs = [0] * max_running
        self.salt = [0] * max_running
        self.stop_ids: list[tuple[int, ...]] = [()] * max_running
        self.finished = [True] * max_running
        self.launched: deque[_ToyStep] = deque()
        self.num_launches = 0
        self.compiles_after_ready = 0
        self.row_steps: dict[int, int] = {}
        """Decode steps launched per request id."""
        self._device_free_at = 0.0

    def warm_up(self, progress=None) -> None:
        """There is nothing to compile."""

    def launch(self, plan: StepPlan) -> _ToyStep:
        step = _ToyStep(self, plan)
        self.launched.append(step)
        self.num_launches += 1
        count_steps(self.row_steps, plan.request_ids[len(plan.chunks) :])
        if self.step_seconds:
            self._device_free_at = max(self._device_free_at, time.perf_counter()) + self.step_seconds
            step.ready_at = self._device_free_at
        return step

    def catch_up(self) -> None:
        """Runs everything launched: a device that is faster than its reader."""
        while self.launched:
            oldest = self.launched.popleft()
            oldest.result = self._run(oldest)

    def finish(self, step: _ToyStep) -> np.ndarray:
        while step.result is None:
            oldest = self.launched.popleft()
            oldest.result = self._run(oldest)
        if self.step_seconds:
            time.sleep(max(0.0, step.ready_at - time.perf_counter()))
        return step.result

    def _run(self, step: _ToyStep) -> np.ndarray:
        plan = step.plan
        assert step.may_run, "only the first half of the step was launched"
        ids, outcomes = iter(step.allowed), array("i")
        for chunk in plan.chunks:
            outcomes.extend(self._run_chunk(chunk, next(ids)))
        for row, page in zip(plan.decode_rows.tolist(), plan.decode_new_pages.tolist(), strict=True):
            outcomes.extend(self._run_decode(row, page, next(ids)))
        return np.ndarray((len(plan.rows), 2), np.int32, outcomes)

    def _run_chunk(self, chunk, allowed: np.ndarray | None) -> tuple[int, RowStatus]:
        row = chunk.row
        request: Request = chunk.request
        pages = chunk.page_table.tolist()
        self.page_table[row] = pages + self._no_pages[len(pages) :]
        self.num_outputs[row], self.max_outputs[row] = chunk.num_outputs, request.max_tokens
        self.salt[row] = salt_of(request.seed, request.sample_index) if self.salted else 0
        assert len(request.stop_ids) <= MAX_STOP_IDS
        self.stop_ids[row] = request.stop_ids
        self.finished[row] = False
        for position, token in enumerate(chunk.token_ids.tolist(), chunk.start):
            self._write(row, position, token)
        self.seq_len[row] = chunk.end
        return self._sample(row, allowed) if chunk.publishes else (-1, RowStatus.VOID)

    def _run_decode(self, row: int, new_page: int, allowed: np.ndarray | None) -> tuple[int, RowStatus]:
        if self.finished[row]:
            return -1, RowStatus.VOID
        position = self.seq_len[row]
        if new_page != self.limits.num_pages:
            self.page_table[row][position // self.limits.page_size] = new_page
        self._write(row, position, self.last_token[row])
        self.seq_len[row] += 1
        return self._sample(row, allowed)

    def _write(self, row: int, position: int, token: int) -> None:
        size = self.limits.page_size
        page = self.page_table[row][position // size]
        assert page < self.limits.num_pages, f"row {row}: position {position} has no page"
        self.kv[page][position % size] = _kv(token, position)

    def _sample(self, row: int, allowed: np.ndarray | None) -> tuple[int, RowStatus]:
        length, size = self.seq_len[row], self.limits.page_size
        first = 0 if self.window is None else max(0, length - self.window)
        pages = self.page_table[row][first // size : -(-length // size)]
        slots = b"".join([self.kv[page] for page in pages])
        start = first % size
        token = _next_token(zlib.crc32(slots[4 * start : 4 * (start + length - first)]), length, self.salt[row])
        if allowed is not None:
            if len(allowed) == 0:
                self.finished[row] = True
                return -1, RowStatus.NO_TOKEN
            token = int(allowed[token % len(allowed)])
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
        for page in pages.tolist():
            self.kv[page] = self._poisoned()

    def _poisoned(self) -> array[int]:
        return array("I", [POISON]) * self.limits.page_size


def toy_sampling(**changes) -> SamplingParams:
    """Greedy unless said otherwise."""
    return SamplingParams(**({"temperature": 0.0} | changes))
