"""Attention of new tokens over a KV cache, and writes into it, in Pallas."""
