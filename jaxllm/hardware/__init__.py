"""Devices: their published specifications, what a compiler needs to know of them, and the ones attached."""
