"""Lives of an engine on the toy device, from a seed: whatever happens, every request's tokens are the oracle's.

    python -m tests.simulator --steps 100000000 --workers 2      runs for hours
    … --record run.jsonl                                         and goes on where it was interrupted
    python -m tests.simulator --summary run.jsonl                what was run with which code
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
from tests.simulator_record import Record, Share, fingerprint
from tests.toy_grammar import ToyGrammar

Event = tuple[Any, ...]
"""("submit", prompt, sampling, options, values of a `ToyGrammar` or None), ("abort", nth request),
("stop", nth request), ("turn", seconds, device is early), ("flush",)."""


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
    # To look at every page and lock costs as much as a turn: after each in one life of sixteen, to see what is wrong
    # for a moment; after some in the others, since what is wrong with a page or a lock mostly stays wrong.
    settings["check_every"] = 1 if rng.random() < 1 / 16 else 32
    longest = settings["max_model_len"] - 1
    prefixes = [random_tokens(rng, rng.randint(1, longest)) for _ in range(3)]
    busy, abort_rate = rng.choice([0.05, 0.3, 1.0]), rng.choice([0.0, 0.02, 0.2])
    shared, timed = rng.choice([0.0, 0.5, 0.95]), rng.choice([0.0, 0.2])
    priorities, salts = rng.choice([1, 1, 3]), [None, None, "a", "b"]
    several, paused = rng.choice([0.0, 0.0, 0.2]), rng.choice([0.0, 0.0, 0.02])
    ruled = rng.choice([0.0, 0.0, 0.2, 1.0])
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
                "n": rng.randrange(2, 6) if rng.random() < several else 1,
            }
            options = {
                "priority": rng.randrange(priorities),
                "timeout": rng.choice([0.001, 0.05, 1.0]) if rng.random() < timed else None,
                "cache_salt": rng.choice(salts) if settings["row_order_seed"] % 3 == 0 else None,
            }
            grammar = (rng.randrange(3), rng.randrange(1, 60), rng.random() < 0.1) if rng.random() < ruled else None
            events.append(("submit", prompt, sampling, options, grammar))
            submitted += sampling["n"]
            if rng.random() < 0.5:
                break
        if submitted and rng.random() < abort_rate:
            events.append((rng.choice(["abort", "stop"]), rng.randrange(submitted)))
        if rng.random() < 0.01:
            events.append(("flush",))
        seconds = 90.0 if rng.random() < paused else rng.choice([0.0, 0.001, 0.02, 0.3])
        events.append(("turn", seconds, rng.random() < 0.3))
    return Script(seed, settings, tuple(events))


def run(script: Script) -> int:
    """Plays a life to its end, idle and empty. Returns the steps that were launched."""
    harness = Harness(**script.settings)
    requests: list[Any] = []
    for kind, *given in script.events:
        if kind == "submit":
            prompt, sampling, options, rules = given
            grammar = None if rules is None else ToyGrammar(*rules)
            try:
                requests += harness.submit_samples(
                    prompt, options=RequestOptions(**options), grammar=grammar, **sampling
                )
            except QueueFullError:
                requests.append(None)
            except InvalidRequestError:
                fits = harness.num_pages * harness.page_size >= 2 * harness.max_model_len
                assert not fits or harness.max_model_len <= 2
                requests.append(None)
        elif kind in ("abort", "stop"):
            if given[0] < len(requests) and requests[given[0]] is not None:
                (harness.engine.abort if kind == "abort" else harness.engine.stop)(requests[given[0]])
        elif kind == "flush":
            harness.scheduler.flush_cache()
        else:
            harness.now += given[0]
            if given[1]:
                harness.runner.catch_up()
            if harness.engine.has_work:  # as who serves requests does it
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


def simulate(seeds: range) -> Share:
    """Lives one after the other; one that fails does not keep the others from being lived."""
    started, steps, failures = time.process_time(), 0, []
    for seed in seeds:
        try:
            steps += run(script_of(seed))
        except Exception as error:
            failures.append((seed, repr(error)))
    return Share(seeds.start, len(seeds), steps, failures, round(time.process_time() - started, 2))


SHARE = 100
"""Lives that a worker is given at a time."""


def shares(first_seed: int, workers: int, lives: int) -> Iterator[Share]:
    """Of so many consecutive seeds each, in their order, without end."""
    # Not forked: the caller may hold locks of jax's threads.
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        running: deque[Any] = deque()
        while True:
            while len(running) < 2 * workers:
                running.append(pool.apply_async(simulate, (range(first_seed, first_seed + lives),)))
                first_seed += lives
            yield running.popleft().get()


def simulate_until(
    steps: int, *, first_seed: int = 0, workers: int = 1, record: Record | None = None, share: int = SHARE
) -> tuple[int, int]:
    """Lives of consecutive seeds until they come to so many steps. Returns steps and lives.

    With a record, what it has of the same code counts, and the seeds go on after all that it has.

    Raises:
      AssertionError: a life has failed; its seed is named.
    """
    code = "" if record is None else fingerprint()
    recorded = [] if record is None else record.of(code)
    first_seed = first_seed if record is None else max(first_seed, record.next_seed)
    done, lives, reports = sum(old.steps for old in recorded), sum(old.lives for old in recorded), 0
    for new in shares(first_seed, workers, share) if done < steps else ():
        if record is not None:
            record.append(code, new)
        done, lives = done + new.steps, lives + new.lives
        for seed, error in new.failures:
            raise AssertionError(f"python -m tests.simulator --seed {seed} replays this: {error}")
        if done // REPORT_STEPS > reports:
            reports = done // REPORT_STEPS
            print(f"{done:,} steps, {lives:,} lives, the last of seed {new.next_seed - 1}", flush=True)
        if done >= steps:
            break
    return done, lives


REPORT_STEPS = 1_000_000
"""From one line about how far a run has come to the next."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="replay one life")
    parser.add_argument("--steps", type=int, default=2_000_000, help="device steps to run, those on record included")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--record", type=Path, metavar="FILE", help="add what is run, and go on after what is there")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="what a record has, by the code it was run with")
    options = parser.parse_args()
    if options.summary is not None:
        print(Record(options.summary).summary())
        return
    if options.seed is not None:
        script = script_of(options.seed)
        error = fails(script)
        print("passes" if error is None else f"{error!r}\n{shrink(script)}")
        raise SystemExit(error is not None)
    record = None if options.record is None else Record(options.record)
    started = time.monotonic()
    steps, lives = simulate_until(options.steps, first_seed=options.first_seed, workers=options.workers, record=record)
    spent = time.monotonic() - started
    print(f"{steps:,} steps, {lives:,} lives, {spent:.0f} s now: every request as the oracle has it")


if __name__ == "__main__":
    main()
