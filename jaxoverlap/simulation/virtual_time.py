"""The real scheduler and loop in virtual time: what a device and a host of given speeds would come to.

    G(step) = step + row · decoding rows + prompt_token · prompt tokens + kv_token · KV positions that are read
            = shapes[compiled shape] + kv_token · KV positions that are read, where that was measured
    C(step) = step + row · rows, of which `after` comes behind the wait (commit) and the rest before the launch

Nothing runs, so hours take seconds. The device does steps one after the other, and the host waits for their results as
the loop says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxoverlap.config import EngineConfig
from jaxoverlap.engine.engine import Engine
from jaxoverlap.request import Request
from jaxoverlap.runtime.buckets import Buckets, row_multiple
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.config import SchedulerConfig
from jaxoverlap.scheduler.plan import RowStatus, StepPlan, StepResult

_VOCAB_SIZE = 1000


@dataclass(frozen=True, kw_only=True)
class Speeds:
    """Seconds.

    Attributes:
      step, row, prompt_token, kv_token: of the device, see the module's formulas.
      shapes: of compiled steps, by what `StepShape` is called; those that are not in it go by the first formula.
      host_step, host_row: of the host; after: the share of it that comes behind the wait.
    """

    step: float
    row: float = 0.0
    prompt_token: float = 0.0
    kv_token: float = 0.0
    shapes: Mapping[str, float] = field(default_factory=dict)
    host_step: float = 0.0
    host_row: float = 0.0
    after: float = 0.3


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that is to come: seconds, tokens, tokens."""

    time: float
    prompt_len: int
    output_len: int


@dataclass(frozen=True)
class Prediction:
    """What came of it. Times are seconds of the simulation.

    Attributes:
      seconds: until the last token; busy: of them, those in which the device worked; host: those in which the host did.
      first_token: of each request, from its arrival; gaps: between two tokens of a request, as its mean.
      steps, overlapped, measured: launched steps; those that were launched while another was in flight; those whose
        compiled step has a time of its own.
    """

    seconds: float
    busy: float
    host: float
    tokens: int
    steps: int
    overlapped: int
    measured: int
    first_token: np.ndarray
    gaps: np.ndarray

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


class _Step:
    __slots__ = ("device", "ready_at", "result")

    def __init__(self, device: VirtualDevice, ready_at: float, result: StepResult) -> None:
        self.device, self.ready_at, self.result = device, ready_at, result

    def read(self) -> StepResult:
        device = self.device
        device.now = max(device.now, self.ready_at)
        device.work(device.host_seconds(len(self.result.outcomes)) * device.speeds.after)
        return self.result

    def sample(self, allowed: np.ndarray) -> None:
        raise AssertionError("nothing is constrained here")


