"""One training job over many processes: start-up, liveness, and stopping together."""
