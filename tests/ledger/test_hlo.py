"""Parsing of HLO text: instructions, trip counts, communication and matmuls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxllm.ledger.compiled import collectives, hlo, matmuls
from jaxllm.ledger.compiled.hlo import Shape

# Two nested loops of 3 and 5 trips; one trip count is annotated, the other must be read off the counter.
LOOPS = """HloModule loops, input_output_alias={ {0}: (0, {}, may-alias), {1}: (2, {}, must-alias) }, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%inner_body (s: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %s = (s32[], f32[16,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[16,8]{1,0} get-tuple-element(%s), index=1
  %y = f32[16,8]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %w = f32[8,8]{1,0} constant({...})
  %z = f32[16,8]{1,0} dot(%y, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="f(x)/dot"}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %t = (s32[], f32[16,8]{1,0}) tuple(%next, %z)
}

%inner_condition (s: (s32[], f32[16,8])) -> pred[] {
  %s = (s32[], f32[16,8]{1,0}) parameter(0)
  ROOT %p = pred[] custom-call(%s), custom_call_target="who_knows"
}

%step (n: s32[]) -> s32[] {
  %n = s32[] parameter(0)
  %two = s32[] constant(2)
  ROOT %m = s32[] add(%n, %two)
}

%outer_body (s: (s32[], f32[16,8])) -> (s32[], f32[16,8]) {
  %s = (s32[], f32[16,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %x = f32[16,8]{1,0} get-tuple-element(%s), index=1
  %zero = s32[] constant(0)
  %start = (s32[], f32[16,8]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[16,8]) while(%start), condition=%inner_condition, body=%inner_body, backend_config={KNOWN}
  %y = f32[16,8]{1,0} get-tuple-element(%loop), index=1
  %next = s32[] fusion(%i), kind=kLoop, calls=%step
  ROOT %t = (s32[], f32[16,8]{1,0}) tuple(%next, %y)
}

%outer_condition (s: (s32[], f32[16,8])) -> pred[] {
  %s = (s32[], f32[16,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %limit = s32[] constant(11)
  ROOT %p = pred[] compare(%i, %limit), direction=LT
}

ENTRY %main (p0: f32[16,8], p1: f32[8], p2: f32[4]) -> f32[16,8] {
  %p0 = f32[16,8]{1,0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %p2 = f32[4]{0} parameter(2)
  %first = s32[] constant(1)
  %start = (s32[], /*index=1*/f32[16,8]{1,0}) tuple(%first, %p0)
  %loop = (s32[], f32[16,8]{1,0:T(8,128)(2,1)S(1)}) while(%start), condition=%outer_condition, body=%outer_body
  ROOT %out = f32[16,8]{1,0} get-tuple-element(%loop), index=1
}
""".replace("KNOWN", '"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}')


def wrap(lines, header="HloModule m, num_partitions=8", parameters="%x = bf16[4,64]{1,0} parameter(0)"):
    """Returns a program of these lines; the last is its root."""
    *before, last = lines
    inside = "\n".join(f"  {line}" for line in [parameters, *before, f"ROOT {last}"])
    return f"{header}\n\nENTRY %main (x: bf16[4,64]) -> bf16[] {{\n{inside}\n}}\n"


def only(line, *before):
    (found,) = collectives.collectives(hlo.parse(wrap([*before, line])))
    return found


def test_instructions():
    module = hlo.parse(LOOPS)
    assert module.entry == "main"
    assert set(module.computations) == {
        "add", "inner_body", "inner_condition", "step", "outer_body", "outer_condition", "main",
    }  # fmt: skip
    dot = module.computations["inner_body"].instructions["z"]
    assert (dot.opcode, dot.operands, dot.root) == ("dot", ("y", "w"), False)
    assert dot.shapes == [Shape("f32", (16, 8))]
    assert module.computations["main"].instructions["loop"].shapes == [Shape("s32", ()), Shape("f32", (16, 8))]
    assert module.computations["main"].root.name == "out"
    assert module.devices == 8
    assert module.aliased_parameters == {0, 2}


def test_sizes_of_elements():
    sizes = {"pred": 1, "s4": 1, "s8": 1, "f8e4m3fn": 1, "bf16": 2, "f16": 2, "u32": 4, "f64": 8, "c64": 8, "token": 0}
    assert {dtype: hlo.shapes(f"{dtype}[]")[0].bytes for dtype in sizes} == sizes
    assert Shape("s4", (3,)).bytes == 2


def test_brackets_in_quotes_and_names_without_percent_signs():
    module = hlo.parse(wrap([r'y = bf16[] custom-call(x), custom_call_target="a)(\"b{", metadata={op_name="f(("}']))
    assert module.computations["main"].root.operands == ("x",)


@pytest.mark.parametrize("text", ["", "HloModule m\n", wrap(["%y = bf16[4"]), wrap(["what is this"])])
def test_invalid_text_is_an_error(text):
    with pytest.raises(ValueError, match=r"HLO|bracket|substring"):
        hlo.parse(text)


def test_trip_counts_multiply():
    runs = hlo.execution_counts(hlo.parse(LOOPS))
    assert runs["outer_body"] == [hlo.ExecutionCount(5, (), False)]  # 1, 3, 5, 7, 9
    assert runs["inner_body"] == [hlo.ExecutionCount(15, (), False)]
    assert "add" not in runs


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("constant(11)", "constant(12)", 6),
        ("%first = s32[] constant(1)", "%first = s32[] constant(20)", 0),
        ("%limit), direction=LT", "%limit), direction=NE", None),
        ("ROOT %m = s32[] add(%n, %two)", "ROOT %m = s32[] multiply(%n, %two)", None),
        ("ROOT %m = s32[] add(%n, %two)", "ROOT %m = s32[] add(%n, %n)", None),
        ("compare(%i, %limit), direction=LT", "compare(%limit, %i), direction=GT", 5),
    ],
)
def test_a_counter_is_read_or_the_loop_is_unknown(old, new, trips):
    assert old in LOOPS
    runs = hlo.execution_counts(hlo.parse(LOOPS.replace(old, new)))["inner_body"]
    assert runs == [hlo.ExecutionCount(3 if trips is None else 3 * trips, ("loop",) if trips is None else (), False)]


def test_collectives_in_loops_run_once_a_trip():
    (found,) = collectives.collectives(hlo.parse(LOOPS))
    assert (found.op, found.devices, found.executions.count, found.computation) == ("all-reduce", 2, 15, "inner_body")
    assert (found.operand_bytes, found.result_bytes, found.dtypes) == (512, 512, ("f32",))
    assert found.volume == 2 * 128 * 15
    assert found.ring_bytes == 2 * 512 / 2 * 15
    (row,) = collectives.summary([found])
    assert (row["count"], row["operand_bytes"], row["volume"]) == (15, 512 * 15, 2 * 128 * 15)


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", 2),
        ("{{0,2,4,6},{1,3,5,7}}", 4),
        ("{}", 8),
        ("[2,4]<=[8]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1'}", 4),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
        ("mesh['axis_0'=8] {'axis_0':(2)4}", 4),
    ],
)
def test_replica_groups(groups, devices):
    found = only(f"%y = bf16[4,64]{{1,0}} all-reduce(%x), channel_id=1, replica_groups={groups}, to_apply=%add")
    assert found.devices == devices


ALL = "replica_groups=[1,8]<=[8]"


@pytest.mark.parametrize(
    ("lines", "op", "operand", "result", "volume"),
    [
        ([f"%y = bf16[32,64]{{1,0}} all-gather(%x), {ALL}, dimensions={{0}}"], "all-gather", 512, 4096, 2048),
        (
            [
                f"%s = (bf16[4,64]{{1,0}}, bf16[32,64]{{1,0}}) all-gather-start(%x), {ALL}, dimensions={{0}}",
                "%y = bf16[32,64]{1,0} all-gather-done(%s)",
            ],
            "all-gather", 512, 4096, 2048,
        ),
        ([f"%s = bf16[4,64] all-reduce-start(%x), {ALL}, to_apply=%add", "%y = bf16[4,64] all-reduce-done(%s)"],
         "all-reduce", 512, 512, 512),
        (
            [
                f"%s = ((bf16[4,64]), bf16[4,8], s32[]) reduce-scatter-start(%x), {ALL}, dimensions={{1}}",
                "%y = bf16[4,8] reduce-scatter-done(%s)",
            ],
            "reduce-scatter", 512, 64, 256,
        ),
        ([f"%y = (bf16[4,64], bf16[4,64]) all-reduce(%x, %x), {ALL}, to_apply=%add"], "all-reduce", 1024, 1024, 1024),
        (
            [f"%y = ((bf16[4,64], bf16[4,64]), (bf16[32,64], bf16[32,64])) all-gather-start(%x, %x), {ALL}"],
            "all-gather", 1024, 8192, 4096,
        ),
        ([f"%y = bf16[4,64]{{1,0}} all-to-all(%x), {ALL}, dimensions={{0}}"], "all-to-all", 512, 512, 256),
        (
            [
                "%s = (bf16[4,64], bf16[4,64], u32[], u32[]) collective-permute-start(%x), "
                "source_target_pairs={{0,1},{1,2},{2,0}}",
                "%y = bf16[4,64] collective-permute-done(%s)",
            ],
            "collective-permute", 512, 512, 256,
        ),
    ],
)  # fmt: skip
def test_every_form_of_every_collective_counts_once(lines, op, operand, result, volume):
    (found,) = collectives.collectives(hlo.parse(wrap(lines)))
    assert (found.op, found.operand_bytes, found.result_bytes, found.volume) == (op, operand, result, volume)
    assert found.devices == (3 if op == "collective-permute" else 8)


def test_a_wrapped_asynchronous_collective_is_counted_once():
    wrapped = "%w (p: bf16[4,64]) -> bf16[4,8] {\n  %p = bf16[4,64] parameter(0)\n  " + (
        f"ROOT %r = bf16[4,8] reduce-scatter(%p), {ALL}, dimensions={{1}}, to_apply=%add\n}}\n\n"
    )
    text = wrap(
        [
            "%s = ((bf16[4,64]), bf16[4,8], u32[]) async-start(%x), calls=%w",
            "%y = bf16[4,8] async-done(%s), calls=%w",
        ]
    )
    (found,) = collectives.collectives(hlo.parse(text.replace("ENTRY", wrapped + "ENTRY")))
    assert (found.op, found.operand_bytes, found.result_bytes) == ("reduce-scatter", 512, 64)


def test_collectives_in_tpu_fusions():
    """A TPU's reduce-scatter is an all-reduce and a slice; one gather in three fusions counts as one gather."""
    fused = """%all-reduce-scatter.1 (p: bf16[4,64]) -> bf16[4,8] {
  %p = bf16[4,64] parameter(0)
  %r = bf16[4,64] all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add
  %i = s32[] constant(0)
  ROOT %d = bf16[4,8] dynamic-slice(%r, %i, %i), dynamic_slice_sizes={4,8}
}

%begin (p: bf16[4,64]) -> bf16[32,64] {
  %p = bf16[4,64] parameter(0)
  %g = bf16[32,64] all-gather(%p), replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
  ROOT %c = bf16[32,64] custom-call(%g), custom_call_target="AsyncCollectiveStart"
}

%end (p: bf16[4,64]) -> bf16[32,64] {
  %p = bf16[4,64] parameter(0)
  %g = bf16[32,64] all-gather(%p), replica_groups=[1,8]<=[8], frontend_attributes={chain_id="0"}
  ROOT %c = bf16[32,64] custom-call(%g), custom_call_target="AsyncCollectiveDone"
}

"""
    lines = [
        "%a = bf16[4,8] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1",
        "%b = bf16[32,64] fusion(%x), kind=kCustom, calls=%begin",
        "%y = bf16[32,64] fusion(%x), kind=kCustom, calls=%end",
    ]
    found = collectives.collectives(hlo.parse(wrap(lines).replace("ENTRY", fused + "ENTRY")))
    assert [(c.op, c.result_bytes) for c in found] == [("reduce-scatter", 64), ("all-gather", 4096)]


def test_one_device_sends_nothing():
    found = only("%y = bf16[4,64] all-reduce(%x), replica_groups={{0},{1}}, to_apply=%add")
    assert (found.volume, found.ring_bytes) == (0, 0.0)


def test_branches_are_marked():
    branch = "%b (p: bf16[4,64]) -> bf16[4,64] {\n  %p = bf16[4,64] parameter(0)\n" + (
        f"  ROOT %r = bf16[4,64] all-reduce(%p), {ALL}\n}}\n\n"
    )
    text = wrap(["%i = s32[] constant(0)", "%y = bf16[4,64] conditional(%i, %x, %x), branch_computations={%b, %b}"])
    (found,) = collectives.collectives(hlo.parse(text.replace("ENTRY", branch + "ENTRY")))
    assert (found.executions.count, found.executions.conditional) == (2, True)


GEMM = (
    '%y = (bf16[4,32]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"alpha_real":1,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]'
    ',"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}, metadata={op_name="a}"}'
)
WEIGHT = "%w = bf16[64,32]{1,0} constant({...})"


@pytest.mark.parametrize(
    ("lines", "flops"),
    [
        ([WEIGHT, GEMM], 2 * 4 * 64 * 32),
        ([WEIGHT, GEMM.replace("$gemm", "$lt$matmul")], 2 * 4 * 64 * 32),
        ([WEIGHT, "%y = bf16[4,32] convolution(%x, %w), dim_labels=bf_io->bf"], 2 * 4 * 64 * 32),
        (
            # A matmul in a batch of 4, as a TPU writes it: the batch is spatial, and one tap in four is not padding.
            [
                "%a = bf16[4,16,8] constant({...})",
                "%b = bf16[4,8,32] constant({...})",
                "%y = bf16[4,16,32] convolution(%a, %b), window={size=4 stride=3 pad=0_0 lhs_dilate=4}, "
                "dim_labels=0bf_0io->0bf",
            ],
            2 * 4 * 16 * 8 * 32,
        ),
        (["%a = f32[6,2,3] constant({...})", "%b = f32[6,3,5] constant({...})",
          "%y = f32[6,2,5] dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, "
          "rhs_contracting_dims={1}"], 2 * 6 * 2 * 3 * 5),
    ],
)  # fmt: skip
def test_matmuls(lines, flops):
    found = matmuls.count_matmuls(hlo.parse(wrap(lines)))
    assert (found.flops, found.count, found.uncounted) == (flops, 1, {})


def test_matmuls_in_loops():
    found = matmuls.count_matmuls(hlo.parse(LOOPS))
    assert (found.flops, found.count) == (15 * 2 * 16 * 8 * 8, 15)
    unknown = matmuls.count_matmuls(hlo.parse(LOOPS.replace("direction=LT", "direction=NE")))
    assert (unknown.flops, unknown.unknown_loops) == (3 * 2 * 16 * 8 * 8, ("loop",))


def test_uncounted_operations_are_named():
    lines = [
        '%a = bf16[4,64] custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"',
        "%b = bf16[4,64] ragged-dot(%a, %a), lhs_contracting_dims={1}",
        '%y = bf16[4,64] custom-call(%b), custom_call_target="__cublas$gemm"',
    ]
    found = matmuls.count_matmuls(hlo.parse(wrap(lines)))
    assert found.flops == 0
    assert found.uncounted == {"__cudnn$fmhaSoftmax": 1, "ragged-dot": 1, "__cublas$gemm": 1}


# Programs of this machine's compiler, with known sums.

DEVICES = Mesh(np.array(jax.devices()[:8]), ("x",))
SHARDED, SINGLE_DEVICE = (NamedSharding(DEVICES, spec) for spec in (PartitionSpec("x"), PartitionSpec()))
SIDE, ROWS, TRIPS = 32, 64, 6


def layers(weights, x):
    return jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, weights)[0]


def data_parallel(mapped):
    """Returns the module of gradients of TRIPS layers, with rows sharded over 8 devices."""
    weights = jax.ShapeDtypeStruct((TRIPS, SIDE, SIDE), jnp.float32, sharding=SINGLE_DEVICE)
    x = jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32, sharding=SHARDED)
    step = jax.shard_map(
        mapped, mesh=DEVICES, in_specs=(PartitionSpec(), PartitionSpec("x")), out_specs=PartitionSpec(), check_vma=False
    )
    return hlo.parse(jax.jit(step).lower(weights, x).compile().as_text())


def summed(weights, x):
    return jax.lax.psum(jax.grad(lambda w: layers(w, x).sum())(weights), "x")


def test_a_real_data_parallel_step():
    module = data_parallel(summed)
    (found,) = collectives.collectives(module)
    assert (found.op, found.devices, found.executions.count) == ("all-reduce", 8, 1)
    assert found.volume == 2 * TRIPS * SIDE * SIDE
    assert matmuls.count_matmuls(module).flops == 3 * TRIPS * 2 * (ROWS // 8) * SIDE * SIDE


def test_a_real_collective_in_a_loop():
    def gathered(weights, x):
        def layer(c, w):
            gathered_weight = jax.lax.all_gather(w, "x", axis=0, tiled=True)
            return jnp.tanh(c @ gathered_weight), None

        return jax.lax.scan(layer, x, weights)[0].sum()[None]

    weights = jax.ShapeDtypeStruct((TRIPS, SIDE, SIDE), jnp.float32, sharding=NamedSharding(
        DEVICES, PartitionSpec(None, "x")))  # fmt: skip
    x = jax.ShapeDtypeStruct((ROWS, SIDE), jnp.float32, sharding=SHARDED)
    step = jax.shard_map(
        gathered,
        mesh=DEVICES,
        in_specs=(PartitionSpec(None, "x"), PartitionSpec("x")),
        out_specs=PartitionSpec("x"),
        check_vma=False,
    )
    module = hlo.parse(jax.jit(step).lower(weights, x).compile().as_text())
    found = [c for c in collectives.collectives(module) if c.op == "all-gather"]
    assert sum(c.volume for c in found) == TRIPS * SIDE * SIDE
    assert sum(c.executions.count for c in found) == TRIPS
    assert matmuls.count_matmuls(module).flops == TRIPS * 2 * (ROWS // 8) * SIDE * SIDE


def test_a_second_reduction_is_detected():
    """A planted fault: a step that reduces its gradients twice is detected."""
    module = data_parallel(lambda w, x: jax.lax.psum(jax.lax.psum(jnp.sin(summed(w, x)), "x") ** 2, "x"))
    assert sum(c.volume for c in collectives.collectives(module)) == 3 * 2 * TRIPS * SIDE * SIDE


def test_a_data_dependent_loop():
    def body(x):
        return x @ x * 0.5

    compiled = jax.jit(lambda x: jax.lax.while_loop(lambda x: x.sum() > 1, body, x))
    module = hlo.parse(compiled.lower(jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)).compile().as_text())
    found = matmuls.count_matmuls(module)
    assert found.flops == 2 * SIDE**3
    assert len(found.unknown_loops) == 1


def test_donation_is_in_the_text():
    def compiled(donate):
        jitted = jax.jit(lambda a, b: (a + b, a * b), donate_argnums=donate)
        return hlo.parse(jitted.lower(*[jax.ShapeDtypeStruct((SIDE,), jnp.float32)] * 2).compile().as_text())

    assert compiled((1,)).aliased_parameters == {1}
    assert compiled(()).aliased_parameters == frozenset()
