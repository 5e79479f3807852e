"""On a CPU, the reduce-scatters of the loop over layers start after those outside it are done."""

import models
import steps

from jaxllm import programs
from jaxllm.ledger.compiled import hlo
from jaxllm.step import gradients

SCATTER = "reduce-scatter"


def awaited(computation, name):
    """Returns the reduce-scatters that an instruction depends on, within its computation."""
    found, seen, ahead = set(), set(), [name]
    while ahead:
        each = computation.instructions[ahead.pop()]
        if each.name not in seen:
            seen.add(each.name)
            if each.opcode == SCATTER:
                found.add(each.name)
            ahead += [operand for operand in each.operands if operand in computation.instructions]
    return found


def loop_over_layers():
    """Returns (reduce-scatters outside the loop over layers, those that the loop depends on) of a ZeRO-1 step."""
    config = steps.config(mesh_data=2, mesh_zero=1)
    run = steps.Run(config, models.ROTARY)
    module = hlo.parse(programs.train_step(config, run.step_spec, run.mesh).compile().as_text())
    entry = module.computations[module.entry]
    (loop,) = [
        each.name
        for each in entry.instructions.values()
        for body in each.called("body")
        if any(inner.opcode == SCATTER for inner in module.computations[body].instructions.values())
    ]
    beside = {each.name for each in entry.instructions.values() if each.opcode == SCATTER}
    return beside, awaited(entry, loop)


def test_the_loop_waits_for_the_others():
    beside, waited = loop_over_layers()
    assert len(beside) >= 2  # those of the embeddings and the final norm
    assert waited == beside


def test_a_loop_that_does_not_wait_is_seen(monkeypatch):
    monkeypatch.setattr(gradients, "_zero_after", lambda arrays: 0)
    beside, waited = loop_over_layers()
    assert waited < beside
