"""Training step as pure functions: state, gradients, optimizers, precision and sharding."""
