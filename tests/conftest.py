"""Every test sees 8 CPU devices, and broadcasting between unequal ranks is an error in all of the code."""

import os

import compiler

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {compiler.FAST}"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
