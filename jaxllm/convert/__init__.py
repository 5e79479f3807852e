"""Command that converts a model to another file format."""
