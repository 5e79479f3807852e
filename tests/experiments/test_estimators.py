"""The estimators' formulas against figures that they publish or print for their documented examples."""

import dataclasses

import estimators
import models
import pytest

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Config
from jaxllm.ledger.rows import Unknown

GPT = dataclasses.replace(models.ROTARY, mlp="gelu", norm="layernorm", context_length=4096)
# The models that the calculators' examples call 6.9B, 20B and Llama 7B, with their default vocabulary.
PYTHIA = dataclasses.replace(
    GPT, vocab_size=51200, layers=32, width=4096, heads=32, kv_heads=32, head_dim=128, mlp_width=16384
)
NEOX = dataclasses.replace(PYTHIA, layers=44, width=6144, heads=64, kv_heads=64, head_dim=96, mlp_width=24576)
LLAMA = dataclasses.replace(PYTHIA, mlp_width=14336)


def run(length=2048, batch=1, **fields) -> Config:
    """Returns a run of one sequence, AdamW and no recomputation; `fields` are `section_field=value`."""
    config = Config()
    config.data.sequence_length, config.train.batch_size, config.optimizer.name = length, batch, "adamw"
    for name, value in fields.items():
        section, _, field = name.partition("_")
        assert hasattr(getattr(config, section), field), name
        setattr(getattr(config, section), field, value)
    return config


def gib(count: float) -> float:
    return round(count / 2**30, 2)


def mib(count: float) -> float:
    return round(count / 2**20, 2)


@pytest.mark.parametrize(
    ("model", "single", "mixed"),
    [
        (413.18 * 2**20, 1.61 * 2**30, 826.36 * 2**20),  # bert-base-cased
        (297.12 * 2**30, 1.16 * 2**40, 594.24 * 2**30),  # idefics-80b-instruct
        (97.70 * 2**20, 390.78 * 2**20, 195.39 * 2**20),  # resnet50
    ],
)
def test_accelerates_documented_tables(model, single, mixed):
    assert estimators.accelerate_bytes(model, mixed=False) == pytest.approx(single, rel=3e-3)
    assert estimators.accelerate_bytes(model, mixed=True) == pytest.approx(mixed, rel=1e-4)


def test_accelerate():
    gpt2, llama = ARCHITECTURES["gpt2"], ARCHITECTURES["llama3-70b"]
    assert estimators.accelerate(gpt2, run(), "fp32") == 16 * 124_439_808
    assert estimators.accelerate(gpt2, run(), "bf16") == 8 * 124_439_808
    assert estimators.accelerate(gpt2, run(batch=4, mesh_data=4), "fp32") == 16 * 124_439_808
    # It counts a base model without a head (huggingface/accelerate#3379).
    assert estimators.accelerate(llama, run(), "bf16") == 8 * (70_553_706_496 - 128_256 * 8192)


@pytest.mark.parametrize(
    ("stage", "offload", "gigabytes"), [(2, True, 5.31), (2, False, 15.93), (3, True, 0.78), (3, False, 6.09)]
)
def test_deepspeeds_documented_example_of_3b(stage, offload, gigabytes):
    assert gib(estimators.deepspeed_bytes(2_851_000_000, 32_000_000, 8, stage, offload)) == gigabytes


@pytest.mark.parametrize(("offload", "megabytes"), [(False, 3291), (True, 477)])
def test_deepspeeds_documented_example_of_t5_large(offload, megabytes):
    assert estimators.deepspeed_bytes(737_670_000, 32_900_000, 4, 3, offload) >> 20 == megabytes


def test_deepspeed():
    model = ARCHITECTURES["llama3-8b"]
    config = run(batch=8, mesh_data=8, mesh_zero=2)
    assert estimators.deepspeed(model, config, "bf16") == 6 * 8_030_261_248
    config.mesh.zero = 3
    assert estimators.deepspeed(model, config, "bf16") == 4 * 128_256 * 4096 + 18 * 8_030_261_248 // 8
    config.optimizer.offload = "all"
    assert estimators.deepspeed(model, config, "bf16") == 4 * 128_256 * 4096 + 2 * 8_030_261_248 // 8


def test_megatrons_parameters_and_state_as_it_prints_them():
    """Megatron's printed figures: GPT-2 XL on one GPU; Llama 3.1 8B on eight with the distributed optimizer.

    The latter is from the log that NVIDIA publishes, of an earlier version that took every norm for a LayerNorm.
    """
    assert mib(estimators.megatron_parameters(ARCHITECTURES["gpt2-xl"]) * 18) == pytest.approx(26699.47, abs=0.01)
    llama = estimators.megatron_parameters(dataclasses.replace(ARCHITECTURES["llama3.1-8b"], norm="layernorm"))
    assert round(llama / 1e9, 4) == 8.0305
    assert mib(llama * (6 + 12 / 8)) == pytest.approx(57438.81, abs=0.01)


def test_megatron_as_it_prints_a_70b_gpt():
    """Published log of a 70B GPT: 80 layers of width 8192, four tensor ranks, 8,192 tokens per micro-batch."""
    sizes = {"layers": 80, "width": 8192, "heads": 64, "kv_heads": 64, "head_dim": 128, "mlp_width": 4 * 8192}
    model = dataclasses.replace(GPT, vocab_size=32000, **sizes)
    tables = 32256 * 8192
    assert round(tables / 1e9, 2) == 0.26
    assert round((estimators.megatron_parameters(model, 4) - tables) / 1e9, 2) == 64.43
    assert round(estimators.megatron_parameters(model, 4) / 1e9, 2) == 64.69
    assert mib(estimators.megatron_layer(model, 8192, 4)) == 1024.0


