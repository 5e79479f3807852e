"""The README's tree is the disk's, and its commands name what exists."""

import re

import runs

README = (runs.ROOT / "README.md").read_text()


def test_tree_is_the_disk():
    block = README.split("test_readme.py compares this")[1].split("```")[1]
    named, folder = set(), ""
    for line in block.strip().splitlines():
        if line.startswith("    "):  # the entry above goes on
            continue
        entry = line.split()[0]
        if line.startswith("  "):
            named.add(folder + entry)
        else:
            folder = entry
            named.add(entry)
    for entry in named:
        path = runs.ROOT / entry
        assert path.is_dir() if entry.endswith("/") else path.is_file(), entry
    here = {f"jaxllm/{p.name}{'/' if p.is_dir() else ''}" for p in (runs.ROOT / "jaxllm").iterdir()}
    small = {"jaxllm/__init__.py", "jaxllm/__pycache__/", "jaxllm/errors.py", "jaxllm/commandline.py"}
    assert here - small == {entry for entry in named if entry.startswith("jaxllm/") and entry != "jaxllm/"}


def test_commands_name_what_exists():
    for module in set(re.findall(r"python -m (jaxllm[.\w]*)", README)):
        path = runs.ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module
    for config in set(re.findall(r"configs/\w+\.py", README)):
        assert (runs.ROOT / config).exists(), config
    targets = set(re.findall(r"^([\w-]+):", (runs.ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"make ([\w-]+)", README)) <= targets
