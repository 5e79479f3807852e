"""Planner: searches for the fastest run that fits on the devices, with the closed-form memory and compute formulas."""
