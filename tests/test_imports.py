"""Imports run downward in one list and never back up; what reads only configuration imports no JAX program."""

import ast
import functools

import runs

# From the top down. The first entry that a module's name starts with is its place.
ORDER = [
    "__main__",
    "train",
    "sample",
    "convert",
    "ledger.__main__",
    "plan",
    "commandline",
    "ledger.runtime",
    "engine",
    "ledger",
    "programs",
    "checkpoints",
    "job",
    "step",
    "decode",
    "data",
    "interop",
    "quantize.calibrate",
    "model",
    "quantize",
    "kernels",
    "parallel",
    "hardware",
    "architectures",
    "config",
    "errors",
]


def place(module):
    names = [name for name in ORDER if module == name or module.startswith(name + ".")]
    assert names, f"jaxllm.{module} has no place in the order"
    return names[0]


@functools.cache
def imports():
    """(module, what it imports of ours) of every import in the package."""
    return tuple(_imports())


def _imports():
    root = runs.ROOT / "jaxllm"
    for path in sorted(root.rglob("*.py")):
        module = ".".join(path.relative_to(root).with_suffix("").parts)
        module = module.removesuffix(".__init__")
        if module == "__init__":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "jaxllm":
                base = node.module.removeprefix("jaxllm").removeprefix(".")
                for alias in node.names:
                    inner = f"{base}.{alias.name}".strip(".")
                    target = root.joinpath(*inner.split("."))
                    yield module, inner if target.is_dir() or target.with_suffix(".py").exists() else base
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
                for name in names:
                    assert name.split(".")[0] not in ("experiments", "configs", "tests"), f"{path} imports {name}"


def is_downward(above, below):
    return ORDER.index(place(above)) <= ORDER.index(place(below))


def test_imports_run_downward():
    wrong = [f"{a} imports {b}" for a, b in imports() if not is_downward(a, b)]
    assert not wrong, wrong


def test_the_check_can_fail():
    assert not is_downward("model.transformer", "step.train_step")
    assert not is_downward("config.schema", "architectures")
    assert not is_downward("engine.generator", "ledger.runtime.sampling")
    assert is_downward("train.trainer", "ledger.bill")


def test_formulas_read_no_model_code():
    """The agreement of the closed forms with XLA is evidence only while they are independent of the program."""
    allowed = {"model.specs", "model.adapter_specs"}
    programs = ("model", "kernels", "programs", "step", "decode", "engine", "train")
    formulas = ("ledger.formula.", "ledger.rows", "ledger.advice.admission")
    found = {(a, b) for a, b in imports() if a.startswith(formulas) and b.split(".")[0] in programs}
    assert found, "no formula reads the declaration of parameters: the names above are wrong"
    assert not [(a, b) for a, b in found if b not in allowed]
