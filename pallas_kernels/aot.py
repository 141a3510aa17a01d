"""Compiles for a GPU that is not there, and tells what came out: kernels, registers, spills, shared memory, copies.

XLA compiles for a described device, given jax's CUDA plugin (`jax-cuda13-plugin` and `jax-cuda13-pjrt` of jax's
version, libdevice from a CUDA toolkit or the `nvidia-nvvm` and `nvidia-cuda-nvcc` wheels). Nothing is executed, so
nothing is known of speed; all else that a compiler can refuse or count is. Start Python with JAX_PLATFORMS=cpu
where there is no GPU.
"""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies


class CanNotCompile(RuntimeError):
    """There is no CUDA plugin for this jax, or no ptxas."""


@dataclass(frozen=True)
class Target:
    """A GPU as XLA's compiler sees it.

    Attributes:
      name: of the device; arch: ptxas's name for its instructions.
      capability: compute capability.
      cores: multiprocessors; shared_memory: bytes that a program may use; the rest feeds XLA's cost model.
    """

    name: str
    arch: str
    capability: tuple[int, int]
    cores: int
    shared_memory: int
    shared_memory_per_core: int
    threads_per_core: int
    bandwidth: int
    l2_cache: int
    memory: int
    clock_ghz: float

    @property
    def config(self) -> str:
        """As the text of XLA's GpuTargetConfigProto."""
        major, minor = self.capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_memory_per_core}
  threads_per_core_limit: {self.threads_per_core}
  core_count: {self.cores}
  fpus_per_core: {64 if self.capability == (8, 0) else 128}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth}
  l2_cache_size: {self.l2_cache}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory}
  shared_memory_per_block_optin: {self.shared_memory}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 minor: 0 patch: 0 }}
device_description_str: "{self.name}"
"""


TARGETS = {
    "h200": Target(
        "NVIDIA H200", "sm_90a", (9, 0), 132, 232448, 233472, 2048, 4_800_000_000_000, 60 << 20, 150754820096, 1.98
    ),
    "a100": Target(
        "NVIDIA A100-SXM4-80GB", "sm_80", (8, 0), 108, 166912, 167936, 2048, 2_039_000_000_000, 40 << 20, 85 << 30, 1.41
    ),
    "l4": Target("NVIDIA L4", "sm_89", (8, 9), 58, 101376, 102400, 1536, 300_000_000_000, 48 << 20, 24 << 30, 2.04),
}


MOSAIC_KERNEL = "kMosaicKernel"
"""The kind of thunks that are kernels of Mosaic GPU; XLA's name for them is kCustomCall."""


@dataclass(frozen=True)
class Thunk:
    """One thing the driver is asked to do.

    Attributes:
      kind: XLA's name for it, such as kKernel, kCustomKernel, kCopy, kCommandBuffer.
      depth: how many others it is inside of.
      shared_memory: bytes, of kernels.
    """

    kind: str
    name: str
    depth: int
    shared_memory: int

    @property
    def is_kernel(self) -> bool:
        return self.kind in ("kKernel", "kCustomKernel", "kGemm", "kCublasLtMatmul", MOSAIC_KERNEL)

    @property
    def is_copy(self) -> bool:
        return "Copy" in self.kind


@dataclass(frozen=True)
class Resources:
    """What ptxas says of one kernel: registers of a thread; bytes spilled, of a thread."""

    registers: int
    spilled: int


@dataclass(frozen=True)
class Report:
    """A function compiled for a target.

    Attributes:
      thunks: in the order of execution.
      resources, ptx: by kernel, and the code, of those that XLA did not take from a library; empty unless asked for.
      argument_bytes, aliased_bytes, temporary_bytes: of device memory.
    """

    target: Target
    thunks: tuple[Thunk, ...]
    resources: dict[str, Resources]
    ptx: str
    argument_bytes: int
    aliased_bytes: int
    temporary_bytes: int

    @property
    def kernels(self) -> list[Thunk]:
        return [thunk for thunk in self.thunks if thunk.is_kernel]

    @property
    def copies(self) -> list[Thunk]:
        return [thunk for thunk in self.thunks if thunk.is_copy]

    @property
    def command_buffers(self) -> list[Thunk]:
        return [thunk for thunk in self.thunks if thunk.kind == "kCommandBuffer"]


