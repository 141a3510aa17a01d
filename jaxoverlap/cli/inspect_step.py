"""`jaxoverlap inspect-step`: what XLA makes of a step, for a GPU that need not be there."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from jaxoverlap.cli.command import FAILED, OK, SOME_FAILED, say
from jaxoverlap.config import KV_CACHE_DTYPES, MAX_RUNNING

Gpu = Annotated[str, typer.Option("--gpu", metavar="h200|a100|l4", help="Which one.")]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        show_default=False,
        help="Folder, .gguf file or hub id, or llama-3-8b for that shape. Default: SmolLM2-135M-Instruct.",
    ),
]
Rows = Annotated[int, typer.Option("--rows", min=0, max=MAX_RUNNING, help="Rows that decode.")]
PromptTokens = Annotated[int, typer.Option("--prompt-tokens", min=0, max=2**20, help="Prompt tokens beside them.")]
Attention = Annotated[str, typer.Option("--attention", metavar="triton|mosaic|xla", help="Who computes attention.")]
KvCacheDtype = Annotated[
    str,
    typer.Option(
        "--kv-cache-dtype",
        metavar="auto|float32|bfloat16|float16|fp8|int8",
        help="Of KV pages; auto is bfloat16, as the weights are.",
    ),
]
NumPages = Annotated[int, typer.Option("--num-pages", min=1, max=2**30, help="KV pages.")]
PageSize = Annotated[int, typer.Option("--page-size", min=1, max=1024, help="Tokens in a KV page.")]


def inspect_step(
    model: Model = None,
    gpu: Gpu = "h200",
    rows: Rows = 64,
    prompt_tokens: PromptTokens = 0,
    attention: Attention = "triton",
    kv_cache_dtype: KvCacheDtype = "auto",
    num_pages: NumPages = 4096,
    page_size: PageSize = 16,
) -> int:
    """Compile a step for a GPU that need not be there, and say what it is: kernels, copies, memory.

    Ends with 1 where the step is more than one command buffer, copies, or has too many kernels. Needs the CUDA
    plugin of the installed jax (jax-cuda13-plugin, jax-cuda13-pjrt), but no GPU.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax.numpy as jnp

    from jaxoverlap.model.loading import open_model
    from jaxoverlap.runtime import inspect_step as inspection
    from jaxoverlap.runtime.row_state import resolve_kv_dtype
    from pallas_kernels.aot import TARGETS, CanNotCompile

    for name, value, allowed in (
        ("gpu", gpu, tuple(TARGETS)),
        ("attention", attention, ("triton", "mosaic", "xla")),
        ("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES),
    ):
        if value not in allowed:
            say(f"error: {name}: {value!r} is not allowed; use one of {', '.join(allowed)}")
            return FAILED
    if rows + prompt_tokens == 0:
        say("error: rows and prompt_tokens are both 0: a step has at least one of them")
        return FAILED
    config = inspection.LLAMA_3_8B if model == "llama-3-8b" else open_model(model).config
    try:
        report = inspection.inspect_step(
            config,
            TARGETS[gpu],
            attention=attention,
            kv_dtype=resolve_kv_dtype(kv_cache_dtype, jnp.dtype(jnp.bfloat16)),
            decode_rows=rows,
            prompt_tokens=prompt_tokens,
            num_pages=num_pages,
            page_size=page_size,
        )
    except CanNotCompile as error:
        say(f"error: {error}")
        return FAILED
    print(report)
    for fault in report.faults:
        print(f"not as it should be: {fault}")
    return SOME_FAILED if report.faults else OK
