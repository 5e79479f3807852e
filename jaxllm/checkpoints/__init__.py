"""Checkpoints that are written atomically, verified by checksum, and restored on any mesh."""
