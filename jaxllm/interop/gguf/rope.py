"""RoPE settings in a GGUF file: base, and context scaling by keys or by a tensor of factors.

Sources: llama.cpp's src/llama-model.cpp (keys, defaults) and its converter of Llama models. The converter writes the
scaling of Llama 3.1 as one factor per rotary pair and drops the parameters that the factors are computed from.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.gguf.file import FamilyKeys
from jaxllm.model.layers import rope_frequencies

_FACTORS = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
CONSTANT_TENSORS = frozenset({_FACTORS, _LONG, _SHORT})
# Parameters of all published models with this scaling.
_LLAMA3 = {"rope_low_freq_factor": 1.0, "rope_high_freq_factor": 4.0, "rope_original_context": 8192}
_TOLERANCE = 1e-5  # relative tolerance of factors computed in float32


def read_rope(keys: FamilyKeys, head_dim: int, names: set[str], tensor: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """Reads the RoPE fields of `Architecture`.

    Args:
      keys: metadata keys of the family.
      head_dim: dimension of a head.
      names: names of the file's tensors.
      tensor: returns a tensor by name.
    Raises:
      UserError: the scaling is not supported.
    """
    where = keys.metadata.where
    rotated = keys.size("rope.dimension_count", head_dim)
    fields: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10_000.0)}
    if keys.family in ("gemma2", "gemma3"):
        # Sliding-window layers have a separate base and are not scaled.
        sliding = keys.number("rope.freq_base_swa", 10_000.0 if keys.family == "gemma3" else 0.0)
        fields["rope_theta_sliding"] = sliding
    if rotated != head_dim:
        fields["rope_dim"] = rotated
    factor = keys.number("rope.scaling.factor", 0.0) or keys.number("rope.scale_linear", 0.0)
    kind = keys.metadata.get(f"{keys.family}.rope.scaling.type", str) or "linear"
    original = keys.size("rope.scaling.original_context_length", 0)
    if kind == "yarn":
        fields |= {
            "rope_scaling": "yarn",
            "rope_factor": factor or 1.0,
            "rope_original_context": original or keys.size("context_length"),
            "rope_beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "rope_beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        keys.expect("rope.scaling.yarn_ext_factor", 1.0)
        keys.expect("rope.scaling.yarn_attn_factor", 1.0)
        keys.expect("rope.scaling.yarn_log_multiplier", 0.0)
    elif kind == "linear":
        fields |= {"rope_scaling": "linear", "rope_factor": factor} if factor not in (0.0, 1.0) else {}
    elif kind not in ("none", "longrope"):
        raise UserError(
            f"{where}: {keys.family}.rope.scaling.type is {kind!r}; supported values are none, linear, yarn, longrope"
        )
    if {_LONG, _SHORT} <= names:
        return fields | _longrope(keys, rotated, original, tensor)
    keys.expect("rope.scaling.attn_factor", 1.0)
    if kind == "longrope":
        raise UserError(f"{where} has no tensors {_LONG} and {_SHORT}, which longrope needs; convert the model again")
    if _FACTORS in names:
        if "rope_scaling" in fields:
            raise UserError(
                f"{where} has both {kind} RoPE scaling and {_FACTORS}, which is unsupported; convert the model again"
            )
        fields |= _from_factors(
            np.asarray(tensor(_FACTORS), np.float64), fields["rope_theta"], rotated, original, where
        )
    return fields


def _longrope(keys: FamilyKeys, rotated: int, original: int, tensor: Callable[[str], np.ndarray]) -> dict[str, Any]:
    """Reads LongRoPE scaling (Phi-3): one factor per rotary pair, for short and for long sequences."""
    where, context = keys.metadata.where, keys.size("context_length")
    factors = {name: tuple(float(str(np.float32(x))) for x in tensor(name).ravel()) for name in (_SHORT, _LONG)}
    if any(len(values) != rotated // 2 for values in factors.values()) or not original:
        wanted = f"{rotated // 2} factors and an original_context_length"
        raise UserError(f"{where}: longrope needs {wanted}; convert the model again")
    scale = context / original
    usual = math.sqrt(1 + math.log(max(scale, 1)) / math.log(original))
    attention_factor = keys.number("rope.scaling.attn_factor", 1.0)
    return {
        "rope_scaling": "longrope",
        "rope_factor": scale,
        "rope_original_context": original,
        "rope_short_factors": factors[_SHORT],
        "rope_long_factors": factors[_LONG],
        "rope_attention_factor": 0.0 if math.isclose(attention_factor, usual, rel_tol=1e-6) else attention_factor,
    }


def _from_factors(factors: np.ndarray, theta: float, head_dim: int, original: int, where: str) -> dict[str, Any]:
    """Recovers the parameters of Llama 3.1's scaling from its factors, the divisors of the frequencies."""
    if factors.shape != (head_dim // 2,):
        raise UserError(
            f"{where}: {_FACTORS} has {factors.size} factors for head_dim {head_dim}; convert the model again"
        )
    if np.all(factors == 1.0):
        return {}
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    for candidate in _candidates(factors, frequency, original):
        fields = {"rope_scaling": "llama3", "rope_factor": float(np.round(factors.max(), 6)), **candidate}
        if np.allclose(llama3_factors(frequency, fields), factors, rtol=_TOLERANCE, atol=0.0):
            return fields
    raise UserError(
        f"{where}: {_FACTORS} does not match Llama 3.1's RoPE scaling, the only one supported as factors; convert the "
        "model from its safetensors files"
    )


def _candidates(factors: np.ndarray, frequency: np.ndarray, original: int) -> Iterator[dict[str, Any]]:
    published: dict[str, Any] = dict(_LLAMA3)
    yield published | ({"rope_original_context": original} if original else {})
    # Between the thresholds, 1 / factor is linear in the rotations per original context; two points determine the line.
    inside = np.flatnonzero((factors > 1.0 + _TOLERANCE) & (factors < factors.max() * (1 - _TOLERANCE)))
    context = original or _LLAMA3["rope_original_context"]
    if len(inside) >= 2:
        a, b = inside[0], inside[-1]
        keep = (1 / factors[[a, b]] - 1 / factors.max()) / (1 - 1 / factors.max())
        turns = context * frequency[[a, b]] / (2 * np.pi)
        slope = (keep[0] - keep[1]) / (turns[0] - turns[1])
        low = turns[1] - keep[1] / slope
        high = low + 1 / slope
        yield {
            "rope_low_freq_factor": float(np.round(low, 4)),
            "rope_high_freq_factor": float(np.round(high, 4)),
            "rope_original_context": int(context),
        }


def llama3_factors(frequency: np.ndarray, fields: dict[str, Any]) -> np.ndarray:
    """Computes the divisor of each frequency; see `jaxllm.model.layers.rope_frequencies`."""
    turns = fields["rope_original_context"] * frequency / (2 * np.pi)
    low, high = fields["rope_low_freq_factor"], fields["rope_high_freq_factor"]
    keep = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return 1 / (keep + (1 - keep) / fields["rope_factor"])


def constant_tensors(model: Architecture) -> dict[str, np.ndarray]:
    """Returns the tensors of a file that are not weights: the RoPE factors, if the scaling needs them."""
    if model.positions != "rotary" or model.rope_scaling not in ("llama3", "longrope"):
        return {}
    if model.rope_scaling == "longrope":
        factors = {_LONG: model.rope_long_factors, _SHORT: model.rope_short_factors}
        return {name: np.array(values, np.float32) for name, values in factors.items()}
    plain, _ = rope_frequencies(dataclasses.replace(model, rope_scaling="none"), "full")
    scaled, _ = rope_frequencies(model, "full")
    return {_FACTORS: (plain / scaled).astype(np.float32)}


def rope_keys(model: Architecture) -> dict[str, Any]:
    """Returns the RoPE keys of a model, without the prefix of the family."""
    keys: dict[str, Any] = {"rope.dimension_count": model.rotated, "rope.freq_base": float(model.rope_theta)}
    if model.rope_theta_sliding:
        keys["rope.freq_base_swa"] = float(model.rope_theta_sliding)
    if model.rope_scaling == "llama3":  # the factors are a tensor; a scaling key would apply them twice
        keys["rope.scaling.original_context_length"] = model.rope_original_context
    elif model.rope_scaling == "longrope":
        _, factor = rope_frequencies(model, "full")
        keys |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": model.rope_original_context,
            "rope.scaling.attn_factor": float(factor),
        }
    elif model.rope_scaling != "none":
        keys |= {"rope.scaling.type": model.rope_scaling, "rope.scaling.factor": float(model.rope_factor)}
    if model.rope_scaling == "yarn":
        keys |= {
            "rope.scaling.original_context_length": model.rope_original_context,
            "rope.scaling.yarn_beta_fast": float(model.rope_beta_fast),
            "rope.scaling.yarn_beta_slow": float(model.rope_beta_slow),
        }
    return keys


def equivalent(model: Architecture, other: Architecture) -> bool:
    """Returns True if two architectures have equivalent rotary positions, even if their fields differ."""
    if model.positions != "rotary" or other.positions != "rotary":
        return model.positions == other.positions
    if model.rope_original_context != other.rope_original_context and model.rope_scaling == "longrope":
        return False
    for kind in set(model.pattern) - {"nope"}:
        for long in (False, True):
            (ours, factor), (theirs, again) = (rope_frequencies(m, kind, long) for m in (model, other))
            if not math.isclose(factor, again, rel_tol=1e-6) or not np.allclose(ours, theirs, rtol=1e-6, atol=0.0):
                return False
    return True
