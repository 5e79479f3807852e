"""FLOPs against hand counts and XLA's count, and the roofline."""

import dataclasses

import jax
import jax.numpy as jnp
import models
import pytest

from jaxllm import programs
from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Config, MeshConfig, RematConfig
from jaxllm.kernels.flash.api import flash_attention
from jaxllm.ledger.compiled import hlo, matmuls
from jaxllm.ledger.formula import flops as compute
from jaxllm.model import transformer
from jaxllm.model.specs import abstract, param_specs, parameter_count
from jaxllm.parallel import mesh


def run(batch=8, length=64, remat="none", attention="xla") -> Config:
    config = Config()
    config.train.batch_size, config.data.sequence_length, config.remat.policy = batch, length, remat
    config.attention.implementation = attention
    return config


def test_product_parameters_are_all_but_lookups_biases_and_norms():
    llama = ARCHITECTURES["llama3-8b"]
    embedding, norms = llama.vocab_size * llama.width, (2 * llama.layers + 1) * llama.width
    assert compute.matmul_parameters(llama) == parameter_count(llama) - embedding - norms
    tied = dataclasses.replace(llama, tied_embeddings=True)
    assert compute.matmul_parameters(tied) == compute.matmul_parameters(llama)


def test_a_token_meets_its_own_experts_only():
    mixtral = ARCHITECTURES["mixtral-8x7b"]
    dense = dataclasses.replace(mixtral, experts=0, experts_per_token=0)
    mlp = 3 * mixtral.width * mixtral.mlp_width * mixtral.layers
    router = mixtral.width * mixtral.experts * mixtral.layers
    assert compute.matmul_parameters(mixtral) == compute.matmul_parameters(dense) + mlp + router


