"""Memory of a training step beside its state: one row per array, by platform."""