def spec(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    """An argument that need not exist."""
    return jax.ShapeDtypeStruct(tuple(shape), dtype)


def compile_for(
    target: Target,
    function: Callable[..., Any],
    *specs: Any,
    donate: tuple[int, ...] = (),
    options: dict[str, Any] | None = None,
    ptxas: bool = True,
) -> Report:
    """Compiles `function` for one device of `target`.

    Args:
      specs: trees of `jax.ShapeDtypeStruct`; donate: which of them are donated.
      options: XLA's, beside its own defaults.
      ptxas: ask it for registers and spills, which takes as long again.

    Raises:
      CanNotCompile: the machine lacks what it takes.
    """
    try:
        topology = topologies.get_topology_desc(platform="cuda", target_config=target.config, topology="1x1x1")
    except Exception as error:
        jax_version = jax.__version__
        wheels = f"jax-cuda13-plugin=={jax_version} jax-cuda13-pjrt=={jax_version} nvidia-nvvm nvidia-cuda-nvcc"
        raise CanNotCompile(
            f"no compiler for NVIDIA GPUs beside jax {jax_version}; it comes with pip install --no-deps {wheels}"
            f": {error}"
        ) from error
    mesh = topologies.make_mesh(topology, (1,), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), specs)
    with tempfile.TemporaryDirectory() as folder, _device_kind(target), _mosaic_dump(folder if ptxas else None):
        lowered = jax.jit(function, donate_argnums=donate).lower(*placed)
        dump = {"xla_dump_to": folder, "xla_dump_emitter_re": "ptx" if ptxas else "nothing"}
        compiled = lowered.compile(compiler_options={**(options or {}), **dump})
        # The second is there only where a pass, such as that to command buffers, changed something.
        sequences = sorted(Path(folder).glob("*thunk_sequence*.txt"), key=lambda path: "after" in path.name)
        thunks = list(_read_thunks(sequences[-1].read_text())) if sequences else []
        if any(thunk.kind == "kCustomCall" for thunk in thunks):
            thunks = list(_with_mosaic(thunks, compiled.as_text() or "", Path(folder)))
        resources: dict[str, Resources] = {}
        code = list(Path(folder).glob("*.ptx"))
        for path in code:
            resources.update(_ask_ptxas(path, target.arch))
        ptx = "".join(path.read_text() for path in code)
        memory: Any = compiled.memory_analysis()
    return Report(
        target,
        tuple(thunks),
        resources,
        ptx,
        memory.argument_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
    )


@contextlib.contextmanager
def _mosaic_dump(folder: str | None) -> Iterator[None]:
    """Mosaic compiles its kernels itself, and XLA sees calls of what comes out; this has it leave their code here."""
    name = "MOSAIC_GPU_DUMP_TO"
    before = os.environ.pop(name, None)
    if folder is not None:
        os.environ[name] = folder
    try:
        yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before


def _with_mosaic(thunks: Sequence[Thunk], hlo: str, folder: Path) -> Iterator[Thunk]:
    """Tells Mosaic's kernels from other calls, which XLA's list does not: names in the order of the program, and shared
    memory where it was dumped."""
    calls = [line for line in hlo.splitlines() if re.search(r'custom_call_target="(?!__)', line)]
    found = iter([re.search(r"\\00(?!stable)([a-z_]+)_mosaic_gpu\\00", line) for line in calls])
    for thunk in thunks:
        name = next(found, None) if thunk.kind == "kCustomCall" else None
        if name is None:
            yield thunk
            continue
        dumps = "".join(path.read_text() for path in folder.glob(f"{name[1]}_*.after_layout_inference.txt"))
        shared = [int(size) for size in re.findall(r"dynamic_shared_memory_size %c(\d+)_i32", dumps)]
        yield replace(thunk, kind=MOSAIC_KERNEL, name=name[1], shared_memory=max(shared, default=0))


def _device_kind(target: Target) -> Any:
    """Newer versions of jax lower Pallas for the device of the mesh that is set."""
    device = jax.sharding.AbstractDevice(target.name, target.cores, "cuda")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def _read_thunks(text: str) -> Iterator[Thunk]:
    for line in text.splitlines():
        found = re.match(r"(\s*)\d+: (k\w+)\s+(?:\[[^]]*\])?\s*([^\s:]*)", line)
        if found:
            shared = re.search(r"shared_memory: (\d+) bytes", line)
            yield Thunk(found[2], found[3], len(found[1]) // 4, int(shared[1]) if shared else 0)


def _ask_ptxas(path: Path, arch: str) -> Iterator[tuple[str, Resources]]:
    command = [_ptxas(), "-v", f"-arch={arch}", str(path), "-o", "/dev/null"]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{command[0]} refused {path.name} (exit code {run.returncode}): {run.stderr[:500]}")
    for part in run.stderr.split("Compiling entry function")[1:]:
        name, registers = re.search(r"'(\S+)'", part), re.search(r"Used (\d+) registers", part)
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        if name and registers:
            yield (
                name[1].removesuffix("_mosaic_gpu_kernel"),
                Resources(int(registers[1]), sum(map(int, spilled.groups())) if spilled else 0),
            )


def _ptxas() -> str:
    """The one beside the CUDA plugin first: a toolkit of the machine may be too old for the PTX that XLA writes."""
    places: list[str | None] = [str(path) for folder in sys.path for path in Path(folder).glob("nvidia/*/bin/ptxas")]
    places += [shutil.which("ptxas"), "/usr/local/cuda/bin/ptxas"]
    for place in places:
        if place and Path(place).is_file():
            return place
    raise CanNotCompile("there is no ptxas: install a CUDA toolkit or the wheel nvidia-cuda-nvcc")
