"""FlashAttention kernels in Pallas for GPUs and TPUs."""
