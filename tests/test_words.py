"""Docstrings begin with a statement; identifiers and messages use the field's terms."""

import ast
import functools
import re

import pytest
import runs

PATHS = sorted((runs.ROOT / "jaxllm").rglob("*.py"))
# A first line that depends on the name above it, or asks a question, is not a statement.
HEADLESS = re.compile(r"(Of|The same|What|Whether|How it|As `\w+`,|Likewise)\b")
# Dialect word -> the field's term.
DIALECT = {
    r"held against": "compared with, checked against",
    r"(is|are) told": "reported, printed, returned",
    r"made again": "recomputed",
    r"put together": "all-gathered, concatenated",
    r"shortage": "out of memory",
    r"nobody": "unknown",
    r"\bisland": "link domain",
}
# Parts of identifiers, between underscores and in CamelCase.
IDENTIFIERS = {
    "shortage",
    "island",
    "survivors",
    "recipe",
    "setting",
    "Recipe",
    "Setting",
    "Clock",
    "Partition",
    "WHOLE",
}


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


def docstrings(module):
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def strings(module):
    return [(n.lineno, n.value) for n in ast.walk(module) if isinstance(n, ast.Constant) and isinstance(n.value, str)]


def identifiers(module):
    for node in ast.walk(module):
        name = getattr(node, "name", None) or getattr(node, "id", None) or getattr(node, "arg", None)
        if isinstance(name, str):
            yield getattr(node, "lineno", 0), name


def documented(text, section):
    """Returns the names that a section of a docstring, such as Args, describes."""
    found = re.search(rf"^{section}:\n((?:  .*\n?|\n)+)", text, re.MULTILINE)
    entries = re.findall(r"^  ([\w*, ]+):", found[1], re.MULTILINE) if found else []
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def stale_arguments(module):
    """Yields (line, name) of arguments and attributes that a docstring describes and the code does not have."""
    for node in ast.walk(module):
        text = ast.get_docstring(node) or "" if isinstance(node, ast.ClassDef | ast.FunctionDef) else ""
        if isinstance(node, ast.FunctionDef):
            given = {argument.arg for argument in ast.walk(node.args) if isinstance(argument, ast.arg)}
            yield from ((node.lineno, name) for name in documented(text, "Args") - given)
        elif isinstance(node, ast.ClassDef):
            fields = {name for _, name in identifiers(node)} | {
                member.attr for member in ast.walk(node) if isinstance(member, ast.Attribute)
            }
            yield from ((node.lineno, name) for name in documented(text, "Attributes") - fields)


def faults(module):
    """Yields (line, problem) for words of a module that are not the field's terms."""
    for line, name in stale_arguments(module):
        yield line, f"the docstring describes {name}, which does not exist"
    for line, text in docstrings(module):
        if HEADLESS.match(text):
            yield line, f"docstring begins: {text.splitlines()[0]}"
    for line, text in strings(module):
        for word, standard in DIALECT.items():
            if found := re.search(word, text):
                yield line, f"{found[0]!r}; write: {standard}"
    for line, name in identifiers(module):
        if name in IDENTIFIERS or IDENTIFIERS & set(name.lower().strip("_").split("_")):
            yield line, f"identifier {name}"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: str(path.relative_to(runs.ROOT / "jaxllm")))
def test_words_are_the_fields(path):
    assert list(faults(tree(path))) == []


@pytest.mark.parametrize(
    "source",
    [
        'def f():\n    """Of a row: its bytes."""\n',
        'def f():\n    """Returns bytes.\n\n    They are held against XLA\'s.\n    """\n',
        'raise ValueError("it is told below")\n',
        "def f(setting): ...\n",
        "class ModelRecipe: ...\nRecipe = 1\n",
        'def f(size):\n    """Returns size.\n\n    Args:\n      size: Bytes.\n      count: Arrays.\n    """\n',
        'class A:\n    """Pair.\n\n    Attributes:\n      left, right: Its parts.\n    """\n\n    left: int\n',
    ],
)
def test_other_words_are_found(source):
    assert list(faults(ast.parse(source)))
