"""How much of the host's time the overlap hides.

    hidden share = (T_serial - T_overlap) / sum over steps of min(C, G)      G device, C host time of a step

Predictions. Toy device: at least 0.95 for G/C from 0.5 to 8, since nothing but the first and last step of a run is
exposed. Real model on a CPU: the device is the host's own cores, so hiding the host's half millisecond can gain no
more than that; its exposed part is under 2 % of a step, because a step is always queued before the one it
follows has finished.

On a GPU a decode step of the embedded model takes less than the host's part of it, so the overlap is bounded by the
host; one of the 8B shape takes 4 ms and more, and what is exposed should stay under 2 % of it.

    python -m benchmarks.bench_overlap --device gpu                                   both models
    python -m benchmarks.bench_overlap --device cpu --models llama-3-8b --layers 1    proves that script without one

Serial and overlapped runs alternate (A B A B …) and medians are compared, since the machine may be busy.

A timeline sees the same: the device idles for T - G a step, by arithmetic and by its lanes. Their difference should be
within 5 % of a step.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.timed_device import timed_engine
from jaxoverlap import LLM, SamplingParams
from jaxoverlap.engine.engine import Engine
from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.decoder import abstract_weights
from jaxoverlap.observe import boundaries
from jaxoverlap.observe.chrome_trace import summary
from jaxoverlap.request import RequestLimits
from jaxoverlap.runtime.inspect_step import LLAMA_3_8B
from jaxoverlap.runtime.runner import DeviceRunner
from jaxoverlap.scheduler.config import SchedulerConfig

MODELS = "smollm2-135m", "llama-3-8b"
CONTEXT = 256


def run(engine: Engine) -> tuple[float, list]:
    """Seconds, and the loop's records."""
    started = time.perf_counter()
    while engine.has_work:
        engine.step()
    return time.perf_counter() - started, list(engine.loop.times.records)


def with_busy_host(engine: Engine, seconds: float) -> Engine:
    """Makes planning take `seconds` longer, so that G/C can be set without tiny sleeps."""
    plan = engine.loop.scheduler.plan

    def slow_plan():
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        return plan()

    engine.loop.scheduler.plan = slow_plan
    return engine


def idle_by_timeline(engine: Engine) -> float:
    """Seconds a step in which the device had nothing to do, while the host worked."""
    engine.start_timeline(10_000)
    run(engine)
    found = summary(engine.stop_timeline())
    return sum(found["exposed"].values()) / found["steps"]


def toy(ratio: float, *, rows: int, host_seconds: float, steps: int, repeats: int) -> dict[str, Any]:
    def made(lookahead: int, device_seconds: float) -> Engine:
        engine = timed_engine(rows, lookahead=lookahead, step_seconds=device_seconds, steps=steps)
        return with_busy_host(engine, host_seconds)

    def measure(lookahead: int, device_seconds: float):
        return run(made(lookahead, device_seconds))

    _, records = measure(0, 0.0)
    host = statistics.median(record.host for record in records)
    device = ratio * host
    serial, overlapped, hideable = [], [], []
    for _ in range(repeats):
        seconds, records = measure(0, device)
        serial.append(seconds)
        hideable.append(sum(min(record.host, device) for record in records if record.launched_rows))
        overlapped.append(measure(1, device)[0])
    launched = steps - 1
    t_serial, t_overlap = statistics.median(serial) / launched, statistics.median(overlapped) / launched
    seen = {lookahead: idle_by_timeline(made(lookahead, device)) for lookahead in (0, 1)}
    return {
        "G/C": ratio,
        "C ms": 1e3 * host,
        "G ms": 1e3 * device,
        "serial ms": 1e3 * t_serial,
        "overlap ms": 1e3 * t_overlap,
        "ideal ms": 1e3 * max(host, device),
        "hidden share": (t_serial - t_overlap) * launched / statistics.median(hideable),
        "serial idle ms": 1e3 * (t_serial - device),
        "serial by timeline": 1e3 * seen[0],
        "overlap idle ms": 1e3 * (t_overlap - device),
        "overlap by timeline": 1e3 * seen[1],
        "off by": max(abs(t_serial - device - seen[0]) / t_serial, abs(t_overlap - device - seen[1]) / t_overlap),
    }


@contextlib.contextmanager
def embedded(rows: int) -> Iterator[Engine]:
    """SmolLM2-135M, with everything compiled that it needs."""
    with LLM(max_running=rows, max_model_len=CONTEXT, max_batched_tokens=CONTEXT, progress=False) as llm:
        yield llm.engine


