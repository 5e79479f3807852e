"""Compiler settings: XLA's memory is measured as users compile; the other tests use settings that compile faster."""

import compiler
import jax
import pytest

from jaxllm.ledger.formula.exact import layout

# They read matmuls and collectives, which no fusion changes.
OTHERS = ("test_compute", "test_communication")


@pytest.fixture(autouse=True)
def _as_users_compile(monkeypatch, request):
    if request.module.__name__ in OTHERS:
        return
    compile_ = jax.stages.Lowered.compile

    def compile_so(lowered, compiler_options=None, **more):
        return compile_(lowered, compiler.OWN | (compiler_options or {}), **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_so)


@pytest.fixture
def fresh_layouts():
    """Clears cached layouts before and after a test that changes the rules they are made with."""
    layout.clear_caches()
    yield
    layout.clear_caches()
