"""Utilisation is at most 100 %: a model's FLOPs never exceed those that its step executes."""

import draws
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.ledger.formula import flops as compute


@draws.closed_form
@given(draws.cases(split=True))
def test_a_step_executes_the_models_flops_at_least(case):
    config, devices = case.config, case.ledger.count
    work = compute.train_step(case.model, config, case.policy, case.platform)
    length = config.data.sequence_length
    needed = compute.model_flops_per_token(case.model, length) * config.train.batch_size * length
    assert 0 < needed <= work.flops * devices


@draws.closed_form
@given(draws.cases(split=True))
def test_remat_adds_work_and_no_model_flops(case):
    """Stronger remat adds executed work but no model FLOPs, so utilisation falls."""
    assert case.ledger  # rejects what the trainer refuses
    work = [
        compute.train_step(case.but(remat_policy=policy).model, case.but(remat_policy=policy).config, case.policy)
        for policy in ("none", "dots", "full")
    ]
    flops = [one.flops for one in work]
    assert flops == sorted(flops)
    assert len({one.tokens for one in work}) == 1


@draws.closed_form
@given(draws.cases(), st.integers(2, 4))
def test_work_is_linear_in_the_batch_and_shared_by_the_devices(case, times):
    case = case.but(optimizer_name="adamw")  # Muon's own matmuls are of weights, not of tokens
    config = case.config
    batch = config.train.batch_size

    def flops(case) -> int:
        work = compute.train_step(case.model, case.config, case.policy, case.platform)
        return work.flops - work.flops_of["optimizer"]  # Muon's matmuls are of weights, not of tokens

    more = case.but(train_batch_size=times * batch)
    spread = more.but(mesh_data=times * config.mesh.data)
    if not case.model.experts:  # experts compute whole blocks
        assert flops(more) == times * flops(case)
    assert flops(spread) == flops(case)
