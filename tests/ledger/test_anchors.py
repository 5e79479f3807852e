"""Published figures that the ledger must reproduce, each to the published digit.

Elsewhere: the backward pass and the bound of decoding (test_compute.py), weights and cache at inference
(test_inference.py), and the cross entropy (model/test_loss.py).
"""

import dataclasses
import math

import models
import pytest

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Architecture, Config
from jaxllm.ledger import rows, trace
from jaxllm.ledger.formula import flops as compute
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.block_graph import BLOCK_INPUT
from jaxllm.ledger.formula.fitted.train.parts import gradient_elements
from jaxllm.ledger.formula.training_memory import training
from jaxllm.ledger.rows import BACKWARD, BOUNDARY, PERSISTENT, UPDATE, Ledger
from jaxllm.model.specs import parameter_count

SIZES = {"vocab_size": 512, "layers": 4, "width": 128, "head_dim": 32, "mlp_width": 384, "context_length": 512}
BASE = dataclasses.replace(models.ROTARY, **SIZES)


def run(**fields) -> Config:
    """Returns a run of 4 sequences of 128 tokens, Adam, float32; `fields` are `section_field=value`."""
    config = Config()
    config.train.batch_size, config.data.sequence_length = 4, 128
    config.optimizer.name, config.precision.policy = "adam", "fp32"
    for name, value in fields.items():
        section, _, field = name.partition("_")
        setattr(getattr(config, section), field, value)
    return config


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_parameter"), [("sgd", 8), ("momentum", 12), ("lion", 12), ("adam", 16), ("adamw", 16)]
)
def test_bytes_a_parameter_in_float32(optimizer, bytes_per_parameter):
    model = ARCHITECTURES["gpt2"]
    ledger = training(model, run(optimizer_name=optimizer), "fp32")
    gradients = next(row.bytes_per_device for row in ledger.rows if row.name == "gradients" and row.phase == UPDATE)
    few = ledger.kind_bytes("state") + sum(row.bytes_per_device for row in ledger.rows if row.name == "counters")
    assert ledger.persistent_bytes + gradients - few == bytes_per_parameter * parameter_count(model)


