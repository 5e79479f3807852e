"""Which layers slide and which have no positions, family by family: parts as `family_parts` has them."""

from collections.abc import Sequence
from typing import Any

from jaxllm.config import Architecture
from jaxllm.errors import UserError
from jaxllm.interop.huggingface.config_fields import Fields
from jaxllm.interop.huggingface.family_parts import Known, Part

# What transformers calls them.
_KINDS = {"full_attention": "full", "sliding_attention": "sliding"}


def shortest(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern that, repeated, gives these kinds of layers."""
    return next(
        tuple(kinds[:n]) for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds))
    )


def layer_kinds(model: Architecture) -> list[str]:
    """The kind of every layer."""
    return [model.pattern[i % len(model.pattern)] for i in range(model.layers)]


def _with_window(kinds: Sequence[str], window: int | None, where: str) -> dict[str, Any]:
    pattern = shortest(kinds)
    if "sliding" not in pattern:
        return {"pattern": pattern, "window": 0}
    if not window:
        raise UserError(f"{where}: layers slide and sliding_window is {window!r}; use the file of one release")
    return {"pattern": pattern, "window": window}


def all_slide(default: int | None) -> Part:
    """Every layer slides where there is a window.

    Args:
      default: the window where the field is missing; a null is none.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        window = fields.get("sliding_window", default)
        fields.only("layer_types", None, [_kind_name("sliding" if window else "full")] * known["layers"])
        return _with_window(["sliding" if window else "full"], window, fields.where)

    return Part(read, lambda m: {"sliding_window": m.window or None})


def all_slide_if_used(default: int) -> Part:
    """The same, where a flag says whether there is a window (Qwen3-MoE)."""

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        del known
        # Without the flag transformers reads the window as none, whatever max_window_layers says.
        window = fields.get("sliding_window", default)
        used = fields.value("use_sliding_window", False) and window
        fields.get("max_window_layers", None)
        return _with_window(["sliding" if used else "full"], window, fields.where)

    return Part(read, lambda m: {"use_sliding_window": bool(m.window), "sliding_window": m.window or None})


def upper_slide_if_used(default: int, first: int) -> Part:
    """Layers from `max_window_layers` on slide, where a flag says so (Qwen2, Qwen3).

    Args:
      default, first: window and first such layer where the fields are missing.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        window = fields.get("sliding_window", default) if fields.value("use_sliding_window", False) else None
        fields.get("sliding_window", None)
        begin = fields.value("max_window_layers", first)
        kinds = ["sliding" if window and i >= begin else "full" for i in range(known["layers"])]
        return _with_window(_listed(fields, known, kinds), window, fields.where)

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
    """All layers slide but every n-th (Gemma 2 and 3).

    Args:
      n, window: where the fields are missing.
    """

    def read(fields: Fields, known: Known) -> dict[str, Any]:
        every = fields.value("sliding_window_pattern", n, "_sliding_window_pattern")
        kinds = ["sliding" if (i + 1) % every else "full" for i in range(known["layers"])]
        found = fields.value("sliding_window", window)
        fields.only("sliding_window_size", found, None)  # an older name
        return _with_window(_listed(fields, known, kinds), found, fields.where)

    def write(model: Architecture) -> dict[str, Any]:
        return {"sliding_window": model.window, "layer_types": [_kind_name(kind) for kind in layer_kinds(model)]}

    return Part(read, write)


def _kind_name(kind: str) -> str:
    """The file's name of a kind of layer; its own where files have none."""
    return next((name for name, ours in _KINDS.items() if ours == kind), kind)


def _listed(fields: Fields, known: Known, kinds: Sequence[str]) -> Sequence[str]:
    """The kinds of layers that the file lists, or those given where it lists none."""
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
    rotated = fields.value("no_rope_layers", [int((i + 1) % every != 0) for i in range(layers)])
    if len(rotated) < layers:
        raise UserError(
            f"{fields.where}: no_rope_layers lists {len(rotated)} layers and num_hidden_layers is {layers}; "
            "use the file of one release"
        )
    slides = window if fields.value("use_sliding_window", False) else None
    fields.get("max_window_layers", None)  # of Qwen's files, from which these were made
    kinds = _listed(fields, known, ["sliding" if slides and not rotated[i] else "full" for i in range(layers)])
    if any(kind == "sliding" and not turns for kind, turns in zip(kinds, rotated, strict=False)):
        raise UserError(f"{fields.where}: layers without positions slide, which jaxllm has no model for")
    kinds = [kind if turns else "nope" for kind, turns in zip(kinds, rotated, strict=False)]
    return _with_window(kinds, slides, fields.where)


def _write_smollm3(model: Architecture) -> dict[str, Any]:
    kinds = layer_kinds(model)
    return {
        "no_rope_layers": [int(kind != "nope") for kind in kinds],
        "use_sliding_window": "sliding" in kinds,
        "sliding_window": model.window or None,
        "layer_types": [_kind_name("full" if kind == "nope" else kind) for kind in kinds],
    }


# Layers without positions among those with.
SMOLLM3 = Part(_read_smollm3, _write_smollm3)
