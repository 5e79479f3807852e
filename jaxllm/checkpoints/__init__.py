"""Checkpoints: written atomically, verified by checksum, opened on any mesh."""
