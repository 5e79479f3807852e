"""The search for ways to sample: what fits, in which order, and what is reported if nothing does."""

import dataclasses

import pytest

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.hardware import detect
from jaxllm.plan import inference

L4 = detect.by_name("l4")
BUDGET = int(0.95 * L4.memory_bytes)


def model(name="llama3-8b"):
    config = Config()
    config.model.name = name
    return architectures.resolve(config.model)


def search(name="llama3-8b", batches=None, budget=BUDGET, weights=("bf16", "int8", "int4"), caches=("bf16", "int8")):
    batches = batches or inference.batches_up_to(64)
    return inference.search(name, model(name), L4, budget, (8192,), batches, weights, caches)


def test_what_is_shown_fits_and_its_peak_is_the_formulas():
    found = search()
    assert {verdict.choice.weights for verdict in found.fitting} == {"bf16", "int8", "int4"}
    for verdict in found.fitting:
        assert verdict.peak_bytes == inference.ledger_of("", model(), L4, verdict.choice).peak_bytes <= BUDGET


@pytest.mark.parametrize("weights", ["bf16", "int8", "int4"])
def test_the_largest_batch_is_the_largest(weights):
    found = search(weights=(weights,), caches=("bf16",))
    largest = max(verdict.choice.batch for verdict in found.fitting)
    choice = dataclasses.replace(found.fitting[0].choice, batch=largest + 1)
    assert inference.ledger_of("", model(), L4, choice).peak_bytes > BUDGET


def test_the_best_makes_the_most_tokens():
    found = search()
    rates = [verdict.tokens_per_second for verdict in found.fitting]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def test_a_tie_goes_to_the_wider_format():
    choice = inference.Serving("bf16", "bf16", 1, 64)
    wide = inference.Verdict(choice, 100, 1.0, "compute", 1.0, "")
    narrow = dataclasses.replace(wide, choice=dataclasses.replace(choice, weights="int4"), peak_bytes=50)
    assert wide.rank < narrow.rank


def test_fewer_bits_never_take_more():
    for batch in (1, 4):
        peaks = [
            inference.ledger_of("", model(), L4, inference.Serving(weights, "bf16", batch, 8192)).peak_bytes
            for weights in ("bf16", "int8", "int4")
        ]
        assert peaks == sorted(peaks, reverse=True)


def test_what_would_fit_where_nothing_does():
    found = search("llama3-70b", batches=(4,), weights=("int4",), caches=("bf16",))
    assert not found.fitting
    assert found.closest is not None
    helping = {remedy.flags.partition("=")[0]: remedy for remedy in inference.remedies(found, 0.05)}
    device = helping["--device"].flags.partition("=")[2]
    assert detect.by_name(device).memory_bytes * 0.95 >= helping["--device"].peak_bytes
    assert "--batch" not in helping  # the weights alone do not fit
    tight = search(batches=(6,), weights=("bf16",), caches=("bf16",))
    helping = {remedy.flags.partition("=")[0]: remedy for remedy in inference.remedies(tight, 0.05)}
    assert set(helping) == {"--batch", "--context", "--weights", "--cache", "--device"}
    batch = int(helping["--batch"].flags.partition("=")[2])
    choice = dataclasses.replace(tight.closest[0], batch=batch)
    assert inference.ledger_of("", model(), L4, choice).peak_bytes <= BUDGET
    one_more = dataclasses.replace(choice, batch=batch + 1)
    assert inference.ledger_of("", model(), L4, one_more).peak_bytes > BUDGET


def test_a_rate_that_is_not_known_is_told():
    unknown = dataclasses.replace(L4, bandwidth=None)
    found = inference.search("llama3-8b", model(), unknown, BUDGET, (8192,), (1,), ("bf16",), ("bf16",))
    assert "bandwidth" in found.fitting[0].unknown
