"""Properties of every ledger: sums, names, JSON, and the time that a closed form takes."""

import json

import calls
import draws
import ledgers
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.architectures import ARCHITECTURES
from jaxllm.config import Config
from jaxllm.ledger import rows
from jaxllm.ledger.compiled.inspection import NAMES, Inspection
from jaxllm.ledger.formula import communication, flops
from jaxllm.ledger.formula.exact.formats import CACHE_FORMATS, FORMATS
from jaxllm.ledger.formula.inference_memory import inference
from jaxllm.ledger.formula.training_memory import training
from jaxllm.ledger.rows import HOST, PERSISTENT, PHASES, Unknown


@draws.closed_form
@given(draws.cases(split=True))
def test_rows_sum_to_the_peak(case):
    ledger = case.ledger
    sums = dict.fromkeys(PHASES, 0)
    for row in ledger.rows:
        assert row.bytes_per_device >= 0
        assert row.formula.endswith(f"= {rows.format_bytes(row.bytes_per_device)}")
        sums[row.phase] += row.bytes_per_device
    persistent, host = sums.pop(PERSISTENT), sums.pop(HOST)
    assert ledger.persistent_bytes == persistent
    assert ledger.host_bytes == host
    assert ledger.peak_bytes == persistent + max(sums.values())
    for phase in PHASES:
        names = [row.name for row in ledger.rows if row.phase == phase]
        assert len(names) == len(set(names)), names


@draws.closed_form
@given(draws.cases(split=True))
def test_formulas_come_out_at_their_bytes(case):
    """The arithmetic left of `=`, divisions included, evaluates to the row's bytes exactly."""
    for row in case.ledger.rows:
        assert draws.evaluated(row.formula) == row.bytes_per_device, (row.name, row.formula)


@draws.closed_form
@given(
    draws.models(),
    st.integers(1, 9),
    st.integers(1, 300),
    st.sampled_from(list(FORMATS)),
    st.sampled_from(CACHE_FORMATS),
    st.sampled_from(["cpu", "gpu", "tpu"]),
)
def test_formulas_of_inference_come_out_at_their_bytes(model, batch, capacity, weights, cache, platform):
    ledger = inference(model, batch, capacity, min(capacity, 64), weights, cache, "", platform, prompt_logprobs=True)
    for row in ledger.rows:
        if row.phase == PERSISTENT:
            # Each 4-bit array ends on a whole byte.
            spare = 50 if weights.startswith("int4") and row.name == "weights" else 0
            size = draws.evaluated(row.formula)
            assert 0 <= row.bytes_per_device - size <= spare, row


@pytest.mark.parametrize("wrong", ["7 / 8 × 4 B = 4 B", "⌊7 / 8⌋ × 4 B = 4 B", "(8 + 1 of padding) / 8 × 4 B = 4 B"])
def test_a_wrong_formula_is_caught(wrong):
    assert draws.evaluated("⌊15 / 8⌋ × 4 B = 4 B") == draws.evaluated("(8 / 8) × 4 B = 4 B") == 4
    assert draws.evaluated(wrong) != 4


@draws.closed_form
@given(draws.cases(split=True))
def test_the_json_has_every_row(case):
    value = json.loads(json.dumps(case.ledger.to_json()))
    assert value["peak_bytes_per_device"] == ledgers.peak(value) == case.ledger.peak_bytes
    assert [(row["name"], row["bytes_per_device"]) for row in value["rows"]] == [
        (row.name, row.bytes_per_device) for row in case.ledger.rows
    ]


figure = st.one_of(st.integers(0, 2**50), st.builds(Unknown, st.text()))
collective = st.fixed_dictionaries({"op": st.text(), "bytes": st.integers(0)})
inspections = st.builds(
    Inspection,
    figures=st.fixed_dictionaries(dict.fromkeys(NAMES, figure)),
    collectives=st.one_of(st.lists(collective, max_size=3), st.builds(Unknown, st.text())),
    matmul_counts=st.one_of(st.fixed_dictionaries({"flops": st.integers(0)}), st.builds(Unknown, st.text())),
    seconds=st.integers(0, 10**6).map(lambda milliseconds: milliseconds / 1000),
    oom_message=st.text(),
)


@draws.closed_form
@given(inspections)
def test_an_inspection_survives_json(inspection):
    assert Inspection.from_json(json.loads(json.dumps(inspection.to_json()))) == inspection


@pytest.mark.parametrize("name", ["gpt3-175b", "llama3.1-405b", "mixtral-8x7b", "gemma3-27b"])
def test_a_closed_form_is_a_few_thousand_function_calls(name):
    """The target is under 10 ms, about 50,000 calls; `experiments/planner_speed.py` measures the time."""
    model, config = ARCHITECTURES[name], Config()
    config.optimizer.name, config.mesh.data, config.mesh.zero, config.train.batch_size = "muon", 8, 3, 8

    for form in (training, flops.train_step, communication.train_step):
        form(model, config, "bf16")  # what depends on the model alone is cached
        assert calls.count(lambda form=form: form(model, config, "bf16")) < 15_000
    inference(model, 8, 4096, 256, "bf16", "bf16")
    assert calls.count(lambda: inference(model, 8, 4096, 256, "bf16", "bf16")) < 25_000
