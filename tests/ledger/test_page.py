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
from jaxllm.ledger.report.page import form, sources, standins
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
                "infer.data": draw.choice(("1", "2")),
                "infer.tensor": draw.choice(("1", "1", "2", "8")),
                "context": str(draw.choice((512, 1024, 4096, 100_000))),
            }
        )
    return made


def in_browser(rendered: str, inputs: list[dict[str, str]], folder: pathlib.Path) -> list[dict]:
    """Returns the bills that the page computes for these texts, as its form does."""
    script = f"""<pre id="computed"></pre><script>
    const inputs = {json.dumps(inputs)}, place = byId("computed");
    try {{
      boot();
      place.textContent = "[" + inputs.map(texts => compute(JSON.stringify(texts), "both")).join(",") + "]";
    }} catch (error) {{
      place.textContent = "failed: " + (__BRYTHON__.error_trace?.(error) ?? error) + error.stack;
    }}
    </script>"""
    path = folder / "page.html"
    path.write_text(rendered.replace("</body>", script + "</body>"))
    command = [BROWSER, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    found = re.search(r'<pre id="computed">(.*?)</pre>', done.stdout, re.DOTALL)
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
def test_the_page_computes_what_python_computes(rendered, tmp_path):
    inputs = settings(96)
    initial = form.initial_state(request(), "h100")
    expected = [form.compute(initial, texts) for texts in inputs]
    trained = [bills["train"] for bills in expected if "error" not in bills["train"]]
    oom_message = {bills["train"]["error"] for bills in expected if "error" in bills["train"]}
    assert len(trained) >= 40
    assert len(oom_message) >= 5
    computed = in_browser(rendered, inputs, tmp_path)
    assert len(computed) == len(inputs)
    for texts, bills, wanted in zip(inputs, computed, expected, strict=True):
        assert bills == json.loads(json.dumps(wanted)), texts
    # The comparison can fail: another setting has other bills.
    assert computed[0] != json.loads(json.dumps(expected[1]))


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_a_changed_formula_changes_the_page(rendered, tmp_path):
    """The page stores no figures: with another formula in its source it shows another peak."""
    initial = form.initial_state(request(), "h100")
    was = "_STATE_BYTES = 4 + 8"
    assert rendered.count(was) == 1
    (computed,) = in_browser(rendered.replace(was, "_STATE_BYTES = 4 + 9"), [initial["texts"]], tmp_path)
    wanted = form.compute(initial, initial["texts"])
    assert computed["train"]["peak_bytes_per_device"] == wanted["train"]["peak_bytes_per_device"] + 1
    assert computed["infer"] == json.loads(json.dumps(wanted["infer"]))


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
def test_the_page_computes_bills_of_this_machine(tmp_path):
    pytest.importorskip("brython", reason="the extra plots is not installed")
    local = request("auto")
    initial = form.initial_state(local, "auto")
    inputs = [initial["texts"], initial["texts"] | {"config.optimizer.name": "muon", "config.train.batch_size": "3"}]
    expected = [form.compute(initial, texts) for texts in inputs]
    assert all("error" not in bills["train"] for bills in expected)
    assert in_browser(page.render(local, "auto", "both"), inputs, tmp_path) == json.loads(json.dumps(expected))


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
STRIPPED = """
import numpy as np
import math
class A:
    x = 1
    def f(self, y):
        z = math.pi
        return z
    __annotations__ = {'x': np.ndarray}
def g(x):
    pass
"""


def test_sources_lose_annotations_and_keep_fields():
    assert ast.dump(sources.stripped(SOURCE)) == ast.dump(ast.parse(STRIPPED))
    unused = "import numpy as np\ndef g(x: np.ndarray):\n    return x\n"
    assert ast.unparse(sources.stripped(unused)) == "def g(x):\n    return x"
    exported = "from numpy import array as array\n__all__ = ['array']"
    assert ast.unparse(sources.stripped(exported)) == exported


RECORDS = """
import dataclasses, typing
class Row(typing.NamedTuple):
    name: str
    size: int = 2
    @property
    def text(self):
        return f"{self.name} {self.size}"
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Bill:
    row: Row
    names: list[str] = dataclasses.field(default_factory=list)
bill = Bill(Row("a"))
result = [
    bill.row.text, Row("b")._replace(size=3).text, Row("a") == ("a", 2), {Row("a"): 1}[Row("a")], Row._fields,
    dataclasses.replace(bill, names=["x"]).names, dataclasses.asdict(bill), bill == Bill(Row("a")),
    [field.name for field in dataclasses.fields(Bill)],
]
"""


def test_records_of_the_page_behave_like_pythons():
    ours: dict = {"__name__": "page", "dataclasses": standins, "typing": standins}
    exec(ast.unparse(sources.stripped(RECORDS)).replace("import dataclasses, typing", ""), ours)
    original: dict = {"__name__": "page"}
    exec(RECORDS, original)
    assert repr(ours["result"]) == repr(original["result"])


def test_the_page_carries_the_closed_forms_and_no_program():
    modules, absent = sources.embedded()
    formulas = ("training_memory", "inference_memory", "flops", "exact.run", "exact.state", "exact.optimizer_slots")
    for name in (*formulas, "fitted.train.cpu", "fitted.train.gpu"):
        assert f"jaxllm.ledger.formula.{name}" in modules
    programs = r"jaxllm\.(programs|decode|kernels|model\.(?!specs|adapter_specs))"
    assert not [name for name in modules if re.match(programs, name)]
    assert "jax" in absent
    assert set(sources.LEFT_OUT) <= set(absent)
