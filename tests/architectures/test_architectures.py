"""Checks parameter counts and shapes of the architectures against the published models, exactly."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import pytest

from jaxllm.architectures import ARCHITECTURES, resolve, resolve_config
from jaxllm.config import Architecture, Config, ModelConfig
from jaxllm.config.validate import check_architecture
from jaxllm.errors import UserError
from jaxllm.model.specs import is_spec, param_specs, parameter_count

# Parameter counts of the published checkpoints; for GPT-3, 12·L·D² + 13·L·D + (V + P)·D + 2·D.
PUBLISHED: dict[str, int] = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3-175b": 174_604_259_328,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-1b": 999_885_952,
    "gemma3-4b": 3_880_099_328,
    "gemma3-12b": 11_765_788_416,
    "gemma3-27b": 27_009_002_240,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "phi3-mini-4k": 3_821_079_552,
    "phi3-medium-4k": 13_960_238_080,
    "phi3.5-mini": 3_821_079_552,
    "phi4": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
}


def disagreements(count: Callable[[Architecture], int]) -> set[str]:
    """Returns the names of the models whose published parameter count differs from `count`."""
    return {name for name, published in PUBLISHED.items() if count(ARCHITECTURES[name]) != published}


def count_without(leaf: str) -> Callable[[Architecture], int]:
    """Returns a parameter count that omits every array named `leaf`."""

    def count(model: Architecture) -> int:
        leaves = jax.tree_util.tree_leaves_with_path(param_specs(model), is_leaf=is_spec)
        return sum(spec.size for path, spec in leaves if getattr(path[-1], "key", None) != leaf)

    return count


def named(condition: Callable[[Architecture], bool]) -> set[str]:
    return {name for name, model in ARCHITECTURES.items() if condition(model)}


def test_every_entry_has_a_published_count() -> None:
    assert PUBLISHED.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_is_the_published_one(name: str) -> None:
    assert parameter_count(ARCHITECTURES[name]) == PUBLISHED[name]


def test_parameter_count_of_a_72b_model_without_grouped_heads() -> None:
    model = dataclasses.replace(ARCHITECTURES["qwen2.5-72b"], kv_heads=64, mlp_width=24576)
    assert parameter_count(model) == 72_287_920_128


@pytest.mark.parametrize(
    ("name", "whole"), [("gemma3-4b", 4_300_079_472), ("gemma3-12b", 12_187_325_040), ("gemma3-27b", 27_432_406_640)]
)
def test_gemma3_with_the_image_token_rows_and_the_image_encoder_is_the_whole_checkpoint(name: str, whole: int) -> None:
    model = dataclasses.replace(ARCHITECTURES[name], vocab_size=262208)
    # SigLIP-400M on 896² images with 14² patches, then a norm and a projection to the model's width.
    W, F = 1152, 4304
    layer = 4 * (W * W + W) + (2 * W * F + F + W) + 4 * W
    encoder = (3 * 14**2 * W + W) + (896 // 14) ** 2 * W + 27 * layer + 2 * W
    projector = W + W * model.width
    assert parameter_count(model) + encoder + projector == whole


def test_gpt3_count_is_the_closed_form() -> None:
    L, D, V, P = 96, 12288, 50257, 2048
    assert PUBLISHED["gpt3-175b"] == 12 * L * D**2 + 13 * L * D + (V + P) * D + 2 * D


def test_a_correct_count_agrees_everywhere() -> None:
    assert disagreements(parameter_count) == set()
    assert disagreements(count_without("no such array")) == set()


@pytest.mark.parametrize(
    ("leaf", "affected"),
    [
        ("head", lambda model: not model.tied_embeddings),
        ("v", lambda model: True),
        ("gate", lambda model: model.gated),
        ("q_bias", lambda model: model.qkv_bias),
        ("router", lambda model: model.experts > 0),
        ("scale", lambda model: True),
        ("positions", lambda model: model.positions == "learned"),
    ],
)
def test_planted_fault_forgotten_array_is_caught(leaf: str, affected: Callable[[Architecture], bool]) -> None:
    assert disagreements(count_without(leaf)) == named(affected) != set()


@pytest.mark.parametrize(
    ("change", "affected"),
    [
        ({"kv_heads": 1}, lambda model: model.kv_heads != 1),
        ({"qk_norm": False}, lambda model: model.qk_norm),
        ({"qk_norm_over": "head"}, lambda model: model.qk_norm_over != "head"),
        ({"norm_placement": "pre"}, lambda model: model.norm_placement == "sandwich"),
        ({"norm_placement": "sandwich"}, lambda model: model.norm_placement != "sandwich"),
        ({"tied_embeddings": True}, lambda model: not model.tied_embeddings),
        ({"experts": 0}, lambda model: model.experts > 0),
        ({"vocab_size": 50257}, lambda model: model.vocab_size != 50257),
    ],
)
def test_planted_fault_wrong_number_is_caught(change: dict[str, Any], affected: Callable[[Architecture], bool]) -> None:
    wrong = disagreements(lambda model: parameter_count(dataclasses.replace(model, **change)))
    assert wrong == named(affected) != set()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_entry_is_consistent_and_hashable(name: str) -> None:
    model = ARCHITECTURES[name]
    check_architecture(model)
    assert hash(model) == hash(dataclasses.replace(model))


def layer_kinds(model: Architecture) -> tuple[str, ...]:
    return model.pattern * model.repeats + model.tail


def test_layer_kinds() -> None:
    assert set(layer_kinds(ARCHITECTURES["mistral-7b"])) == {"sliding"}
    assert set(layer_kinds(ARCHITECTURES["mixtral-8x7b"])) == {"full"}
    assert set(layer_kinds(ARCHITECTURES["phi3-mini-4k"])) == {"sliding"}
    unrotated = [layer for layer, kind in enumerate(layer_kinds(ARCHITECTURES["smollm3-3b"])) if kind == "nope"]
    assert unrotated == list(range(3, 36, 4))
    for name, model in ARCHITECTURES.items():
        kinds = layer_kinds(model)
        assert len(kinds) == model.layers
        full = [layer for layer, kind in enumerate(kinds) if kind == "full"]
        if name.startswith("gemma2"):
            assert full == list(range(1, model.layers, 2))
        if name.startswith("gemma3"):
            assert full == list(range(5, model.layers, 6))


def test_gemma_scales() -> None:
    assert ARCHITECTURES["gemma2-9b"].attention_scale == 1 / 16
    assert ARCHITECTURES["gemma2-27b"].attention_scale == 1 / 12
    assert math.isclose(ARCHITECTURES["gemma3-27b"].attention_scale, 168**-0.5)
    assert ARCHITECTURES["gemma2-2b"].embedding_scale == 48.0
    assert all(
        model.embedding_scale == math.sqrt(model.width)
        for name, model in ARCHITECTURES.items()
        if name.startswith("gemma")
    )


def test_context_scaling() -> None:
    scaled = {
        name: (model.rope_scaling, model.rope_factor)
        for name, model in ARCHITECTURES.items()
        if model.rope_scaling != "none" or model.rope_factor != 1.0
    }
    assert scaled == {
        **dict.fromkeys(("llama3.1-8b", "llama3.1-70b", "llama3.1-405b"), ("llama3", 8.0)),
        **dict.fromkeys(("llama3.2-1b", "llama3.2-3b"), ("llama3", 32.0)),
        **dict.fromkeys(("phi3.5-mini", "phi4-mini"), ("longrope", 32.0)),
        **dict.fromkeys(("gemma3-4b", "gemma3-12b", "gemma3-27b"), ("linear", 8.0)),
    }


def test_resolve_without_overrides_is_the_entry() -> None:
    for name, entry in ARCHITECTURES.items():
        assert resolve(ModelConfig(name=name)) == entry


def test_resolve_applies_overrides_and_nothing_else() -> None:
    changes: dict[str, Any] = {
        "layers": 2,
        "width": 64,
        "pattern": ("full",),
        "logit_softcap": 0.0,
        "tied_embeddings": False,
    }
    model = resolve(ModelConfig(name="gemma2-2b", **changes))
    assert model == dataclasses.replace(ARCHITECTURES["gemma2-2b"], **changes)
    assert model.head_dim == 256


@pytest.mark.parametrize(
    ("name", "changes", "kv_heads"),
    [
        ("gpt2", {"heads": 4}, 4),
        ("gpt2", {"heads": 4, "kv_heads": 2}, 2),
        ("llama3-8b", {"heads": 16}, 8),
        ("llama2-7b", {"kv_heads": 8}, 8),
    ],
)
def test_resolve_keeps_ungrouped_heads_ungrouped(name: str, changes: dict[str, int], kv_heads: int) -> None:
    assert resolve(ModelConfig(name=name, **changes)).kv_heads == kv_heads


def test_unknown_name_names_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'llama-3-8b', which is not a known model; nearest: .*\bllama3-8b\b"):
        resolve(ModelConfig(name="llama-3-8b"))


def test_resolve_config_checks_the_whole_configuration() -> None:
    config = Config()
    assert resolve_config(config) == ARCHITECTURES["gpt2"]
    config.model.kv_heads = 5
    with pytest.raises(UserError, match=r"config\.model\.heads \(12\) is not a multiple"):
        resolve_config(config)
    config.model = ModelConfig(name=3)
    with pytest.raises(UserError, match=r"config\.model\.name is 3 \(int\); it must be str"):
        resolve_config(config)