@contextlib.contextmanager
def shaped(rows: int, config: ModelConfig) -> Iterator[Engine]:
    """A model of that shape whose weights are random numbers, made on the device: bfloat16 on a GPU."""
    platform = jax.devices()[0].platform
    dtype = jnp.bfloat16 if platform == "gpu" else jnp.float32

    def random(index: int, spec: Any) -> jax.Array:
        return 0.02 * jax.random.normal(jax.random.key(index), spec.shape, spec.dtype)

    leaves, tree = jax.tree.flatten(abstract_weights(config, dtype))
    weights = jax.tree.unflatten(tree, [jax.jit(random, static_argnums=(0, 1))(*pair) for pair in enumerate(leaves)])
    limits = RequestLimits(config.vocab_size, CONTEXT, 16, rows * CONTEXT // 16)
    scheduler = SchedulerConfig(limits=limits, max_running=rows, max_batched_tokens=CONTEXT)
    attention = "triton" if platform == "gpu" else "xla"
    runner = DeviceRunner(config, weights, scheduler, dtype=dtype, attention=attention)
    del weights, leaves
    runner.warm_up()
    engine = Engine(scheduler, runner, lookahead=1)
    yield engine
    engine.close()
    runner.release()


def real(engine: Engine, rows: int, *, steps: int, repeats: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A model on this device. Every step that was still running when the host came to wait for it had its successor
    queued already, so the device did not idle after it: only steps that were ready before can be exposed.

    Returns a row, and the synchronisation table of the overlapped runs."""
    times: dict[int, list[float]] = {0: [], 1: []}
    host, idle, overlapped_turns = [], [], []
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    for _ in range(repeats):
        for lookahead in (0, 1):
            engine.loop.lookahead = lookahead
            for _ in range(rows):
                engine.add([504, 3575, 282, 4649, 314] * 6, params)
            while engine.loop.scheduler.state.rows.decoding.sum() < rows:
                engine.step()
            engine.loop.times.clear()
            _, records = run(engine)
            steady = [r for r in records if r.launched_rows == rows][2:-2]
            turns = [r.host + r.wait for r in steady]
            times[lookahead].append(statistics.median(turns))
            if lookahead == 1:
                host += [r.host for r in steady]
                idle += [r.exposed for r in steady]
                overlapped_turns += steady
    serial, overlapped = statistics.median(times[0]), statistics.median(times[1])
    row = {
        "rows": rows,
        "C ms": 1e3 * statistics.median(host),
        "serial ms": 1e3 * serial,
        "overlap ms": 1e3 * overlapped,
        "overlap/serial": overlapped / serial,
        "exposed host ms": 1e3 * statistics.fmean(idle),
        "exposed share": statistics.fmean(idle) / overlapped,
    }
    return row, boundaries.table(overlapped_turns)


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=200)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--device", choices=["cpu", "gpu"], help="default: a GPU if there is one")
    options.add_argument("--models", nargs="*", choices=MODELS, help="default: both on a GPU, SmolLM2-135M on a CPU")
    options.add_argument("--layers", type=int, help="of the 8B shape: all 32 by default")
    options.add_argument("--no-real", action="store_true", help="the toy device only")
    args = options.parse_args()
    if args.device is not None:
        jax.config.update("jax_platforms", {"cpu": "cpu", "gpu": "cuda"}[args.device])
        try:
            jax.devices()
        except (RuntimeError, AssertionError):  # the latter where jax has no plugin for it
            options.error(f"--device {args.device}: jax finds none")
    results: dict[str, Any] = {
        "toy": [
            toy(ratio, rows=64, host_seconds=0.002, steps=args.steps, repeats=args.repeats)
            for ratio in (0.5, 1.0, 2.0, 4.0, 8.0)
        ]
    }
    report.show(
        "Toy device, 64 rows, a host that takes 2 ms more", results["toy"], "bars: hidden share ≥ 0.95, off by ≤ 0.05"
    )
    if not args.no_real:
        results |= on_this_device(args)
    keys = {"toy": ["G/C"], "real": ["model", "rows"], "boundaries": ["boundary"]}
    report.write(args.json, "overlap", results, keys=keys)


def on_this_device(args: Any) -> dict[str, Any]:
    device = jax.devices()[0]
    layers = args.layers or LLAMA_3_8B.num_layers
    large = replace(LLAMA_3_8B, num_layers=layers, windows=LLAMA_3_8B.windows[:layers])
    measured = []
    for model in args.models or (MODELS if device.platform == "gpu" else MODELS[:1]):
        for rows in (1, 8, 64, 256) if device.platform == "gpu" else (1, 8):
            with embedded(rows) if model == MODELS[0] else shaped(rows, large) as engine:
                row, boundary = real(engine, rows, steps=60, repeats=3)
            measured.append(({"model": model, **row}, boundary))
    table = [row for row, _ in measured]
    report.show(f"Decode steps on {device.device_kind}", table, "bar: exposed share ≤ 0.02")
    report.show(f"What synchronises a step, {table[-1]['rows']} rows, overlapped", measured[-1][1])
    return {"device": device.device_kind, "real": table, "boundaries": measured[-1][1]}


if __name__ == "__main__":
    main()
