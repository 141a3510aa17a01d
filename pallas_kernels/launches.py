"""Every kernel with every shape that it has to take, as something to compile: `python -m pallas_kernels.launches`."""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax.numpy as jnp

import pallas_kernels as pk
from pallas_kernels.aot import TARGETS, compile_for, spec
from pallas_kernels.choice import unavailable
from pallas_kernels.pages import abstract
from pallas_kernels.shapes import HEADS, Heads

ROWS, LONG_ROWS, TOKENS, PAGES, COLUMNS = 64, 4, 512, 4096, 128


@dataclass(frozen=True)
class Launch:
    """A call of one kernel.

    Attributes:
      kernel: its name; implementation: whose it is; case: what it is called with, in words.
      function, specs, donate: as for `compile_for`.
    """

    kernel: str
    implementation: str
    case: str
    function: Callable[..., Any]
    specs: tuple[Any, ...]
    donate: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.kernel} {self.implementation} {self.case}"

    def runs_on(self, target: str) -> bool:
        """Whether a target of `TARGETS` has what the kernel is made of."""
        if self.implementation == "mosaic":
            return target == "h200"
        return "float8" not in self.case or TARGETS[target].capability >= (8, 9)


def launches(
    heads: Heads, dtype: Any, page_size: int, pool_dtype: Any = None, implementation: str = "triton"
) -> Iterator[Launch]:
    """All kernels for a model's heads. Decode twice: rows enough for a GPU, and few that must be split; of Mosaic's,
    where both are split, only these."""
    h, k, d = heads.heads, heads.kv_heads, heads.dim
    dtype, pool_dtype = jnp.dtype(dtype), jnp.dtype(pool_dtype or dtype)
    case = f"{heads.name} {pool_dtype} page {page_size}"
    pool = abstract((2 * PAGES, page_size, k, d), pool_dtype)
    options: dict[str, Any] = {"page_offset": PAGES, "scale": d**-0.5, "implementation": implementation}

    def ints(*shape: int) -> Any:
        return spec(shape, jnp.int32)

    def decode(*arrays: Any) -> Any:
        return pk.decode_attention(*arrays, **options)

    def extend(*arrays: Any) -> Any:
        return pk.extend_attention(*arrays, **options)

    def write(*arrays: Any) -> Any:
        return pk.write_kv(*arrays, implementation=implementation)

    def rope(*arrays: Any) -> Any:
        return pk.rope_and_write_kv(*arrays, norm_eps=1e-6, implementation=implementation)

    arrays: tuple[Any, ...]
    for rows, columns in ((ROWS, COLUMNS), (LONG_ROWS, 4 * COLUMNS))[implementation == "mosaic" :]:
        arrays = (spec((rows, h, d), dtype), pool, pool, ints(rows, columns), ints(rows), ints(rows, k))
        yield Launch("decode_attention", implementation, f"{case}, {rows} rows", decode, arrays, (5,))
    tables = (ints(8, COLUMNS), ints(9), ints(8))
    yield Launch("extend_attention", implementation, case, extend, (spec((TOKENS, h, d), dtype), pool, pool, *tables))
    if implementation == "mosaic":  # its writes are Triton's
        return
    line = spec((ROWS, k, d), dtype)
    yield Launch("write_kv", implementation, case, write, (pool, pool, line, line, ints(ROWS)), (0, 1))
    phases = spec((ROWS, d // 2), jnp.float32)
    arrays = (spec((ROWS, (h + 2 * k) * d), dtype), pool, pool, phases, phases, ints(ROWS), spec((2, d), jnp.float32))
    yield Launch("rope_and_write_kv", implementation, case, rope, arrays, (1, 2))


WIDE = Heads("g8-wide", 16, 2, 256)


def draw(vocab_size: int) -> Launch:
    """A draw for rows that each have parameters of their own."""
    floats, ints = spec((ROWS,), jnp.float32), spec((ROWS,), jnp.int32)
    arrays = (spec((ROWS, vocab_size), jnp.float32), floats, floats, ints, floats, floats, floats, spec((ROWS,), bool))
    return Launch("draw_tokens", "triton", f"of {vocab_size}", partial(pk.draw_tokens, implementation="triton"), arrays)


def all_launches() -> Iterator[Launch]:
    """Group sizes, head dims, dtypes and page sizes, each at least once; not their product."""
    yield from map(draw, (97, 128_256))
    for heads in HEADS:
        yield from launches(heads, jnp.bfloat16, 16)
    for heads, dtype, page_size in (
        (HEADS[0], jnp.float32, 16),
        (HEADS[2], jnp.float32, 16),
        (HEADS[2], jnp.bfloat16, 64),
        (HEADS[4], jnp.float16, 8),
        (WIDE, jnp.bfloat16, 16),
    ):
        yield from launches(heads, dtype, page_size)
    for heads, pool_dtype in (
        (HEADS[0], "int8"),
        (HEADS[0], "float8_e4m3fn"),
        (HEADS[3], "int8"),
        (HEADS[5], "int8"),
        (HEADS[5], "float8_e4m3fn"),
    ):
        yield from launches(heads, jnp.bfloat16, 16, pool_dtype)
    if unavailable("mosaic") is None:
        for heads, dtype, page_size, codes in (
            (HEADS[0], jnp.bfloat16, 16, None),
            (HEADS[1], jnp.float16, 8, None),
            (HEADS[2], jnp.bfloat16, 64, None),
            (HEADS[3], jnp.bfloat16, 16, None),
            (WIDE, jnp.bfloat16, 24, None),
            (HEADS[0], jnp.bfloat16, 16, "int8"),
            (HEADS[5], jnp.bfloat16, 64, "float8_e4m3fn"),
        ):
            yield from launches(heads, dtype, page_size, codes, "mosaic")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiles every kernel for GPUs that need not be there.")
    parser.add_argument("targets", nargs="*", default=["h200"], help=f"of {', '.join(TARGETS)}; h200 if left out")
    failed = 0
    print(f"{'GPU':5} {'kernel':60} {'registers':>9} {'spilled':>8} {'shared memory':>14}")
    for target in parser.parse_args().targets:
        for launch in all_launches():
            if not launch.runs_on(target):
                continue
            report = compile_for(TARGETS[target], launch.function, *launch.specs, donate=launch.donate)
            used = report.resources[launch.kernel]
            shared = max(thunk.shared_memory for thunk in report.kernels if thunk.name == launch.kernel)
            failed += used.spilled > 0 or shared > TARGETS[target].shared_memory
            print(f"{target:5} {launch!s:60} {used.registers:9} {used.spilled:8} {shared:14}", flush=True)
    if failed:
        raise SystemExit(f"{failed} kernels spill registers or need more shared memory than there is")


if __name__ == "__main__":
    main()
