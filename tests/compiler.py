"""What tests tell XLA."""

import functools

# Most of the tests' time is compilation, and most of that LLVM's. Small programs run as fast without; what XLA itself
# does with a program, its buffers and its collectives, stays the same.
FAST = "--xla_backend_optimization_level=0"


@functools.cache
def plain() -> dict[str, bool]:
    """Options of a program whose numbers a test is about, and not its buffers: compiled on a CPU in half the time.

    Fused operations then go to LLVM directly, where XLA still can; none where it cannot (JAX 0.12).
    """
    import jax  # not before `conftest` has set it up

    options = {"xla_cpu_use_fusion_emitters": False}
    try:
        jax.jit(lambda x: x).lower(0.0).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return {}
    return options
