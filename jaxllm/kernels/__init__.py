"""Attention kernels and the reference implementation that they are tested against."""
