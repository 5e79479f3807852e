"""Every field of the model and of the mesh changes a spec, the traced program, or a row of the ledger."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
import runs

from jaxllm import architectures
from jaxllm.config import Architecture, MeshConfig
from jaxllm.ledger.formula import training_memory
from jaxllm.model import specs, transformer

LLAMA3 = dataclasses.replace(
    models.ROTARY, rope_scaling="llama3", rope_factor=8.0, rope_original_context=64, rope_theta=100.0
)
# YaRN's ramp begins and ends at whole pairs, so there must be many of them.
YARN = dataclasses.replace(
    LLAMA3, head_dim=64, rope_theta=1e4, rope_original_context=4096, rope_scaling="yarn", rope_beta_fast=32.0
)

# Field -> (a model in which it matters, another value).
CHANGES = {
    "vocab_size": (models.ROTARY, 65),
    "layers": (models.ROTARY, 3),
    "width": (models.ROTARY, 40),
    "heads": (models.ROTARY, 6),
    "kv_heads": (models.ROTARY, 4),
    "head_dim": (models.ROTARY, 10),
    "mlp_width": (models.ROTARY, 50),
    "context_length": (models.LEARNED, 100),
    "mlp": (models.ROTARY, "geglu"),
    "norm": (models.SLIDING, "rmsnorm"),
    "norm_placement": (models.ROTARY, "sandwich"),
    "norm_eps": (models.ROTARY, 1e-3),
    "positions": (models.ROTARY, "learned"),
    "qkv_bias": (models.ROTARY, True),
    "out_bias": (models.ROTARY, True),
    "mlp_bias": (models.ROTARY, True),
    "qk_norm": (models.ROTARY, True),
    "qk_norm_over": (models.POST, "head"),
    "tied_embeddings": (models.ROTARY, False),
    "init_std": (models.ROTARY, 0.3),
    "pattern": (models.SLIDING, ("sliding", "sliding", "full")),
    "window": (models.SLIDING, 5),
    "embedding_scale": (models.SLIDING, 2.0),
    "query_scale": (models.SLIDING, 0.5),
    "attention_softcap": (models.SLIDING, 10.0),
    "logit_softcap": (models.SLIDING, 10.0),
    "rope_theta": (models.ROTARY, 5e5),
    "rope_theta_sliding": (models.SLIDING, 200.0),
    "rope_dim": (models.ROTARY, 6),
    "rope_scaling": (models.SLIDING, "none"),
    "rope_factor": (models.SLIDING, 8.0),
    "rope_original_context": (LLAMA3, 32),
    "rope_low_freq_factor": (LLAMA3, 2.0),
    "rope_high_freq_factor": (LLAMA3, 8.0),
    "rope_beta_fast": (YARN, 2.0),
    "rope_beta_slow": (YARN, 4.0),
    "rope_short_factors": (models.LONGROPE, (1.0, 1.2, 1.3)),
    "rope_long_factors": (models.LONGROPE, (1.2, 2.5, 4.0)),
    "rope_attention_factor": (YARN, 1.5),
    "experts": (models.EXPERTS, 5),
    "experts_per_token": (models.EXPERTS, 1),
    "normalize_routing": (models.EXPERTS, False),
    "router_aux_weight": (models.EXPERTS, 0.5),
    "unroll": (models.ROTARY, 2),
}


def footprint(model):
    """Returns all that the system uses of a model: its specs, and its program with every constant."""
    tree = specs.param_specs(model)
    tokens = jnp.zeros((1, 8), jnp.int32)

    def program(params):
        hidden, _, aux_loss = transformer.forward(params, tokens, tokens, model)
        return transformer.logits(hidden, params, model), aux_loss

    traced = jax.make_jaxpr(program)(specs.abstract(tree, jnp.float32))
    return str(tree), str(traced), [np.asarray(const).tobytes() for const in traced.consts]


def test_the_table_has_every_field():
    assert set(CHANGES) == {field.name for field in dataclasses.fields(Architecture)}


@pytest.mark.parametrize("field", CHANGES)
def test_model_field_is_read(field):
    model, value = CHANGES[field]
    assert getattr(model, field) != value
    assert footprint(dataclasses.replace(model, **{field: value})) != footprint(model)


def test_the_footprint_ignores_what_does_not_matter():
    """A field that the model does not use changes nothing, so a change above is due to the field."""
    unused = dataclasses.replace(models.ROTARY, window=3, rope_beta_fast=7.0, experts_per_token=9)
    unused = dataclasses.replace(unused, qk_norm_over="projection", rope_long_factors=(2.0,))
    assert footprint(unused) == footprint(models.ROTARY)


def ledger_rows(**fields):
    """Returns the rows of a run on 2 × 2 devices; `fields` are `section_field=value`."""
    config = runs.tiny_config("unused", mesh_data=2, mesh_replica=2, train_batch_size=16, train_accumulate=2)
    config.model.kv_heads, config.remat.policy = 2, "names:attn_qkv"
    for name, value in fields.items():
        section, _, field = name.partition("_")
        setattr(getattr(config, section), field, value)
    return training_memory.training(architectures.resolve(config.model), config, "bf16").rows


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(MeshConfig)])
def test_mesh_field_is_read(field):
    values = (1, 2, 3) if field == "zero" else (1, 4) if field != "tensor" else (2,)
    for value in values:
        assert ledger_rows(**{f"mesh_{field}": value}) != ledger_rows(), value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train_batch_size", 32),
        ("train_accumulate", 4),
        ("train_loss_chunk", 16),
        ("train_attention_chunk", 8),
        ("data_sequence_length", 64),
        ("remat_policy", "full"),
        ("optimizer_name", "lion"),
        ("optimizer_moment_dtype", "bfloat16"),
        ("optimizer_offload", "all"),
        ("lora_rank", 2),
    ],
)
def test_field_of_a_run_changes_its_bill(field, value):
    assert ledger_rows(**{field: value}) != ledger_rows()
