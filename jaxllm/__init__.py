"""Trains and samples language models in JAX, and predicts memory and compute before a run starts."""
