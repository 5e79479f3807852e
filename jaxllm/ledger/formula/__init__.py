"""Closed-form predictions of memory, FLOPs, communication and time, without tracing a model."""
