"""The Python sources that the page carries: the closed forms as they are installed, ready for a browser.

The page runs the same modules that the command runs. They are found by following imports from the page's form; what
takes no part in a closed form (compilers, traces, terminal tables, arrays) is left out, and a stand-in without values
takes its place (`page.standins`). Annotations and docstrings are taken out: they weigh, and annotations name modules
that are not there. The annotated fields of a class stay, as its `__fields__`.
"""

import ast
import pathlib
from collections.abc import Iterator
from typing import Any

import jaxllm

ROOT = pathlib.Path(jaxllm.__file__).parent
FORM = "jaxllm.ledger.report.page.form"
# Those that need names of others stand after them.
STANDINS = tuple(
    f"jaxllm.ledger.report.page.standins.{name}" for name in ("names", "records", "library", "trees", "install")
)
# Imported by modules of the closed forms, and not for them.
LEFT_OUT = ("jaxllm.step.state",)


def embedded() -> tuple[dict[str, str], tuple[str, ...]]:
    """(name -> source of each module that the page carries, empty of packages; names of those that it lacks).

    Both are sorted, so that a page is made of the same bytes each time.
    """
    found: dict[str, str] = {}
    absent: set[str] = set()
    waiting = [FORM]
    while waiting:
        name = waiting.pop()
        if name in found or name in absent:
            continue
        path = _path(name)
        if name in LEFT_OUT or path is None:
            absent.add(name)
            continue
        tree = lighter(path.read_text())
        found[name] = ast.unparse(tree)
        waiting += imports(tree)
    packages = {package: "" for name in found for package in _parents(name)}
    return dict(sorted((packages | found).items())), tuple(sorted(absent))


def standins() -> str:
    """The program that has to run first: the stand-ins one after another, so that none imports another."""
    body: list[ast.stmt] = []
    for name in STANDINS:
        path = _path(name)
        assert path is not None
        nodes = lighter(path.read_text()).body
        body += [node for node in nodes if not (isinstance(node, ast.ImportFrom) and node.module in STANDINS)]
    return ast.unparse(ast.Module(body, []))


def _path(module: str) -> pathlib.Path | None:
    """The file of a module of this project; None for others."""
    first, *rest = module.split(".")
    if first != ROOT.name:
        return None
    path = ROOT.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def imports(tree: ast.Module) -> Iterator[str]:
    """Modules that a source names in its imports, wherever they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = [name for name in submodules if (path := _path(name)) is not None and path.exists()]
            yield from inner
            if len(inner) < len(submodules):
                yield node.module


def lighter(source: str) -> ast.Module:
    """A source without docstrings, annotations, and the imports that only these needed."""
    tree = _Lighter().visit(ast.parse(source))
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} | _exported(tree)
    for node in list(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] in used]
            if not node.names:
                tree.body.remove(node)
    return ast.fix_missing_locations(tree)


def _exported(tree: ast.Module) -> set[str]:
    """Names in a module's `__all__`: those that a package hands on from its modules."""
    assigned = [
        node for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return {name for node in assigned for name in ast.literal_eval(node.value)}


class _Lighter(ast.NodeTransformer):
    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        node.body = _without_docstring(node.body)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = _without_docstring(node.body) or [ast.Pass()]
        node.returns = None
        given = node.args
        for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg):
            if argument is not None:
                argument.annotation = None
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        fields = {
            field.target.id: field.annotation
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        self.generic_visit(node)
        node.body = _without_docstring(node.body)
        declared = ast.Dict([ast.Constant(name) for name in fields], list(fields.values()))
        node.body.append(ast.Assign([ast.Name("__fields__", ast.Store())], declared))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else None


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
