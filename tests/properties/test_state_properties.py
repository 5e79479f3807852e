"""The state: trees of one shape, and the closed form's bytes against those of the trainer's arrays."""

import chex
import draws
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from jaxllm import programs
from jaxllm.config.remat import TAGS
from jaxllm.decode import state as decode_state
from jaxllm.errors import UserError
from jaxllm.ledger import rows, trace
from jaxllm.ledger.compiled import absent
from jaxllm.ledger.device import tree_bytes
from jaxllm.ledger.formula.exact import activations
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.inference_memory import inference
from jaxllm.ledger.rows import HOST, PERSISTENT
from jaxllm.model.specs import abstract, param_specs
from jaxllm.step import gradients
from jaxllm.step.placement import make_layout


def abstract_state(case: draws.Case):
    """Returns the trainer's abstract state; rejects the draw if the trainer refuses it."""
    try:
        return trace.abstract_state(case.config, case.model, "cpu")
    except UserError as refused:
        assert "would be padded" in str(refused)  # noqa: PT017
        reject()


@pytest.mark.parametrize("family", draws.FAMILIES)
def test_persistent_rows_are_the_arrays_bytes(family):
    """Weights, optimizer slots, padding and the rest match to the byte, on the device and in host memory."""

    @draws.traced
    @given(draws.cases(families=(family,), split=True))
    def check(case):
        state, ledger = abstract_state(case), case.ledger

        def billed(*kinds: str) -> dict[str, int]:
            return {phase: sum(ledger.kind_bytes(kind, phase) for kind in kinds) for phase in (PERSISTENT, HOST)}

        def held(tree) -> dict[str, int]:
            host = trace.bytes_per_device(tree, "pinned_host")
            return {PERSISTENT: trace.bytes_per_device(tree) - host, HOST: host}

        assert billed("weights", "master weights") == held(state.params)
        assert billed("optimizer") == held(state.opt_state)
        assert billed("state") == held((state.step, state.key, state.loss_scale))
        assert ledger.persistent_bytes == held(state)[PERSISTENT]
        assert ledger.host_bytes - ledger.kind_bytes("activations", HOST) == held(state)[HOST]
        if case.config.mesh.data == case.config.mesh.tensor == 1:
            assert not draws.padding(ledger)
            chex.assert_trees_all_equal_shapes(state.params, abstract(param_specs(case.model), "float32"))

    check()


@draws.traced
@given(draws.cases(split=True))
def test_rows_of_activations_are_the_residuals(case):
    """Rows match, tag by tag, what JAX's derivative of the program saves."""
    abstract_state(case)
    kept = trace.residuals(case.config, case.model, case.platform)
    settled = run_lib.make(case.model, case.config, case.policy, case.platform)
    for phase, found in ((rows.BOUNDARY, kept.tags), (HOST, kept.host)):
        billed: dict[str, int] = {}
        for row in activations.rows_between_passes(settled, rows.BOUNDARY):
            if row.phase == phase and row.bytes_per_device:
                name = row.name if row.name in TAGS else trace.UNTAGGED
                billed[name] = billed.get(name, 0) + row.bytes_per_device
        assert billed == found
    assert activations.loss_gradients(settled) * settled.compute_bytes == kept.loss


@draws.traced
@given(draws.cases(split=True), st.sampled_from(["momentum", "adam", "lion"]))
def test_gradients_and_moments_have_the_weights_shapes(case, optimizer):
    case = case.but(optimizer_name=optimizer)
    config, mesh = case.config, absent.abstract_mesh(case.config)
    step_spec, state = programs.make_step_spec(config, case.model, "cpu"), abstract_state(case)
    layout = make_layout(config, case.model, step_spec.policy, mesh)
    batch = programs.abstract_batch(config, mesh)

    def step(params, batch):
        return gradients.accumulate(params, batch, step_spec, layout, 1.0)[1]

    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    taken = jax.eval_shape(step, params, batch)
    structure = jax.tree.structure(state.params)
    moments = [
        tree
        for tree in jax.tree.leaves(state.opt_state, is_leaf=lambda node: jax.tree.structure(node) == structure)
        if jax.tree.structure(tree) == structure
    ]
    assert len(moments) == (2 if optimizer == "adam" else 1)
    chex.assert_trees_all_equal_shapes(state.params, taken, *moments)
    size = 4 if config.train.accumulate > 1 else run_lib.make(case.model, config, case.policy, "cpu").compute_bytes
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(taken)} == {size}


@draws.traced
@given(draws.cases())
def test_a_step_gives_back_the_state_that_it_takes(case):
    """A step preserves tree, shapes and dtypes, so every buffer of the state can be donated."""
    abstract_state(case)
    step_spec = programs.make_step_spec(case.config, case.model, "cpu")
    program = programs.train_step(case.config, step_spec, absent.abstract_mesh(case.config))
    after, _ = jax.eval_shape(program.jitted, *program.inputs)
    chex.assert_trees_all_equal_shapes_and_dtypes(program.inputs[0], after)


@draws.traced
@given(draws.models(), st.integers(1, 5), st.integers(1, 80), st.sampled_from(["fp32", "bf16"]))
def test_inference_rows_are_the_arrays_bytes(model, batch, capacity, policy):
    dtype = {"fp32": jnp.float32, "bf16": jnp.bfloat16}[policy]
    ledger = inference(model, batch, capacity, 4, policy, policy)
    state = decode_state.abstract(model, batch, capacity, dtype)
    weights = abstract(param_specs(model), dtype)
    assert ledger.kind_bytes("weights") == tree_bytes(weights)
    assert ledger.kind_bytes("KV cache") == tree_bytes(state.cache.kv)
    assert ledger.persistent_bytes == tree_bytes((weights, state))
