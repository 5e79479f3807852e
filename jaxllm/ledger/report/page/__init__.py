"""The bill as one HTML file: its figures, pictures, and a form that recomputes them, with no network at all.

The page carries the sources of the closed forms as they are installed (`page.sources`) and runs them with Brython, a
Python in JavaScript, on the small stand-ins of `page.standins`. Nothing is written a second time: a formula that
changes here changes in the next page. `page.form` is the program on both sides.
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
# Of Brython's library; all else that the closed forms import is in `page.standins`.
_LIBRARY = ("math", "sys")


def render(asked: BillRequest, device_name: str, task: str) -> str:
    """The page, the same bytes for the same request.

    Args:
      device_name: what `--device` was.
      task: train, infer or both: what the page shows first.
    Raises:
      UserError: Brython is not installed, or both bills are refused.
    """
    runtime = _brython()
    started = form.start(asked, device_name)
    first = form.answer(started, started["texts"])
    wanted = TASKS if task == "both" else (task,)
    for error in (first[name]["error"] for name in wanted if "error" in first[name]):
        raise UserError(error)
    modules, absent = sources.embedded()
    program = {
        "modules": modules,
        "absent": absent,
        "standins": sources.standins(),
        "library": _library(runtime),
        "jax_version": jax.__version_info__,
        "environment": {name: os.environ[name] for name in devices.FRACTION_VARIABLES if name in os.environ},
        "form": sources.FORM,
    }
    data = {"started": started, "first": first, "task": task, "groups": list(view.GROUPS), "colours": view.COLOURS}
    pieces = {
        "title": html.escape(f"{first[wanted[0]]['model']}: what it needs"),
        "style": (_ASSETS / "page.css").read_text(),
        "script": (_ASSETS / "page.js").read_text(),
        "form": _controls(started["texts"]),
        "data": _inline(json.dumps(data)),
        "program": _inline(json.dumps(program)),
        "brython": (runtime / "brython.js").read_text().replace("</script", "<\\/script"),
        "modules": html.escape(", ".join(name for name, source in modules.items() if source)),
    }
    return string.Template((_ASSETS / "page.html").read_text()).substitute(pieces)


def _brython() -> pathlib.Path:
    """The folder of Brython's scripts.

    Raises:
      UserError: it is not installed.
    """
    found = importlib.util.find_spec("brython")
    if found is None or found.origin is None:
        raise UserError("--html needs Brython, which is not installed: pip install 'jaxllm[plots]'")
    return pathlib.Path(found.origin).parent / "data"


def require() -> None:
    """Brython is there.

    Raises:
      UserError: it is not installed.
    """
    _brython()


def _library(runtime: pathlib.Path) -> dict[str, Any]:
    """The modules of Brython's library that the page needs, in its own form."""
    text = (runtime / "brython_stdlib.js").read_text()
    every, _ = json.JSONDecoder().raw_decode(text, text.index("{"))
    return {name: every[name] for name in _LIBRARY}


def _inline(text: str) -> str:
    """JSON that ends no script element."""
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
