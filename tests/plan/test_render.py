"""Tables are rendered without truncation."""

import dataclasses
import io

import pytest
from rich.console import Console

from jaxllm import architectures
from jaxllm.hardware import detect
from jaxllm.plan import inference, render, training
from jaxllm.plan.confirm import Confirmation
from jaxllm.plan.request import SearchResult
from jaxllm.plan.training_space import TrainingChoice, TrainingSpace

REMATS = ("full", "offload:attn_qkv,attn_context,resid_mid,mlp_up,mlp_gate", "names:attn_context")
CHOICE = TrainingChoice(16, 16, 8, 3, 128, REMATS[0], 512, 4096, "none", "float32", "bf16")


def shown(compiled: bool, offload: str, width: int) -> str:
    config = training.base_config("llama3-70b", 8192, 65536, "adamw")
    space = TrainingSpace(config, architectures.resolve_config(config), 2048, "gpu", ("bf16",), ("float32",))
    choices = [dataclasses.replace(CHOICE, remat=remat, offload=offload) for remat in REMATS]
    fitting = tuple(training.TrainingEstimate(choice, 70 * 2**30, 123.4, 200.0, "interconnect") for choice in choices)
    found = SearchResult(space, detect.by_name("h100"), 71 * 2**30, 3, fitting, None, 0.1)
    made = Confirmation(tuple((estimate, 69 * 2**30) for estimate in fitting if compiled))
    out = io.StringIO()
    render.show_training(found, made, render.Output(Console(file=out, width=width), 10))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, render.WIDTH])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("offload", ["none", "moments"])
def test_nothing_is_cut(compiled, offload, width):
    text = shown(compiled, offload, width)
    lines = text.splitlines()
    assert "…" not in text
    assert max(map(len, lines)) <= width
    rows = lines[lines.index(next(line for line in lines if "───" in line)) + 1 :][: len(REMATS)]
    assert [row.split()[0] for row in rows] == ["1", "2", "3"], "a row wraps"
    for part in (
        "16×16×8",
        "2×128",
        "70.00 GiB",
        "123 s",
        "4.35 M",
        "offload a",
        "names b",
        "interconnect",
        "512/4096",
    ):
        assert part in text, part
    assert ("69.00 GiB" in text) == compiled
    assert ("moments  " in text or "offload: moments" in text) == (offload == "moments")


@pytest.mark.parametrize("compiled", [False, True])
def test_sampling_fits_80_columns(compiled):
    model = architectures.resolve_config(training.base_config("llama3-70b", 8192, 65536, "adamw"))
    choices = [inference.InferenceChoice(weights, "bf16", 128, 131_072) for weights in ("int8-128", "int4")]
    space = inference.InferenceSpace("llama3-70b", model, 131_072, ("int8-128", "int4"), ("bf16",))
    fitting = tuple(inference.InferenceEstimate(each, 70 * 2**30, 0.01, "bandwidth", 123.4, "") for each in choices)
    found = SearchResult(space, detect.by_name("h100"), 71 * 2**30, 2, fitting, None, 0.1)
    made = Confirmation(tuple((estimate, 69 * 2**30) for estimate in fitting if compiled))
    out = io.StringIO()
    render.show_inference(found, made, render.Output(Console(file=out, width=80), 10))
    text = out.getvalue()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= 80
    for part in ("12,800", "100.0", "123 s", "131,072", "bound: bandwidth"):
        assert part in text, part
