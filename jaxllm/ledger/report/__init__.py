"""The ledger for people: terminal tables, sentences, a PNG and an HTML page."""
