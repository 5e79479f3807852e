"""Every test sees 8 CPU devices, and broadcasting between unequal ranks is an error in all of the code."""

import os

import compiler
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {compiler.FAST}"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import jax  # after its settings


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Each compiled program has memory mappings of its own, of which Linux allows a process 65,530: then XLA dies."""
    yield
    jax.clear_caches()
