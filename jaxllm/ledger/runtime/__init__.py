"""Ledger of a run: printed before it starts, checked against measurements, and used to explain out-of-memory errors."""
