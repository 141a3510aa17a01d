"""The one list of shapes that tests and benchmarks share."""

from dataclasses import dataclass

# Around a page, a block and a tile: where an off-by-one shows.
AWKWARD_LENGTHS = (1, 15, 16, 17, 127, 128, 129)
PAGE_SIZES = (8, 16, 64)


@dataclass(frozen=True)
class Heads:
    """Query heads H, KV heads K and head dim D of a model family."""

    name: str
    heads: int
    kv_heads: int
    dim: int

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads


SMOLLM2_135M = Heads("smollm2-135m", 9, 3, 64)

# Every group size and head dim that a kernel has to take, each at least once.
HEADS = (
    SMOLLM2_135M,  # G = 3
    Heads("mha", 2, 2, 80),  # G = 1
    Heads("g4", 8, 2, 128),
    Heads("g5", 5, 1, 96),
    Heads("g7", 14, 2, 64),
    Heads("g8", 8, 1, 128),
)


@dataclass(frozen=True)
class DecodeCase:
    """Rows of a decode step, their lengths spread evenly over [shortest, longest]."""

    rows: int
    shortest: int
    longest: int

    @property
    def lengths(self) -> list[int]:
        span = max(self.rows - 1, 1)
        return [self.shortest + i * (self.longest - self.shortest) // span for i in range(self.rows)]


@dataclass(frozen=True)
class ExtendCase:
    """`rows` chunks of `chunk` tokens, each after `cached` tokens already written."""

    rows: int
    chunk: int
    cached: int

    @property
    def tokens(self) -> int:
        return self.rows * self.chunk


DECODE_CASES = (
    DecodeCase(1, 128, 128),
    DecodeCase(2, 64, 192),
    DecodeCase(4, 64, 192),
    DecodeCase(8, 64, 192),
    DecodeCase(16, 64, 192),
    DecodeCase(32, 64, 192),
    DecodeCase(8, 64, 4096),
)
EXTEND_CASES = (
    ExtendCase(1, 32, 0),
    ExtendCase(1, 128, 0),
    ExtendCase(8, 64, 0),
    ExtendCase(1, 512, 0),
    ExtendCase(1, 512, 3584),
)
