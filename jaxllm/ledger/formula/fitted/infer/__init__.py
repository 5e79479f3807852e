"""Memory of the temporaries of prefill and decode, by platform."""
