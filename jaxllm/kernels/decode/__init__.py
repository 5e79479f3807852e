"""Pallas kernels for decoding: attention of new tokens over a KV cache, and cache writes."""
