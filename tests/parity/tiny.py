"""Tiny random models of every family, created and saved by transformers itself."""

import copy
import pathlib

import torch
import transformers

VOCABULARY = 97
ORIGINAL = 32  # positions before scaling, for models with scaled positions
WINDOW = 16

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # several times the usual, since small values would hide errors
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.0}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": ORIGINAL,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}


def _longrope(pairs: int) -> dict:
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + i for i in range(pairs)],
    }


# Name -> (configuration class, fields that differ from _SIZES; None omits a field).
CASES = {
    "llama2": ("Llama", {}),
    "llama3": ("Llama", {"num_key_value_heads": 1, "rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"head_dim": 10, "attention_bias": True, "mlp_bias": True, "rms_norm_eps": 1e-3}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "mistral": ("Mistral", {"sliding_window": WINDOW, "head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **_EXPERTS}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2.5-yarn": ("Qwen2", {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3-moe": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True, **_EXPERTS},
    ),
    "qwen3-moe-raw": (
        "Qwen3Moe",
        {"head_dim": 16, "num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": False, **_EXPERTS},
    ),
    "gemma2": ("Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "query_pre_attn_scalar": 24}),
    "gemma3": (
        "Gemma3Text",
        {
            "num_hidden_layers": 7,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 24,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gpt2": ("GPT2", {}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e5}}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 6}),
    "phi3": ("Phi3", {"sliding_window": WINDOW}),
    "phi3-longrope": ("Phi3", {"rope_parameters": _longrope(6), "original_max_position_embeddings": ORIGINAL}),
    "phi4-mini": (
        "Phi3",
        {
            "hidden_size": 64,
            "rope_parameters": _longrope(6) | {"partial_rotary_factor": 0.75},
            "original_max_position_embeddings": ORIGINAL,
            "tie_word_embeddings": True,
        },
    ),
    "olmo2": ("Olmo2", {}),
}
_GPT2 = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
_GPT2 |= {"max_position_embeddings": "n_positions", "intermediate_size": None, "num_key_value_heads": None}


def build(name: str, **changes):
    """Returns a float32 model seeded by its name; norm weights and biases are away from their identities."""
    kind, more = CASES[name]
    fields = copy.deepcopy(_SIZES | more | changes)  # copied because transformers modifies its arguments
    if kind == "GPT2":
        fields = {_GPT2.get(key, key): value for key, value in fields.items() if _GPT2.get(key, key)}
    config = getattr(transformers, f"{kind}Config")(**fields)
    torch.manual_seed(sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def save(model, folder: pathlib.Path) -> pathlib.Path:
    model.save_pretrained(folder)
    return folder
