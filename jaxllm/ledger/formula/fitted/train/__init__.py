"""What XLA makes of a training step beside its state: a row for each array, by platform."""
