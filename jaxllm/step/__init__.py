"""The training step: gradients, optimizer and state, as pure functions."""
