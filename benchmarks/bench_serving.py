"""Serving over gRPC: a rate sweep, the price of serving, and a soak test.

    python -m benchmarks.bench_serving sweep     --rates 2 4 8        latency and goodput against the rate of arrivals
    python -m benchmarks.bench_serving overhead  --streams 256        over gRPC ÷ offline, the same work, in turns
    python -m benchmarks.bench_serving soak      --minutes 30         mixed load, aborts; memory, answers, pages

It starts a server of its own: `--engine toy` has a device of `--step-ms` a step and the real everything else, `real`
the embedded model; or it takes one that runs, by `--target` (sweep only). The generator uses the same machine, so on
few cores it takes part of what it measures.

Prediction: a step is one message to the front end, which then writes one to each stream, at some 20 to 50 µs of Python
each; the engine has nothing of it but its message, so its host time a step stays within 1.15 of offline, and a real
model at 32 streams, with steps of tens of milliseconds, keeps at least 0.95 of its throughput.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import load, report
from jaxoverlap.client import AsyncClient

_MIB = 1 << 20
_SHARES = (50, 90, 99)
PLOTS = {
    "sweep": [
        {"title": title, "table": "rows", "x": "rate", "lines": lines, "unit": unit, "log": True}
        for title, lines, unit in (
            ("First token", [f"TTFT p{share}" for share in _SHARES], "ms"),
            ("Between two tokens", [f"ITL p{share}" for share in _SHARES], "ms"),
            ("Answered, and answered in time", ["req/s", "goodput"], "requests a second"),
            ("Throughput", ["tok/s"], "tokens a second"),
        )
    ]
}
"""By mode, what a report draws of its tables."""
KEYS = {
    "sweep": {"rows": ["rate"]},
    "overhead": {"rows": ["streams"]},
    "soak": {"counts": [], "memory": ["process"], "samples": ["seconds"]},
}


class Server:
    """`jaxoverlap serve` as processes of its own."""

    def __init__(self, args: argparse.Namespace) -> None:
        module = "tests.server.toy" if args.engine == "toy" else "jaxoverlap.cli.main"
        options = [f"--{name.replace('_', '-')}={value}" for name, value in engine_settings(args).items()]
        options += ["--listen=127.0.0.1:0", "--metrics-port=0", f"--frontends={args.frontends}", "--max-queue=100000"]
        options += ["--deterministic"] if args.deterministic else []
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", *options],
            env=os.environ | {"TOY_STEP_SECONDS": str(args.step_ms / 1e3)},
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self._log.seek(0)
        log = self._log.read()
        if not line.startswith("serving "):
            raise SystemExit(f"the server did not start:\n{log}")
        self.target = line.split()[-1]
        self._metrics_url = next(word for word in log.split() if word.endswith("/metrics"))

    def metrics(self) -> dict[str, float]:
        """Those without labels, by name, and the buckets of histograms, by name and bound."""
        with urllib.request.urlopen(self._metrics_url, timeout=20) as page:
            families = text_string_to_metric_families(page.read().decode())
        found = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.labels.keys() <= {"le"}:
                found[" ".join([sample.name, *sample.labels.values()])] = sample.value
        return {name.removeprefix("jaxoverlap_"): value for name, value in found.items()}

    def memory(self) -> dict[str, int]:
        """Resident bytes of each process."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        found: dict[str, int] = {}
        for process in processes:
            words = " ".join(process.cmdline())
            kind = next((kind for kind in ("core_process", "frontend_process", "serve") if kind in words), "helper")
            name = {"core_process": "engine", "frontend_process": "front end", "serve": "supervisor"}.get(kind, kind)
            found[f"{name} {process.pid}"] = process.memory_info().rss
        return found

    def stop(self) -> int:
        self.process.terminate()
        code = self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()
        return code


