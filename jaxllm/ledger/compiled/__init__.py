"""Compiled column: memory, collectives and FLOPs of the programs as compiled by XLA for attached or absent devices."""
