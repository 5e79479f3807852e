"""Rules for memory that XLA allocates beyond the exact arrays, fitted to compiled programs."""
