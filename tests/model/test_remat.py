"""Rematerialization: every policy gives the gradients of `none` and saves the activations that it names."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import models
import numpy as np
import pytest
from steps import leaf_names

from jaxllm.config import LoraConfig, remat
from jaxllm.config.attention import PLAIN, Attention
from jaxllm.config.remat import TAGS, RematPolicy, group_size, parse
from jaxllm.errors import UserError
from jaxllm.model import adapter_specs, adapters, specs, transformer

POLICIES = ["full", "sqrt", "dots", "names:attn_qkv,mlp_up", "offload:attn_qkv,mlp_gate"]
# Usual initial values: the large ones of the small models multiply rounding errors layer by layer.
DEEP = {name: dataclasses.replace(model, layers=model.layers + 4, init_std=0.02) for name, model in models.ALL.items()}

# The kernels need heads of 16 or more.
DEEP["kernels"] = dataclasses.replace(models.SLIDING, layers=2, head_dim=16, init_std=0.02)


@functools.cache
def inputs(name):
    model = DEEP[name]
    params = specs.initialize(specs.param_specs(model), jax.random.key(0), jnp.float32)
    tokens = jax.random.randint(jax.random.key(1), (2, 16), 0, model.vocab_size)
    return params, tokens, jnp.broadcast_to(jnp.arange(16), tokens.shape)


def loss(params, name, policy, attention=PLAIN):
    _, tokens, positions = inputs(name)
    hidden, _, aux_loss = transformer.forward(
        params, tokens, positions, DEEP[name], remat=parse(policy), attention=attention
    )
    # The square of a normalized output is nearly constant, so its gradient would be only rounding errors.
    return (hidden * jax.random.normal(jax.random.key(2), hidden.shape)).mean() + aux_loss


@functools.cache
def gradients(name, policy):
    return jax.jit(jax.grad(loss), static_argnums=(1, 2))(inputs(name)[0], name, policy)


@pytest.mark.parametrize("name", models.ALL)
@pytest.mark.parametrize("policy", ["full", *(pytest.param(policy, marks=pytest.mark.once) for policy in POLICIES[1:])])
def test_gradients_are_those_of_none(name, policy):
    want, got = gradients(name, "none"), gradients(name, policy)
    # Relative to the largest gradient of all leaves: some, such as that of a key bias, are only rounding errors.
    scale = max(float(jnp.abs(b).max()) for b in jax.tree.leaves(want))
    for leaf, a, b in zip(leaf_names(want), jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-6, err_msg=leaf)


@pytest.mark.parametrize("policy", ["full", "names:attn_context,attn_lse"])
def test_gradients_by_kernels_are_those_of_none(policy):
    want = gradients("kernels", "none")
    scale = max(float(jnp.abs(b).max()) for b in jax.tree.leaves(want))
    got = jax.jit(jax.grad(loss), static_argnums=(1, 2, 3))(*with_kernels(policy))
    for leaf, a, b in zip(leaf_names(want), jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a / scale, b / scale, atol=1e-6, err_msg=leaf)


def kept(name, policy):
    """Returns the number of elements of all residuals of the forward pass, without the parameters."""
    params = inputs(name)[0]
    held = jax.eval_shape(lambda p: jax.vjp(lambda p: loss(p, name, policy), p)[1], params)
    return sum(x.size for x in jax.tree.leaves(held)) - sum(x.size for x in jax.tree.leaves(params))


def test_policies_keep_less_and_less():
    sizes = [kept("rotary", policy) for policy in ("none", "dots", "names:attn_qkv", "full")]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == len(sizes)
    # With sqrt the inputs of the groups are saved instead of the inputs of the six blocks.
    block, groups = 2 * 16 * DEEP["rotary"].width, 6 // group_size(6, RematPolicy("sqrt"))
    assert kept("rotary", "full") - kept("rotary", "sqrt") == (6 - groups) * block > 0


def test_offloaded_activations_leave_the_device():
    """Activations tagged in `offload:` are copied to host memory in the forward pass and back in the backward pass."""

    def moves(policy):
        text = str(jax.make_jaxpr(jax.grad(loss), static_argnums=(1, 2))(inputs("rotary")[0], "rotary", policy))
        return [re.findall(rf"devices=\(MemorySpace.{space},\)", text) for space in ("Host", "Device")]

    assert [len(found) for found in moves("offload:mlp_up")] == [1, 1]
    assert [len(found) for found in moves("names:mlp_up")] == [0, 0]


@pytest.mark.parametrize(("repeats", "size"), [(0, 1), (1, 1), (6, 2), (12, 3), (16, 4), (24, 4), (32, 4), (80, 8)])
def test_groups_are_near_the_square_root(repeats, size):
    policy = RematPolicy("sqrt")
    got = group_size(repeats, policy)
    assert got == size or got * size == repeats  # both divisors next to the root are equally good
    assert group_size(repeats, RematPolicy("full")) == 1


def with_kernels(policy):
    """Returns arguments of `loss` that use kernels whose operations are plain JAX."""
    return inputs("kernels")[0], "kernels", policy, Attention("pallas", "gpu", interpret=True)


def test_every_tag_is_given():
    """Every tag that a policy may name is given to an activation in some model's block."""
    given = set()
    for name in models.ALL:
        text = str(jax.make_jaxpr(jax.grad(loss), static_argnums=(1, 2))(inputs(name)[0], name, "none"))
        given |= set(re.findall(r"name\[name=(\w+)\]", text))
    text = str(jax.make_jaxpr(jax.grad(loss), static_argnums=(1, 2, 3))(*with_kernels("none")))
    of_kernels = set(re.findall(r"name\[name=(\w+)\]", text))
    assert given | of_kernels == set(TAGS) - {adapters.ADAPTERS}
    assert of_kernels - given == {"attn_lse"}
    assert given - of_kernels >= {"attn_scores", "attn_probs"}
    assert text.count("name[name=attn_context]") == text.count("name[name=attn_lse]"), "the context is named once"
    beside = specs.initialize(
        adapter_specs.adapter_specs(DEEP["rotary"], LoraConfig(rank=2)), jax.random.key(0), jnp.float32
    )
    joined = adapters.joined(inputs("rotary")[0], beside)
    assert "name[name=lora]" in str(jax.make_jaxpr(jax.grad(loss), static_argnums=(1, 2))(joined, "rotary", "none"))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("ful", "did you mean 'full'"),
        ("names:", "names:<tag,tag>"),
        ("names", "names:<tag,tag>"),
        ("full:mlp_up", "names:<tag,tag>"),
        ("names:mlp_upp", "did you mean 'mlp_up'"),
        ("offload:attn_qvk", "did you mean 'attn_qkv'"),
    ],
)
def test_what_is_no_policy_is_refused(policy, message):
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        parse(policy)
    assert "\n" not in str(caught.value)


def test_kinds_are_all_parsed():
    for kind in remat.KINDS:
        text = kind if kind not in ("names", "offload") else f"{kind}:{TAGS[0]}"
        assert parse(text).kind == kind
