"""Registry of published transformer architectures, and resolution of a run's `model` section to one of them.

`jaxllm.architectures.families` has the fields that a family shares; a row here has the values of one member. To add
a model, add a row. `tests/architectures/test_architectures.py` checks parameter counts stated by the publishers.
"""

import dataclasses
import difflib

from jaxllm.architectures.families import (
    gemma2,
    gemma3,
    gpt,
    llama,
    llama3,
    llama31,
    olmo2,
    phi3,
    phi_longrope,
    qwen3,
    qwen25,
    qwen25_small,
    smollm2,
    smollm3,
)
from jaxllm.config import Architecture, Config, ModelConfig, validate
from jaxllm.config import overrides as config_tree
from jaxllm.errors import UserError

# Published longrope factors (Ding et al. 2024): each divides the frequency of one rotary pair. Values are copied digit
# by digit from config.json of each release, so that frequencies equal those used in training. Short factors apply to
# sequences within the original context of 4096 positions, long factors to longer ones.
_PHI35_MINI_SHORT = (
    *(1.0, 1.0199999809265137, 1.0299999713897705, 1.0299999713897705, 1.0499999523162842),
    *(1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0499999523162842, 1.0699999332427979),
    *(1.0999999046325684, 1.1099998950958252, 1.1599998474121094, 1.1599998474121094, 1.1699998378753662),
    *(1.2899998426437378, 1.339999794960022, 1.679999828338623, 1.7899998426437378, 1.8199998140335083),
    *(1.8499997854232788, 1.8799997568130493, 1.9099997282028198, 1.9399996995925903, 1.9899996519088745),
    *(2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346, 2.0199997425079346),
    *(2.0199997425079346, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914),
    *(2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914, 2.0299997329711914),
    *(2.0799996852874756, 2.0899996757507324, 2.189999580383301, 2.2199995517730713, 2.5899994373321533),
    *(2.729999542236328, 2.749999523162842, 2.8399994373321533),
)

_PHI35_MINI_LONG = (
    *(1.0800000429153442, 1.1100000143051147, 1.1399999856948853, 1.340000033378601, 1.5899999141693115),
    *(1.600000023841858, 1.6200000047683716, 2.620000123977661, 3.2300000190734863, 3.2300000190734863),
    *(4.789999961853027, 7.400000095367432, 7.700000286102295, 9.09000015258789, 12.199999809265137),
    *(17.670000076293945, 24.46000099182129, 28.57000160217285, 30.420001983642578, 30.840002059936523),
    *(32.590003967285156, 32.93000411987305, 42.320003509521484, 44.96000289916992, 50.340003967285156),
    *(50.45000457763672, 57.55000305175781, 57.93000411987305, 58.21000289916992, 60.1400032043457),
    *(62.61000442504883, 62.62000274658203, 62.71000289916992, 63.1400032043457, 63.1400032043457),
    *(63.77000427246094, 63.93000411987305, 63.96000289916992, 63.970001220703125, 64.02999877929688),
    *(64.06999969482422, 64.08000183105469, 64.12000274658203, 64.41000366210938, 64.4800033569336),
    *(64.51000213623047, 64.52999877929688, 64.83999633789062),
)

_PHI4_MINI_SHORT = (1.0,) * 48

_PHI4_MINI_LONG = (
    *(1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649),
    *(2.446418898, 2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533),
    *(5.984965424, 6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651),
    *(14.64173252, 16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03),
    *(32.1, 32.13, 32.23, 32.6, 32.61, 32.64, 32.66, 32.7),
    *(32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77),
)

