"""The kernels in Pallas's Triton style: GPUs from Ampere on, and interpreted on a CPU."""

from pallas_kernels.triton.decode import decode_attention
from pallas_kernels.triton.draw import draw_tokens
from pallas_kernels.triton.extend import extend_attention
from pallas_kernels.triton.write import rope_and_write_kv, write_kv

__all__ = ["decode_attention", "draw_tokens", "extend_attention", "rope_and_write_kv", "write_kv"]
