"""What the prefix cache and a long queue cost the host, on a device that takes no time.

Three tables:

* A decode step of 256 rows (plan + launch + commit) with the cache off, with a tree of 100,000 pages beside free
  ones, and with the same tree in a pool that is full, so that every new page is one evicted. Prompts have different
  lengths, so that in each step a sixteenth of the rows begins a page. The engines take turns, 50 steps each.
* A prompt of 16 to 1024 pages against trees of 1,000 to 100,000: matching it (all of it is there), taking pages for
  one that is new (evicting as many), inserting those. Trees take turns.
* Planning with 100,000 requests in the queue beside 100: all rows taken; rows free but no pages for the head of the
  queue; requests that come and go with every step; and all rows taken with a head that has waited too long.

Predictions. A decode step asks the tree for nothing unless a page is to be evicted (some 3 µs each, 16 a step), so it
costs 1.0 times the step without a cache, 1.2 times when it evicts; bar 1.3. Matching costs 0.4 µs a page and inserting
1.5 µs; the size of the tree changes that by no more than what misses of the processor's caches cost, 1.5 times. The
queue is a sorted dictionary of which a step reads the head: 1.0 times, and 1.2 where requests leave it.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.timed_device import VOCAB_SIZE, TimedDevice
from jaxoverlap.cache.row_memory import RowMemory
from jaxoverlap.engine.engine import Engine
from jaxoverlap.request import RequestLimits, RequestOptions
from jaxoverlap.sampling_params import SamplingParams
from jaxoverlap.scheduler.config import SchedulerConfig

PAGE = 16
_BLOCK = 50
_LONG = 1024
"""Pages of the prompts that are looked for in a tree."""


def tokens_of(rng: np.random.Generator, pages: int) -> np.ndarray:
    return rng.integers(0, VOCAB_SIZE, pages * PAGE, dtype=np.int32)


def insert(memory: RowMemory, row: int, tokens: np.ndarray) -> None:
    """As a request that has just this prompt and ends."""
    memory.seat(row, tokens, None, len(tokens) // PAGE)
    memory.grow(row, len(tokens))
    memory.release(row, tokens)


def fill_tree(memory: RowMemory, row: int, pages: int, rng: np.random.Generator) -> None:
    """Chats of 32 pages that begin with one of 64 system prompts of 16."""
    heads = [tokens_of(rng, 16) for _ in range(64)]
    for head in itertools.cycle(heads):
        missing = pages - memory.cache.num_pages
        if missing <= 0:
            return
        insert(memory, row, np.concatenate([head, tokens_of(rng, min(16, missing))]))


# ---------------------------------------------------------------- a decode step


def decode_engine(rows: int, steps: int, *, cache: bool, tree: int = 0, full: bool = False) -> Engine:
    """`rows` requests that decode; a tree of `tree` pages, in a pool with room for all, or for no more than that."""
    length = 2 * PAGE + steps
    needed = rows * -(-length // PAGE)
    prompts_need = rows * 4
    num_pages = tree + (prompts_need if full else needed)
    limits = RequestLimits(VOCAB_SIZE, length, PAGE, num_pages)
    config = SchedulerConfig(
        limits=limits,
        max_running=rows,
        max_batched_tokens=512,
        prefix_cache=cache,
        max_prompt_wait=float("inf"),
    )
    engine = Engine(config, TimedDevice(config, 0.0), lookahead=1)
    rng = np.random.default_rng(0)
    memory = engine.loop.scheduler.state.memory
    if tree:
        fill_tree(memory, 0, num_pages if full else tree, rng)
    for row in range(rows):
        prompt = tokens_of(rng, 2)[: PAGE + row % PAGE]
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=steps))
    while engine.loop.scheduler.num_waiting or engine.loop.scheduler.state.rows.decoding.sum() < rows:
        engine.step()
    engine.loop.times.clear()
    return engine


def decode_steps(rows: int, tree: int, steps: int) -> list[dict[str, Any]]:
    total = steps + rows + 4 * _BLOCK  # the first rows decode while the last prompts still come in
    cases = {
        "off": decode_engine(rows, total, cache=False),
        "on, empty": decode_engine(rows, total, cache=True),
        f"on, {tree} pages": decode_engine(rows, total, cache=True, tree=tree),
        f"on, {tree} pages, evicting": decode_engine(rows, total, cache=True, tree=tree, full=True),
    }
    in_tree = {name: engine.loop.scheduler.state.memory.cache.num_pages for name, engine in cases.items()}
    for block in range(steps // _BLOCK + 1):
        for engine in cases.values():
            for _ in range(_BLOCK):
                engine.step()
            if block == 0:
                engine.loop.times.clear()
    base = None
    table = []
    for name, engine in cases.items():
        times = [t for t in engine.loop.times.records if t.launched_rows == rows]
        assert len(times) > 0.9 * steps, "rows ended early"
        host = [1e6 * t.host for t in times]
        median = statistics.median(host)
        base = base or median
        table.append(
            {
                "cache": name,
                **{
                    f"{n} µs": 1e6 * statistics.median(getattr(t, n) for t in times)
                    for n in ("plan", "launch", "commit")
                },
                "host µs": median,
                "p99 µs": _quantile(host, 0.99),
                "max µs": max(host),
                "evicted": in_tree[name] - engine.loop.scheduler.state.memory.cache.num_pages,
                "ratio": median / base,
            }
        )
    return table


def pauses(pages: int) -> dict[str, Any]:
    """What takes all nodes of the tree at once, and so stops a step: a full collection by Python's garbage collector.
    And the longest of many uses of a page, which should touch no other."""
    memory = RowMemory(1, 64, pages + 64, PAGE)
    seconds = []
    for _ in range(2):
        gc.collect()
        started = time.perf_counter()
        gc.collect()
        seconds.append(time.perf_counter() - started)
        fill_tree(memory, 0, pages, np.random.default_rng(1))
    leaf = next(memory.cache.unlocked())
    longest = 0.0
    for _ in range(4 * pages + 64):
        memory.cache.lock(leaf)
        started = time.perf_counter()
        memory.cache.unlock(leaf)
        longest = max(longest, time.perf_counter() - started)
    return {
        "tree pages": pages,
        "collection without tree ms": 1e3 * seconds[0],
        "collection with tree ms": 1e3 * seconds[1],
        "longest release of a page ms": 1e3 * longest,
    }


# ---------------------------------------------------------------- a prompt against a tree


class Tree:
    """About `pages` pages, some in chains of 1024 that stay, and a row to add and evict others with."""

    def __init__(self, pages: int) -> None:
        self.rng = np.random.default_rng(pages)
        self.chains = [tokens_of(self.rng, _LONG) for _ in range(max(1, pages // 10_000))]
        size = max(pages, _LONG)
        self.memory = RowMemory(1, _LONG, size + _LONG, PAGE)
        for chain in self.chains:
            insert(self.memory, 0, chain)
            self.memory.cache.lock(self.memory.cache.match(chain, None))
        fill_tree(self.memory, 0, size + _LONG, self.rng)

    def match(self, pages: int) -> float:
        chain = self.chains[int(self.rng.integers(len(self.chains)))][: pages * PAGE]
        started = time.perf_counter()
        node = self.memory.cache.match(chain, None)
        seconds = time.perf_counter() - started
        assert node.depth == pages
        return seconds

    def seat(self, pages: int) -> float:
        """Match, lock and copy the path: what an admission pays."""
        chain = self.chains[int(self.rng.integers(len(self.chains)))][: pages * PAGE]
        started = time.perf_counter()
        self.memory.seat(0, chain, None, pages)
        seconds = time.perf_counter() - started
        self.memory.release(0, chain)
        return seconds

    def insert(self, pages: int) -> tuple[float, float, float]:
        """Seconds to take pages by evicting others, to insert them, and to let go of them."""
        tokens, memory = tokens_of(self.rng, pages), self.memory
        memory.seat(0, tokens, None, pages)
        times = [time.perf_counter()]
        memory.grow(0, pages * PAGE)
        times.append(time.perf_counter())
        memory.cache_pages(0, tokens)
        times.append(time.perf_counter())
        memory.release(0, tokens)
        times.append(time.perf_counter())
        grow, put, release = (b - a for a, b in itertools.pairwise(times))
        return grow, put, release


def prompts_against_trees(sizes: Sequence[int], prompts: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    trees = {size: Tree(size) for size in sizes}
    table = []
    for pages in prompts:
        samples: dict[tuple[str, int], list[float]] = {}
        for repeat in range(repeats + 2):
            for size, tree in trees.items():
                grow, put, release = tree.insert(pages)
                found = {"match": tree.match(pages), "seat": tree.seat(pages)}
                found |= {"evict": grow, "insert": put, "release": release}
                if repeat >= 2:
                    for name, seconds in found.items():
                        samples.setdefault((name, size), []).append(1e6 * seconds)
        for name in ("match", "seat", "evict", "insert", "release"):
            medians = [statistics.median(samples[name, size]) for size in sizes]
            table.append(
                {
                    "prompt pages": pages,
                    "µs": name,
                    **{f"tree {size}": value for size, value in zip(sizes, medians, strict=True)},
                    "largest / smallest": medians[-1] / medians[0],
                    "per page": medians[-1] / pages,
                }
            )
    return table


# ---------------------------------------------------------------- a long queue


def queue_engine(case: str, rows: int, queued: int) -> tuple[Engine, Callable[[], None]]:
    """An engine with `queued` requests that wait, and what is to be done before each step."""
    page_room = rows * 64
    limits = RequestLimits(VOCAB_SIZE, 1024, PAGE, page_room if case != "rows free, no pages" else rows * 64 // 2)
    late = case == "rows full, head late"
    config = SchedulerConfig(
        limits=limits,
        max_running=rows,
        max_batched_tokens=512,
        max_mixed_tokens=512,
        max_prompt_wait=2.0 if late else float("inf"),
        headroom=64 if late else 960,
    )
    now = itertools.count() if late else None
    clock = (lambda: 0.005 * next(now)) if now is not None else time.monotonic
    engine = Engine(config, TimedDevice(config, 0.0), lookahead=1, clock=clock)
    rng = random.Random(0)
    ids = itertools.count()

    def add(max_tokens: int) -> None:
        prompt = [next(ids) % VOCAB_SIZE, *(rng.randrange(VOCAB_SIZE) for _ in range(31))]
        engine.add(prompt, SamplingParams(temperature=0, max_tokens=max_tokens), RequestOptions(timeout=1e6))

    scheduler = engine.loop.scheduler
    if case == "come and go":
        for _ in range(queued):
            add(2)

        def before() -> None:
            while scheduler.num_waiting < queued:
                add(2)
    else:
        seats = rows // 2 if case == "rows free, no pages" else rows
        for _ in range(seats):
            add(960)
        while scheduler.num_waiting or scheduler.state.rows.decoding.sum() < seats:
            engine.step()
        for _ in range(queued):
            add(960)

        def before() -> None:
            pass

    return engine, before


def long_queues(rows: int, short: int, long: int, steps: int) -> list[dict[str, Any]]:
    table = []
    for case in ("rows full", "rows free, no pages", "come and go", "rows full, head late"):
        engines = {queued: queue_engine(case, rows, queued) for queued in (short, long)}
        for block in range(steps // _BLOCK + 1):
            for engine, before in engines.values():
                for _ in range(_BLOCK):
                    before()
                    engine.step()
                if block == 0:
                    engine.loop.times.clear()
        plans = {q: [1e6 * t.plan for t in engine.loop.times.records] for q, (engine, _) in engines.items()}
        medians = {q: statistics.median(values) for q, values in plans.items()}
        scheduler = engines[long][0].loop.scheduler
        table.append(
            {
                "case": case,
                "waiting": scheduler.num_waiting,
                "running": scheduler.num_running,
                **{f"{q} plan µs": medians[q] for q in engines},
                **{f"{q} p99 µs": _quantile(plans[q], 0.99) for q in engines},
                **{f"{q} max µs": max(plans[q]) for q in engines},
                "preempted": scheduler.counters.preemptions,
                "ratio": medians[long] / medians[short],
            }
        )
    return table


def _quantile(values: Sequence[float], q: float) -> float:
    return sorted(values)[min(len(values) - 1, int(q * len(values)))]


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--steps", type=int, default=600)
    options.add_argument("--rows", type=int, default=256)
    options.add_argument("--tree", type=int, default=100_000)
    options.add_argument("--queue", type=int, default=100_000)
    options.add_argument("--repeats", type=int, default=40)
    args = options.parse_args()
    results: dict[str, Any] = {"pauses": pauses(args.tree)}
    results["decode"] = decode_steps(args.rows, args.tree, args.steps)
    results["prompts"] = prompts_against_trees((1_000, 10_000, args.tree), (16, 64, 256, _LONG), args.repeats)
    results["queue"] = long_queues(args.rows, 100, args.queue, args.steps)
    report.show(f"A decode step of {args.rows} rows (medians)", results["decode"], "bar: ratio ≤ 1.3")
    report.show("A prompt against trees (medians of µs)", results["prompts"], "grows with the prompt, not the tree")
    report.show(f"Planning with {args.queue} requests in the queue beside 100", results["queue"], "flat: ratio near 1")
    report.show("What visits the whole tree", [results["pauses"]])
    keys = {"decode": ["cache"], "prompts": ["prompt pages", "µs"], "queue": ["case"]}
    report.write(args.json, "cache_host", results, keys=keys)


if __name__ == "__main__":
    main()
