"""What the prefix cache saves on a trace of chats, on the embedded model.

Chats begin with one of 8 system prompts and have several turns; the prompt of a turn is everything before it and a new
message. Chats start at random times of a set rate, whatever the engine does, and a turn follows the last one's end
after a pause. The trace is cut into parts, which an engine with the cache and one without play in turn; the one without
has a quarter of the pages, which is more than its rows can fill. Tokens are random, so nothing but what is meant to be
shared is.

    hit rate        prompt tokens found in the cache / prompt tokens
    computed        prompt tokens launched
    ideal           every prefix once: prompt tokens that no earlier prompt or output contained, after the same tokens
    ideal, pages    the same if only whole pages can be found, and each request's last token is computed
    busy            seconds in which the engine had something to do
    same            answers that are token for token those of the other engine

Predictions. With system prompts of 150 tokens, messages of 25, answers of 16 and three turns, a prompt has 215 tokens,
of which 25 to 45 are new and 8 more sit in a page that is not whole: a hit rate of 0.75, computed tokens within 10 % of
the ideal in pages (two chats that begin at the same time compute their system prompt twice), which is 1.3 times the
ideal. Without the cache a prompt takes 4 mixed steps instead of one, so the time to the first token falls to a third
and the engine is busy half as long.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import report
from jaxoverlap import LLM, SamplingParams
from jaxoverlap.engine.engine import Engine
from jaxoverlap.request import Request


@dataclass(frozen=True)
class Turn:
    """`pause`: seconds after the end of the turn before."""

    message: list[int]
    outputs: int
    pause: float


@dataclass(frozen=True)
class Chat:
    start: float
    system: list[int]
    turns: list[Turn]


@dataclass
class Served:
    """One request; times in seconds on `time.perf_counter`."""

    due: float
    request: Request
    first_token: float | None = None
    end: float | None = None


@dataclass
class Arm:
    """An engine, and what it has served so far."""

    engine: Engine
    served: list[Served] = field(default_factory=list)
    wall: float = 0.0
    busy: float = 0.0


def make_parts(args: Any, vocab: int) -> list[list[Chat]]:
    """`args.requests` turns in all; the start times count from the beginning of each part."""
    rng = np.random.default_rng(args.seed)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(100, vocab, int(rng.integers(low, high + 1))).tolist()

    systems = [ids(*args.system) for _ in range(args.systems)]
    left = args.requests
    parts = []
    for part in range(args.parts):
        chats, now = [], 0.0
        in_part = left // (args.parts - part)
        left -= in_part
        while in_part:
            count = min(in_part, args.turns)
            in_part -= count
            now += float(rng.exponential(count / args.rate))
            turns = [Turn(ids(10, 40), int(rng.integers(8, 25)), float(rng.exponential(1.0))) for _ in range(count)]
            chats.append(Chat(now, systems[int(rng.integers(len(systems)))], turns))
        parts.append(chats)
    return parts


def play(arm: Arm, chats: Sequence[Chat]) -> None:
    """One part, to its end."""
    engine, serial = arm.engine, itertools.count()
    started = time.perf_counter()
    coming: list[tuple[float, int, list[int], tuple[Turn, ...]]] = []
    for chat in chats:
        coming.append((started + chat.start, next(serial), chat.system, tuple(chat.turns)))
    heapq.heapify(coming)
    running: dict[int, tuple[Served, tuple[Turn, ...]]] = {}
    while coming or running:
        now = time.perf_counter()
        while coming and coming[0][0] <= now:
            due, _, before, turns = heapq.heappop(coming)
            params = SamplingParams(temperature=0, max_tokens=turns[0].outputs, ignore_eos=True)
            served = Served(due, engine.add(before + turns[0].message, params))
            arm.served.append(served)
            running[served.request.request_id] = served, turns[1:]
        if not engine.has_work:
            time.sleep(max(0.0, coming[0][0] - time.perf_counter()))
            continue
        output = engine.step()
        ended = time.perf_counter()
        arm.busy += ended - now
        for request in output.requests:
            served, _ = running[request.request_id]
            served.first_token = served.first_token or ended
        for request in output.finished:
            served, turns = running.pop(request.request_id)
            served.end = ended
            if turns:
                so_far = request.prompt_ids.tolist() + request.output_ids
                heapq.heappush(coming, (ended + turns[0].pause, next(serial), so_far, turns))
    arm.wall += time.perf_counter() - started


def ideal(served: Sequence[Served], page: int) -> tuple[int, int]:
    """Prompt tokens to compute if every prefix is kept, and if every whole page of one is."""
    seen: set[int] = set()
    tokens = in_pages = 0
    for one in served:  # in the order of arrival: a turn comes after the end of the last one
        prompt, outputs = one.request.prompt_ids.tolist(), one.request.output_ids
        prefixes = list(itertools.accumulate(prompt + outputs[:-1], lambda h, token: hash((h, token)), initial=0))[1:]
        known = next((i for i, prefix in enumerate(prefixes[: len(prompt)]) if prefix not in seen), len(prompt))
        tokens += len(prompt) - known
        in_pages += len(prompt) - min(known, len(prompt) - 1) // page * page
        seen.update(prefixes)
    return tokens, in_pages


def sharing(llm: LLM, prefix_cache: bool, pages: slice) -> Engine:
    """Another engine on the same model, with a part of its pages. They take turns, each to the end of its requests."""
    config = dataclasses.replace(llm.resolved.scheduler, prefix_cache=prefix_cache)
    engine = Engine(config, llm.runner, lookahead=llm.resolved.lookahead)
    pool = engine.loop.scheduler.state.memory.pool
    pool.free(pool.allocate(config.limits.num_pages)[pages])
    return engine


def summary(name: str, arm: Arm, other: Arm, page: int) -> dict[str, Any]:
    counters = arm.engine.loop.scheduler.counters
    prompt = sum(one.request.prompt_len for one in arm.served)
    cached = sum(one.request.cached_tokens for one in arm.served)
    first = sorted(one.first_token - one.due for one in arm.served if one.first_token is not None)
    best, best_in_pages = ideal(arm.served, page)
    answers = [{tuple(s.request.prompt_ids.tolist()): s.request.output_ids for s in a.served} for a in (arm, other)]
    return {
        "cache": name,
        "requests": len(arm.served),
        "prompt tokens": prompt,
        "hit rate": cached / prompt,
        "computed": counters.computed_tokens,
        "ideal": best,
        "ideal, pages": best_in_pages,
        "first token p50 s": first[len(first) // 2],
        "p99 s": first[int(0.99 * len(first))],
        "tokens/s": sum(len(one.request.output_ids) for one in arm.served) / arm.wall,
        "busy s": arm.busy,
        "wall s": arm.wall,
        "preempted": counters.preemptions,
        "same": sum(answers[1].get(key) == value for key, value in answers[0].items()) / len(answers[0]),
    }


def main() -> None:
    options = report.parser(__doc__)
    options.add_argument("--requests", type=int, default=500)
    options.add_argument("--rate", type=float, default=1.5, help="requests a second")
    options.add_argument("--systems", type=int, default=8)
    options.add_argument(
        "--system", type=int, nargs=2, default=(100, 200), help="tokens of a system prompt, least and most"
    )
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--parts", type=int, default=10)
    options.add_argument("--max-running", type=int, default=9)
    options.add_argument("--max-model-len", type=int, default=8192)
    options.add_argument("--num-pages", type=int, default=2600)
    options.add_argument("--seed", type=int, default=0)
    args = options.parse_args()
    sizes = {"max_running": args.max_running, "max_model_len": args.max_model_len, "num_pages": args.num_pages}
    with LLM(progress=False, **sizes) as llm:
        page = llm.engine.limits.page_size
        parts = make_parts(args, llm.engine.limits.vocab_size)
        quarter = args.num_pages // 4
        engines = {"on": sharing(llm, True, slice(quarter, None)), "off": sharing(llm, False, slice(quarter))}
        for engine in engines.values():  # once through, with tokens that do not come again
            play(Arm(engine), [Chat(0.1 * i, [50] * 150, [Turn([51 + i] * 30, 12, 0.0)]) for i in range(12)])
            engine.loop.scheduler.flush_cache()
            counters = engine.loop.scheduler.counters
            counters.computed_tokens = counters.cached_tokens = counters.admitted_tokens = 0
        arms = {name: Arm(engine) for name, engine in engines.items()}
        settings = {name: value for name, value in vars(args).items() if name != "json"}
        for part, chats in enumerate(parts):
            for name in ("on", "off") if part % 2 == 0 else ("off", "on"):
                play(arms[name], chats)
            rows = [summary("on", arms["on"], arms["off"], page), summary("off", arms["off"], arms["on"], page)]
            # A run takes minutes; what is there is kept.
            results = {"settings": settings, "rows": rows}
            report.write(args.json, "prefix_cache", results, keys={"rows": ["cache"]})
    low, high = args.system
    title = f"{args.requests} requests, {args.rate} a second; system prompts of {low}–{high} tokens, {args.turns} turns"
    first = ("cache", "requests", "prompt tokens", "hit rate", "computed", "ideal", "ideal, pages", "same")
    report.show(title, [{name: row[name] for name in first} for row in rows])
    report.show(
        "The same, in time", [{n: value for n, value in row.items() if n == "cache" or n not in first} for row in rows]
    )


if __name__ == "__main__":
    main()