class VirtualDevice:
    """A `Runner` that says when it would be ready, and whose clock is the engine's.

    Attributes:
      now: seconds; busy, host: so many of them were device work, host work.
      measured: steps whose compiled step has a time of its own.
    """

    compiles_after_ready = 0

    def __init__(self, config: SchedulerConfig, speeds: Speeds, buckets: Buckets) -> None:
        self.speeds, self.buckets = speeds, buckets
        self.now = self.busy = self.host = 0.0
        self.measured = 0
        self._free_at = 0.0
        self._lengths = np.zeros(config.max_running, dtype=np.int64)
        self._outputs = np.zeros(config.max_running, dtype=np.int64)
        self._limits = np.zeros(config.max_running, dtype=np.int64)

    def host_seconds(self, rows: int) -> float:
        return self.speeds.host_step + self.speeds.host_row * rows

    def work(self, seconds: float) -> None:
        """The host is busy for so long."""
        self.now += seconds
        self.host += seconds

    def launch(self, plan: StepPlan) -> _Step:
        speeds = self.speeds
        self.work(self.host_seconds(len(plan.rows)) * (1 - speeds.after))
        result = np.empty((len(plan.rows), 2), dtype=np.int32)
        result[:, 0] = 1
        for chunk in plan.chunks:
            row = chunk.row
            self._lengths[row], self._limits[row] = chunk.end, chunk.request.max_tokens
            self._outputs[row] = chunk.num_outputs
        self._lengths[plan.decode_rows] += 1
        self._outputs[plan.rows] += 1
        done = self._outputs[plan.rows] >= self._limits[plan.rows]
        result[:, 1] = np.where(done, RowStatus.LENGTH.value, RowStatus.RUNNING.value)
        for index, chunk in enumerate(plan.chunks):
            if not chunk.publishes:
                self._outputs[chunk.row] = chunk.num_outputs
                result[index] = -1, RowStatus.VOID.value
        seconds = self._seconds_of_shape(plan) + speeds.kv_token * int(self._lengths[plan.rows].sum())
        self.busy += seconds
        self._free_at = max(self._free_at, self.now) + seconds
        return _Step(self, self._free_at, StepResult(result))

    def _seconds_of_shape(self, plan: StepPlan) -> float:
        """What a step takes that reads no KV."""
        speeds = self.speeds
        measured = speeds.shapes.get(str(self.buckets.shape_of(plan))) if speeds.shapes else None
        if measured is not None:
            self.measured += 1
            return measured
        return speeds.step + speeds.row * len(plan.decode_rows) + speeds.prompt_token * plan.num_prefill_tokens


def simulate(config: EngineConfig, speeds: Speeds, arrivals: Sequence[Arrival], platform: str = "gpu") -> Prediction:
    """Serves the arrivals, which are in the order of their times.

    Args:
      platform: "gpu" or "cpu", whose defaults settings get.

    Raises:
      ConfigError, InvalidRequestError: settings or lengths that can't be.
    """
    longest = max(arrival.prompt_len + arrival.output_len for arrival in arrivals)
    context = max(longest, config.max_model_len or 0)  # of a model that allows what is asked for
    resolved = config.resolve(
        platform=platform, vocab_size=_VOCAB_SIZE, model_len=context, page_bytes=1, kv_memory_bytes=1 << 40
    )
    buckets = Buckets(
        resolved.scheduler, row_multiple(resolved.attention), min_prefill_tokens=config.min_prefill_tokens
    )
    device = VirtualDevice(resolved.scheduler, speeds, buckets)
    engine = Engine(resolved.scheduler, device, lookahead=resolved.lookahead, clock=lambda: device.now)
    requests: list[Request] = []
    coming, overlapped, steps = 0, 0, 0
    while coming < len(arrivals) or engine.has_work:
        if not engine.has_work:
            device.now = max(device.now, arrivals[coming].time)
        while coming < len(arrivals) and arrivals[coming].time <= device.now:
            arrival = arrivals[coming]
            # Prompts share nothing, or the prefix cache would compute for nothing.
            prompt = np.full(arrival.prompt_len, coming % _VOCAB_SIZE, dtype=np.int32)
            prompt[: min(2, arrival.prompt_len)] = [coming // _VOCAB_SIZE % _VOCAB_SIZE, coming % _VOCAB_SIZE][
                : arrival.prompt_len
            ]
            requests.append(engine.add(prompt, SamplingParams(temperature=0, max_tokens=arrival.output_len)))
            coming += 1
        engine.step()
        turn = engine.loop.times.records[-1]
        steps += turn.launched_rows > 0
        overlapped += turn.launched_rows > 0 and turn.in_flight > 0
    first = np.array([request.first_token_time for request in requests], dtype=float)
    last = np.array([request.finish_time for request in requests], dtype=float)
    outputs = np.array([len(request.output_ids) for request in requests])
    began = np.array([arrival.time for arrival in arrivals])
    several = outputs > 1
    return Prediction(
        seconds=float(last.max() - began.min()),
        busy=device.busy,
        host=device.host,
        tokens=int(outputs.sum()),
        steps=steps,
        overlapped=overlapped,
        measured=device.measured,
        first_token=first - began,
        gaps=(last - first)[several] / (outputs[several] - 1),
    )
