"""Per-family parts (see `family_parts`) for sliding-window layers and layers without positions (NoPE)."""

from collections.abc import Sequence
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.huggingface.config_fields import Fields
from jaxllm.interop.huggingface.family_parts import Known, Part
from jaxllm.interop.rules import layer_kinds, shortest_pattern

# Layer types in transformers -> ours.
_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


def _with_window(kinds: Sequence[str], window: int | None, where: str) -> dict[str, Any]:
    pattern = shortest_pattern(kinds)
    if "sliding" not in pattern:
        return {"pattern": pattern, "window": 0}
    if not window:
        raise UserError(
            f"{where}: some layers use a sliding window and sliding_window is {window!r}; use the file of one release"
        )
    return {"pattern": pattern, "window": window}


def all_slide(default: int | None) -> Part:
    """Part for families in which every layer uses the sliding window, if there is one.

    Args:
      default: window in tokens if the field is missing; null means no window.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        window = fields.get("sliding_window", default)
        fields.expect("layer_types", None, [_kind_name("sliding" if window else "full")] * known["layers"])
        return _with_window(["sliding" if window else "full"], window, fields.where)

    return Part(read, lambda m: {"sliding_window": m.window or None})


def all_slide_if_used(default: int) -> Part:
    """Part for families in which a flag enables the sliding window of every layer (Qwen3-MoE).

    Args:
      default: window in tokens if the field is missing.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        del known
        # Without the flag, transformers ignores the window, whatever max_window_layers is.
        window = fields.get("sliding_window", default)
        used = fields.value("use_sliding_window", False) and window
        fields.get("max_window_layers", None)
        return _with_window(["sliding" if used else "full"], window, fields.where)

    return Part(read, lambda m: {"use_sliding_window": bool(m.window), "sliding_window": m.window or None})


def upper_slide_if_used(default: int, first: int) -> Part:
    """Part for families in which a flag enables the window of layers `max_window_layers` and up (Qwen2, Qwen3).

    Args:
      default: window in tokens if the field is missing.
      first: first sliding layer if the field is missing.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        window = fields.get("sliding_window", default) if fields.value("use_sliding_window", False) else None
        fields.get("sliding_window", None)
        begin = fields.value("max_window_layers", first)
        kinds = ["sliding" if window and i >= begin else "full" for i in range(known["layers"])]
        return _with_window(_listed_kinds(fields, known, kinds), window, fields.where)

    def write(model: Architecture) -> dict[str, Any]:
        kinds = layer_kinds(model)
        slides = "sliding" in kinds
        return {
            "use_sliding_window": slides,
            "sliding_window": model.window or None,
            "max_window_layers": kinds.index("sliding") if slides else model.layers,
            "layer_types": [_kind_name(kind) for kind in kinds],
        }

    return Part(read, write)


def slide_but_every(n: int, window: int) -> Part:
    """Part for families in which all layers slide except every n-th (Gemma 2 and 3).

    Args:
      n: default period.
      window: default window in tokens.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        every = fields.value("sliding_window_pattern", n, "_sliding_window_pattern")
        kinds = ["sliding" if (i + 1) % every else "full" for i in range(known["layers"])]
        found = fields.value("sliding_window", window)
        fields.expect("sliding_window_size", found, None)  # an older name
        return _with_window(_listed_kinds(fields, known, kinds), found, fields.where)

    def write(model: Architecture) -> dict[str, Any]:
        return {"sliding_window": model.window, "layer_types": [_kind_name(kind) for kind in layer_kinds(model)]}

    return Part(read, write)


def _kind_name(kind: str) -> str:
    """Returns the name of a layer kind in transformers; the name itself if transformers has none."""
    return next((name for name, ours in _KINDS.items() if ours == kind), kind)


def _listed_kinds(fields: Fields, known: Known, kinds: Sequence[str]) -> Sequence[str]:
    """Returns the layer kinds listed in the file, or `kinds` if it lists none."""
    names = fields.value("layer_types", [_kind_name(kind) for kind in kinds])
    if len(names) != known["layers"] or set(names) - set(_KINDS):
        raise UserError(
            f"{fields.where}: layer_types lists {len(names)} layers of {sorted(set(map(str, names)))}; it must have "
            f"{known['layers']}, each of {' or '.join(_KINDS)}"
        )
    return [_KINDS[name] for name in names]


def _read_smollm3(fields: Fields, known: Known) -> dict[str, Any]:
    layers, window = known["layers"], fields.get("sliding_window", None)
    every = fields.value("no_rope_layer_interval", 4)
    rope_flags = fields.value("no_rope_layers", [int((i + 1) % every != 0) for i in range(layers)])
    if len(rope_flags) < layers:
        raise UserError(
            f"{fields.where}: no_rope_layers lists {len(rope_flags)} layers and num_hidden_layers is {layers}; "
            "use the file of one release"
        )
    slides = window if fields.value("use_sliding_window", False) else None
    fields.get("max_window_layers", None)  # left over from Qwen's config files, from which these derive
    kinds = _listed_kinds(fields, known, ["sliding" if slides and not rope_flags[i] else "full" for i in range(layers)])
    if any(kind == "sliding" and not has_rope for kind, has_rope in zip(kinds, rope_flags, strict=False)):
        raise UserError(
            f"{fields.where}: layers without RoPE have a sliding window, which is unsupported; use another model"
        )
    kinds = [kind if has_rope else "nope" for kind, has_rope in zip(kinds, rope_flags, strict=False)]
    return _with_window(kinds, slides, fields.where)


def _write_smollm3(model: Architecture) -> dict[str, Any]:
    kinds = layer_kinds(model)
    return {
        "no_rope_layers": [int(kind != "nope") for kind in kinds],
        "use_sliding_window": "sliding" in kinds,
        "sliding_window": model.window or None,
        "layer_types": [_kind_name("full" if kind == "nope" else kind) for kind in kinds],
    }


# Mixes NoPE layers and layers with positions.
SMOLLM3 = Part(_read_smollm3, _write_smollm3)
