"""Rotary position fields of config.json, read in all of their spellings and written back.

Older files have `rope_theta` and `rope_scaling` at the top level. Newer files have both in `rope_parameters`, with one
table per layer type if these differ. The scaling type of a table is its `rope_type`, or `type` in the oldest files.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.huggingface.config_fields import Fields

Known = Mapping[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_KINDS = ("default", "linear", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class Rope:
    """RoPE defaults and supported options of a model family.

    Attributes:
      theta: default base.
      sliding: default base of sliding-window layers, which are not scaled; 0: same as the other layers.
      partial: whether files may rotate only a part of each head.
      original: default context length before scaling, in tokens, for families that have this field outside of the
        table; 0: the field is in the table.
      aliases: the family's other names of scaling types.
    """

    theta: float
    sliding: float = 0.0
    partial: bool = False
    original: int = 0
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def read(self, fields: Fields, known: Known) -> dict[str, Any]:
        """Reads the RoPE fields of `Architecture`.

        Args:
          fields: fields of config.json.
          known: fields of `Architecture` read so far; needs context_length and head_dim.
        Raises:
          UserError: the scaling type is not supported, or fields contradict each other.
        """
        table = _table(fields)
        base = fields.value("rope_theta", self.theta)
        full_table = table.get(_FULL, {}) if isinstance(table.get(_FULL), dict) else table
        if fields.get("rope_theta", None) is not None and full_table.get("rope_theta", base) != base:
            raise UserError(
                f"{fields.where}: rope_theta is {base!r}, but {full_table['rope_theta']!r} in the RoPE table; "
                "use the file of one release"
            )
        if self.sliding:
            return self._read_per_layer_type(fields, known, table, base)
        if _FULL in table or _SLIDING in table:
            raise UserError(f"{fields.where}: rope_parameters differ by layer type, which this family does not support")
        part = fields.value("partial_rotary_factor", 1.0)
        original = fields.value("original_max_position_embeddings", self.original)
        return self._read_one(Fields(table, f"{fields.where}: rope_scaling"), known, base, part, original)

    def _read_per_layer_type(self, fields: Fields, known: Known, table: dict[str, Any], base: float) -> dict[str, Any]:
        local, full, sliding = fields.value("rope_local_base_freq", self.sliding), table, {}
        if _FULL in table or _SLIDING in table:
            both = Fields(table, f"{fields.where}: rope_parameters")
            full, sliding = both.value(_FULL, {}), both.value(_SLIDING, {})
            both.finish(neutral=False)
        sliding_rope = self._read_one(
            Fields(sliding, f"{fields.where}: rope_parameters.{_SLIDING}"), known, local, 1.0, 0
        )
        if "rope_scaling" in sliding_rope:
            raise UserError(f"{fields.where}: sliding layers have scaled RoPE, which is unsupported; use another model")
        scaled = self._read_one(Fields(full, f"{fields.where}: rope_scaling"), known, base, 1.0, 0)
        return scaled | {"rope_theta_sliding": sliding_rope["rope_theta"]}

    def _read_one(self, table: Fields, known: Known, theta: float, part: float, original: int) -> dict[str, Any]:
        """Reads the RoPE fields of one layer type.

        Args:
          table: the RoPE table of the layer type.
          known: fields of `Architecture` read so far.
          theta: base, from outside of the table or the family's default.
          part: rotated fraction of a head, likewise.
          original: context length before scaling, likewise; 0 if unknown.
        """
        kind = table.value("rope_type", "default", "type")
        kind = self.aliases.get(kind, kind)
        rope: dict[str, Any] = {"rope_theta": table.value("rope_theta", theta)}
        part = table.value("partial_rotary_factor", part)
        if part != 1.0:
            if not self.partial:
                raise UserError(f"{table.where}: partial_rotary_factor is {part}; it must be 1.0 for this family")
            rope["rope_dim"] = int(known["head_dim"] * part)
        if kind in ("llama3", "yarn", "longrope"):
            context = table.value("original_max_position_embeddings", known["context_length"])
            rope["rope_original_context"] = original or context
        if kind == "linear":
            rope["rope_factor"] = _factor(table)
        elif kind == "llama3":
            rope |= {
                "rope_factor": _factor(table),
                "rope_low_freq_factor": table.value("low_freq_factor", 1.0),
                "rope_high_freq_factor": table.value("high_freq_factor", 4.0),
            }
        elif kind == "yarn":
            rope |= _yarn(table, known["context_length"] / rope["rope_original_context"])
        elif kind == "longrope":
            rope |= _longrope(table, known["context_length"] / rope["rope_original_context"])
        elif kind != "default":
            supported = ", ".join(_KINDS)
            raise UserError(f"{table.where} has the unsupported type {kind!r}; supported values are {supported}")
        table.finish(neutral=False)
        return rope if kind == "default" else rope | {"rope_scaling": kind}

    def write(self, model: Architecture) -> dict[str, Any]:
        """Writes the fields in the spelling of transformers before release 5, which later releases also read."""
        values: dict[str, Any] = {"rope_theta": model.rope_theta, "rope_scaling": _scaling_table(model)}
        if self.sliding:
            values["rope_local_base_freq"] = model.rope_theta_sliding
        if self.partial:
            values["partial_rotary_factor"] = model.rotated / model.head_dim
        if self.original:
            values["original_max_position_embeddings"] = model.rope_original_context or model.context_length
        return values


def _table(fields: Fields) -> dict[str, Any]:
    """Returns the RoPE table of the file, under either name; empty if there is none."""
    old, new = fields.value("rope_scaling", {}), fields.value("rope_parameters", {})
    if old and new and old != new:
        raise UserError(f"{fields.where}: rope_scaling and rope_parameters differ; use the file of one release")
    return dict(new or old)


def _factor(table: Fields) -> float:
    factor = table.value("factor", 0.0)
    if factor <= 0:
        raise UserError(f"{table.where} needs a positive factor; use the file of one release")
    return factor


def _yarn(table: Fields, ratio: float) -> dict[str, Any]:
    factor = table.value("factor", ratio)
    scales = [table.value(name, 0.0) for name in ("mscale", "mscale_all_dim")]
    attention = table.value("attention_factor", 0.0)
    if all(scales) and not attention:
        above, below = (0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0 for scale in scales)
        attention = above / below
    table.expect("truncate", True)
    return {
        "rope_factor": factor,
        "rope_beta_fast": table.value("beta_fast", 32.0),
        "rope_beta_slow": table.value("beta_slow", 1.0),
        "rope_attention_factor": attention,
    }


def _longrope(table: Fields, ratio: float) -> dict[str, Any]:
    short, long = (tuple(map(float, table.value(name, []))) for name in ("short_factor", "long_factor"))
    return {
        "rope_factor": table.value("factor", ratio),
        "rope_short_factors": short,
        "rope_long_factors": long,
        "rope_attention_factor": table.value("attention_factor", 0.0),
    }


def _scaling_table(model: Architecture) -> dict[str, Any] | None:
    kind = model.rope_scaling
    if kind == "none":
        return None
    table: dict[str, Any] = {"rope_type": kind, "factor": model.rope_factor}
    if kind in ("llama3", "yarn", "longrope"):
        table["original_max_position_embeddings"] = model.rope_original_context
    if kind == "llama3":
        table |= {"low_freq_factor": model.rope_low_freq_factor, "high_freq_factor": model.rope_high_freq_factor}
    if kind == "yarn":
        table |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
    if kind == "longrope":
        table |= {"short_factor": list(model.rope_short_factors), "long_factor": list(model.rope_long_factors)}
    if kind in ("yarn", "longrope") and model.rope_attention_factor:
        table["attention_factor"] = model.rope_attention_factor
    return table
