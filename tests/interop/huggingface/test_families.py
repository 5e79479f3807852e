"""config.json of every family: old and new spellings, defaults, reading and writing, and refusals."""

import dataclasses

import folders
import numpy as np
import pytest

from jaxllm.architectures import ARCHITECTURES
from jaxllm.errors import UserError
from jaxllm.interop.huggingface import families
from jaxllm.interop.huggingface.config_file import canonical, read_config, write_config
from jaxllm.model.layers import rope_frequencies

# Fields as in the releases, including redundant ones and ones without effect.
LLAMA32 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.45.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
GEMMA3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "vocab_size": 32000,
}
QWEN25_7B = {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 131072,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 152064,
}


def read(values, **changes):
    merged = {name: value for name, value in (values | changes).items() if value is not ...}
    return read_config(merged, "config.json")[1]


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_published_models_both_ways(name):
    model = ARCHITECTURES[name]
    family, values = write_config(model)
    assert read_config(values, "x") == (family, read(values))
    assert canonical(read(values)) == canonical(model)


@pytest.mark.parametrize("family", sorted(folders.FAMILIES))
def test_every_family_both_ways(family):
    model = folders.FAMILIES[family]
    found, values = write_config(model, family)
    assert found == family
    assert canonical(read(values)) == canonical(model)


@pytest.mark.parametrize(
    ("values", "name", "apart"),
    [
        (LLAMA32, "llama3.2-1b", {}),
        (MISTRAL, "mistral-7b", {}),
        (GEMMA3_4B, "gemma3-4b", {"vocab_size": 262208}),
        (QWEN25_7B, "qwen2.5-7b", {}),
    ],
)
def test_files_of_releases(values, name, apart):
    assert canonical(read(values)) == canonical(dataclasses.replace(ARCHITECTURES[name], **apart))


def test_new_spellings_say_the_same():
    rope = LLAMA32["rope_scaling"] | {"rope_theta": 500000.0}
    new = read(LLAMA32, rope_scaling=..., rope_theta=..., torch_dtype=..., rope_parameters=rope, dtype="bfloat16")
    assert new == read(LLAMA32)
    assert read(LLAMA32, rope_scaling=..., rope_parameters=rope) == new, "said twice"
    assert read(LLAMA32, quantization_config=None) == new
    text = GEMMA3_4B["text_config"] | {
        "rope_scaling": None,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "layer_types": ["full_attention" if i % 6 == 5 else "sliding_attention" for i in range(34)],
    }
    assert read(GEMMA3_4B, text_config=text) == read(GEMMA3_4B)


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(5120, 64, 8), (2560, 32, 8)])
def test_a_head_is_as_large_as_the_file_says(width, heads, kv_heads):
    """head_dim is read from the file: 128, although width / heads is 80. The exported file states it too (CASES E1)."""
    sizes = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    model = read({"model_type": "qwen3", "head_dim": 128} | sizes)
    assert model.head_dim == 128
    assert (model.heads + 2 * model.kv_heads) * model.head_dim == (10240 if heads == 64 else 6144)
    assert write_config(model)[1]["head_dim"] == 128
    assert read({"model_type": "llama"} | sizes).head_dim == 80, "derived where nothing is given"
    assert read({"model_type": "qwen3"} | sizes).head_dim == 128, "the family's own where nothing is given"


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_llama3_frequencies(key):
    """Llama 3 RoPE scaling: multipliers of the 32 pairs (CASES E2)."""
    scaling = {key if name == "rope_type" else name: value for name, value in LLAMA32["rope_scaling"].items()}
    model = read(LLAMA32, rope_scaling=scaling)
    plain = read(LLAMA32, rope_scaling=None)
    ratio = rope_frequencies(model, "full")[0] / rope_frequencies(plain, "full")[0]
    wanted = [1.0] * 15 + [0.605573, 0.303743, 0.103448] + [0.03125] * 14
    np.testing.assert_allclose(ratio, wanted, atol=1e-6)


def test_defaults_are_the_familys():
    assert read({"model_type": "llama"}).rope_theta == 10_000.0
    assert read({"model_type": "mixtral"}).rope_theta == 1_000_000.0
    assert not read({"model_type": "llama"}).tied_embeddings
    assert read({"model_type": "gemma2"}).tied_embeddings
    assert read({"model_type": "mistral"}).window == 4096
    assert read({"model_type": "mistral", "sliding_window": None}).window == 0
    assert read({"model_type": "gemma2"}).attention_softcap == 50.0
    assert read({"model_type": "gemma2", "attn_logit_softcapping": None}).attention_softcap == 0.0
    assert not read({"model_type": "qwen3_moe"}).normalize_routing
    assert read({"model_type": "smollm3"}).pattern == ("full", "full", "full", "nope")
    assert read({"model_type": "gpt2", "n_inner": None}).mlp_width == 4 * 768


