"""Advice on fitting in memory: admission before sampling, remedies for training, and out-of-memory reports."""
