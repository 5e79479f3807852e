"""Temporaries of prefill and decode, by platform."""
