"""Gives every test 8 CPU devices, and makes implicit rank promotion an error."""

import os

import compiler
import hypothesis
import pytest

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8 {compiler.FAST}"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

import jax  # must follow the environment settings

# The same examples in every run; `--hypothesis-profile=explore` draws new ones.
hypothesis.settings.register_profile("fixed", derandomize=True)
hypothesis.settings.register_profile("explore", derandomize=False)
hypothesis.settings.load_profile("fixed")


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Frees compiled programs: each has memory mappings, Linux allows a process 65,530, and XLA crashes beyond that."""
    yield
    jax.clear_caches()
