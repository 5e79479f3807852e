"""The README and docs: the tree is the disk's, links resolve, and commands name what exists."""

import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import runs

from jaxllm.config import Config, overrides

README = (runs.ROOT / "README.md").read_text()
PAGES = [runs.ROOT / "README.md", runs.ROOT / "CONTRIBUTING.md", *sorted((runs.ROOT / "docs").glob("*.md"))]
# Given by the libraries that define flags, not by a command.
COMMON_FLAGS = {"config", "help"}


def commands(page):
    """[words of each `jaxllm …` or `python -m jaxllm.…` command of a page], continuation lines joined."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"^ +(?:python -m jaxllm[. ]|jaxllm )(\w+[^\n#;&]*)", text, re.MULTILINE)
    return [shlex.split(line) for line in found]


COMMANDS = [(page.name, words) for page in PAGES for words in commands(page)]


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
    small = {"__init__.py", "__main__.py", "__pycache__/", "errors.py", "commandline.py"}
    missing = here - {f"jaxllm/{name}" for name in small}
    assert missing == {entry for entry in named if entry.startswith("jaxllm/") and entry != "jaxllm/"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https:") or (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_files_exist(page):
    text = page.read_text()
    targets = set(re.findall(r"^([\w-]+):", (runs.ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^ +|`)make ([\w-]+)", text, re.MULTILINE)) <= targets
    for file in set(re.findall(r"(?<![\w/])((?:configs|experiments)/\w+\.py)", text)):
        assert (runs.ROOT / file).exists(), file


@pytest.mark.parametrize(("page", "words"), COMMANDS, ids=lambda value: " ".join(value)[:60])
def test_commands_have_flags_and_fields_that_exist(page, words):
    name, *arguments = words
    if name in ("models", "devices"):
        assert not arguments
        return
    source = (runs.ROOT / "jaxllm" / name / "__main__.py").read_text()
    flags = set(re.findall(r'DEFINE_\w+\(\s*"(\w+)"', source)) | COMMON_FLAGS
    fields = overrides.field_paths(Config())
    for argument in arguments:
        if argument.startswith("--config."):
            assert argument[9:].split("=")[0] in fields, argument
        elif argument.startswith("--"):
            assert argument[2:].split("=")[0] in flags, argument


def quick(words):
    """Commands that only evaluate closed forms, for a model that needs no file."""
    return words[0] in ("models", "devices", "ledger", "plan") and "--compile" not in words


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [words for _, words in COMMANDS if quick(words)], ids=lambda words: " ".join(words)[:60]
)
def test_commands_of_the_docs_run(words, tmp_path):
    words = [str(tmp_path / word) if word.startswith("bill.") else word for word in words]
    done = runs.command("jaxllm", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_the_checks_can_fail():
    assert "trian" not in {words[0] for _, words in COMMANDS}
    assert len(COMMANDS) > 30
    with pytest.raises(AssertionError, match="no_such"):
        test_commands_have_flags_and_fields_that_exist("page", ["ledger", "--config.train.no_such=1"])


def test_console_script_reports_an_unknown_command_in_one_line():
    done = subprocess.run([sys.executable, "-m", "jaxllm", "trian"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: unknown command 'trian'; did you mean train? (jaxllm --help lists the commands)\n"
    assert not pathlib.Path("trian").exists()
