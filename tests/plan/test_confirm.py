"""Confirmation by the compiler: a plan that does not fit is dropped, and the next takes its place."""

import pytest

from jaxllm import architectures
from jaxllm.errors import RunError, UserError
from jaxllm.hardware import detect
from jaxllm.ledger.compiled.inspection import Inspection
from jaxllm.ledger.rows import Unknown
from jaxllm.plan import confirm, training
from jaxllm.plan.training_space import TrainingSpace

H100 = detect.by_name("h100")


@pytest.fixture(scope="module")
def found():
    config = training.base_config("gpt2", 1024, 8, "adamw")
    space = TrainingSpace(
        config, architectures.resolve_config(config), 1, "gpu", ("bf16",), ("float32",), ("full", "none")
    )
    return training.search(space, H100, H100.memory_bytes)


def compiled(peak, oom_message=""):
    unknown = Unknown("not asked")
    return {"train_step": Inspection({"peak": peak}, unknown, unknown, 1.0, oom_message)}


def test_the_compilers_figure_stands_beside(found):
    made = confirm.confirm_training(found, 2, lambda config, sampling: compiled(123))
    assert [(estimate.choice, peak) for estimate, peak in made.compiled] == [
        (estimate.choice, 123) for estimate in found.fitting[:2]
    ]
    assert made.remaining(found.fitting) == found.fitting


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (compiled(H100.memory_bytes + 1), "compiled"),
        (compiled(Unknown("refused"), "needs 90G of 80G"), "needs 90G of 80G"),
        (compiled(Unknown("no analysis")), "no analysis"),
    ],
)
def test_what_does_not_fit_is_dropped(found, answer, why):
    answers = iter([answer, compiled(H100.memory_bytes)])
    made = confirm.confirm_training(found, 1, lambda config, sampling: next(answers))
    assert [estimate.choice for estimate, _ in made.dropped] == [found.fitting[0].choice]
    assert why in made.dropped[0][1]
    assert made.compiled[0][0].choice == found.fitting[1].choice
    assert made.remaining(found.fitting) == found.fitting[1:]


def test_the_configuration_that_is_compiled_is_the_candidates(found):
    seen = []
    confirm.confirm_training(found, 1, lambda config, sampling: seen.append(config) or compiled(1))
    assert seen == [found.space.configured(found.fitting[0].choice)]


def test_formulas_that_are_always_wrong_are_a_failure(found):
    with pytest.raises(RunError, match="none of the best"):
        confirm.confirm_training(found, 1, lambda config, sampling: compiled(10**15))


def test_a_compiler_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(confirm.absent, "_is_installed", lambda module: False)
    with pytest.raises(UserError, match=r"jaxllm\[cuda12\]"):
        confirm.compiler("h100", H100, 8)
    with pytest.raises(UserError, match="this machine has"):
        confirm.compiler("auto", H100, 10**6)
