"""The command that continues prompts and holds conversations."""
