"""Flash attention in Pallas for GPUs and TPUs."""
