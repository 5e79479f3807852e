"""Every test sees 8 CPU devices, and broadcasting between unequal ranks is an error in all of the code."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
