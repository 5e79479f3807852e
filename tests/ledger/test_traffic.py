"""Bytes in device memory, counted from HLO: by hand for small programs, and for a decoded token."""

import dataclasses
import textwrap

import jax
import jax.numpy as jnp
import models
import pytest

from jaxllm import programs
from jaxllm.decode.weights import WeightLayout
from jaxllm.ledger.compiled import hlo
from jaxllm.ledger.compiled.traffic import traffic
from jaxllm.model.specs import parameter_count

HEADER = "HloModule test, is_scheduled=true\n"


def counted(body, per_iteration=False):
    found = traffic(hlo.parse(HEADER + textwrap.dedent(body)), per_iteration)
    return found.read, found.written


def test_operands_and_results_count_once():
    assert counted("""
        ENTRY %main (a: f32[10], b: f32[10]) -> f32[10] {
          %a = f32[10]{0} parameter(0)
          %b = f32[10]{0} parameter(1)
          ROOT %sum = f32[10]{0} add(%a, %b)
        }""") == (80, 40)


FUSED = """
    %fused (p0: f32[100,10], p1: s32[], p2: f32[10]) -> f32[10] {{
      %p0 = f32[100,10]{{1,0}} parameter(0)
      %p1 = s32[] parameter(1)
      %zero = s32[] constant(0)
      %row = f32[1,10]{{1,0}} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={{1,10}}
      %bitcast = f32[10]{{0}} bitcast(%row)
      %p2 = f32[10]{{0}} parameter(2)
      ROOT %out = f32[10]{{0}} add(%bitcast, %p2)
    }}

    ENTRY %main (a: f32[100,10], i: s32[], b: f32[10]) -> f32[10] {{
      %a = f32[100,10]{{1,0}} parameter(0)
      %i = s32[] parameter(1)
      %b = f32[10]{{0}} parameter(2)
      ROOT %f = f32[10]{{0}} fusion({operands}), kind=kLoop, calls=%fused
    }}"""


def test_of_an_operand_that_a_fusion_slices_the_slice_counts():
    assert counted(FUSED.format(operands="%a, %i, %b")) == (40 + 4 + 40, 40)


def test_an_update_in_place_counts_the_update():
    assert counted("""
        %fused (p0: f32[100,10], p1: f32[1,10], p2: s32[]) -> f32[100,10] {
          %p0 = f32[100,10]{1,0} parameter(0)
          %p1 = f32[1,10]{1,0} parameter(1)
          %p2 = s32[] parameter(2)
          %zero = s32[] constant(0)
          ROOT %new = f32[100,10]{1,0} dynamic-update-slice(%p0, %p1, %p2, %zero)
        }

        ENTRY %main (a: f32[100,10], b: f32[1,10], i: s32[]) -> f32[100,10] {
          %a = f32[100,10]{1,0} parameter(0)
          %b = f32[1,10]{1,0} parameter(1)
          %i = s32[] parameter(2)
          ROOT %f = f32[100,10]{1,0} fusion(%a, %b, %i), kind=kLoop, calls=%fused
        }""") == (40 + 40 + 4, 40)


def test_a_kernels_operand_that_it_updates_in_place_does_not_count():
    assert counted("""
        ENTRY %main (a: f32[100], b: f32[10]) -> f32[100] {
          %a = f32[100]{0} parameter(0)
          %b = f32[10]{0} parameter(1)
          ROOT %k = f32[100]{0} custom-call(%a, %b), custom_call_target="w", output_to_operand_aliasing={{}: (0, {})}
        }""") == (40, 0)


SIZES = {"vocab_size": 512, "layers": 3, "width": 256, "heads": 8, "kv_heads": 4, "head_dim": 32, "mlp_width": 768}
DENSE = dataclasses.replace(models.ROTARY, **SIZES, context_length=512)
SLIDING = dataclasses.replace(models.SLIDING, **SIZES, context_length=512, window=64)


def per_token(model, layout, batch=1):
    """Returns the traffic of one decoded token, relative to weights and cache."""
    program = programs.decode(model, batch, 8, 512, jnp.float32, layout=layout)
    executable = program.jitted.lower(*program.inputs).compile({"xla_backend_optimization_level": 0})
    moved = traffic(hlo.parse(executable.as_text()), per_iteration=True)
    embeddings = 0 if model.tied_embeddings else model.vocab_size * model.width
    return moved.total / (4 * (parameter_count(model) - embeddings) + program.inputs[1].cache.nbytes)


@pytest.mark.parametrize("model", [DENSE, SLIDING], ids=["dense", "sliding"])
@pytest.mark.parametrize(("batch", "most"), [(1, 1.07), (4, 1.15)])  # activations weigh more in a small model
def test_a_decoded_token_reads_weights_and_cache_once_on_a_cpu(model, batch, most):
    assert 1 < per_token(model, WeightLayout.PER_LAYER, batch) < most
    jax.clear_caches()


def test_weights_sliced_from_stacks_would_be_caught():
    assert per_token(DENSE, WeightLayout.TRAINING) > 1.8
