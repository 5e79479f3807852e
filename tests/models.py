"""Small models that together use every branch of the transformer."""

import dataclasses

from jaxllm.config import Architecture

ROTARY = Architecture(
    vocab_size=64,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp_width=48,
    context_length=128,
    mlp="swiglu",
    norm="rmsnorm",
    norm_placement="pre",
    norm_eps=1e-5,
    positions="rotary",
    qkv_bias=False,
    out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    tied_embeddings=True,
    init_std=0.2,  # ten times the usual, so that outputs of a small model differ by far more than rounding errors
)
LEARNED = dataclasses.replace(
    ROTARY,
    kv_heads=4,
    mlp="gelu",
    norm="layernorm",
    positions="learned",
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tied_embeddings=False,
)
# Two kinds of layers, three repeats and one extra layer, with every cap and norm of Gemma 2 and 3.
SLIDING = dataclasses.replace(
    ROTARY,
    layers=5,
    mlp="geglu",
    norm="rmsnorm_plus_one",
    norm_placement="sandwich",
    qk_norm=True,
    pattern=("sliding", "full"),
    window=6,
    embedding_scale=32**0.5,
    query_scale=0.3,
    attention_softcap=20.0,
    logit_softcap=15.0,
    rope_theta_sliding=100.0,
    rope_scaling="linear",
    rope_factor=4.0,
)
EXPERTS = dataclasses.replace(ROTARY, experts=4, experts_per_token=2, mlp_width=24, router_aux_weight=0.02)
# Norms after the sub-layers and over whole projections, as in OLMo 2.
POST = dataclasses.replace(
    ROTARY, norm_placement="post", qk_norm=True, qk_norm_over="projection", tied_embeddings=False
)
# Layers without RoPE, as in SmolLM3, and layers with partial RoPE that depends on the sequence length, as in Phi-3.
LONGROPE = dataclasses.replace(
    ROTARY,
    layers=3,
    pattern=("full", "nope"),
    rope_theta=100.0,
    rope_dim=6,
    rope_scaling="longrope",
    rope_factor=4.0,
    rope_original_context=10,
    rope_short_factors=(1.0, 1.1, 1.3),
    rope_long_factors=(1.2, 2.5, 3.9),
)

ALL = {
    "rotary": ROTARY,
    "learned": LEARNED,
    "sliding": SLIDING,
    "experts": EXPERTS,
    "post": POST,
    "longrope": LONGROPE,
}
