"""The web page runs the formulas themselves, so its figures equal Python's to the byte."""

import ast
import html
import json
import pathlib
import random
import re
import shutil
import subprocess

import pytest

from jaxllm import architectures
from jaxllm.config import Config
from jaxllm.hardware import detect
from jaxllm.ledger.report import page
from jaxllm.ledger.report.page import form, sources
from jaxllm.ledger.request import BillRequest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


def request(device: str = "h100") -> BillRequest:
    config = Config()
    config.model.name, config.data.sequence_length = "llama3.2-1b", 1024
    return BillRequest(config, detect.by_name(device), None, 1, None, 128)


def settings(count: int) -> list[dict[str, str]]:
    """Returns texts of the form, drawn with a fixed seed: mostly valid settings, some invalid."""
    draw = random.Random(8)
    fields = [field for fields in form.FORM.values() for field in fields]
    models = list(architectures.ARCHITECTURES)
    made = []
    for i in range(count):
        texts = {field.name: draw.choice(field.choices) for field in fields if field.choices}
        data, tensor, replica = draw.choice((1, 2, 3, 8, 16, 64)), draw.choice((1, 1, 2, 4)), draw.choice((1, 1, 2))
        accumulate = draw.choice((1, 1, 2, 4))
        devices = data * tensor * replica + (draw.random() < 0.04)
        made.append(
            texts
            | {
                "config.model.name": models[i % len(models)],
                "config.mesh.data": str(data),
                "config.mesh.tensor": str(tensor),
                "config.mesh.replica": str(replica),
                "count": str(devices),
                "config.attention.implementation": {3: "pallas", 5: "xla", 7: "cudnn"}.get(i % 20, "auto"),
                "config.train.accumulate": str(accumulate),
                "config.train.batch_size": str(data * replica * accumulate * draw.choice((1, 1, 2, 3))),
                "config.data.sequence_length": str(draw.choice((128, 512, 1024, 1000))),
                "config.train.loss_chunk": str(draw.choice((512, 1000, 4096))),
                "config.train.attention_chunk": draw.choice(
                    ("0", "128", "", "-1") if draw.random() < 0.1 else ("0", "128")
                ),
                "batch": str(draw.choice((1, 8, 100))),
                "context": str(draw.choice((512, 1024, 4096, 100_000))),
            }
        )
    return made


def in_browser(rendered: str, asked: list[dict[str, str]], folder: pathlib.Path) -> list[dict]:
    """Returns the page's answers to these texts, requested as its form does."""
    script = f"""<pre id="told"></pre><script>
    const asked = {json.dumps(asked)}, place = byId("told");
    try {{
      boot();
      place.textContent = "[" + asked.map(texts => answerOf(JSON.stringify(texts), "both")).join(",") + "]";
    }} catch (error) {{
      place.textContent = "failed: " + (__BRYTHON__.error_trace?.(error) ?? error) + error.stack;
    }}
    </script>"""
    path = folder / "page.html"
    path.write_text(rendered.replace("</body>", script + "</body>"))
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    found = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    text = html.unescape(found[1])
    assert text.startswith("["), text[:4000]
    return json.loads(text)


@pytest.fixture(scope="module")
def rendered() -> str:
    pytest.importorskip("brython", reason="the extra plots is not installed")
    return page.render(request(), "h100", "both")


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_the_page_tells_what_python_tells(rendered, tmp_path):
    asked = settings(96)
    started = form.start(request(), "h100")
    expected = [form.answer(started, texts) for texts in asked]
    trained = [answer["train"] for answer in expected if "error" not in answer["train"]]
    oom_message = {answer["train"]["error"] for answer in expected if "error" in answer["train"]}
    assert len(trained) >= 40
    assert len(oom_message) >= 5
    told = in_browser(rendered, asked, tmp_path)
    assert len(told) == len(asked)
    for texts, answer, wanted in zip(asked, told, expected, strict=True):
        assert answer == json.loads(json.dumps(wanted)), texts
    # The comparison can fail: another setting has another answer.
    assert told[0] != json.loads(json.dumps(expected[1]))


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_a_changed_formula_changes_the_page(rendered, tmp_path):
    """The page stores no figures: with another formula in its source it shows another peak."""
    started = form.start(request(), "h100")
    was = "_STATE_BYTES = 4 + 8"
    assert rendered.count(was) == 1
    (told,) = in_browser(rendered.replace(was, "_STATE_BYTES = 4 + 9"), [started["texts"]], tmp_path)
    wanted = form.answer(started, started["texts"])
    assert told["train"]["peak_bytes_per_device"] == wanted["train"]["peak_bytes_per_device"] + 1
    assert told["infer"] == json.loads(json.dumps(wanted["infer"]))


def test_the_page_needs_no_network(rendered):
    assert "default-src 'none'" in rendered
    own = rendered[: rendered.index("globalThis.__BRYTHON__ =")]
    assert not re.findall(r'(?:src|href)="(?!data:)', own)
    for script in ("page.js", "page.css", "page.html"):
        text = (sources.ROOT / "ledger" / "report" / "page" / "assets" / script).read_text()
        assert not re.search(r"https?:|fetch\(|XMLHttpRequest|@import|url\(", text), script
    assert len(rendered) < 3_000_000


def test_the_page_is_the_same_bytes_each_time(rendered):
    assert page.render(request(), "h100", "both") == rendered


SOURCE = '''
"""Doc."""
import numpy as np
import math
class A:
    """Doc."""
    x: np.ndarray = 1
    def f(self, y: int) -> "A":
        """Doc."""
        z: float = math.pi
        return z
def g(x: np.ndarray) -> None:
    """Only a docstring."""
'''
LIGHTER = """
import numpy as np
import math
class A:
    x = 1
    def f(self, y):
        z = math.pi
        return z
    __fields__ = {'x': np.ndarray}
def g(x):
    pass
"""


def test_sources_lose_annotations_and_keep_fields():
    assert ast.dump(sources.lighter(SOURCE)) == ast.dump(ast.parse(LIGHTER))
    unused = "import numpy as np\ndef g(x: np.ndarray):\n    return x\n"
    assert ast.unparse(sources.lighter(unused)) == "def g(x):\n    return x"


def test_the_page_carries_the_closed_forms_and_no_program():
    modules, absent = sources.embedded()
    formulas = ("training_memory", "inference_memory", "flops", "exact.run", "exact.state", "exact.optimizer_slots")
    for name in (*formulas, "fitted.train.cpu", "fitted.train.gpu"):
        assert f"jaxllm.ledger.formula.{name}" in modules
    programs = r"jaxllm\.(programs|decode|kernels|model\.(?!specs|adapter_specs))"
    assert not [name for name in modules if re.match(programs, name)]
    assert "jax" in absent
    assert set(sources.LEFT_OUT) <= set(absent)
