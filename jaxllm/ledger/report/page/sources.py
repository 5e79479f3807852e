"""Python sources that the HTML page embeds: the installed closed forms, prepared for a browser.

The page runs the same modules as the command. They are found by following imports from the page's form. Modules that no
closed form needs (compilers, traces, terminal tables, arrays) are left out and replaced by placeholders
(`page.standins`). Annotations and docstrings are removed: they add size, and annotations name missing modules. The
annotated fields of a class are kept as its `__annotations__`.
"""

import ast
import pathlib
from collections.abc import Iterator
from typing import Any

import jaxllm

ROOT = pathlib.Path(jaxllm.__file__).parent
FORM = "jaxllm.ledger.report.page.form"
STANDINS = "jaxllm.ledger.report.page.standins"
# Imported by modules of the closed forms, but not needed by these.
LEFT_OUT = ("jaxllm.step.state",)


def embedded() -> tuple[dict[str, str], tuple[str, ...]]:
    """Returns (name -> source of each embedded module, names of other imported modules). Sources of packages are empty.

    Both are sorted, so the page is reproducible byte for byte.
    """
    found: dict[str, str] = {}
    others: set[str] = set()
    waiting = [FORM]
    while waiting:
        name = waiting.pop()
        if name in found or name in others:
            continue
        path = _path(name)
        if name in LEFT_OUT or path is None:
            others.add(name)
            continue
        tree = stripped(path.read_text())
        found[name] = ast.unparse(tree)
        waiting += imports(tree)
    packages = {package: "" for name in found for package in _parents(name)}
    return dict(sorted((packages | found).items())), tuple(sorted(others))


def standins() -> str:
    """Returns the program that must run first, which installs the stand-ins."""
    path = _path(STANDINS)
    assert path is not None
    return ast.unparse(stripped(path.read_text()))


def _path(module: str) -> pathlib.Path | None:
    """Returns the file of a module of this project, or None for other modules."""
    first, *rest = module.split(".")
    if first != ROOT.name:
        return None
    path = ROOT.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def imports(tree: ast.Module) -> Iterator[str]:
    """Yields the modules that a source imports, at any level of nesting."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            inner = [name for name in submodules if (path := _path(name)) is not None and path.exists()]
            yield from inner
            if len(inner) < len(submodules):
                yield node.module


def stripped(source: str) -> ast.Module:
    """Returns a source's tree without docstrings, annotations, and the imports that only annotations need."""
    tree = ast.parse(source)
    names = _names(tree)
    tree = _Stripper().visit(tree)
    unneeded = names - _names(tree)
    for node in list(tree.body):
        if isinstance(node, ast.Import | ast.ImportFrom):
            node.names = [alias for alias in node.names if (alias.asname or alias.name).split(".")[0] not in unneeded]
            if not node.names:
                tree.body.remove(node)
    return ast.fix_missing_locations(tree)


def _names(tree: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


class _Stripper(ast.NodeTransformer):
    def visit_Module(self, node: ast.Module) -> ast.Module:
        self.generic_visit(node)
        node.body = _without_docstring(node.body)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.body = _without_docstring(node.body) or [ast.Pass()]
        node.returns = None
        own = node.args
        for argument in (*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg):
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
        node.body.append(ast.Assign([ast.Name("__annotations__", ast.Store())], declared))
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        self.generic_visit(node)
        return ast.Assign([node.target], node.value) if node.value else None


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