def test_megatron():
    model = dataclasses.replace(GPT, vocab_size=100, layers=2, width=8, heads=2, kv_heads=2, head_dim=4, mlp_width=32)
    parameters = 2 * (4 * 64 + 2 * 8 * 32 + 2 * 2 * 8) + 2 * 8 + 128 * 8
    assert estimators.megatron_parameters(model) == parameters
    tokens = 3 * 16
    kept = 2 * 34 * tokens * 8 + tokens * (8 + 8) + 2 * tokens * (128 + 8)
    alone = estimators.megatron(model, run(16, 3), "bf16")
    assert alone == pytest.approx(18 * parameters + 1.05 * kept, abs=1)
    # Full recomputation does not change its figure.
    assert estimators.megatron(model, run(16, 3, remat_policy="full"), "bf16") == alone
    shared = estimators.megatron(model, run(16, 12, mesh_data=4, mesh_zero=1), "bf16")
    assert shared == pytest.approx(9 * parameters + 1.05 * kept, abs=1)
    assert estimators.megatron(model, run(16, 24, mesh_data=4, mesh_zero=1, train_accumulate=2), "bf16") == shared
    # With sequence parallelism and recomputed scores, everything is sharded over the tensor ranks.
    selective = estimators.megatron(model, run(16, 3, mesh_tensor=2, train_attention_chunk=4), "bf16")
    kept = 2 * tokens * (18 * 8 + 4 * 32) + tokens * (8 + 8) + 4 * tokens * (256 + 8)
    parameters += 128 * 8
    assert selective == pytest.approx((18 * parameters + kept) / 2, abs=1)


def test_the_cookbooks_documented_examples():
    """Matches what calc_transformer_mem.py prints for its examples: GiB per GPU."""
    state = estimators.cookbook_state(estimators.cookbook_parameters(PYTHIA, 2048), 2, 128, 2, 1, "adamw")
    assert gib(state) == pytest.approx(6.40 + 25.60 + 0.60 + 0.93, abs=0.02)
    assert (
        gib(estimators.cookbook_activations(PYTHIA, 8, 2048, recompute=True)) == 2 * 34.00
    )  # there on two tensor ranks
    assert gib(estimators.cookbook(NEOX, run(remat_policy="full", mesh_zero=1), "fp16")) == 362.45
    assert gib(estimators.cookbook(LLAMA, run(4096, mesh_zero=1), "bf16")) == 203.33
    llama3 = dataclasses.replace(LLAMA, vocab_size=128256, mlp="swiglu", kv_heads=8)
    config = run(4096, 16, mesh_data=8, mesh_zero=3, optimizer_name="muon")
    assert gib(estimators.cookbook(llama3, config, "bf16")) == 209.91


UNSUPPORTED = [
    ("accelerate", run(batch=4, mesh_data=4, mesh_zero=1), "bf16", "no sharding"),
    ("accelerate", run(optimizer_name="lion"), "bf16", "Adam only"),
    ("accelerate", run(), "bf16_pure", "float32 weights"),
    ("deepspeed", run(), "bf16", "not for 0"),
    ("deepspeed", run(batch=4, mesh_data=4, mesh_zero=1), "bf16", "not for 1"),
    ("deepspeed", run(batch=4, mesh_data=4, mesh_zero=2), "fp32", "fp32"),
    ("deepspeed", run(batch=4, mesh_data=4, mesh_zero=3, mesh_replica=2), "bf16", "replica 2"),
    ("deepspeed", run(batch=4, mesh_data=4, mesh_zero=3, optimizer_offload="moments"), "bf16", "together"),
    ("megatron", run(), "fp32", "fp32"),
    ("megatron", run(batch=4, mesh_data=4, mesh_zero=2), "bf16", "no further sharding"),
    ("megatron", run(optimizer_offload="all"), "bf16", "no offload"),
    ("cookbook", run(remat_policy="dots"), "bf16", "not dots"),
    ("cookbook", run(optimizer_name="sgd"), "bf16", "no sgd"),
    ("cookbook", run(optimizer_offload="moments"), "bf16", "no offload"),
]


@pytest.mark.parametrize(("estimator", "config", "policy", "why"), UNSUPPORTED)
def test_unsupported_runs_are_unknown(estimator, config, policy, why):
    found = estimators.estimates(ARCHITECTURES["llama3-8b"], config, policy, "h100")
    assert set(found) == {"accelerate", "deepspeed", "megatron", "cookbook"}
    assert isinstance(found[estimator], Unknown)
    assert why in found[estimator].why


def test_on_a_gpu_and_on_a_tpu():
    config = run(8192, 8)
    on_gpu, on_tpu = (
        estimators.estimates(ARCHITECTURES["llama3-8b"], config, "bf16", name) for name in ("h100", "v5e")
    )
    assert isinstance(on_gpu["megatron"], int)
    assert on_gpu["accelerate"] == on_tpu["accelerate"]
    assert isinstance(on_tpu["megatron"], Unknown)
