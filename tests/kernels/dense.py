"""Attention in NumPy and float64, row by row: an oracle that compiles nothing."""

import numpy as np

from tests.kernels.cases import Case


def attention(
    case: Case, q: np.ndarray, chunks: tuple[int, ...], *, window: int | None = None, softcap: float | None = None
) -> np.ndarray:
    """Of the last `chunks[row]` positions of each row; q [T, H, D] → [T, H, D] in q's dtype, zeros for padding."""
    out, start = np.zeros(q.shape), 0
    table = np.asarray(case.page_table)
    for row, (length, chunk) in enumerate(zip(case.lengths, chunks, strict=True)):
        position = np.arange(length)
        pages = table[row, position // case.page_size] + case.page_offset
        k, v = (
            np.asarray(pool)[pages, position % case.page_size].astype(np.float64).repeat(case.heads.group, axis=1)
            for pool in (case.k_pages, case.v_pages)
        )
        queries = np.asarray(q[start : start + chunk]).astype(np.float64)
        scores = np.einsum("thd,xhd->thx", queries, k) * case.scale
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        distance = np.arange(length - chunk, length)[:, None] - position
        seen = (distance >= 0) & (distance < (window or length + 1))
        scores = np.where(seen[:, None, :], scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e300))
        out[start : start + chunk] = np.einsum("thx,xhd->thd", weights / weights.sum(axis=-1, keepdims=True), v)
        start += chunk
    return out.astype(q.dtype)


def decode_attention(case: Case, q: np.ndarray, **options: float | None) -> np.ndarray:
    """One query per row, none for rows of length 0."""
    out = np.zeros_like(q)
    real = np.asarray(case.lengths) > 0
    out[real] = attention(case, np.asarray(q)[real], tuple(int(n > 0) for n in case.lengths), **options)
    return out
