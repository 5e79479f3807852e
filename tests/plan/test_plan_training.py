"""The search for training runs: against brute force, and against what users expect of any plan."""

import dataclasses
import itertools

import models
import pytest

from jaxllm import architectures, programs
from jaxllm.config import Config, validate
from jaxllm.config import overrides as config_tree
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.ledger.compiled.absent import abstract_mesh
from jaxllm.ledger.formula import roofline, training_memory
from jaxllm.ledger.formula.exact import layout, optimizer_slots
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact import state as states
from jaxllm.plan import remedies, training, training_space
from jaxllm.plan.training_space import TrainingChoice, TrainingSpace, override_flags
from jaxllm.step.placement import make_layout

H100 = detect.by_name("h100")
REMATS = ("none", "full", "offload:attn_context")
CHUNKS = ((64, 16), (16, 4))


@pytest.fixture(autouse=True, scope="module")
def _short_chunks():
    """Shortens the chunks, so that a sequence of 64 tokens has several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_space, "CHUNKS", CHUNKS)
        patch.setattr(training_space, "MIN_CHUNK", 4)
        yield


def run(batch: int = 4, optimizer: str = "adamw", **model) -> Config:
    config = training.base_config("llama3.2-1b", 64, batch, optimizer)
    numbers = dataclasses.asdict(dataclasses.replace(models.ROTARY, layers=4, width=64, mlp_width=128, **model))
    for name, value in numbers.items():
        setattr(config.model, name, value)
    return config


def small(count: int = 4, batch: int = 4, **fields) -> TrainingSpace:
    config = run(batch)
    model = architectures.resolve_config(config)
    usual = {"precisions": ("bf16",), "moments": ("float32",), "remats": REMATS}
    return TrainingSpace(config, model, count, "gpu", **{**usual, **fields})


def forget():
    """Clears the caches of earlier counts."""
    layout.clear_caches()
    for cached in (optimizer_slots._shards, optimizer_slots._counted):
        cached.cache_clear()
    states._stored.cache_clear()


def every_choice(searched: TrainingSpace):
    """Yields every combination that the fields of a configuration allow, whether a plan would consider it or not."""
    divisors = [size for size in range(1, searched.count + 1) if searched.count % size == 0]
    meshes = [
        mesh
        for mesh in itertools.product(divisors, divisors, divisors)
        if mesh[0] * mesh[1] * mesh[2] == searched.count
    ]
    for (replica, data, tensor), zero, accumulate, remat, offload, (loss, attention), chunked in itertools.product(
        meshes, range(4), (1, 2, 3, 4), searched.remats, training_space.OFFLOADS, CHUNKS, (False, True)
    ):
        queries = attention if chunked else 0
        yield TrainingChoice(
            *(replica, data, tensor, zero, accumulate, remat, queries, loss, offload),
            *(searched.moments[0], searched.precisions[0]),
        )


def configured(base: Config, choice: TrainingChoice) -> Config:
    config = config_tree.from_dict(config_tree.to_dict(base))
    for path, value in choice.fields.items():
        section, name = path.split(".")
        setattr(getattr(config, section), name, value)
    return config


def brute_force(searched: TrainingSpace) -> list[tuple[int, tuple, TrainingChoice]]:
    """Returns (peak, rank, choice) of every valid choice; caches are cleared between choices."""
    found = []
    for choice in every_choice(searched):
        config = configured(searched.base, choice)
        try:
            validate.check(config, searched.model)
        except UserError:
            continue
        forget()
        peak = training_memory.training(searched.model, config, choice.precision, "gpu").peak_bytes
        least = roofline.train_step(run_lib.make(searched.model, config, choice.precision, "gpu"), H100)
        seconds = float(f"{least.seconds:.4g}")
        found.append((peak, (seconds, choice.complexity, sum(least.seconds_of.values()), peak), choice))
    return found


@pytest.fixture(scope="module")
def everything():
    return brute_force(small())


def best_of(everything, budget: int) -> TrainingChoice:
    return min((entry for entry in everything if entry[0] <= budget), key=lambda entry: entry[1])[2]


def budgets(everything) -> list[int]:
    """Returns budgets from one that a single choice fits to one that all fit."""
    peaks = sorted(peak for peak, _, _ in everything)
    return [peaks[0], peaks[len(peaks) // 100], peaks[len(peaks) // 10], peaks[len(peaks) // 2], peaks[-1]]


def test_the_best_is_the_best_of_all_that_fit(everything):
    assert len(everything) > 500
    for budget in budgets(everything):
        found = training.search(small(), H100, budget)
        assert found.fitting[0].choice == best_of(everything, budget)
        assert all(estimate.peak_bytes <= budget for estimate in found.fitting)


def test_a_forgotten_stage_is_caught(everything, monkeypatch):
    meshes = TrainingSpace.meshes
    monkeypatch.setattr(TrainingSpace, "meshes", lambda self: (mesh for mesh in meshes(self) if mesh[3] < 3))
    least, *_, most = budgets(everything)
    assert best_of(everything, least).zero == 3
    assert not training.search(small(), H100, least).fitting, "only stage 3 fits there"
    assert training.search(small(), H100, most).fitting[0].choice == best_of(everything, most), "stage 3 gains nothing"


def test_where_nothing_fits_the_closest_is_returned(everything):
    least = budgets(everything)[0]
    nothing = training.search(small(), H100, least - 1)
    assert not nothing.fitting
    assert nothing.closest is not None
    assert nothing.closest[1] == least


@pytest.mark.parametrize("count", [1, 4])
def test_every_choice_is_a_valid_configuration(count):
    searched = small(count)
    choices = [choice for family in searched.families() for choice in family]
    assert len(choices) == len(set(choices))
    for choice in choices:
        config = searched.configured(choice)
        validate.check(config, searched.model)
        assert choice.replica * choice.data * choice.tensor == count
        assert config == configured(searched.base, choice)


def test_overrides_make_the_same_peak():
    searched = small()
    found = training.search(searched, H100, 3_000_000)
    for estimate in found.fitting[:20]:
        config = run()
        for argument in override_flags(searched.overrides(estimate.choice, None)):
            path, _, value = argument.removeprefix("--config.").partition("=")
            section, name = path.split(".")
            kind = type(getattr(getattr(config, section), name))
            setattr(getattr(config, section), name, kind(value))
        model = architectures.resolve_config(config)
        assert (
            training_memory.training(model, config, estimate.choice.precision, "gpu").peak_bytes == estimate.peak_bytes
        )


def test_a_written_file_makes_the_same_run(tmp_path):
    searched = small()
    best = training.search(searched, H100, 3_000_000).fitting[0].choice
    text = searched.config_file(best, "A plan.")
    made: dict = {}
    exec(compile(text, "plan.py", "exec"), made)
    assert made["get_config"]() == searched.configured(best)


def test_of_a_file_only_what_differs_is_overridden():
    searched = small()
    best = training.search(searched, H100, 10**12).fitting[0].choice
    changed = searched.overrides(best, {})
    before = config_tree.field_paths(searched.base)
    assert changed == {path: value for path, value in best.fields.items() if before[path] != value}
    assert "train.batch_size" not in changed
    typed = {"init_from": "some/model", "mesh.zero": 7}
    again = searched.overrides(best, typed)
    assert again["init_from"] == "some/model"
    assert again == typed | changed


def test_more_devices_are_never_slower():
    tokens = []
    for count in (1, 2, 4, 8):
        found = training.search(small(count, batch=8), H100, 2_500_000)
        assert found.fitting, count
        tokens.append(1 / found.fitting[0].seconds)
    assert tokens == sorted(tokens)


def test_what_fits_on_fewer_devices_fits_on_more():
    fits = [bool(training.search(small(count, batch=8), H100, 1_000_000).fitting) for count in (1, 2, 4, 8)]
    assert fits == sorted(fits)
    assert len(set(fits)) == 2  # the budget is one that separates them


def test_a_tie_goes_to_the_simpler():
    found = training.search(small(), H100, 10**12)
    first = found.fitting[0]
    for other in found.fitting:
        if other.rank[1] == first.rank[1]:
            assert first.choice.complexity <= other.choice.complexity


def test_rates_that_are_not_known_come_last():
    no_links = dataclasses.replace(H100, interconnect=None, network=None)
    found = training.search(small(), no_links, 10**12)
    assert all(estimate.unknown for estimate in found.fitting)  # four devices always communicate
    without_link = training.search(small(1), dataclasses.replace(H100, host_link=None), 3_000_000)
    known = [not estimate.unknown for estimate in without_link.fitting]
    assert known == sorted(known, reverse=True)
    assert len(set(known)) == 2


def test_nothing_is_offloaded_on_a_cpu():
    searched = dataclasses.replace(small(), platform="cpu", precisions=("fp32",))
    choices = [choice for family in searched.families() for choice in family]
    assert {choice.offload for choice in choices} == {"none"}
    assert not any(choice.remat.startswith("offload") for choice in choices)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_what_the_trainer_would_refuse_is_not_planned(optimizer):
    """The plan has no choice that the trainer refuses (offloading, a mesh that pads): the best of many starts."""
    config = run(batch=8, optimizer=optimizer, vocab_size=67)
    model = architectures.resolve_config(config)
    searched = TrainingSpace(config, model, 4, "gpu", ("bf16", "fp32"), ("float32",), remats=("none", "full"))
    found = training.search(searched, H100, 10**12)
    least = training.search(searched, H100, min(estimate.peak_bytes for estimate in found.fitting))
    assert least.fitting
    oom_message = 0
    for family in searched.families():
        for choice in family:
            step_spec = programs.make_step_spec(searched.configured(choice), model, "gpu")
            try:
                make_layout(
                    searched.configured(choice), model, step_spec.policy, abstract_mesh(searched.configured(choice))
                )
            except UserError:
                oom_message += 1
                assert choice not in {estimate.choice for estimate in (*found.fitting, *least.fitting)}
    assert oom_message


def test_remedies_fit_and_the_count_is_the_smallest():
    budget = training.smallest_peak(small(1, precisions=("bf16_pure",)))
    found = training.search(small(1), H100, budget)
    assert not found.fitting
    helping = {remedy.flags.partition("=")[0]: remedy for remedy in remedies.training_remedies(found, 0.05, False)}
    count = int(helping["--count"].flags.partition("=")[2])
    assert count == next(n for n in (1, 2, 4) if training.search(small(n), H100, budget).fitting)
    assert set(helping) >= {"--precision", "--device"}
    for flag, remedy in helping.items():
        assert flag == "--device" or remedy.peak_bytes <= budget


def test_what_would_fit_is_typed_as_the_run_was(monkeypatch):
    """A file's fields are changed by --config.…; the plan's own flags for them apply only with a model's name."""
    monkeypatch.setattr(remedies, "_training_peak", lambda space: 1)
    monkeypatch.setattr(remedies, "MIN_LENGTH", 1)
    found = training.search(small(1), H100, 1)
    length, batch = found.space.length, found.space.base.train.batch_size
    for is_file in (True, False):
        flags = " ".join(remedy.flags for remedy in remedies.training_remedies(found, 0.05, is_file)) + " "
        halved = f"--config.data.sequence_length={length // 2} --config.train.batch_size={2 * batch} "
        assert (halved in flags) == is_file
        assert ("--config.optimizer.name=" in flags) == is_file
        assert (f" --sequence_length={length // 2} " in flags) != is_file
        assert (" --optimizer=" in flags) != is_file


def test_ten_thousand_candidates_are_evaluated():
    config = training.base_config("llama3-8b", 8192, 256, "adamw")
    searched = TrainingSpace(
        config, architectures.resolve_config(config), 16, "gpu", ("bf16",), ("float32", "bfloat16")
    )
    assert sum(1 for _ in searched.families()) > 0
    found = training.search(searched, H100, int(0.95 * H100.memory_bytes))
    assert found.evaluated >= 10_000
    assert 0 < len(found.fitting) < found.evaluated
