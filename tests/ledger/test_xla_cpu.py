"""Rules of a CPU's workspaces that arithmetic alone can check; XLA's own figures are checked in test_memory.py."""

import dataclasses

import jax
import pytest
from test_memory import BASE, run

from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.fitted.train import cpu_moments
from jaxllm.ledger.formula.training_memory import step_rows, training
from jaxllm.ledger.rows import BACKWARD, BOUNDARY

NUMBERS = sum(p.spec.size for p in run_lib.make(BASE, run(), "fp32", "cpu").parameters)
TABLE = BASE.vocab_size * BASE.width


def phase(config, name, model=BASE):
    """Returns row name -> bytes in a phase."""
    made = step_rows(run_lib.make(model, config, config.precision.policy, "cpu"))
    return {row.name: row.bytes_per_device for row in made if row.phase == name}


@pytest.mark.parametrize(
    ("optimizer", "dtype", "numbers", "size"),
    [
        ("adamw", "float32", 0, 4),
        ("momentum", "float32", 0, 4),
        ("lion", "float32", NUMBERS, 4),
        ("momentum", "bfloat16", NUMBERS, 2),
        ("adamw", "bfloat16", 2 * NUMBERS - TABLE, 2),  # one copy of the table reuses the place of the other's moment
    ],
)
def test_moments_that_are_copied(optimizer, dtype, numbers, size):
    config = run(optimizer_name=optimizer, optimizer_moment_dtype=dtype)
    assert cpu_moments.copied(run_lib.make(BASE, config, "fp32", "cpu"))[0] == numbers * size


def test_gradients_lie_where_lions_moments_lay():
    """A float32 gradient fits the buffer of its array's moment to the byte; without such a buffer, nothing is saved."""
    config = run(optimizer_name="lion")
    layers = phase(config, BACKWARD)["gradients of layers"]
    assert phase(config, BACKWARD)["copies of old moments"] <= NUMBERS * 4 - layers
    made = run_lib.make(BASE, config, "fp32", "cpu")
    (nothing,) = cpu_moments.rows_of_copies(made, BACKWARD, [])
    assert nothing.bytes_per_device == NUMBERS * 4
    (too_large,) = cpu_moments.rows_of_copies(made, BACKWARD, [NUMBERS * 4])
    assert too_large.bytes_per_device == NUMBERS * 4


def test_a_stage_scatters_into_shares_beside_whole_gradients():
    stages = [phase(run(mesh_data=4, mesh_zero=stage, train_batch_size=16), BOUNDARY) for stage in range(4)]
    whole, share = ([rows.get(name, 0) for rows in stages] for name in NAMES)
    assert whole[0] == whole[1] > 0
    assert whole[2:] == [0, 0]
    assert share[0] == 0
    assert 4 * share[1] == whole[1]
    assert share[1] == share[2] == share[3]


NAMES = ("gradients of layers", "gradients of layers, scattered")


def test_only_adafactor_on_one_device_keeps_squares_over_micro_batches():
    def squares(**fields):
        return phase(run(train_batch_size=16, train_accumulate=2, **fields), BACKWARD).get("weights, squared", 0)

    assert squares(optimizer_name="adafactor") == NUMBERS * 4
    assert squares(optimizer_name="adafactor", mesh_data=4) == 0
    assert squares(optimizer_name="adamw") == 0


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="XLA of JAX 0.12 keeps none of it")
def test_a_model_without_a_loop_makes_more_in_its_forward_pass():
    loop, none = (dataclasses.replace(BASE, unroll=unroll) for unroll in (1, BASE.layers))
    name = "gradient inputs, unrolled layers"
    assert name not in phase(run(), BOUNDARY, loop)
    assert phase(run(), BOUNDARY, none)[name] > 0
    assert training(none, run(), "fp32").peak_bytes > training(loop, run(), "fp32").peak_bytes
