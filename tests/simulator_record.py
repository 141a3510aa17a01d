"""What the simulator has run, a JSON line for each share of lives, so that a long run can be done on several days.

A line counts for the code that it was run with. That is told by a digest of the files that decide what a life does, not
by the revision, so that work elsewhere does not start the count again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DECIDING = (
    "jaxoverlap/scheduler/*.py",
    "jaxoverlap/cache/*.py",
    "jaxoverlap/engine/engine.py",
    "jaxoverlap/engine/loop.py",
    "jaxoverlap/request.py",
    "jaxoverlap/runtime/result_queue.py",
    "tests/simulator.py",
    "tests/harness.py",
    "tests/fakes.py",
    "tests/toy_grammar.py",
)


def fingerprint() -> str:
    """The SHA-256 of all `DECIDING` files with their names."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in DECIDING for path in ROOT.glob(pattern)):
        digest.update(f"{path.relative_to(ROOT)}\n{hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()


class Share(NamedTuple):
    """Lives of consecutive seeds, as they went.

    Attributes:
      first_seed, lives: of the seeds; steps: that the device did in the lives that passed.
      failures: seed and error of each life that did not.
      cpu_seconds: spent on all of them.
    """

    first_seed: int
    lives: int
    steps: int
    failures: list[tuple[int, str]]
    cpu_seconds: float

    @property
    def next_seed(self) -> int:
        return self.first_seed + self.lives


class Record:
    """A file of shares that grows; what is in it already was done by whatever code its lines name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shares: list[tuple[str, Share]] = []
        """With the fingerprint of their code."""
        for line in path.read_text().splitlines() if path.exists() else ():
            values = json.loads(line)
            self.shares.append((values.pop("fingerprint"), Share(**values)))

    @property
    def next_seed(self) -> int:
        """After all that were run, with whatever code."""
        return max((share.next_seed for _, share in self.shares), default=0)

    def of(self, code: str) -> list[Share]:
        return [share for fingerprint, share in self.shares if fingerprint == code]

    def append(self, code: str, share: Share) -> None:
        self.shares.append((code, share))
        with self.path.open("a") as file:
            print(json.dumps({"fingerprint": code, **share._asdict()}), file=file)

    def summary(self) -> str:
        """A paragraph for each code, in the order in which they were begun."""
        parts = []
        now = fingerprint()
        for code in dict.fromkeys(code for code, _ in self.shares):
            shares = self.of(code)
            failed = [seed for share in shares for seed, _ in share.failures]
            first, last = min(share.first_seed for share in shares), max(share.next_seed for share in shares) - 1
            hours = sum(share.cpu_seconds for share in shares) / 3600
            parts.append(
                f"{code[:16]}{' (the code as it is now)' if code == now else ''}\n"
                f"  {sum(share.steps for share in shares):,} steps, {sum(share.lives for share in shares):,} lives "
                f"(seeds {first} to {last}), {hours:.2f} core hours\n"
                f"  {len(failed)} failures{f': seeds {failed}' if failed else ''}"
            )
        return "\n".join(parts)
