"""One int32 array per step to the device: what the host knows and the device does not.

The device knows the tokens, lengths and positions of rows that decode; the host sends the row, and a page when
one is needed: 8 bytes. A prefill chunk brings its tokens, its row's page table and the row's parameters.

Padding is out of range everywhere: row `num_rows`, page `no_page`, so gathers fill and scatters drop.
`_layout` is that of both sides.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxoverlap.request import MAX_STOP_IDS, Request
from jaxoverlap.runtime.buckets import StepShape
from jaxoverlap.scheduler.plan import StepPlan

ROW_PARAMS = np.dtype(
    [
        ("num_outputs", np.int32),
        ("max_outputs", np.int32),
        ("min_outputs", np.int32),
        ("top_k", np.int32),
        ("sample_index", np.int32),
        ("seed", np.uint32, 2),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("repetition_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("has_bias", np.int32),
        ("top_logprobs", np.int32),
        ("stop_ids", np.int32, MAX_STOP_IDS),
    ]
)
"""What a request fixes for its row: 4-byte words, so that it travels and is kept as int32 [.., ROW_PARAM_WORDS]."""

ROW_PARAM_WORDS = ROW_PARAMS.itemsize // 4

NO_STOP_ID = -1
"""Fills `stop_ids`; it is compared with tokens, which are never negative, and never used as an index."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedStep:
    """A step's input, unpacked: T prompt tokens of R rows, then B decoding rows.

    Attributes:
      token_ids: int32 [T].
      cu_q_lens: int32 [R + 1], the chunks' boundaries in `token_ids`.
      chunk_rows: int32 [R]; chunk_starts: int32 [R], position of each chunk's first token.
      publishes: int32 [R], 1 where the chunk ends its prompt.
      page_tables: int32 [R, C]; row_params: int32 [R, ROW_PARAM_WORDS].
      decode_rows, new_pages: int32 [B].
    """

    token_ids: jax.Array
    cu_q_lens: jax.Array
    chunk_rows: jax.Array
    chunk_starts: jax.Array
    publishes: jax.Array
    page_tables: jax.Array
    row_params: jax.Array
    decode_rows: jax.Array
    new_pages: jax.Array


@functools.cache
def _layout(shape: StepShape, pages_per_row: int) -> tuple[list[tuple[str, slice, tuple[int, ...]]], int]:
    """Name, place and shape of each field of the packed array, and its size; there are no more shapes than steps."""
    tokens, rows = shape.prefill_tokens, shape.prefill_rows
    fields = {
        "token_ids": (tokens,),
        "cu_q_lens": (rows + 1,) if rows else (0,),
        "chunk_rows": (rows,),
        "chunk_starts": (rows,),
        "publishes": (rows,),
        "page_tables": (rows, pages_per_row),
        "row_params": (rows, ROW_PARAM_WORDS),
        "decode_rows": (shape.decode_rows,),
        "new_pages": (shape.decode_rows,),
    }
    layout, offset = [], 0
    for name, field in fields.items():
        size = math.prod(field)
        layout.append((name, slice(offset, offset + size), field))
        offset += size
    return layout, offset


def packed_size(shape: StepShape, pages_per_row: int) -> int:
    """Words of the packed array."""
    return _layout(shape, pages_per_row)[1]


def pack(plan: StepPlan, shape: StepShape, num_rows: int, pages_per_row: int) -> np.ndarray:
    """The plan as a fresh int32 array, read-only from here on: the device may read it in place."""
    packed = np.zeros(packed_size(shape, pages_per_row), dtype=np.int32)
    field = _split(packed, shape, pages_per_row)
    field["decode_rows"].fill(num_rows)
    field["decode_rows"][: len(plan.decode_rows)] = plan.decode_rows
    field["new_pages"].fill(plan.no_page)
    field["new_pages"][: len(plan.decode_rows)] = plan.decode_new_pages
    if shape.prefill_rows:
        field["chunk_rows"].fill(num_rows)
        field["page_tables"].fill(plan.no_page)
        end = 0
        for index, chunk in enumerate(plan.chunks):
            start, end = end, end + len(chunk.token_ids)
            field["token_ids"][start:end] = chunk.token_ids
            field["cu_q_lens"][index + 1] = end
            field["chunk_rows"][index] = chunk.row
            field["chunk_starts"][index] = chunk.start
            field["publishes"][index] = chunk.publishes
            field["page_tables"][index, : len(chunk.page_table)] = chunk.page_table
            field["row_params"][index] = row_params(chunk.request, chunk.num_outputs)
        field["cu_q_lens"][len(plan.chunks) + 1 :] = end
    packed.flags.writeable = False
    return packed


def unpack(packed: jax.Array, shape: StepShape, pages_per_row: int) -> PackedStep:
    """The same on the device: int32 [packed_size] → `PackedStep`."""
    return PackedStep(**_split(packed, shape, pages_per_row))


def _split(packed, shape: StepShape, pages_per_row: int) -> dict[str, Any]:
    return {name: packed[at].reshape(field) for name, at, field in _layout(shape, pages_per_row)[0]}


def row_params(request: Request, num_outputs: int) -> np.ndarray:
    """int32 [1, ROW_PARAM_WORDS]"""
    sampling = request.sampling
    params = np.zeros((), dtype=ROW_PARAMS)
    params["num_outputs"] = num_outputs
    params["max_outputs"] = request.max_tokens
    params["min_outputs"] = sampling.min_tokens
    params["top_k"] = sampling.top_k
    params["sample_index"] = request.sample_index
    params["seed"] = (request.seed & 0xFFFFFFFF, request.seed >> 32)
    params["temperature"] = sampling.temperature
    params["top_p"] = sampling.top_p
    params["min_p"] = sampling.min_p
    params["repetition_penalty"] = sampling.repetition_penalty
    params["presence_penalty"] = sampling.presence_penalty
    params["frequency_penalty"] = sampling.frequency_penalty
    params["has_bias"] = sampling.has_bias
    params["top_logprobs"] = sampling.num_top_logprobs
    params["stop_ids"] = NO_STOP_ID
    params["stop_ids"][: len(request.stop_ids)] = request.stop_ids
    return params.reshape(1).view(np.int32)


def read_row_params(words: jax.Array) -> dict[str, jax.Array]:
    """int32 [n, ROW_PARAM_WORDS] → the fields of `ROW_PARAMS`, each [n] or [n, size], in its own dtype."""
    read = {}
    assert ROW_PARAMS.fields is not None
    for name, (dtype, offset, *_) in ROW_PARAMS.fields.items():
        base, size = (dtype.subdtype[0], dtype.subdtype[1][0]) if dtype.subdtype else (dtype, None)
        first = offset // 4
        column = words[:, first] if size is None else words[:, first : first + size]
        read[name] = jax.lax.bitcast_convert_type(column, jnp.dtype(base))
    return read