ARCHITECTURES: dict[str, Architecture] = {
    "gpt2": gpt(12, 768, 12),
    "gpt2-medium": gpt(24, 1024, 16),
    "gpt2-large": gpt(36, 1280, 20),
    "gpt2-xl": gpt(48, 1600, 25),
    # The paper alternates dense and banded sparse attention without giving the band; here all layers are dense.
    "gpt3-175b": gpt(96, 12288, 96, context_length=2048),
    "llama2-7b": llama(32, 4096, 32, 32, 128, 11008),
    "llama2-13b": llama(40, 5120, 40, 40, 128, 13824),
    "llama2-70b": llama(80, 8192, 64, 8, 128, 28672),
    "llama3-8b": llama3(32, 4096, 32, 8, 128, 14336),
    "llama3-70b": llama3(80, 8192, 64, 8, 128, 28672),
    "llama3.1-8b": llama31(32, 4096, 32, 8, 128, 14336),
    "llama3.1-70b": llama31(80, 8192, 64, 8, 128, 28672),
    "llama3.1-405b": llama31(126, 16384, 128, 8, 128, 53248),
    "llama3.2-1b": llama31(16, 2048, 32, 8, 64, 8192, factor=32.0, tied_embeddings=True),
    "llama3.2-3b": llama31(28, 3072, 24, 8, 128, 8192, factor=32.0, tied_embeddings=True),
    # Jiang et al. 2023, v0.1; Jiang et al. 2024. Source: config.json of each release.
    "mistral-7b": llama(32, 4096, 32, 8, 128, 14336, context_length=32768, pattern=("sliding",), window=4096),
    "mixtral-8x7b": llama(
        *(32, 4096, 32, 8, 128, 14336),
        context_length=32768,
        rope_theta=1_000_000.0,
        experts=8,
        experts_per_token=2,
        router_aux_weight=0.02,
    ),
    "qwen2.5-0.5b": qwen25_small(24, 896, 14, 2, 64, 4864, context_length=32768),
    "qwen2.5-1.5b": qwen25_small(28, 1536, 12, 2, 128, 8960),
    "qwen2.5-3b": qwen25_small(36, 2048, 16, 2, 128, 11008, context_length=32768),
    "qwen2.5-7b": qwen25(28, 3584, 28, 4, 128, 18944, norm_eps=1e-6),
    "qwen2.5-14b": qwen25(48, 5120, 40, 8, 128, 13824),
    "qwen2.5-32b": qwen25(64, 5120, 40, 8, 128, 27648),
    "qwen2.5-72b": qwen25(80, 8192, 64, 8, 128, 29568),
    "qwen3-0.6b": qwen3(28, 1024, 16, 8, 128, 3072, tied_embeddings=True),
    "qwen3-1.7b": qwen3(28, 2048, 16, 8, 128, 6144, tied_embeddings=True),
    "qwen3-4b": qwen3(36, 2560, 32, 8, 128, 9728, tied_embeddings=True),
    "qwen3-8b": qwen3(36, 4096, 32, 8, 128, 12288),
    "qwen3-14b": qwen3(40, 5120, 40, 8, 128, 17408),
    "qwen3-32b": qwen3(64, 5120, 64, 8, 128, 25600),
    "qwen3-30b-a3b": qwen3(48, 2048, 32, 4, 128, 768, experts=128, experts_per_token=8, router_aux_weight=0.001),
    "gemma2-2b": gemma2(26, 2304, 8, 4, 256, 9216),
    "gemma2-9b": gemma2(42, 3584, 16, 8, 256, 14336),
    # Both 27B models scale attention by (D / N) ** -0.5, the smaller ones by H ** -0.5.
    "gemma2-27b": gemma2(46, 4608, 32, 16, 128, 36864, query_scale=(4608 / 32) ** -0.5),
    "gemma3-1b": gemma3(
        *(26, 1152, 4, 1, 256, 6912),
        context_length=32768,
        window=512,
        rope_scaling="none",
        rope_factor=1.0,
    ),
    "gemma3-4b": gemma3(34, 2560, 8, 4, 256, 10240),
    "gemma3-12b": gemma3(48, 3840, 16, 8, 256, 15360),
    "gemma3-27b": gemma3(62, 5376, 32, 16, 128, 21504, query_scale=(5376 / 32) ** -0.5),
    "smollm2-135m": smollm2(30, 576, 9, 3, 64, 1536, init_std=1 / 24),
    "smollm2-360m": smollm2(32, 960, 15, 5, 64, 2560),
    "smollm2-1.7b": smollm2(24, 2048, 32, 32, 64, 8192, rope_theta=130_000.0),
    "smollm3-3b": smollm3(36, 2048, 16, 4, 128, 11008),
    "olmo2-1b": olmo2(16, 2048, 16, 16, 128, 8192),
    "olmo2-7b": olmo2(32, 4096, 32, 32, 128, 11008),
    "olmo2-13b": olmo2(40, 5120, 40, 40, 128, 13824),
    "olmo2-32b": olmo2(64, 5120, 40, 8, 128, 27648),
    "phi3-mini-4k": phi3(32, 3072, 32, 32, 96, 8192, pattern=("sliding",), window=2047),
    "phi3-medium-4k": phi3(40, 5120, 40, 10, 128, 17920, pattern=("sliding",), window=2047),
    "phi3.5-mini": phi_longrope(*(32, 3072, 32, 32, 96, 8192), short=_PHI35_MINI_SHORT, long=_PHI35_MINI_LONG),
    "phi4": phi3(40, 5120, 40, 10, 128, 17920, vocab_size=100352, context_length=16384, rope_theta=250_000.0),
    "phi4-mini": phi_longrope(
        *(32, 3072, 24, 8, 128, 8192),
        short=_PHI4_MINI_SHORT,
        long=_PHI4_MINI_LONG,
        vocab_size=200064,
        rope_dim=96,
        tied_embeddings=True,
    ),
}


def resolve(model: ModelConfig) -> Architecture:
    """Returns the architecture named `model.name`, with every override that is not None applied.

    An override changes only its own field: a new width or number of heads keeps head_dim, and a new width keeps
    embedding_scale. One exception: in a model without grouped heads (kv_heads equal to heads), `heads` also sets
    `kv_heads`, unless that is given. If every field without a default is given, as by `explicit_config`, any name is
    accepted.

    Raises:
      UserError: the name is unknown; the message names the nearest ones.
    """
    fields = dataclasses.fields(Architecture)
    overrides = {field.name: getattr(model, field.name) for field in fields if getattr(model, field.name) is not None}
    if model.name not in ARCHITECTURES:
        if all(field.name in overrides for field in fields if field.default is dataclasses.MISSING):
            return Architecture(**overrides)
        near = difflib.get_close_matches(model.name, ARCHITECTURES, n=3, cutoff=0.0)
        raise UserError(f"config.model.name is {model.name!r}, which is not a known model; nearest: {', '.join(near)}")
    entry = ARCHITECTURES[model.name]
    if "heads" in overrides and entry.kv_heads == entry.heads:
        overrides = {"kv_heads": overrides["heads"]} | overrides
    return dataclasses.replace(entry, **overrides)


def explicit_config(name: str, model: Architecture) -> ModelConfig:
    """Returns the configuration of a model outside the registry: all of its fields, under a name for messages."""
    return ModelConfig(name=name, **{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})


def resolve_config(config: Config) -> Architecture:
    """Returns the architecture of a run after checking the whole configuration.

    Raises:
      UserError: the configuration is invalid; one line names the fields and the fix.
    """
    config_tree.check_types(config)
    model = resolve(config.model)
    validate.check(config, model)
    return model
