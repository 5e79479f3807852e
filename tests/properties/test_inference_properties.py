"""Inference has training's weights and none of its other rows, and a cache that grows until it may stop."""

import dataclasses

import draws
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.config import MeshConfig
from jaxllm.ledger.formula.inference_memory import inference
from jaxllm.ledger.rows import PERSISTENT

GONE = {"gradients", "gradient accumulator", "optimizer", "activations", "master weights", "logits and loss"}


@draws.closed_form
@given(draws.cases())
def test_inference_is_training_without_gradients_optimizer_and_activations(case):
    """Inference weights equal those that training stores, in the same dtype."""
    case = dataclasses.replace(case, config=dataclasses.replace(case.config, mesh=MeshConfig()))
    case = case.but(optimizer_offload="none")
    for policy, dtype in (("fp32", "fp32"), ("bf16_pure", "bf16")):
        train = dataclasses.replace(case, policy=policy).ledger
        infer = inference(case.model, 1, 16, 4, dtype, dtype)
        stored = {(row.name, row.kind, row.bytes_per_device) for row in train.rows if row.phase == PERSISTENT}
        weights = {row for row in stored if row[1] == "weights"}
        assert weights <= {(row.name, row.kind, row.bytes_per_device) for row in infer.rows}
        assert {kind for _, kind, _ in stored - weights} <= {"optimizer", "state"}
        assert not GONE & {row.kind for row in infer.rows}


@draws.closed_form
@given(draws.models(), st.integers(1, 8), st.integers(1, 60))
def test_a_full_layers_cache_is_linear_and_a_sliding_ones_stops(model, batch, capacity):
    def cache(tokens: int, sequences: int = batch) -> dict[str, int]:
        made = inference(model, sequences, tokens, 1, "fp32", "fp32").rows
        return {row.name: row.bytes_per_device for row in made if row.kind == "KV cache"}

    one, some, twice = cache(1), cache(capacity), cache(2 * capacity)
    assert len(one) == len({*model.pattern[: model.layers]})
    for name in one:
        cap = model.window if name.endswith("sliding") else 10**9
        assert some[name] == min(capacity, cap) * one[name]
        assert twice[name] == min(2 * capacity, cap) * one[name]
        assert cache(capacity, 3 * batch)[name] == 3 * some[name]


@draws.closed_form
@given(draws.models(), st.integers(1, 8), st.integers(1, 60), st.integers(1, 16))
def test_more_of_anything_never_costs_less(model, batch, capacity, chunk):
    base = inference(model, batch, capacity, chunk, "fp32", "fp32").peak_bytes
    for more in ((1, 0, 0), (0, 1, 0), (0, 0, 1)):
        sizes = (n + m for n, m in zip((batch, capacity, chunk), more, strict=True))
        assert inference(model, *sizes, "fp32", "fp32").peak_bytes >= base
    assert inference(model, batch, capacity, chunk, "bf16", "bf16", platform="gpu").peak_bytes <= base
