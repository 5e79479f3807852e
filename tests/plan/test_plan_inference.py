"""The search for ways to sample: what fits, in which order, and what is reported if nothing does."""

import dataclasses

import pytest

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.config.inference_mesh import InferenceMesh
from jaxllm.hardware import detect
from jaxllm.plan import inference, remedies
from jaxllm.plan.inference import InferenceChoice, InferenceEstimate, InferenceSpace

L4 = detect.by_name("l4")
BUDGET = int(0.95 * L4.memory_bytes)


def model(name="llama3-8b"):
    config = Config()
    config.model.name = name
    return architectures.resolve(config.model)


def space(name="llama3-8b", batch=None, weights=("bf16", "int8", "int4"), caches=("bf16", "int8")):
    return InferenceSpace(name, model(name), 8192, weights, caches, batch, max_batch=64)


def search(*args, **fields):
    return inference.search(space(*args, **fields), L4, BUDGET)


def peak(choice):
    return inference.ledger_of(space(), L4, choice).peak_bytes


def test_what_is_shown_fits_and_its_peak_is_the_formulas():
    found = search()
    assert {estimate.choice.weights for estimate in found.fitting} == {"bf16", "int8", "int4"}
    for estimate in found.fitting:
        assert estimate.peak_bytes == peak(estimate.choice) <= BUDGET


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_the_largest_batch_is_the_largest(weights):
    found = search(weights=(weights,), caches=("bf16",))
    largest = max(estimate.choice.batch for estimate in found.fitting)
    choice = dataclasses.replace(found.fitting[0].choice, batch=largest + 1)
    assert peak(choice) > BUDGET


def test_the_best_makes_the_most_tokens():
    found = search()
    rates = [estimate.tokens_per_second for estimate in found.fitting]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_a_tie_goes_to_the_wider_format():
    choice = InferenceChoice("bf16", "bf16", 1, 64)
    wide = InferenceEstimate(choice, 100, 1.0, "compute", 1.0, "")
    narrow = dataclasses.replace(wide, choice=dataclasses.replace(choice, weights="int4"), peak_bytes=50)
    assert wide.rank < narrow.rank


def test_fewer_bits_never_take_more():
    for batch in (1, 4):
        peaks = [peak(InferenceChoice(weights, "bf16", batch, 8192)) for weights in ("bf16", "int8", "int4")]
        assert peaks == sorted(peaks, reverse=True)


def test_what_would_fit_where_nothing_does():
    found = search("llama3-70b", batch=4, weights=("int4",), caches=("bf16",))
    assert not found.fitting
    assert found.closest is not None
    helping = {remedy.flags.partition("=")[0]: remedy for remedy in remedies.inference_remedies(found, 0.05)}
    device = helping["--device"].flags.partition("=")[2]
    assert detect.by_name(device).memory_bytes * 0.95 >= helping["--device"].peak_bytes
    assert "--batch" not in helping  # the weights alone do not fit
    tight = search(batch=6, weights=("bf16",), caches=("bf16",))
    helping = {remedy.flags.partition("=")[0]: remedy for remedy in remedies.inference_remedies(tight, 0.05)}
    assert set(helping) == {"--batch", "--context", "--weights", "--cache", "--count", "--device"}
    batch = int(helping["--batch"].flags.partition("=")[2])
    choice = dataclasses.replace(tight.closest[0], batch=batch)
    assert peak(choice) <= BUDGET
    one_more = dataclasses.replace(choice, batch=batch + 1)
    assert peak(one_more) > BUDGET


def test_a_model_that_needs_two_devices():
    """Llama 3 70B in bf16 has 131 GiB of weights: two H100 hold it and some sequences, one does not."""
    h100 = detect.by_name("h100")
    budget = int(0.95 * h100.memory_bytes)
    one = space("llama3-70b", weights=("bf16",), caches=("bf16",))
    alone = inference.search(one, h100, budget)
    assert not alone.fitting
    (more,) = [r for r in remedies.inference_remedies(alone, 0.05) if r.flags.startswith("--count")]
    assert more.flags == "--count=2"
    found = inference.search(dataclasses.replace(one, count=2), h100, budget)
    best = found.fitting[0].choice
    assert (best.mesh, best.batch) == (InferenceMesh(tensor=2), 3)
    one_more = dataclasses.replace(best, batch=4)
    assert inference.ledger_of(found.space, h100, one_more).peak_bytes > budget
    assert 2 * 3.35e12 / 141e9 * 3 > found.fitting[0].tokens_per_second > 130  # weights read once per token
    batches = inference.largest_batches(found, best)
    assert batches[8192] == 3
    assert batches[2048] > 3 * batches[8192]


def test_small_models_are_replicated():
    """On four devices a model that fits on one serves the most tokens with its sequences sharded over `data`."""
    found = inference.search(dataclasses.replace(space(weights=("bf16",)), count=4), L4, BUDGET)
    meshes = {estimate.choice.mesh for estimate in found.fitting}
    assert meshes == {InferenceMesh(4, 1), InferenceMesh(2, 2), InferenceMesh(1, 4)}
    assert all(estimate.choice.batch % estimate.choice.mesh.data == 0 for estimate in found.fitting)


def test_an_unknown_rate_is_named():
    unknown = dataclasses.replace(L4, bandwidth=None)
    found = inference.search(space(batch=1, weights=("bf16",), caches=("bf16",)), unknown, BUDGET)
    assert "bandwidth" in found.fitting[0].unknown
