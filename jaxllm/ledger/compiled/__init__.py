"""The compiled column: what XLA allocates for our programs, on devices attached or absent."""
