"""How large a kernel's tiles are: by a formula, or by a table that `pallas_kernels.autotune` has written for the GPU.

A table is `tuned/NAME-OF-THE-GPU.json` in this package: what was found for each `Problem.key`. Whatever it leaves out
the formula decides, so a GPU without a table works as before.
"""

import functools
import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.pages import QUANTIZED

FOLDER = Path(__file__).parent / "tuned"

PROGRAMS = 4 * 132  # four for each multiprocessor of an H200
SPLIT_POSITIONS = 256  # fewer are not worth a program of their own
MAX_SPLITS = 64
BLOCK_BYTES = 16 * 1024  # of a block of keys; with that many for values, two stages fit every GPU's shared memory
QUERIES = 64  # rows of an extend tile: wgmma needs 64, and 128 spill on Ampere
FLOAT32_TILE = 32, 16  # queries and positions: float32 products do not run on tensor cores, and wider ones spill


def power_of_two(n: int) -> int:
    """The smallest that is at least `n`."""
    return 1 << (n - 1).bit_length()


@dataclass(frozen=True)
class Tiling:
    """A launch's sizes.

    Attributes:
      queries: of a tile; block: positions in a block of keys; splits: programs that a row's context may be split among.
      num_warps, num_stages: Triton's.
    """

    queries: int
    block: int
    splits: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Problem:
    """What decides a kernel's tiling.

    Attributes:
      kernel: "decode_attention" or "extend_attention".
      group, kv_heads, dim: G, K, D. dtype: of products; pool_dtype: of the pools. page_size: S.
      rows: B, of decode; 1 of extend.
      longest: positions that a row may read.
    """

    kernel: str
    group: int
    kv_heads: int
    dim: int
    dtype: str
    pool_dtype: str
    page_size: int
    rows: int
    longest: int

    @property
    def key(self) -> str:
        """Its line in a table; rows and positions in powers of two."""
        heads = f"{self.group}x{self.kv_heads} heads of {self.dim}, {self.dtype} over {self.pool_dtype}"
        size = f"pages of {self.page_size}, {power_of_two(self.rows)} rows, {power_of_two(self.longest)} positions"
        return f"{self.kernel}, {heads}, {size}"


def tiling(problem: Problem) -> Tiling:
    """For the GPU that is compiled for."""
    return table(device_name()).get(problem.key) or formula(problem)


def formula(problem: Problem) -> Tiling:
    """What compiles without spilling on every GPU from Ampere on, and should keep an H200 busy."""
    group, dim, size = problem.group, problem.dim, jnp.dtype(problem.dtype).itemsize
    block = max(16, min(64, BLOCK_BYTES // (power_of_two(dim) * size)))
    if problem.kernel == "decode_attention":
        return Tiling(
            queries=max(16, power_of_two(group)),
            block=block,
            splits=num_splits(problem.rows, problem.kv_heads, problem.longest),
            # Float32 products and masked lanes take registers: 4 warps would spill there, but over codes 8 of them do.
            num_warps=4 if size == 2 and (dim == power_of_two(dim) or problem.pool_dtype in QUANTIZED) else 8,
            # What the page table leaves of 5 stages are two buffers, of 3 one.
            num_stages=5 if size == 2 else 3,
        )
    queries, block = FLOAT32_TILE if size == 4 else (QUERIES, block)
    stages = 3
    if group >= 8 and dim > 64:
        block, stages = min(block, 32), 2  # an L4 spills with larger blocks, an A100 with more stages
    # As many warps as hold it without spilling.
    return Tiling(queries, block, splits=1, num_warps=8 if size == 4 or dim > 64 else 4, num_stages=stages)


def num_splits(rows: int, kv_heads: int, longest: int) -> int:
    """Programs for the longest context there can be: enough to fill a GPU, none with too little to do."""
    return max(1, min(-(-PROGRAMS // (rows * kv_heads)), -(-longest // SPLIT_POSITIONS), MAX_SPLITS))


def device_name() -> str:
    """Of the device that is compiled for, which need not be there."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    return described.device_kind if described is not None else jax.devices()[0].device_kind


def path_of(device: str) -> Path:
    return FOLDER / f"{device.replace(' ', '-')}.json"


@functools.cache
def table(device: str) -> dict[str, Tiling]:
    """What was found for a device; empty where nothing was.

    Raises:
      ValueError: the file is no such table.
    """
    path = path_of(device)
    if not path.is_file():
        return {}
    names = {field.name for field in fields(Tiling)}
    entries = json.loads(path.read_text())["tilings"]
    for key, entry in entries.items():
        if set(entry) != names or not all(isinstance(value, int) and value > 0 for value in entry.values()):
            raise ValueError(f"{path}: {key!r} is {entry}, allowed are positive integers {sorted(names)}")
    return {key: Tiling(**entry) for key, entry in entries.items()}


def write_table(device: str, found: dict[str, Tiling], how: str) -> Path:
    """Adds to a device's table; `how` says how they were chosen."""
    path = path_of(device)
    entries: dict[str, Any] = {key: asdict(entry) for key, entry in {**table(device), **found}.items()}
    path.parent.mkdir(exist_ok=True)
    content = {"device": device, "how": how, "jax": jax.__version__, "tilings": dict(sorted(entries.items()))}
    path.write_text(json.dumps(content, indent=1) + "\n")
    table.cache_clear()
    return path
