"""The ledger of a run: printed before it, checked against it, consulted when memory runs out."""
