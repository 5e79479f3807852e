"""The command that writes a model in another format."""
