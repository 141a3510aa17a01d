from pallas_kernels.reference import decode_attention, extend_attention, write_kv  # noqa: F401