def test_gpt3_with_adam_takes_35_devices_of_80_gb():
    model = ARCHITECTURES["gpt3-175b"]
    ledger = training(model, run(), "fp32")
    states = ledger.persistent_bytes + parameter_count(model) * 4
    assert round(states / 1e12, 1) == 2.8
    assert -(-states // (80 * 10**9)) == 35


def test_mixed_precision_has_the_same_state_and_half_of_the_activations():
    """2 + 2 + 4 + 4 + 4 = 16 bytes; scores, norms and rotary angles are float32 in either precision."""
    one, other = (training(BASE, run(), policy, "gpu") for policy in ("fp32", "bf16"))
    assert one.persistent_bytes == other.persistent_bytes
    assert training(BASE, run(), "fp16").persistent_bytes == one.persistent_bytes + 8  # the loss scale
    assert other.kind_bytes("master weights") == one.kind_bytes("weights")
    assert states(BASE, run(precision_policy="bf16")) == 16 * parameter_count(BASE)
    for tag in ("attn_qkv", "mlp_up", "mlp_hidden", "resid_mid", BLOCK_INPUT):
        assert held(one, tag, BOUNDARY) == 2 * held(other, tag, BOUNDARY)


def held(ledger: Ledger, name: str, phase: str) -> int:
    (row,) = [row for row in ledger.rows if (row.name, row.phase) == (name, phase)]
    return row.bytes_per_device


def states(model: Architecture, config: Config) -> int:
    """Returns the bytes ZeRO counts on one device: compute weights, gradients, and persistent state but counters."""
    ledger = training(model, config, "bf16", "gpu")
    few = sum(row.bytes_per_device for row in ledger.rows if row.name in ("counters", "step and key"))
    (copies,) = [r for r in ledger.rows if r.phase == BOUNDARY and r.name.startswith("compute copy of weights")]
    assert ledger.peak_bytes > ledger.persistent_bytes + copies.bytes_per_device
    return ledger.persistent_bytes - few + copies.bytes_per_device + gradient_bytes(model, config, "bf16")


def gradient_bytes(model: Architecture, config: Config, policy: str) -> int:
    """Returns the bytes of all gradients on one device, in the dtype in which they are computed."""
    made = run_lib.make(model, config, policy, "gpu")
    return gradient_elements(made, made.parameters) * made.compute_bytes


def zero_run(**fields) -> Config:
    return run(precision_policy="bf16", data_sequence_length=8, **fields)


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_table(stage, gigabytes):  # Rajbhandari et al. 2020, figure 1: 7.5e9 parameters on 64 devices
    """Checks 16; 4 + 12/N; 2 + 14/N; 16/N bytes per parameter."""
    model, config = ARCHITECTURES["llama2-7b"], zero_run(mesh_data=64, mesh_zero=stage, train_batch_size=64)
    found = states(model, config) / parameter_count(model)
    assert found == pytest.approx((16, 4 + 12 / 64, 2 + 14 / 64, 16 / 64)[stage], rel=1e-6)
    assert round(found * 7.5, 1) == gigabytes


def test_zero_2_of_a_billion_parameters():  # deepspeedai/DeepSpeed#5102, #5099, #4527
    """2 + 2/4 + 12/4 bytes per parameter with 16-bit gradients; float32 accumulators are a separate row."""
    model = dataclasses.replace(BASE, layers=1, width=1000, vocab_size=1_000_000 - 1923)
    config = zero_run(mesh_data=4, mesh_zero=2, train_batch_size=4)
    parameters = parameter_count(model)
    assert parameters == pytest.approx(1e9, rel=2e-3)
    assert states(model, config) == pytest.approx(5.5 * parameters, rel=1e-3)
    config.train.accumulate, config.train.batch_size = 2, 8
    parts = training(model, config, "bf16", "gpu")
    (summed,) = {row.bytes_per_device for row in parts.rows if row.kind == "gradient accumulator"}
    assert summed == pytest.approx(parameters, rel=1e-3)  # 4 B on 4 devices: 6.5 in total
    named = {row.name for row in parts.rows}
    assert {"master weights", "m, first moment", "v, second moment", "gradients", "compute copy of weights"} <= named


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_stages_shard_what_they_say(devices):  # deepspeedai/DeepSpeed#4093
    """Stage 1 shards moments, 2 gradients too, 3 weights too; doubling the devices halves what is sharded."""
    whole = parameter_count(BASE) * 4
    for stage in range(4):
        config = run(mesh_data=devices, mesh_zero=stage, train_batch_size=8)
        ledger = training(BASE, config, "fp32")
        assert held(ledger, "m, first moment", PERSISTENT) == whole // (devices if stage >= 1 else 1)
        assert gradient_bytes(BASE, config, "fp32") == whole // (devices if stage >= 2 else 1)
        assert held(ledger, "weights", PERSISTENT) == whole // (devices if stage >= 3 else 1)


# Activations of one layer, bfloat16: s tokens of b sequences, width h, a heads.


def of_one_layer(model: Architecture, config: Config) -> int:
    """Returns the bytes that one more layer saves by the ledger's rows, and checks that the trace agrees."""
    deeper = dataclasses.replace(model, layers=model.layers + 1)
    by_rows, by_trace = (
        [figure(one) for one in (model, deeper)]
        for figure in (
            lambda one: training(one, config, "bf16", "gpu").kind_bytes("activations", BOUNDARY),
            lambda one: sum(trace.residuals(config, one, "gpu").tags.values()),
        )
    )
    assert by_rows == by_trace
    return by_rows[1] - by_rows[0]


def test_activations_of_a_classic_layer():  # Korthikanti et al. 2022, equation 1: s·b·h·(34 + 5·a·s/h)
    """The paper's count, less two 1-byte dropout masks (after attention and after the MLP).

    For the scores, less dropout's mask (1) and its result (2), and plus two bytes: probabilities are float32 here.
    """
    h, a, s, b = 128, 4, 64, 2
    model = dataclasses.replace(
        models.LEARNED, layers=2, width=h, heads=a, kv_heads=a, head_dim=h // a, mlp_width=4 * h
    )
    config = run(train_batch_size=b, data_sequence_length=s, precision_policy="bf16")
    published = s * b * h * 34 + 5 * a * s * s * b
    masks, scores = s * b * h * 2, a * s * s * b * (1 + 2 - 2)
    config.attention.implementation = "xla"
    assert of_one_layer(model, config) == published - masks - scores == s * b * h * 32 + 4 * a * s * s * b


def test_activations_of_a_llama_layer():
    """Checks s·b·[h(12 + 4g) + 6f] + 4·s·b·a, with g = kv/q heads and f the MLP's width.

    The 4·s·b·a of a fused kernel are the softmax's log-sum-exp, which our kernel saves. Chunked attention recomputes
    its
    scores instead; unchunked attention saves float32 probabilities, 4·a·s² per sequence.
    """
    h, a, kv, f, s, b = 128, 4, 2, 352, 64, 2
    model = dataclasses.replace(models.ROTARY, layers=2, width=h, heads=a, kv_heads=kv, head_dim=h // a, mlp_width=f)
    config = run(
        train_batch_size=b,
        data_sequence_length=s,
        precision_policy="bf16",
    )
    published_but_logarithms = s * b * (h * (12 + 4 * kv / a) + 6 * f)
    assert of_one_layer(model, config) == published_but_logarithms + 4 * s * b * a
    config.train.attention_chunk = 16
    assert of_one_layer(model, config) == published_but_logarithms
    config.train.attention_chunk, config.attention.implementation = 0, "xla"
    assert of_one_layer(model, config) == published_but_logarithms + 4 * a * s * s * b


def test_activations_under_full_remat():
    """Checks 2·s·b·h: a layer's input alone."""
    config = run(train_batch_size=2, data_sequence_length=64, precision_policy="bf16", remat_policy="full")
    for model in models.ROTARY, models.LEARNED:
        assert of_one_layer(model, config) == 2 * 64 * 2 * model.width


@pytest.mark.parametrize("layers", [4, 9, 16, 64, 100, 400])
def test_sqrt_remat_keeps_twice_the_root(layers):  # Chen et al. 2016, section 4.2
    """Saves the inputs of √L groups, and the √L blocks of the group being recomputed."""
    ledger = training(dataclasses.replace(BASE, layers=layers), run(remat_policy="sqrt"), "fp32")
    inputs = held(ledger, BLOCK_INPUT, BOUNDARY) // (4 * 128 * BASE.width * 4)
    one = training(BASE, run(remat_policy="none"), "fp32")
    block = (one.kind_bytes("activations", BOUNDARY) - in_hbm(one)) // BASE.layers
    assert inputs == math.isqrt(layers)
    assert held(ledger, "blocks of one group", BACKWARD) == math.isqrt(layers) * block


def in_hbm(ledger: Ledger) -> int:
    names = ("token ids", "rotary angles", "final norm")
    return sum(held(ledger, name, BOUNDARY) for name in names)


def flops(model: Architecture, **fields) -> int:
    """Returns FLOPs with attention that multiplies every pair, as the published figures assume."""
    return compute.train_step(model, run(attention_implementation="xla", **fields), "bf16").flops


def test_sqrt_remat_is_one_more_forward_pass_of_the_blocks():
    """Blocks take 4/3 of their FLOPs; the head's gradient is computed while its logits exist."""
    model = dataclasses.replace(BASE, layers=16)
    head = 3 * 2 * model.vocab_size * model.width * 4 * 128
    none, sqrt = (flops(model, remat_policy=policy) - head for policy in ("none", "sqrt"))
    assert 3 * sqrt == 4 * none


def test_full_remat_is_a_third_more():
    """Full remat adds a third, except for the head and the MLP's last matmul, whose result no gradient reads."""
    none, full = (flops(ARCHITECTURES["gpt3-175b"], remat_policy=policy) for policy in ("none", "full"))
    assert 1.2 < full / none < 4 / 3


def test_flops_of_gpt3s_step():  # Narayanan et al. 2021, section 5.1, without recomputation: 72 for their 96
    """Checks 72·B·s·L·h²·(1 + s/6h + V/12Lh): every pair of tokens, masked or not."""
    model = ARCHITECTURES["gpt3-175b"]
    B, s, L, h, V = 8, 2048, model.layers, model.width, model.vocab_size
    published = 72 * B * s * L * h**2 * (1 + s / (6 * h) + V / (12 * L * h))
    assert flops(model, train_batch_size=B, data_sequence_length=s) == pytest.approx(published, rel=1e-12)


def test_a_token_takes_6n_flops_and_attention():  # Kaplan et al. 2020; Chowdhery et al. 2022, appendix B
    """With causal masking a token sees (s + 1)/2 others on average, and each takes 12·l·h FLOPs."""
    model = ARCHITECTURES["gpt3-175b"]
    products = parameter_count(model) - model.context_length * model.width  # positions are a lookup
    biases_and_norms = products - compute.matmul_parameters(model)
    assert 0 < biases_and_norms < 2e-4 * products
    per_token = compute.model_flops_per_token(model, 2048)
    attention = 12 * model.layers * model.width * (2048 + 1) / 2
    assert per_token == 6 * compute.matmul_parameters(model) + attention
    assert rows.format_si(per_token, "FLOP") == "1.06 TFLOP"
