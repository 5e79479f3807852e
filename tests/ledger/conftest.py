"""What XLA holds for a program is measured as users compile it; the other tests compile in less time."""

import compiler
import jax
import pytest


@pytest.fixture(autouse=True)
def _as_users_compile(monkeypatch):
    compile_ = jax.stages.Lowered.compile

    def compile_so(lowered, compiler_options=None, **more):
        return compile_(lowered, compiler.OWN | (compiler_options or {}), **more)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_so)
