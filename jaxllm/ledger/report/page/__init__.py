"""Self-contained HTML page of a bill: figures, plots, and a form that recomputes them offline.

The page embeds the installed sources of the closed forms (`page.sources`) and runs them with Brython, a Python
implementation in JavaScript. What Brython's library does not serve is in `page.standins`. No formula is duplicated: a
changed formula appears in the next page. Both Python here and the browser run `page.form`.
"""

import html
import importlib.util
import json
import os
import pathlib
import string
from typing import Any

import jax

from jaxllm.errors import UserError
from jaxllm.hardware import spec as devices
from jaxllm.ledger.report import groups as view
from jaxllm.ledger.report.page import form, sources
from jaxllm.ledger.request import TASKS, BillRequest

_ASSETS = pathlib.Path(__file__).parent / "assets"
# Modules of Brython's library that the closed forms import, and those that they import in turn.
_LIBRARY = (
    *("_collections", "_collections_abc", "_functools", "_json", "_operator", "_py_abc", "_thread", "_weakref"),
    *("_weakrefset", "abc", "bisect", "collections", "difflib", "enum", "functools", "heapq", "itertools", "keyword"),
    *("math", "operator", "python_re", "re", "reprlib", "sys", "types"),
)
# Imported by difflib for its colours.
_UNUSED = "_colorize"


def render(bill_request: BillRequest, device_name: str, task: str) -> str:
    """Returns the HTML of the page. The same request gives the same bytes.

    Args:
      bill_request: request that fills the form at first.
      device_name: value of `--device`.
      task: train, infer or both; selects what the page shows first.
    Raises:
      UserError: Brython is not installed, or a bill of `task` cannot be computed.
    """
    runtime = _brython()
    initial = form.initial_state(bill_request, device_name)
    first = form.compute(initial, initial["texts"])
    wanted = TASKS if task == "both" else (task,)
    for error in (first[name]["error"] for name in wanted if "error" in first[name]):
        raise UserError(error)
    modules, imported = sources.embedded()
    library = _library(runtime)
    program = {
        "modules": modules,
        "absent": [_UNUSED, *(name for name in imported if name.split(".")[0] not in library)],
        "standins": sources.standins(),
        "library": library,
        "jax_version": jax.__version_info__,
        "environment": {name: os.environ[name] for name in devices.FRACTION_VARIABLES if name in os.environ},
        "form": sources.FORM,
    }
    data = {"initial": initial, "first": first, "task": task, "groups": list(view.GROUPS), "colours": view.COLOURS}
    pieces = {
        "title": html.escape(f"{first[wanted[0]]['model']}: what it needs"),
        "style": (_ASSETS / "page.css").read_text(),
        "script": (_ASSETS / "page.js").read_text(),
        "form": _controls(initial["texts"]),
        "data": _inline(json.dumps(data)),
        "program": _inline(json.dumps(program)),
        "brython": (runtime / "brython.js").read_text().replace("</script", "<\\/script"),
        "modules": html.escape(", ".join(name for name, source in modules.items() if source)),
    }
    return string.Template((_ASSETS / "page.html").read_text()).substitute(pieces)


def _brython() -> pathlib.Path:
    """Returns the folder of Brython's scripts.

    Raises:
      UserError: Brython is not installed.
    """
    found = importlib.util.find_spec("brython")
    if found is None or found.origin is None:
        raise UserError("--html needs Brython, which is not installed: pip install 'jaxllm[plots]'")
    return pathlib.Path(found.origin).parent / "data"


def require() -> None:
    """Checks that Brython is installed.

    Raises:
      UserError: Brython is not installed.
    """
    _brython()


def _library(runtime: pathlib.Path) -> dict[str, Any]:
    """Returns the modules of Brython's library that the page needs, in Brython's format."""
    text = (runtime / "brython_stdlib.js").read_text()
    every, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    return {name: every[name] for name in _LIBRARY}


def _inline(text: str) -> str:
    """Escapes JSON so that it cannot close the script element around it."""
    return text.replace("<", "\\u003c")


def _controls(texts: dict[str, str]) -> str:
    groups = []
    for group, fields in form.FORM.items():
        controls = "\n".join(_control(field, texts[field.name]) for field in fields)
        groups.append(f"<fieldset><legend>{html.escape(group)}</legend>\n{controls}\n</fieldset>")
    return "\n".join(groups)


def _control(field: form.Field, text: str) -> str:
    name, value = html.escape(field.name), html.escape(text)
    if not field.choices:
        control = f'<input type="number" id="{name}" name="{name}" value="{value}" min="{field.least}" step="1">'
    else:
        choices = field.choices if text in field.choices else (text, *field.choices)
        options = "".join(
            f"<option{' selected' if choice == text else ''}>{html.escape(choice)}</option>" for choice in choices
        )
        control = f'<select id="{name}" name="{name}">{options}</select>'
    return f'<label for="{name}"><span>{html.escape(field.label)}</span>{control}</label>'
