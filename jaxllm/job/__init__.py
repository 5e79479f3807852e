"""Multi-process training jobs: start-up, liveness, and a coordinated stop."""
