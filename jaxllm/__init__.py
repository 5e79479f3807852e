"""Train language models in JAX, sample them, and know the bill before paying it."""
