"""Lives of an engine on the toy device, from a seed: whatever happens, every request's tokens are the oracle's.

    python -m tests.simulator --steps 100000000 --workers 2      runs for hours, prints the seeds
    … --record run.jsonl                                          and goes on where it was interrupted
    python -m tests.simulator --seed 123                         replays one, and shrinks it if it fails

A life is a script: settings and a list of events. Its seed fixes it, `run` plays it, and `shrink` leaves out
whatever a failure does not need. The scheduler, the cache, the policy and the loop are the real ones; the device
completes steps when they are read or, where the script says so, as early as it can.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxoverlap.errors import InvalidRequestError, QueueFullError
from jaxoverlap.request import RequestOptions
from tests.fakes import VOCAB_SIZE
from tests.harness import Harness

Event = tuple[Any, ...]
"""("submit", prompt, sampling, options), ("abort", nth request), ("turn", seconds, device is early), ("flush",)."""


@dataclass(frozen=True)
class Script:
    seed: int
    settings: dict[str, Any]
    events: tuple[Event, ...]

    def __str__(self) -> str:
        lines = [f"seed {self.seed}, {len(self.events)} events", json.dumps(self.settings)]
        return "\n".join([*lines, *(json.dumps(event) for event in self.events)])


def random_settings(rng: random.Random) -> dict[str, Any]:
    """A pool from one request's worth to ample, and everything else over its range."""
    page_size = rng.choice([1, 2, 4, 16, 64])
    max_model_len = rng.randrange(2, 120)
    one_request = -(-(max_model_len - 1) // page_size)
    window = rng.randrange(1, 60) if rng.random() < 0.1 else None
    finer: dict[str, Any] = {
        "mixed_steps": rng.random() < 0.6,
        "max_mixed_tokens": rng.choice([1, 3, 16, 64]),
        "context_per_token": rng.choice([5.0, 50.0]) if rng.random() < 0.3 else None,
        "max_prefill_streak": None if rng.random() < 0.5 else rng.randrange(1, 4),
        "max_decode_wait": rng.choice([0.0, 0.01, 0.3]),
        "max_prompt_wait": rng.choice([0.02, 0.2, 2.0, 1e9]),
        "headroom": rng.choice([1, 4, 16, 64]),
        "prefix_cache": window is None and rng.random() < 0.8,
        "cache_aware_order": rng.random() < 0.3,
        "window": window,
        "max_queue": rng.randrange(1, 9) if rng.random() < 0.2 else None,
        "stuck_after": rng.choice([3.0, 60.0]),  # must never come to pass, in either case
    }
    return {
        "page_size": page_size,
        "num_pages": int(one_request * rng.choice([1, 1, 1.5, 2, 4, 20])) + rng.randrange(3),
        "max_model_len": max_model_len,
        "max_running": rng.choice([1, 2, 3, 8, 16]),
        "max_batched_tokens": rng.choice([1, 2, 7, 16, 64, 200]),
        "max_prefill_rows": rng.choice([1, 2, 16]),
        "lookahead": rng.choice([0, 1, 1, 2, 3, 4]),
        "row_order_seed": rng.getrandbits(30),
        "settings": finer,
    }


def random_tokens(rng: random.Random, count: int) -> list[int]:
    return rng.choices(range(VOCAB_SIZE), k=count)


def script_of(seed: int) -> Script:
    rng = random.Random(seed)
    settings = random_settings(rng)
    # Integrity after every turn costs as much as the turn: all of it in one life of eight, at the end in the others.
    settings["check_every_turn"] = rng.random() < 0.125
    longest = settings["max_model_len"] - 1
    prefixes = [random_tokens(rng, rng.randint(1, longest)) for _ in range(3)]
    busy, abort_rate = rng.choice([0.05, 0.3, 1.0]), rng.choice([0.0, 0.02, 0.2])
    shared, timed = rng.choice([0.0, 0.5, 0.95]), rng.choice([0.0, 0.2])
    priorities, salts = rng.choice([1, 1, 3]), [None, None, "a", "b"]
    events: list[Event] = []
    submitted, most = 0, rng.randrange(1, 40)
    # Short lives: what breaks an engine is variety, not length.
    for _ in range(rng.randrange(20, 200)):
        while rng.random() < busy and submitted < most:
            prompt = random_tokens(rng, rng.randint(1, rng.choice([min(4, longest), longest])))
            if rng.random() < shared:
                prefix = rng.choice(prefixes)
                own = prompt if rng.random() < 0.7 else []  # else it may be cached to its last token
                prompt = (prefix[: rng.randint(1, len(prefix))] + own)[:longest]
            sampling = {
                "max_tokens": None if rng.random() < 0.2 else rng.randrange(1, settings["max_model_len"] + 10),
                "stop_token_ids": random_tokens(rng, rng.randrange(4)),
                "ignore_eos": rng.random() < 0.5,
                "seed": rng.randrange(3) if rng.random() < shared else rng.getrandbits(62),
            }
            options = {
                "priority": rng.randrange(priorities),
                "timeout": rng.choice([0.001, 0.05, 1.0]) if rng.random() < timed else None,
                "cache_salt": rng.choice(salts) if settings["row_order_seed"] % 3 == 0 else None,
            }
            events.append(("submit", prompt, sampling, options))
            submitted += 1
            if rng.random() < 0.5:
                break
        if submitted and rng.random() < abort_rate:
            events.append(("abort", rng.randrange(submitted)))
        if rng.random() < 0.01:
            events.append(("flush",))
        events.append(("turn", rng.choice([0.0, 0.001, 0.02, 0.3]), rng.random() < 0.3))
    return Script(seed, settings, tuple(events))


def run(script: Script) -> int:
    """Plays a life to its end, idle and empty. Returns the steps that were launched."""
    harness = Harness(**script.settings)
    requests: list[Any] = []
    for kind, *given in script.events:
        if kind == "submit":
            prompt, sampling, options = given
            try:
                requests.append(harness.submit(prompt, options=RequestOptions(**options), **sampling))
            except QueueFullError:
                requests.append(None)
            except InvalidRequestError:
                fits = harness.num_pages * harness.page_size >= 2 * harness.max_model_len
                assert not fits or harness.max_model_len <= 2
                requests.append(None)
        elif kind == "abort":
            if given[0] < len(requests) and requests[given[0]] is not None:
                harness.engine.abort(requests[given[0]])
        elif kind == "flush":
            harness.scheduler.flush_cache()
        else:
            harness.now += given[0]
            if given[1]:
                harness.runner.catch_up()
            harness.turn()
    harness.run()
    return harness.runner.num_launches


def fails(script: Script) -> Exception | None:
    try:
        run(script)
    except Exception as error:
        return error
    return None


def shrink(script: Script) -> Script:
    """Leaves out events, in ever smaller pieces, as long as the life still fails (Zeller's ddmin, 1999)."""
    piece = len(script.events) // 2
    while piece:
        start = 0
        while start < len(script.events):
            shorter = replace(script, events=script.events[:start] + script.events[start + piece :])
            if fails(shorter):
                script = shorter
            else:
                start += piece
        piece //= 2
    return script


def simulate(seed: int) -> int:
    """One life. Returns its steps; an AssertionError names the seed."""
    try:
        return run(script_of(seed))
    except Exception as error:
        raise AssertionError(f"python -m tests.simulator --seed {seed} replays this: {error}") from error


SHARE = 100
"""Lives that a worker is given at a time."""


def simulate_share(first_seed: int, size: int) -> int:
    return sum(simulate(seed) for seed in range(first_seed, first_seed + size))


def shares(first_seed: int, workers: int, size: int) -> Iterator[int]:
    """Steps of each share of so many consecutive seeds, in their order, without end."""
    # Not forked: the caller may hold locks of jax's threads.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        running: deque[Any] = deque()
        while True:
            while len(running) < 2 * workers:
                running.append(pool.apply_async(simulate_share, (first_seed, size)))
                first_seed += size
            yield running.popleft().get()


def simulate_until(
    steps: int, *, first_seed: int, workers: int, report_every: int = 50, record: Path | None = None, share: int = SHARE
) -> tuple[int, int]:
    """Lives of consecutive seeds until they come to so many steps. Returns steps and seeds.

    `record` gets a line for each share that was lived to its end, and what it has already is not run again.
    """
    recorded = [] if record is None or not record.exists() else [*map(json.loads, record.read_text().splitlines())]
    assert [line["first_seed"] for line in recorded] == [first_seed + share * i for i in range(len(recorded))]
    done, seeds = sum(line["steps"] for line in recorded), share * len(recorded)
    for more in shares(first_seed + seeds, workers, share) if done < steps else ():
        if record is not None:
            with record.open("a") as file:
                print(json.dumps({"first_seed": first_seed + seeds, "steps": more}), file=file)
        done, seeds = done + more, seeds + share
        if seeds % (report_every * share) == 0:
            print(f"{done:,} steps, seeds {first_seed} to {first_seed + seeds - 1}", flush=True)
        if done >= steps:
            break
    return done, seeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="replay one life")
    parser.add_argument("--steps", type=int, default=2_000_000, help="device steps to run")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--record", type=Path, help="keep here what was run, and go on from it")
    options = parser.parse_args()
    if options.seed is not None:
        script = script_of(options.seed)
        error = fails(script)
        print("passes" if error is None else f"{error!r}\n{shrink(script)}")
        raise SystemExit(error is not None)
    started, first = time.monotonic(), options.first_seed
    steps, seeds = simulate_until(options.steps, first_seed=first, workers=options.workers, record=options.record)
    spent = time.monotonic() - started
    print(f"{steps:,} steps, seeds {first} to {first + seeds - 1}, {spent:.0f} s: every request as the oracle has it")


if __name__ == "__main__":
    main()
