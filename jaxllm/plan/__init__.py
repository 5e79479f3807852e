"""Searching for the run that a device holds and that is fastest, by the closed forms alone."""
