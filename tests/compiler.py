"""XLA flags used by the tests."""

from importlib import metadata

# Most of the tests' time is compilation, most of it in LLVM. Small programs run as fast without LLVM's optimizations.
# JAX 0.10 has two code generators for fusions; the older one compiles in half the time. XLA's own result, its buffers
# and its collectives, stays the same except for some bytes of fusions: see OWN.
FAST = "--xla_backend_optimization_level=0"
# Options for a single program whose byte counts matter: use the fusion code generator that users have.
OWN: dict[str, bool] = {}
if metadata.version("jax").startswith("0.10."):
    FAST += " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    OWN = {"xla_cpu_use_fusion_emitters": True}
