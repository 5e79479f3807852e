"""Exact byte counts of arrays: parameters, optimizer state, saved activations, and their sharding over devices."""
