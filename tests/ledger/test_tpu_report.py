"""Parsing of the TPU compiler's report of its buffers, on small synthetic reports."""

from jaxllm.ledger.compiled import tpu_report

USAGE = """Memory Space: default (color=0)
Total bytes: {total} (1.00KiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list
Memory Space: vmem (color=1)
Total bytes: 777 (777B)
"""
ASSIGNMENT = """BufferAssignment:
allocation 0: size 512, thread-local:
 value: <1 x @0> (size=4,offset=0): s32[]
allocation 1: size 4096, parameter 0, shape |f32[8,128]| at ShapeIndex {}, maybe-live-out:
 value: <2 param.0 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 2: size 512, parameter 1, shape |s32[]| at ShapeIndex {}:
allocation 3: size 1024, parameter 2, shape |f32[256]| at ShapeIndex {}, color 1:
allocation 4: size 4096, output shape is |f32[8,128]|, maybe-live-out:
allocation 5: size 9000, preallocated-temp:
"""


def write(folder, name: str, total: int, assignment: str = ASSIGNMENT) -> None:
    stem = f"{name}.after_optimizations-"
    (folder / f"{stem}memory-usage-report.txt").write_text(USAGE.format(total=total))
    (folder / f"{stem}buffer-assignment.txt").write_text(assignment)


def test_arguments_are_those_in_main_memory_donated_or_not(tmp_path):
    write(tmp_path, "module_0000.jit_step", 20000)
    assert tpu_report.figures(tmp_path) == {"temps": 20000 - 4096 - 512, "peak": 20000}


def test_the_module_that_needs_most_is_the_program(tmp_path):
    write(tmp_path, "module_0000.jit_small", 5000)
    write(tmp_path, "module_0001.jit_step", 30000, ASSIGNMENT.replace("4096, parameter", "8192, parameter"))
    write(tmp_path, "module_0002.jit_other", 6000)
    assert tpu_report.figures(tmp_path) == {"temps": 30000 - 8192 - 512, "peak": 30000}


def test_what_is_not_there_is_not_told(tmp_path):
    assert tpu_report.figures(tmp_path) == {}
    (tmp_path / "a.after_optimizations-memory-usage-report.txt").write_text(USAGE.format(total=1))
    assert tpu_report.figures(tmp_path) == {}  # the buffer assignment is missing
    write(tmp_path, "b", 9)
    (tmp_path / "b.after_optimizations-memory-usage-report.txt").write_text(
        "Memory Space: vmem (color=1)\nTotal bytes: 9 (9B)"
    )
    assert tpu_report.figures(tmp_path) == {}
