"""Attention: the reference that every kernel is held to."""
