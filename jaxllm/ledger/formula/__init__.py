"""The formula column: memory, FLOPs, communication and time in closed form, without tracing a model."""
