"""Imports run downward in one list and never back up; what reads only configuration imports no JAX program."""

import ast
import functools
import pathlib

import runs

# From the top down. The first entry that a module's name starts with is its place.
ORDER = [
    "train.__main__",
    "sample",
    "convert",
    "chat_loop",
    "ledger.__main__",
    "plan",
    "planning",
    "commandline",
    "train.loop",
    "decode.engine",
    "ledger",
    "programs",
    "train",
    "decode",
    "data",
    "interop.opening",
    "interop.peft",
    "interop.text",
    "interop.gguf",
    "interop.huggingface",
    "interop",
    "model",
    "kernels",
    "mesh",
    "hardware",
    "gpus",
    "tpus",
    "devices",
    "targets",
    "architectures",
    "model_families",
    "longrope",
    "config_checks",
    "attention_choice",
    "remat_policy",
    "config_tree",
    "config",
    "errors",
]
XLA = sorted((runs.ROOT / "jaxllm" / "ledger" / "xla").glob("[a-z]*.py"))


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
    assert not is_downward("model.transformer", "train.step")
    assert not is_downward("config", "architectures")
    assert not is_downward("interop.rules", "interop.gguf.model")
    assert is_downward("train.loop", "ledger.bill")


def test_formulas_read_no_model_code():
    """Agreement of the closed forms with XLA is evidence only while they are independent of the program."""
    allowed = {"model.specs", "model.adapter_specs"}
    formulas = ("memory", "compute", "activations", "slots", "inference", "rows")
    formulas += ("setting", "layout", "counts", "states", "dataflow", "tiles", "communication", "roofline", "formats")
    formulas += ("inference_cpu", "inference_pass", "inference_tpu", "inference_tpu_attention", "inference_tpu_pass")
    formulas += ("inference_workspaces", "admission", *(f"xla/{path.stem}" for path in XLA))
    for name in formulas:
        assert pathlib.Path(runs.ROOT / "jaxllm" / "ledger" / f"{name}.py").exists(), name
        used = {
            b
            for a, b in imports()
            if a == f"ledger.{name}".replace("/", ".") and b.split(".")[0] in ("model", "kernels", "programs", "train")
        }
        assert used <= allowed, (name, used)
