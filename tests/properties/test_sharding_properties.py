"""ZeRO and tensor parallelism: what is sharded, what the shards sum to, and what sharding never enlarges."""

import dataclasses

import draws
from hypothesis import given

from jaxllm.config import MeshConfig
from jaxllm.ledger import rows
from jaxllm.ledger.rows import HOST, PERSISTENT


@draws.closed_form
@given(draws.cases(split=True))
def test_a_higher_stage_never_holds_more(case):
    ledgers = [case.but(mesh_zero=stage).ledger for stage in range(4)]
    states = [draws.state_bytes(ledger) - draws.padding(ledger) for ledger in ledgers]
    assert states == sorted(states, reverse=True)
    known = [draws.known_bytes(ledger) for ledger in ledgers]
    assert known == sorted(known, reverse=True)


@draws.closed_form
@given(draws.cases(split=True))
def test_more_devices_never_hold_more_each(case):
    """Twice the devices along `data`, each with as many tokens, never need more bytes per device."""
    mesh, train = case.config.mesh, case.config.train
    before = case.ledger
    after = case.but(mesh_data=2 * mesh.data, train_batch_size=2 * train.batch_size).ledger
    assert after.count == 2 * before.count
    assert draws.state_bytes(after) - draws.padding(after) <= draws.state_bytes(before)
    assert draws.known_bytes(after) <= draws.known_bytes(before)


@draws.closed_form
@given(draws.cases(split=True))
def test_more_devices_with_the_same_batch_never_hold_more_each(case):
    """Twice the devices along `data`, each with half of the tokens, need fewer bytes per device."""
    mesh, train = case.config.mesh, case.config.train
    case = case.but(train_batch_size=2 * train.batch_size)
    after = case.but(mesh_data=2 * mesh.data).ledger
    assert draws.activations(after) < draws.activations(case.ledger)
    assert draws.known_bytes(after) < draws.known_bytes(case.ledger)


@draws.closed_form
@given(draws.cases())
def test_shares_of_stage_3_are_the_whole(case):
    """In each row, the shards sum to what one device would store, within the padding, which has separate rows."""
    case = case.but(mesh_replica=1, mesh_zero=3, optimizer_name="adam")
    alone = dataclasses.replace(case, config=dataclasses.replace(case.config, mesh=MeshConfig())).ledger
    devices, shared = case.config.mesh.data, case.ledger
    whole_on_each = ("counters", "step and key", "loss scale")
    for phase in (PERSISTENT, HOST):
        one, shares = draws.row_bytes(alone, phase), draws.row_bytes(shared, phase)
        zeros = sum(size for name, size in shares.items() if name.startswith("padding"))
        kept = {row.name for row in alone.rows if row.phase == phase and row.kind != "activations"}
        for name in kept:
            if name in whole_on_each:
                assert shares[name] == one[name]
            else:
                # A shard's unpadded part is rounded down array by array; the rest is in the padding.
                assert devices * shares[name] <= one[name] <= devices * (shares[name] + zeros)


@draws.closed_form
@given(draws.cases())
def test_gradients_are_split_from_stage_2_on(case):
    """Gradient accumulators are sharded from stage 2 on; gradients of a single micro-batch are counted alike."""
    case = case.but(mesh_replica=1, train_accumulate=2, train_batch_size=2 * case.config.train.batch_size)
    name = "accumulated gradients"
    kept = [draws.row_bytes(case.but(mesh_zero=stage).ledger, rows.BOUNDARY)[name] for stage in range(4)]
    devices = case.config.mesh.data
    assert kept[0] == kept[1]
    assert kept[2] == kept[3]
    assert kept[0] <= devices * kept[2]
    assert kept[2] <= kept[0]
