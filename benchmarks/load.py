"""An open-loop load over gRPC: requests leave when their time has come, whether or not earlier ones are back.

A request's clock starts at the moment it was to leave, so a generator or a server that falls behind can't hide it.
Prompts are token ids, drawn from ids that are plain tokens in every model here; answers go on to their length.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxoverlap import SamplingParams
from jaxoverlap.client import AsyncClient
from jaxoverlap.errors import JaxOverlapError

_IDS = range(20, 90)


@dataclass(frozen=True)
class Work:
    """One request."""

    prompt: tuple[int, ...]
    output_len: int

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, seed=5, max_tokens=self.output_len, ignore_eos=True)


@dataclass
class Outcome:
    """What became of a request; seconds since it was to leave.

    Attributes:
      pieces: when each message with tokens came, and how many.
      aborted: it was ended on purpose; error: it was ended by anything else.
    """

    work: Work
    pieces: list[tuple[float, int]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    aborted: bool = False
    error: str | None = None

    @property
    def is_whole(self) -> bool:
        return self.error is None and not self.aborted

    @property
    def first_token(self) -> float:
        return self.pieces[0][0]

    @property
    def gaps(self) -> list[float]:
        """Seconds between messages, as a reader sees them."""
        return [later - earlier for (earlier, _), (later, _) in itertools.pairwise(self.pieces)]

    @property
    def seconds_per_token(self) -> float:
        """After the first message."""
        tokens = len(self.token_ids) - self.pieces[0][1]
        return (self.pieces[-1][0] - self.first_token) / tokens if tokens else 0.0


def lengths(described: str) -> Callable[[random.Random], int]:
    """From "64", "uniform:LOW,HIGH" or "lognormal:MEDIAN,SIGMA"."""
    kind, _, numbers = described.rpartition(":")
    try:
        values = [float(number) for number in numbers.split(",")]
    except ValueError:
        values = []
    if kind == "" and len(values) == 1:
        return lambda rng: int(values[0])
    if kind == "uniform" and len(values) == 2:
        return lambda rng: rng.randint(int(values[0]), int(values[1]))
    if kind == "lognormal" and len(values) == 2:
        return lambda rng: max(1, round(rng.lognormvariate(math.log(values[0]), values[1])))
    raise ValueError(f"{described!r}: use N, uniform:LOW,HIGH or lognormal:MEDIAN,SIGMA")


def make_work(count: int, prompt: str, output: str, file: Path | None, most: int, seed: int = 0) -> list[Work]:
    """Requests of lengths that are drawn, or taken in turn from a JSON list of [prompt, output]; `most` bounds both
    together."""
    rng = random.Random(seed)
    drawn: Iterator[tuple[int, int]]
    if file is None:
        prompt_len, output_len = lengths(prompt), lengths(output)
        drawn = ((prompt_len(rng), output_len(rng)) for _ in itertools.count())
    else:
        drawn = itertools.cycle((int(one), int(other)) for one, other in json.loads(file.read_text()))
    work = []
    for prompt_tokens, output_tokens in itertools.islice(drawn, count):
        prompt_tokens = min(prompt_tokens, most - 1)
        ids = tuple(rng.choice(_IDS) for _ in range(prompt_tokens))
        work.append(Work(ids, min(output_tokens, most - prompt_tokens)))
    return work


def arrivals(count: int, rate: float, burst: int, seed: int = 0) -> list[float]:
    """Seconds at which requests leave: bursts of `burst` (1 is a Poisson process), `rate` requests a second on average;
    an infinite rate is all at once."""
    if math.isinf(rate):
        return [0.0] * count
    rng = random.Random(seed)
    moments = itertools.accumulate(rng.expovariate(rate / burst) for _ in range(-(-count // burst)))
    return [moment for moment in moments for _ in range(burst)][:count]


async def ask(client: AsyncClient, work: Work, due: float, abort_after: int | None = None) -> Outcome:
    """Streams one request. `abort_after`: it is left after so many messages, before the first for 0."""
    outcome = Outcome(work)
    try:
        async with aclosing(client.stream(list(work.prompt), work.params)) as pieces:
            if abort_after == 0:
                first = asyncio.ensure_future(anext(pieces))
                await asyncio.wait([first], timeout=0.01)
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
                outcome.aborted = True
                return outcome
            async for piece in pieces:
                if piece.token_ids:
                    outcome.pieces.append((time.perf_counter() - due, len(piece.token_ids)))
                    outcome.token_ids += piece.token_ids
                if len(outcome.pieces) == abort_after:
                    outcome.aborted = True
                    return outcome
    except JaxOverlapError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    return outcome


async def run(client: AsyncClient, work: Sequence[Work], moments: Sequence[float]) -> tuple[list[Outcome], float]:
    """All of it; returns the outcomes and the seconds from the first to leave to the last to come back."""
    began = time.perf_counter()

    async def one(item: Work, moment: float) -> Outcome:
        await asyncio.sleep(began + moment - time.perf_counter())
        return await ask(client, item, began + moment)

    outcomes = await asyncio.gather(*(one(item, moment) for item, moment in zip(work, moments, strict=True)))
    return outcomes, time.perf_counter() - began - moments[0]


def summary(outcomes: Sequence[Outcome], seconds: float, first_target: float, token_target: float) -> dict[str, float]:
    """Percentiles in milliseconds. Goodput: requests a second whose first token came within `first_target` seconds and
    whose others took `token_target` seconds each, on average."""
    whole = [outcome for outcome in outcomes if outcome.is_whole]
    good = [one for one in whole if one.first_token <= first_target and one.seconds_per_token <= token_target]
    row: dict[str, float] = {
        "failed": len(outcomes) - len(whole),
        "req/s": len(whole) / seconds,
        "tok/s": sum(len(outcome.token_ids) for outcome in whole) / seconds,
        "goodput": len(good) / seconds,
    }
    for name, values in (
        ("TTFT", [outcome.first_token for outcome in whole]),
        ("ITL", [gap for outcome in whole for gap in outcome.gaps]),
    ):
        for share in (50, 90, 99):
            row[f"{name} p{share}"] = 1e3 * float(np.percentile(values, share)) if values else math.nan
    return row
