"""The attention kernels in Pallas's Mosaic style: TMA and wgmma, for Hopper. Imported when first asked for: it needs
a newer jax than the rest."""

from pallas_kernels.mosaic.decode import decode_attention
from pallas_kernels.mosaic.extend import extend_attention

__all__ = ["decode_attention", "extend_attention"]
