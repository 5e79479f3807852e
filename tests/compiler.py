"""What tests tell XLA."""

from importlib import metadata

# Most of the tests' time is compilation, and most of that LLVM's. Small programs run as fast without its optimisations.
# JAX 0.10 writes the code of each fusion in one of two ways, of which the older is compiled in half the time. What XLA
# itself does with a program, its buffers and its collectives, stays the same, but for some bytes of fusions: see OWN.
FAST = "--xla_backend_optimization_level=0"
# Of one program: its fusions as users have them, where bytes are the point.
OWN: dict[str, bool] = {}
if metadata.version("jax").startswith("0.10."):
    FAST += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    OWN = {"xla_cpu_use_fusion_emitters": True}