@contextmanager
def serving(args: argparse.Namespace) -> Iterator[Server]:
    server = Server(args)
    try:
        yield server
    finally:
        server.stop()


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    settings: dict[str, Any] = {"max_running": args.streams, "max_model_len": args.context}
    if args.engine == "toy":
        settings |= {"page_size": 16, "num_pages": args.streams * -(-args.context // 16)}
    return settings


def work_of(args: argparse.Namespace, count: int, seed: int = 0) -> list[load.Work]:
    return load.make_work(count, args.prompt_len, args.output_len, args.lengths, args.context, seed)


# -------------------------------------------------------------------- sweep


async def sweep(args: argparse.Namespace, target: str) -> list[dict[str, Any]]:
    rows = []
    async with AsyncClient(target, progress=False) as client:
        for seed, rate in enumerate(args.rates):
            work = work_of(args, args.requests, seed)  # other prompts, or the prefix cache would do the work
            moments = load.arrivals(len(work), rate, args.burst)
            outcomes, seconds = await load.run(client, work, moments)
            first, token = args.first_token_ms / 1e3, args.token_ms / 1e3
            rows.append({"rate": rate, **load.summary(outcomes, seconds, first, token)})
            for error in {outcome.error for outcome in outcomes if outcome.error}:
                print(f"rate {rate}: {error}", file=sys.stderr)
    return rows


# -------------------------------------------------------------------- overhead


class Offline:
    """The same engine in this process."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = engine_settings(args)
        if args.engine == "real":
            from jaxoverlap import LLM

            self._llm = LLM(**settings, progress=False)
            self.engine = self._llm.engine
        else:
            os.environ["TOY_STEP_SECONDS"] = str(args.step_ms / 1e3)
            from jaxoverlap.config import EngineConfig
            from tests.server import toy

            self._llm = None
            self.engine = toy.build_engine(EngineConfig(**settings)).engine

    def run(self, work: list[load.Work]) -> tuple[float, float]:
        """Tokens a second, and the mean host seconds of a step."""
        self.engine.loop.times.clear()
        began = time.perf_counter()
        if self._llm is not None:
            self._llm.generate([list(one.prompt) for one in work], [one.params for one in work])
        else:
            for one in work:
                self.engine.add(list(one.prompt), one.params)
            while self.engine.has_work:
                self.engine.step()
        seconds = time.perf_counter() - began
        host = [record.host for record in self.engine.loop.times.records if record.launched_rows]
        return sum(one.output_len for one in work) / seconds, statistics.fmean(host)


async def overhead(args: argparse.Namespace, server: Server) -> list[dict[str, Any]]:
    offline = Offline(args)
    tokens: dict[str, list[float]] = {"offline": [], "served": []}
    host: dict[str, list[float]] = {"offline": [], "served": []}
    async with AsyncClient(server.target, progress=False) as client:
        for repeat in range(args.repeats + 1):  # the first round warms up
            work = work_of(args, args.streams, seed=repeat)  # other prompts, or the prefix cache would do the work
            here, here_host = await asyncio.to_thread(offline.run, work)
            before = server.metrics()
            outcomes, seconds = await load.run(client, work, [0.0] * len(work))
            gain = {name: value - before[name] for name, value in server.metrics().items()}
            failed = [outcome.error for outcome in outcomes if not outcome.is_whole]
            if failed:
                raise SystemExit(f"{len(failed)} requests failed, such as: {failed[0]}")
            if repeat:
                tokens["offline"].append(here)
                host["offline"].append(here_host)
                tokens["served"].append(sum(len(outcome.token_ids) for outcome in outcomes) / seconds)
                host["served"].append(gain["step_host_seconds_sum"] / gain["steps_total"])
    there, here = statistics.median(tokens["served"]), statistics.median(tokens["offline"])
    served_host, offline_host = statistics.median(host["served"]), statistics.median(host["offline"])
    row = {
        "streams": args.streams,
        "offline tok/s": here,
        "served tok/s": there,
        "throughput ratio": there / here,
        "offline host µs": 1e6 * offline_host,
        "served host µs": 1e6 * served_host,
        "host ratio": served_host / offline_host,
    }
    return [row]


# -------------------------------------------------------------------- soak


async def soak(args: argparse.Namespace, server: Server) -> dict[str, Any]:
    """`streams` callers, one request after the other each; some are left before or while they are answered. Every
    answer is compared with the one that the same request got when it was alone. Memory is compared between the last
    tenth of the time and the second one, for in the first there is something to be grown. Timelines are recorded half
    of the time, and thrown away."""
    rng = random.Random(0)
    async with AsyncClient(server.target, progress=False) as client:
        work = work_of(args, args.distinct)
        alone = {one: (await load.ask(client, one, 0.0)).token_ids for one in work}
        began, end = time.monotonic(), time.monotonic() + 60 * args.minutes
        counts = {"whole": 0, "aborted": 0, "failed": 0, "wrong": 0}
        memory: list[tuple[float, dict[str, int]]] = []

        async def caller() -> None:
            while time.monotonic() < end:
                one = rng.choice(work)
                leaves = rng.randint(0, one.output_len - 1) if rng.random() < args.abort_share else None
                outcome = await load.ask(client, one, time.perf_counter(), leaves)
                counts["whole" if outcome.is_whole else "aborted" if outcome.aborted else "failed"] += 1
                expected = alone[one] if outcome.is_whole else alone[one][: len(outcome.token_ids)]
                counts["wrong"] += outcome.token_ids != expected
                if outcome.error:
                    print(outcome.error, file=sys.stderr)

        async def watch() -> None:
            while time.monotonic() < end:
                memory.append((time.monotonic() - began, server.memory()))
                await client.start_trace()
                await asyncio.sleep(min(2.5, 60 * args.minutes / 200))
                await client.stop_trace()
                await asyncio.sleep(min(2.5, 60 * args.minutes / 200))

        await asyncio.gather(watch(), *(caller() for _ in range(args.streams)))
        while (now := await client.load()).running or now.queued:
            await asyncio.sleep(0.05)
        pages = await client.memory_snapshot()
        leaked = pages.own + pages.locked
        after = {one: (await load.ask(client, one, 0.0)).token_ids for one in work}
    counts["wrong"] += sum(after[one] != alone[one] for one in work)
    seen = server.metrics()
    total = 60 * args.minutes
    growth = []
    for name in memory[-1][1]:
        early, late = (
            statistics.fmean(one[name] for moment, one in memory if low <= moment / total < high and name in one)
            for low, high in ((0.1, 0.2), (0.9, 1.01))
        )
        growth.append({"process": name, "early MiB": early / _MIB, "late MiB": late / _MIB, "growth": late / early - 1})
    counts |= {
        "leaked pages": leaked,
        "compiles": int(seen["compiles_after_ready_total"]),
        "gc pauses over 10 ms": int(seen["gc_pause_seconds_count"] - seen["gc_pause_seconds_bucket 0.01"]),
    }
    return {
        "counts": [counts],
        "memory": growth,
        "samples": [{"seconds": moment, **rss} for moment, rss in memory],
    }


# -------------------------------------------------------------------- the command


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("mode", choices=["sweep", "overhead", "soak"])
    options.add_argument("--engine", choices=["toy", "real"], default="toy")
    options.add_argument("--target", help="a server that runs already; sweep only")
    options.add_argument("--step-ms", type=float, default=5.0, help="of the toy's device")
    options.add_argument("--frontends", type=int, default=1)
    options.add_argument("--deterministic", action="store_true", help="of the server; for soaks of the real model")
    options.add_argument("--streams", type=int, default=32, help="rows of the engine; callers of overhead and soak")
    options.add_argument("--context", type=int, default=1024)
    options.add_argument("--prompt-len", default="64", help="N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA")
    options.add_argument("--output-len", default="64", help="the same")
    options.add_argument("--lengths", type=Path, help="instead: a JSON list of [prompt, output], of a real trace")
    options.add_argument("--rates", type=float, nargs="+", default=[4, 8, 16, 32], help="requests a second; inf")
    options.add_argument("--requests", type=int, default=100, help="for each rate")
    options.add_argument("--burst", type=int, default=1, help="requests that leave together; 1 is Poisson")
    options.add_argument("--first-token-ms", type=float, default=500, help="the target of goodput")
    options.add_argument("--token-ms", type=float, default=50, help="the same, for each further token")
    options.add_argument("--repeats", type=int, default=5, help="of overhead")
    options.add_argument("--minutes", type=float, default=30, help="of the soak")
    options.add_argument("--abort-share", type=float, default=0.2)
    options.add_argument("--distinct", type=int, default=64, help="different requests of the soak")
    args = options.parse_args()
    settings = {name: value for name, value in vars(args).items() if not isinstance(value, Path)}
    results: dict[str, Any] = {"settings": settings}
    if args.mode == "sweep" and args.target:
        results["rows"] = asyncio.run(sweep(args, args.target))
    elif args.target:
        options.error("--target goes with sweep only: the other modes look at the server's processes")
    else:
        with serving(args) as server:
            if args.mode == "sweep":
                results["rows"] = asyncio.run(sweep(args, server.target))
            elif args.mode == "overhead":
                results["rows"] = asyncio.run(overhead(args, server))
            else:
                results |= asyncio.run(soak(args, server))
    if args.mode == "soak":
        report.show(f"Soak, {args.minutes:g} minutes", results["counts"], "bar: nothing wrong, nothing leaked")
        report.show("Memory", results["memory"], "bar: growth within 0.02")
    elif args.mode == "sweep":
        targets = f"first token within {args.first_token_ms:g} ms, then {args.token_ms:g} ms a token"
        report.show("Latencies in ms against the rate of arrivals", results["rows"], f"goodput: {targets}")
    else:
        report.show("The price of serving", results["rows"], "bars: throughput ratio ≥ 0.95, host ratio ≤ 1.15")
    results["plots"] = PLOTS.get(args.mode, [])
    report.write(args.json, f"serving {args.mode}", results, keys=KEYS[args.mode])


if __name__ == "__main__":
    main()
