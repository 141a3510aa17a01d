"""Every kernel × shape compiled for GPUs that are not there: no spills, and shared memory that they have.

For an H200; with JAXOVERLAP_ALL_GPUS for an A100 and an L4 as well, which takes some minutes more.
"""

import os
import re
from dataclasses import replace

import jax.numpy as jnp
import pytest

from pallas_kernels.aot import TARGETS, CanNotCompile, compile_for
from pallas_kernels.launches import LONG_ROWS, Launch, all_launches, launches
from pallas_kernels.pages import abstract, num_bytes
from pallas_kernels.shapes import HEADS

pytest.importorskip("jax_cuda13_plugin", reason="XLA's compiler for NVIDIA GPUs is not installed")

LAUNCHES = list(all_launches())
OLDER = [target for target in TARGETS if target != "h200"] if os.environ.get("JAXOVERLAP_ALL_GPUS") else []
ON = [("h200", launch) for launch in LAUNCHES]
# What writes is small and alike on all of them.
ON += [(target, each) for target in OLDER for each in LAUNCHES if "attention" in each.kernel and each.runs_on(target)]


@pytest.mark.parametrize(("target", "launch"), ON, ids=str)
def test_a_kernel_fits_the_gpu_without_spilling(target, launch):
    gpu = TARGETS[target]
    report = compile_for(gpu, launch.function, *launch.specs, donate=launch.donate)
    assert report.resources[launch.kernel].spilled == 0
    shared = [thunk.shared_memory for thunk in report.kernels if thunk.name == launch.kernel]
    assert len(shared) == 1
    assert shared[0] <= gpu.shared_memory
    assert not report.copies
    pools = [launch.specs[index] for index in launch.donate]
    assert report.aliased_bytes >= num_bytes(pools)


def one_of(implementation: str, kernel: str, case: str = "") -> Launch:
    found = (each for each in LAUNCHES if (each.implementation, each.kernel) == (implementation, kernel))
    return next(each for each in found if case in each.case)


@pytest.mark.parametrize("kernel", ["decode_attention", "extend_attention", "write_kv", "rope_and_write_kv"])
@pytest.mark.parametrize(("dtype", "most"), [("bfloat16", 2**31), ("int8", 2**32), ("float8_e4m3fn", 2**32)])
def test_large_pools_are_addressed_in_64_bits(kernel, dtype, most):
    """From so many numbers on; of codes, those from 2**31 on are refused (`is_addressable`)."""
    launch = next(each for each in launches(HEADS[2], jnp.bfloat16, 16, dtype) if each.kernel == kernel)
    pools = [index for index, each in enumerate(launch.specs) if getattr(each, "shape", ())[1:] == (16, 2, 128)]

    def products(pages: int) -> int:
        pool = abstract((pages, 16, 2, 128), dtype)
        specs = [pool if index in pools else each for index, each in enumerate(launch.specs)]
        ptx = compile_for(TARGETS["h200"], launch.function, *specs, donate=launch.donate).ptx
        return len(re.findall(r"(?:mul|mad)\.(?:lo\.s64|lo\.u64|wide\.[su]32)", ptx))

    assert len(pools) == 2
    page = 16 * 2 * 128
    assert products(most // page + 1) > products(2**31 // page)


def test_a_split_is_stored_before_it_is_announced_and_read_after():
    """Stores of all threads, barrier, atomic that releases and acquires on the whole GPU, barrier, loads."""
    launch = one_of("triton", "decode_attention", f"{LONG_ROWS} rows")
    ptx = compile_for(TARGETS["h200"], launch.function, *launch.specs, donate=launch.donate).ptx
    before, atomic, after = re.split(r"(atom\.global\S+)", ptx)
    assert atomic == "atom.global.gpu.acq_rel.add.u32"
    assert before.rindex("st.global") < before.rindex("bar.sync")
    assert after.index("bar.sync") < after.index("ld.global")


def test_a_part_is_in_memory_before_the_cluster_meets_and_read_after():
    """TMA's store is waited for, fence, arrival at the cluster's barrier, wait, fence, loads that no cache answers."""
    # No other test's: what Mosaic has compiled it keeps, and writes no code of it again.
    launch = next(launches(HEADS[0], jnp.bfloat16, 32, implementation="mosaic"))
    ptx = compile_for(TARGETS["h200"], launch.function, *launch.specs, donate=launch.donate).ptx
    stored, met, read = ptx.split("fence.acq_rel.cluster;")
    wait = stored.rindex("cp.async.bulk.wait_group")
    assert stored.rindex("cp.async.bulk.tensor") < wait < stored.rindex("bar.sync")
    assert met.index("mbarrier.arrive.shared::cluster") < met.index("mbarrier.try_wait")
    assert "ld.global" not in met and "ld.global" in read and "ld.global.nc" not in read


def test_where_there_is_no_compiler_it_says_so():
    nowhere = replace(TARGETS["h200"], name='no text of a protocol buffer: "')
    with pytest.raises(CanNotCompile, match="no compiler for NVIDIA GPUs"):
        compile_for(nowhere, lambda: None)
