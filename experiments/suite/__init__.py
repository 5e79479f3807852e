"""Sections of `gpu_suite.py` and their common helpers."""
