"""What the device knows of every row. It stays there; the host sends only what changes.

`last_token` is the future-token buffer: a step leaves a row's next token here, at the row's own index, and the
next step takes it from here. It never travels through the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.model.config import ModelConfig
from jaxoverlap.model.stages import split_config, stage_sizes
from jaxoverlap.runtime.packing import ROW_PARAM_WORDS
from pallas_kernels import Pages
from pallas_kernels.pages import FLOAT8, abstract, is_addressable


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class RowState:
    """One line per row of the row table, R rows.

    Attributes:
      last_token: int32 [R], sampled and not yet run: the input of the row's next decode step.
      seq_len: int32 [R], positions whose KV is written; the last token will be written at this one.
      num_outputs: int32 [R], tokens sampled so far.
      finished: bool [R]; a finished row's further steps write nothing and are void.
      page_table: int32 [R, C], page ids without a layer's offset; ids outside the pool where there is no page.
      params: int32 [R, ROW_PARAM_WORDS], see `packing.ROW_PARAMS`.
    """

    last_token: jax.Array
    seq_len: jax.Array
    num_outputs: jax.Array
    finished: jax.Array
    page_table: jax.Array
    params: jax.Array

    @classmethod
    def blank(cls, num_rows: int, pages_per_row: int, no_page: int) -> RowState:
        """Before the first request: all rows finished, no pages."""
        # One buffer each: donated arguments may not share memory.
        return cls(
            last_token=jnp.zeros(num_rows, dtype=jnp.int32),
            seq_len=jnp.zeros(num_rows, dtype=jnp.int32),
            num_outputs=jnp.zeros(num_rows, dtype=jnp.int32),
            finished=jnp.ones(num_rows, dtype=jnp.bool_),
            page_table=jnp.full((num_rows, pages_per_row), no_page, dtype=jnp.int32),
            params=jnp.zeros((num_rows, ROW_PARAM_WORDS), dtype=jnp.int32),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVPages:
    """The KV pool, flat over layers: layer l's page p is page ``l * P + p``.

    Attributes:
      k, v: [L * P, page_size, K, D]; plain, or codes and scales.
    """

    k: Pages
    v: Pages

    @classmethod
    def abstract(cls, config: ModelConfig, num_pages: int, page_size: int, dtype: Any) -> KVPages:
        """As `jax.ShapeDtypeStruct`s; P pages in each layer."""
        shape = (config.num_layers * num_pages, page_size, config.num_kv_heads, config.head_dim)
        return cls(abstract(shape, dtype), abstract(shape, dtype))


def stages_for_pool(config: ModelConfig, num_pages: int, page_size: int, dtype: Any) -> int:
    """`max_stages` of a step with kernels: the fewest whose pools these can address; 1 where no division helps."""

    def reach_all(most: int) -> bool:
        stages = split_config(config, stage_sizes(config.num_layers, most))
        return all(is_addressable(KVPages.abstract(stage, num_pages, page_size, dtype)) for stage in stages)

    return next(filter(reach_all, range(1, config.num_layers + 1)), 1)


def resolve_kv_dtype(kv_cache_dtype: str, dtype: np.dtype) -> np.dtype:
    """What `EngineConfig.kv_cache_dtype` stands for in an engine of `dtype`."""
    if kv_cache_dtype == "auto":
        return dtype
    return FLOAT8 if kv_cache_dtype == "fp8" else jnp.dtype(kv_cache_dtype)


def kv_dtype_name(dtype: Any) -> str:
    """What a user calls it."""
    return "fp8" if jnp.dtype(dtype) == FLOAT8 else jnp.dtype(dtype).name
