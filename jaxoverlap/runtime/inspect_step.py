"""What a step is on a GPU that is not there: its kernels, copies and memory, as XLA compiles it (`pallas_kernels.aot`).

A step should be one command buffer (one CUDA graph: one launch for the driver), copy nothing, leave the pool where it
is, and have few kernels per layer: at few rows a kernel takes about as long as its launch.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.decoder import abstract_weights
from jaxoverlap.model.rope import RopeConfig
from jaxoverlap.runtime.buckets import StepShape, round_up, row_multiple
from jaxoverlap.runtime.packing import packed_size
from jaxoverlap.runtime.row_state import KVPages, RowState, stages_for_pool
from jaxoverlap.runtime.step import DeviceStep
from pallas_kernels.aot import Report, Target, compile_for, spec
from pallas_kernels.pages import num_bytes

MAX_KERNELS = 9
"""Of a layer: norm, QKV, rope and write, attention, O, norm, gate and up, their product, down. One more in a step that
has both prompts and decoding rows, because their attentions are two."""


@dataclass(frozen=True)
class StepReport:
    """The first half of a step, compiled.

    Attributes:
      compiled: by XLA.
      shape: of the step.
      num_layers: of the model.
      pool_bytes: of the KV pool, keys and values.
    """

    compiled: Report
    shape: StepShape
    num_layers: int
    pool_bytes: int

    @property
    def kernels_per_layer(self) -> int | None:
        """At most; None where attention is no kernel of ours."""
        return max(map(len, self._layers), default=None)

    @property
    def kernels_of_a_layer(self) -> list[str]:
        """The names of them, in the middle of the model."""
        layers = self._layers
        return layers[len(layers) // 2] if layers else []

    @property
    def _layers(self) -> list[list[str]]:
        """Names of kernels, from each layer's attention to the next one's; from the second of two, because before the
        first one's is what all layers share."""
        names = [kernel.name for kernel in self.compiled.kernels]
        last = "decode_attention" if self.shape.decode_rows else "extend_attention"
        found = [index for index, name in enumerate(names) if name.startswith(last)]
        return [names[before:after] for before, after in pairwise(found)]

    @property
    def pool_stays(self) -> bool:
        return self.compiled.aliased_bytes >= self.pool_bytes

    @property
    def faults(self) -> list[str]:
        """What a step should not be."""
        compiled, shape = self.compiled, self.shape
        most = MAX_KERNELS + bool(shape.prefill_tokens and shape.decode_rows)
        outside = [thunk.name for thunk in compiled.kernels if thunk.depth == 0]
        found = {
            f"{len(compiled.command_buffers)} command buffers, not one": len(compiled.command_buffers) != 1,
            f"{len(outside)} kernels outside of command buffers": bool(outside),
            f"{len(compiled.copies)} copies": bool(compiled.copies),
            "the KV pool is copied": not self.pool_stays,
            "temporaries of 5 % of the KV pool and more": 20 * compiled.temporary_bytes >= self.pool_bytes
            and not shape.prefill_tokens,  # those of prompts grow with them
            f"{self.kernels_per_layer} kernels per layer, more than {most}": (self.kernels_per_layer or 0) > most,
        }
        return [fault for fault, is_so in found.items() if is_so]

    def __str__(self) -> str:
        compiled = self.compiled
        kinds = Counter(thunk.kind for thunk in compiled.thunks if not thunk.is_kernel)
        others = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())) or "none"
        per_layer = self.kernels_per_layer
        lines = [
            f"{compiled.target.name}, {self.num_layers} layers",
            f"kernels            {len(compiled.kernels)}" + (f", {per_layer} per layer" if per_layer else ""),
            f"command buffers    {len(compiled.command_buffers)}",
            f"copies             {len(compiled.copies)}",
            f"other thunks       {others}",
            f"KV pool            {self.pool_bytes / 1e9:.2f} GB, {'in place' if self.pool_stays else 'COPIED'}",
            f"temporaries        {compiled.temporary_bytes / 1e6:.1f} MB, "
            f"{100 * compiled.temporary_bytes / self.pool_bytes:.1f} % of the pool",
        ]
        if per_layer:
            lines.append("a layer            " + ", ".join(self.kernels_of_a_layer))
        return "\n".join(lines)


def inspect_step(
    config: ModelConfig,
    target: Target,
    *,
    attention: str = "triton",
    dtype: Any = jnp.bfloat16,
    kv_dtype: Any = None,
    decode_rows: int = 64,
    prompt_tokens: int = 0,
    num_pages: int = 4096,
    page_size: int = 16,
    max_model_len: int = 2048,
    max_running: int = 256,
) -> StepReport:
    """Compiles the step of so many decoding rows and prompt tokens; weights and pool need not exist.

    The pool is of `kv_dtype`, or of `dtype` as weights and activations are.

    Raises:
      pallas_kernels.aot.CanNotCompile: the machine lacks XLA's compiler for NVIDIA GPUs.
    """
    pages_per_row = -(-max_model_len // page_size)
    pool = num_pages, page_size, dtype if kv_dtype is None else kv_dtype
    prompts, multiple = min(prompt_tokens, 16), row_multiple(attention)
    rows = round_up(decode_rows, multiple)
    shape = StepShape(prompt_tokens, prompts, rows, round_up(prompts + rows, multiple))
    step = DeviceStep(
        config=config,
        dtype=jnp.dtype(dtype),
        num_rows=max_running,
        pages_per_row=pages_per_row,
        num_pages=num_pages,
        page_size=page_size,
        max_step_tokens=prompt_tokens + rows,
        attention=attention,
        max_stages=1 if attention == "xla" else stages_for_pool(config, *pool),
    )
    weights = tuple(abstract_weights(stage, jnp.dtype(dtype)) for stage in step.stages)
    kv = tuple(KVPages.abstract(stage, *pool) for stage in step.stages)
    state = jax.eval_shape(partial(RowState.blank, max_running, pages_per_row, num_pages))
    packed = spec((packed_size(shape, pages_per_row),), jnp.int32)
    arguments = (weights, kv, state, packed)
    options = step.compiler_options
    compiled = compile_for(target, step.functions(shape), *arguments, donate=(1, 2), options=options, ptxas=False)
    return StepReport(compiled, shape, config.num_layers, num_bytes(kv))


LLAMA_3_8B = ModelConfig(
    family="llama",
    vocab_size=128_256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14_336,
    norm_eps=1e-5,
    rope=RopeConfig(theta=500_000.0),
    tie_word_embeddings=False,
    max_position_embeddings=8192,
)
