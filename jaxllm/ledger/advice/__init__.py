"""What would fit: admission before a run, remedies, and the explanation of an out-of-memory error."""
