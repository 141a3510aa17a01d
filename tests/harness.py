"""An engine on the toy device, with everything checked that can be: used by scripted tests and the simulator."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np

from jaxoverlap.engine.engine import Engine
from jaxoverlap.errors import DeadlineError
from jaxoverlap.outputs import FinishReason
from jaxoverlap.request import DEFAULT_OPTIONS, Request, RequestLimits, RequestOptions, RequestStatus
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.config import SchedulerConfig
from jaxoverlap.scheduler.plan import StepOutput, StepPlan
from tests.fakes import VOCAB_SIZE, ToyRunner, oracle, salt_of
from tests.toy_grammar import ToyGrammar

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
    settings: dict = field(default_factory=dict)
    """Further fields of `SchedulerConfig`."""
    now: float = 0.0
    """The scheduler's clock."""
    check_every: int | None = 1
    """Turns from one look at every page and lock to the next; None looks at the end only."""
    turns: int = 0
    plans: list[StepPlan] = field(default_factory=list)
    """Launched so far."""
    requests: list[Request] = field(default_factory=list)
    delivered: dict[int, list[int]] = field(default_factory=dict)
    terminal: dict[int, int] = field(default_factory=dict)
    grammars: dict[int, ToyGrammar] = field(default_factory=dict)
    _timed: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = RequestLimits(VOCAB_SIZE, self.max_model_len, self.page_size, self.num_pages)
        config = SchedulerConfig(
            limits=limits,
            max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens,
            max_prefill_rows=self.max_prefill_rows,
            **self.settings,
        )
        self.runner = ToyRunner(
            limits, self.max_running, step_seconds=self.step_seconds, salted=True, window=config.window
        )
        self.engine = Engine(
            config, self.runner, lookahead=self.lookahead, eos_token_ids=EOS_IDS, clock=lambda: self.now
        )
        self.scheduler = self.engine.loop.scheduler
        if self.row_order_seed is not None:
            random.Random(self.row_order_seed).shuffle(self.scheduler.state.rows.free_rows)
        free, launch = self.scheduler.state.memory.pool.free, self.runner.launch

        def free_and_poison(pages: np.ndarray) -> None:
            free(pages)
            self.runner.poison(pages)

        self.scheduler.state.memory.pool.free = free_and_poison
        self.runner.launch = lambda plan: self.plans.append(plan) or launch(plan)

    def submit(self, prompt: list[int], **given) -> Request:
        """As `submit_samples`, of one sample."""
        (request,) = self.submit_samples(prompt, **given)
        return request

    def submit_samples(
        self,
        prompt: list[int],
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
        grammar: ToyGrammar | None = None,
        **sampling,
    ) -> list[Request]:
        params = SamplingParams(**({"temperature": 0.0, "seed": 1} | sampling))
        requests = self.engine.add_samples(prompt, params, options, grammar)
        for request in requests:
            if grammar is not None:
                self.grammars[request.request_id] = grammar
            self.requests.append(request)
            self.delivered[request.request_id] = []
            self.terminal[request.request_id] = 0
            if request.deadline is not None:
                self._timed.append(request)
        return requests

    def turn(self) -> StepOutput:
        output = self.engine.step()
        self.turns += 1
        self._receive(output)
        if self._timed:
            self._timed = [request for request in self._timed if request.status != RequestStatus.FINISHED]
            assert all(request.deadline > self.now for request in self._timed), "a deadline has passed, unnoticed"
        assert self.scheduler.state.memory.num_unpromised >= 0, "promised pages are not there"
        if self.check_every is not None and self.turns % self.check_every == 0:
            self.scheduler.check_integrity()
            self._check_salts()
        return output

    def _check_salts(self) -> None:
        """No token tells who read whose pages, so the oracle can't."""
        state = self.scheduler.state
        for request in state.running.values():
            assert state.memory.node_of(request.row).salt == request.cache_salt, "pages of another salt are read"

    def _receive(self, output: StepOutput) -> None:
        for request, token in zip(output.requests, output.token_ids, strict=True):
            assert self.terminal[request.request_id] == 0, "a token after the end"
            self.delivered[request.request_id].append(token)
        for request in output.finished:
            self.terminal[request.request_id] += 1
            assert self.terminal[request.request_id] == 1, "two terminal events"
            self.check_outcome(request)

    def preempt(self, request: Request) -> None:
        """Takes its row away, as making room does; the request goes on by itself."""
        assert request.row is not None and not self.scheduler.state.rows.leaving[request.row]
        self.scheduler.state.leave(request)

    def steps_in_flight(self, row: int) -> int:
        """Launched and uncommitted steps that name a row."""
        return sum(row in pending.plan.rows for pending in self.engine.loop.in_flight)

    def drain(self) -> None:
        """Commits what is in flight and retires, without planning anything new."""
        while self.engine.loop.in_flight:
            self._receive(self.scheduler.commit(*self.engine.loop.in_flight.pop()))
        self.scheduler.retire()
        self.scheduler.check_integrity()

    def run(self, max_turns: int = 20_000) -> None:
        """To the end, and checks that everything is back."""
        last = self.turns + max_turns
        while self.engine.has_work and self.turns < last:
            self.now += 0.001
            self.turn()
        assert not self.engine.has_work, f"not finished after {max_turns} turns"
        self.scheduler.check_integrity()
        memory, rows = self.scheduler.state.memory, self.scheduler.state.rows
        assert memory.num_available == memory.pool.num_pages and memory.cache.num_locked == 0
        assert rows.num_running == 0
        assert not self.runner.launched, "a launched step was never read"
        assert all(count == 1 for count in self.terminal.values()), self.terminal

    def check_outcome(self, request: Request) -> None:
        assert request.status == RequestStatus.FINISHED
        assert self.delivered[request.request_id] == request.output_ids
        sampling, grammar = request.sampling, self.grammars.get(request.request_id)
        expected, reason = oracle(
            request.prompt_ids.tolist(),
            request.max_tokens,
            request.stop_ids,
            tuple(sampling.stop_token_ids),
            salt=salt_of(request.seed, request.sample_index),
            window=self.settings.get("window"),
            constraint=None if grammar is None else grammar.start(),
        )
        cut_short = request.finish_reason in (FinishReason.ABORTED, FinishReason.STOP_STRING)
        if cut_short or isinstance(request.error, DeadlineError):
            assert request.output_ids == expected[: len(request.output_ids)]
        else:
            assert (request.output_ids, request.finish_reason) == (expected, reason), request