def test_layers_that_slide():
    listed = ["full_attention", "sliding_attention", "sliding_attention"] * 2
    qwen = {"model_type": "qwen3", "num_hidden_layers": 6, "use_sliding_window": True, "sliding_window": 8}
    assert read(qwen, layer_types=listed).pattern == ("full", "sliding", "sliding")
    assert read(qwen, max_window_layers=4).pattern == ("full",) * 4 + ("sliding",) * 2
    assert read(qwen, use_sliding_window=False).pattern == ("full",)
    smol = {"model_type": "smollm3", "num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0]}
    assert read(smol).pattern == ("full", "nope")


def test_longrope_and_partial_rotation():
    """Reads Phi-4-mini's spelling: factors for the rotated pairs, and the original context outside the table."""
    model = read(
        {
            "model_type": "phi3",
            "hidden_size": 64,
            "num_attention_heads": 4,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 131072,
            "rope_scaling": {"type": "su", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6},
        }
    )
    assert (model.rope_dim, model.rope_scaling, model.rope_original_context) == (12, "longrope", 4096)
    assert (model.rope_factor, model.rope_long_factors) == (32.0, (2.0,) * 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "the unsupported type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "mrope"}}, "the unsupported type 'mrope'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs a positive factor"),
        ({"rope_scaling": LLAMA32["rope_scaling"] | {"mystery": 1}}, "mystery = 1"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_scaling and rope_parameters differ"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "fp8", "bits": 8}}, "weights are quantized (quant_method 'fp8')"),
        ({"quantization_config": {"bits": 4}}, "weights are quantized (quant_method None)"),
        (
            {"rope_scaling": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            "rope_theta is 500000.0",
        ),
        ({"mystery": 3}, "mystery = 3"),
        ({"logits_scaling": 8.0, "residual_multiplier": 0.2}, "logits_scaling = 8.0, residual_multiplier = 0.2"),
        ({"hidden_size": "2048"}, "hidden_size is '2048'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"model_type": "mamba"}, "model_type is 'mamba'"),
        ({"model_type": "qwen2", "mlp_bias": True, "attention_bias": ...}, "mlp_bias is True"),
        ({"model_type": "mistral", "attention_bias": True}, "attention_bias is True"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),
    ],
)
def test_what_there_is_no_model_for_is_refused_by_name(changes, words):
    with pytest.raises(UserError) as caught:
        read(LLAMA32, **changes)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        ({"model_type": "gpt2", "activation_function": "relu"}, "activation_function is 'relu'"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        ({"model_type": "gemma2", "hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"model_type": "gemma2", "layer_types": ["full_attention"]}, "layer_types lists 1 layers"),
        ({"model_type": "qwen3", "layer_types": ["linear_attention"] * 32}, "linear_attention"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers lists 1 layers"),
        ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ({"model_type": "gemma3", "text_config": {"mystery": 1}}, "text_config has unsupported fields"),
        ({"model_type": "gemma3", "mystery": 1}, "mystery = 1"),
    ],
)
def test_what_a_family_cannot_do(values, words):
    with pytest.raises(UserError) as caught:
        read(values)
    assert words in str(caught.value)


def test_a_model_without_a_family_names_the_nearest():
    model = dataclasses.replace(ARCHITECTURES["llama3-8b"], logit_softcap=5.0)
    with pytest.raises(UserError, match=r"the closest, llama, differs in logit_softcap \(5\.0 instead of 0\.0\)"):
        write_config(model)


def test_a_part_that_is_forgotten_is_a_fault_that_shows(monkeypatch):
    """Writing is verified by reading back: a wrong sliding window in the written configuration is detected."""
    family = families.FAMILIES["mistral"]
    parts = tuple(
        dataclasses.replace(part, write=lambda m: {"sliding_window": 1})
        if "sliding_window" in part.write(model)
        else part
        for model in [ARCHITECTURES["mistral-7b"]]
        for part in family.parts
    )
    monkeypatch.setitem(families.FAMILIES, "mistral", dataclasses.replace(family, parts=parts))
    assert write_config(ARCHITECTURES["mistral-7b"])[0] != "mistral"
