"""What tests tell XLA."""

# Most of the tests' time is compilation, and most of that LLVM's. Small programs run as fast without; what XLA itself
# does with a program, its buffers and its collectives, stays the same.
FAST = "--xla_backend_optimization_level=0"
