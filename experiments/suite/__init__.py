"""The sections of `gpu_suite.py`, and what they share."""
