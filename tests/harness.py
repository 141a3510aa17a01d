"""An engine on the toy device, with everything checked that can be: used by scripted, random and hypothesis tests."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from jaxoverlap.engine.engine import Engine
from jaxoverlap.request import FinishReason, Request, RequestLimits, RequestStatus, SamplingParams
from jaxoverlap.scheduler.plan import StepOutput
from jaxoverlap.scheduler.scheduler import SchedulerConfig
from tests.fakes import VOCAB_SIZE, ToyRunner, oracle

EOS_IDS = (5, 17)


@dataclass
class Harness:
    """Submit, abort, turn; every turn checks the invariants, and every finished request is held to the oracle."""

    page_size: int = 16
    num_pages: int = 64
    max_model_len: int = 256
    max_running: int = 8
    max_batched_tokens: int = 32
    max_prefill_rows: int = 16
    lookahead: int = 1
    row_order_seed: int | None = None
    step_seconds: float = 0.0
    check_every_turn: bool = True
    turns: int = 0
    requests: list[Request] = field(default_factory=list)
    delivered: dict[int, list[int]] = field(default_factory=dict)
    terminal: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        limits = RequestLimits(VOCAB_SIZE, self.max_model_len, self.page_size, self.num_pages)
        config = SchedulerConfig(
            limits=limits,
            max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens,
            max_prefill_rows=self.max_prefill_rows,
        )
        self.runner = ToyRunner(limits, self.max_running, step_seconds=self.step_seconds, salted=True)
        self.engine = Engine(config, self.runner, lookahead=self.lookahead, eos_token_ids=EOS_IDS)
        self.scheduler = self.engine.loop.scheduler
        if self.row_order_seed is not None:
            np.random.default_rng(self.row_order_seed).shuffle(self.scheduler.rows.free_rows)
        free = self.scheduler.pool.free

        def free_and_poison(pages: np.ndarray) -> None:
            free(pages)
            self.runner.poison(pages)

        self.scheduler.pool.free = free_and_poison

    def submit(self, prompt: list[int], **sampling) -> Request:
        params = SamplingParams(**({"temperature": 0.0, "seed": 1} | sampling))
        request = self.engine.add(prompt, params)
        self.requests.append(request)
        self.delivered[request.request_id] = []
        self.terminal[request.request_id] = 0
        return request

    def turn(self) -> StepOutput:
        output = self.engine.step()
        self.turns += 1
        for request, token in zip(output.requests, output.token_ids, strict=True):
            assert self.terminal[request.request_id] == 0, "a token after the end"
            self.delivered[request.request_id].append(token)
        for request in output.finished:
            self.terminal[request.request_id] += 1
            assert self.terminal[request.request_id] == 1, "two terminal events"
            self.check_outcome(request)
        if self.check_every_turn:
            self.scheduler.check_integrity()
        return output

    def run(self, max_turns: int = 100_000) -> None:
        """To the end, and checks that everything is back."""
        for _ in range(max_turns):
            if not self.engine.has_work:
                break
            self.turn()
        assert not self.engine.has_work, f"not finished after {max_turns} turns"
        self.scheduler.check_integrity()
        pool, rows = self.scheduler.pool, self.scheduler.rows
        assert pool.num_free == pool.num_pages
        assert rows.num_running == 0
        assert not self.runner.launched, "a launched step was never read"
        assert all(count == 1 for count in self.terminal.values()), self.terminal

    def check_outcome(self, request: Request) -> None:
        assert request.status == RequestStatus.FINISHED
        assert self.delivered[request.request_id] == request.output_ids
        sampling = request.sampling
        expected, reason = oracle(
            request.prompt_ids.tolist(),
            request.max_tokens,
            request.stop_ids,
            tuple(sampling.stop_token_ids),
            salt=request.seed % 1009,
        )
        if request.finish_reason == FinishReason.ABORTED:
            assert request.output_ids == expected[: len(request.output_ids)]
        else:
            assert (request.output_ids, request.finish_reason) == (expected, reason), request


def random_prompt(rng: np.random.Generator, longest: int) -> list[int]:
    return rng.integers(0, VOCAB_SIZE, int(rng.integers(1, longest + 1))).tolist()


def random_harness(rng: np.random.Generator) -> Harness:
    """A pool from one request's worth to ample, and everything else over its range."""
    page_size = int(rng.choice([1, 2, 4, 16, 64]))
    max_model_len = int(rng.integers(2, 120))
    one_request = -(-(max_model_len - 1) // page_size)
    return Harness(
        page_size=page_size,
        num_pages=int(one_request * rng.choice([1, 1.5, 2, 4, 20])) + int(rng.integers(0, 3)),
        max_model_len=max_model_len,
        max_running=int(rng.choice([1, 2, 3, 8, 16])),
        max_batched_tokens=int(rng.choice([1, 2, 7, 16, 64, 200])),
        max_prefill_rows=int(rng.choice([1, 2, 16])),
        lookahead=int(rng.choice([0, 1, 1, 2, 4])),
        row_order_seed=int(rng.integers(1 << 30)),
    )


def random_submit(harness: Harness, rng: np.random.Generator) -> Request:
    limit = harness.max_model_len - 1
    stops = rng.integers(0, VOCAB_SIZE, int(rng.integers(0, 4))).tolist()
    return harness.submit(
        random_prompt(rng, int(rng.choice([min(4, limit), limit]))),
        max_tokens=None if rng.random() < 0.2 else int(rng.integers(1, harness.max_model_len + 10)),
        stop_token_ids=stops,
        ignore_eos=bool(rng.random() < 0.5),
        seed=int(rng.integers(1 << 62)),
    )