@pytest.mark.parametrize("model", [models.ROTARY, models.LEARNED], ids=["rotary", "learned"])
def test_forward_flops_are_what_xla_counts(model):
    """XLA adds element-wise work, whose fraction shrinks with the width; here most FLOPs are matmuls."""
    model = dataclasses.replace(model, width=256, head_dim=64, mlp_width=1024, layers=1, vocab_size=512)
    tokens = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def forward(params, tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
        return transformer.logits(transformer.forward(params, tokens, positions, model)[0], params, model)

    counted = jax.jit(forward).lower(abstract(param_specs(model), jnp.float32), tokens).compile().cost_analysis()
    assert compute.forward_flops(model, 2, 128) == pytest.approx(counted["flops"], rel=0.05)


def test_backward_is_twice_forward_and_remat_is_one_more():
    """Full remat recomputes every matmul of the blocks but the MLP's last, whose result no gradient reads."""
    model = ARCHITECTURES["gpt2"]
    forward = compute.forward_flops(model, 8, 64)
    head = 2 * model.vocab_size * model.width * 8 * 64
    last = 2 * model.width * model.mlp_width * model.layers * 8 * 64
    assert compute.train_step(model, run(), "fp32").flops == 3 * forward
    assert compute.train_step(model, run(remat="full"), "fp32").flops == 4 * forward - head - last


SIZES = {"vocab_size": 512, "layers": 6, "width": 128, "head_dim": 32, "mlp_width": 384, "context_length": 512}
PRODUCTS = dataclasses.replace(models.ROTARY, **SIZES)
# Every norm and cap, and no layer outside the loop, where XLA on a CPU merges recomputation with the original.
CAPPED = dataclasses.replace(models.SLIDING, layers=8, width=64)
POLICIES = ("none", "full", "sqrt", "dots", "names:attn_context", "names:attn_probs", "names:attn_qkv,mlp_up")


def compiled_flops(model, config) -> int:
    step_spec = programs.make_step_spec(config, model, "cpu")
    program = programs.train_step(config, step_spec, mesh.make_mesh(config.mesh))
    found = matmuls.count_matmuls(hlo.parse(program.compile().as_text()))
    assert not found.uncounted
    assert not found.unknown_loops
    return found.flops


@pytest.mark.parametrize("chunk", [0, 32])
@pytest.mark.parametrize("policy", POLICIES)
def test_flops_of_a_step_are_those_of_its_products(policy, chunk):
    """Matches the compiled matmuls exactly, recomputation included."""
    for model in (PRODUCTS, CAPPED) if policy in ("none", "full") else (PRODUCTS,):
        config = run(2, 128, policy)
        config.precision.policy, config.optimizer.name, config.train.attention_chunk = "fp32", "sgd", chunk
        assert compute.train_step(model, config, "fp32", "cpu").flops == compiled_flops(model, config)


def test_flops_of_one_of_many_devices():
    config = run(8, 128, "full")
    config.precision.policy, config.train.accumulate = "fp32", 2
    config.mesh.data, config.mesh.tensor, config.mesh.zero = 2, 2, 3
    assert compute.train_step(PRODUCTS, config, "fp32").flops == compiled_flops(PRODUCTS, config)
    alone = dataclasses.replace(config, mesh=MeshConfig())
    assert compute.train_step(PRODUCTS, alone, "fp32").flops == 4 * compute.train_step(PRODUCTS, config, "fp32").flops


@pytest.mark.parametrize(("experts", "each"), [(4, 2), (16, 2)])
def test_experts_multiply_their_own_tokens(experts, each):
    """Experts multiply their own tokens, in blocks that may be partly empty; not every expert takes every token."""
    model = dataclasses.replace(PRODUCTS, experts=experts, experts_per_token=each, mlp_width=128, layers=4)
    config = run(2, 128, "full")
    config.precision.policy, config.optimizer.name = "fp32", "sgd"
    step_spec = programs.make_step_spec(config, model, "cpu")
    program = programs.train_step(config, step_spec, mesh.make_mesh(config.mesh))
    found = matmuls.count_matmuls(hlo.parse(program.compile().as_text()))
    # XLA counts a few sums over tokens as matmuls too.
    assert compute.train_step(model, config, "fp32", "cpu").flops == pytest.approx(found.flops, rel=0.005)
    dense = dataclasses.replace(model, experts=0, mlp_width=each * 128)
    assert found.flops < 1.6 * compute.train_step(dense, config, "fp32", "cpu").flops


def test_a_product_forgotten_in_recomputation_is_caught():
    config = run(2, 128, "full")
    config.precision.policy, config.optimizer.name = "fp32", "sgd"
    kept = dataclasses.replace(config, remat=RematConfig("names:attn_out"))
    assert compute.train_step(PRODUCTS, kept, "fp32").flops != compiled_flops(PRODUCTS, config)


@pytest.mark.parametrize("name", ["gpt2", "llama3-8b", "gemma3-27b", "mixtral-8x7b"])
def test_recomputation_lies_between_none_and_full(name):
    """More saved tags mean less work; `sqrt` takes the most: it reruns its groups, then each of their blocks."""
    flops = {
        policy: compute.train_step(ARCHITECTURES[name], run(8, 1024, policy), "bf16").flops
        for policy in ("none", "dots", "names:attn_qkv,mlp_up,mlp_gate", "names:attn_qkv", "full", "sqrt")
    }
    assert list(flops.values()) == sorted(flops.values())
    assert flops["full"] < 4 / 3 * flops["none"]


def test_model_flops_are_6n_and_visible_pairs():
    model = ARCHITECTURES["llama3-8b"]
    length = 8192
    attention = 12 * model.layers * model.heads * model.head_dim * (length + 1) / 2
    expected = 6 * compute.matmul_parameters(model) + attention
    assert compute.model_flops_per_token(model, length) == expected


def test_visible_pairs_are_counted_one_by_one():
    model = dataclasses.replace(models.SLIDING, window=6)
    for length in (1, 5, 6, 7, 20):
        for kind, window in (("full", length), ("sliding", 6)):
            pairs = sum(1 for q in range(length) for k in range(q + 1) if q - k < window)
            assert compute.visible_pairs(model, kind, length) == pairs


def test_decode_reads_all_weights_and_all_keys():
    model = ARCHITECTURES["llama3-8b"]
    work = compute.decode_token(model, 1, 8192, "bf16", "bf16")
    weights = 2 * (parameter_count(model) - model.vocab_size * model.width + model.width)
    assert work.bytes_of == {"weights": weights, "KV cache": 2**30}
    assert compute.decode_token(model, 8, 8192, "bf16", "bf16").bytes_of["KV cache"] == 8 * 2**30


def test_narrow_formats_are_read_with_their_scales():
    """int4 in groups of 32 takes half a byte and a sixteenth of two bytes per matrix element; the rest has 16 bits."""
    model = ARCHITECTURES["llama3-8b"]
    matrices = compute.matmul_parameters(model) - model.vocab_size * model.width
    rest = parameter_count(model) - matrices - model.vocab_size * model.width + model.width  # a row is looked up
    for dtype, each in (("int8-128", 1 + 2 / 128), ("int4-32", 0.5 + 2 / 32), ("bf16", 2)):
        work = compute.decode_token(model, 1, 1, dtype, "bf16")
        assert work.bytes_of["weights"] == pytest.approx(matrices * each + 2 * rest, rel=1e-7)
    cache = compute.decode_token(model, 1, 8192, "bf16", "int8").bytes_of["KV cache"]
    assert cache == 2 * model.layers * 8192 * model.kv_heads * (model.head_dim + 4)


def test_prefill_writes_the_keys_that_decode_reads():
    model = ARCHITECTURES["gemma3-27b"]
    prompt = compute.prefill(model, 3, 5000, "bf16", "bf16")
    assert prompt.bytes_of["KV cache"] == compute.decode_token(model, 3, 5000, "bf16", "bf16").bytes_of["KV cache"]
    head = 2 * model.vocab_size * model.width
    assert prompt.flops == compute.forward_flops(model, 3, 5000) - 3 * 4999 * head


def test_the_parts_of_a_step():
    model = ARCHITECTURES["gpt2"]
    plain, full = (compute.train_step(model, run(remat=policy), "bf16") for policy in ("none", "full"))
    forward = compute.forward_flops(model, 8, 64)
    assert plain.flops_of == {"forward": forward, "backward": 2 * forward, "recomputation": 0, "optimizer": 0}
    assert full.flops - plain.flops == full.flops_of["recomputation"] > 0
    assert set(plain.bytes_of) == {"weights", "gradients", "activations", "logits", "optimizer"}
    # A third pass reads the weights again, and recomputed activations are moved again.
    assert full.bytes_of["weights"] > plain.bytes_of["weights"]
    assert full.bytes_of["activations"] > plain.bytes_of["activations"]
    assert plain.intensity == plain.flops / plain.bytes


def test_bytes_of_a_step_by_hand():
    """GPT-2 in float32 with Adam: weights in two passes, gradients, and the optimizer's arrays.

    The optimizer moves three arrays of 4 B, and two moments of 4 B each way.
    """
    model, config = ARCHITECTURES["gpt2"], run()
    config.optimizer.name = "adam"
    count = parameter_count(model)
    moved = compute.train_step(model, config, "fp32").bytes_of
    assert moved["weights"] == 2 * 4 * count
    assert moved["gradients"] == 2 * 4 * count
    assert moved["optimizer"] == 12 * count + 16 * count
    assert moved["logits"] == 4 * 4 * 8 * 64 * model.vocab_size
    mixed = compute.train_step(model, config, "bf16").bytes_of
    assert mixed["weights"] == 2 * 2 * count + (4 + 2) * count  # and cast from their masters


@pytest.mark.parametrize("experts", [0, 4])
def test_muon_s_products_are_counted(experts):
    """Covers the Newton-Schulz iteration; exact if no gather is counted as a matmul too."""
    model = dataclasses.replace(PRODUCTS, experts=experts, experts_per_token=experts // 2)
    config = run(2, 128, "full")
    config.precision.policy, config.optimizer.name = "fp32", "muon"
    work = compute.train_step(model, config, "fp32", "cpu")
    step_spec = programs.make_step_spec(config, model, "cpu")
    program = programs.train_step(config, step_spec, mesh.make_mesh(config.mesh))
    found = matmuls.count_matmuls(hlo.parse(program.compile().as_text()))
    assert work.flops_of["optimizer"] > work.flops_of["forward"]
    assert work.flops == pytest.approx(found.flops, rel=0.001 if experts else 0)


def dots(jaxpr) -> int:
    """Returns the number of matmuls in a jaxpr, nested ones included."""
    inner = (getattr(p, "jaxpr", p) for eqn in jaxpr.eqns for p in jax.tree.leaves(eqn.params, is_leaf=is_jaxpr))
    own = sum(eqn.primitive.name == "dot_general" for eqn in jaxpr.eqns)
    return own + sum(dots(each) for each in inner if hasattr(each, "eqns"))


def is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_kernels_have_nine_products_over_the_pairs_that_are_seen():
    """Kernels take two matmuls forward, three for dq, four for dk and dv; plain attention six, over all pairs."""
    q, k = jnp.zeros((1, 64, 4, 32)), jnp.zeros((1, 2, 64, 32))
    segments = jnp.ones((1, 64), jnp.int32)

    def attend(q, k, v):
        rules = {"causal": True, "window": 0, "scale": 1.0, "softcap": 0.0, "platform": "gpu"}
        return flash_attention(q, k, v, segments, segments, **rules)

    text = jax.make_jaxpr(lambda q, k, v: jax.vjp(attend, q, k, v)[1](q))(q, k, k)
    calls = [eqn for eqn in text.jaxpr.eqns if eqn.primitive.name == "pallas_call"]
    assert sorted(dots(eqn.params["jaxpr"]) for eqn in calls) == [2, 3, 4]
    plain, by_kernels = (
        compute.train_step(PRODUCTS, run(2, 128, attention=name), "bf16") for name in ("xla", "pallas")
    )
    product = 2 * 2 * PRODUCTS.layers * PRODUCTS.heads * PRODUCTS.head_dim  # two sequences, per pair
    seen = 128 * 129 // 2
    assert by_kernels.flops == plain.flops - 6 * product * 128**2 + 9 * product * seen
    assert by_kernels.flops_of["recomputation"] == 3 * product * seen
    # A window hides more pairs; sliding layers alternate with full ones, so the count is averaged.
    sliding = dataclasses.replace(PRODUCTS, pattern=("sliding", "full"), window=16)
    seen += 16 * 17 // 2 + (128 - 16) * 16
    by_kernels = compute.train_step(sliding, run(2, 128, attention="pallas"), "bf16")
    assert by_kernels.flops == plain.flops - 6 * product * 128**2 + 9 * product * seen // 2
    # No array with an element per pair is moved.
    assert by_kernels.bytes_of["activations"] < plain.bytes_of["activations"]


def test_a_kernel_that_runs_again_is_counted():
    """The kernel's forward pass is counted again if one of its two results is not saved."""
    full, lse, both = (
        compute.train_step(PRODUCTS, run(2, 128, policy, "pallas"), "bf16").flops
        for policy in ("names:attn_out", "names:attn_out,attn_context", "names:attn_out,attn_context,attn_lse")
    )
    product = 2 * 2 * PRODUCTS.layers * PRODUCTS.heads * PRODUCTS.head_dim * 128 * 129 // 2
    assert full == lse == both + 2 * product


@pytest.mark.parametrize("attention", ["xla", "pallas"])
@pytest.mark.parametrize("remat", ["none", "full", "sqrt"])
@pytest.mark.parametrize("length", [1024, 16384])
@pytest.mark.parametrize("name", ["gemma3-27b", "gemma2-9b", "llama3-8b", "mixtral-8x7b", "gpt2"])
def test_utilisation_is_at_most_one(name, length, remat, attention):
    """Utilisation at a step's least time is at most 1 even if a window hides most pairs: hidden pairs are no work."""
    model = dataclasses.replace(ARCHITECTURES[name], context_length=length)
    if "sliding" in model.pattern:
        model = dataclasses.replace(model, window=1024)
    work = compute.train_step(model, run(4, length, remat, attention), "bf16")
    needed = compute.model_flops_per_token(model, length) * 4 * length
    assert 0 < needed <= work.flops
    # The mistake that exceeds 1: counting all pairs as work for a model whose program skips the hidden ones.
    if "sliding" in model.pattern and length == 16384:
        full = dataclasses.replace(model, pattern=("full",), window=0)
        assert compute.model_flops_per_token(full, length) > 1.1 * compute.model_flops_per_token(model, length)
