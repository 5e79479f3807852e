"""User-facing output of the ledger: terminal tables, sentences, a PNG and an HTML page."""
