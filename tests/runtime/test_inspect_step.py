"""Whole steps compiled for an H200 that is not there: one command buffer, nothing copied, few kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import pytest

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.rope import RopeConfig
from jaxoverlap.runtime.inspect_step import MAX_KERNELS, inspect_step
from pallas_kernels.aot import TARGETS

pytest.importorskip("jax_cuda13_plugin", reason="XLA's compiler for NVIDIA GPUs is not installed")

SMOLLM2_135M = ModelConfig("llama", 49_152, 576, 30, 9, 3, 64, 1536, 1e-5, RopeConfig(theta=1e5), True)
FEW_LAYERS = replace(SMOLLM2_135M, num_layers=4, windows=())


@pytest.mark.parametrize(("attention", "model"), [("triton", SMOLLM2_135M), ("mosaic", FEW_LAYERS)])
def test_a_decode_step_is_one_command_buffer_that_copies_nothing(attention, model):
    report = inspect_step(model, TARGETS["h200"], attention=attention, decode_rows=64)
    assert not report.faults, str(report)
    assert report.kernels_per_layer == MAX_KERNELS == 9
    assert all(kernel.depth == 1 for kernel in report.compiled.kernels)


@pytest.mark.parametrize(("attention", "kv_dtype"), [("mosaic", "int8"), ("triton", "float8_e4m3fn")])
def test_a_step_over_codes_is_one_too_and_its_pool_has_about_half_the_bytes(attention, kv_dtype):
    report = inspect_step(FEW_LAYERS, TARGETS["h200"], attention=attention, decode_rows=64, kv_dtype=kv_dtype)
    assert not report.faults, str(report)
    assert report.kernels_per_layer == MAX_KERNELS
    assert report.pool_bytes == 4 * 4096 * 16 * 3 * 2 * (64 + 4)  # bfloat16 has 2 * 64 for 64 + 4


@pytest.mark.parametrize(
    ("attention", "prompt_tokens", "decode_rows", "kernels"),
    [("triton", 0, 4, 9), ("triton", 512, 0, 9), ("triton", 512, 8, 10), ("mosaic", 512, 0, 9), ("mosaic", 512, 8, 10)],
)
def test_so_are_steps_with_prompts_and_those_of_few_rows(attention, prompt_tokens, decode_rows, kernels):
    shape = {"prompt_tokens": prompt_tokens, "decode_rows": decode_rows}
    report = inspect_step(FEW_LAYERS, TARGETS["h200"], attention=attention, **shape)
    assert not report.faults, str(report)
    assert report.kernels_per_layer == len(report.kernels_of_a_layer) == kernels
    assert all(kernel.depth == 1 for kernel in report.compiled.kernels)


def test_a_step_over_a_pool_that_is_divided_is_still_one_command_buffer():
    """Its codes are between 2**31 and 2**32: two stages with a pool each."""
    pages = 2**31 // (4 * 16 * 3 * 64) + 1
    report = inspect_step(FEW_LAYERS, TARGETS["h200"], decode_rows=64, kv_dtype="int8", num_pages=pages)
    assert not report.faults, str(report)
    assert report.kernels_per_layer == MAX_KERNELS
    assert report.pool_bytes == pages * 4 * 16 * 3 * 2 * (64 + 4)


@pytest.mark.skipif(not os.environ.get("JAXOVERLAP_ALL_GPUS"), reason="JAXOVERLAP_ALL_GPUS is not set")
@pytest.mark.parametrize("target", ["a100", "l4"])
def test_older_gpus(target):
    report = inspect_step(SMOLLM2_135M, TARGETS[target], decode_rows=8)
    assert report.pool_stays and report.kernels_per_layer is not None


def test_the_command_says_the_same_of_a_large_model():
    command = [sys.executable, "-m", "jaxoverlap.cli.main", "inspect-step", "--model", "llama-3-8b"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "9 per layer" in done.stdout and "command buffers    1" in done.stdout
