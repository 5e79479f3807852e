"""The picture draws the bill's figures, its texts do not overlap, and its bytes are reproducible."""

import itertools

import pytest

from jaxllm.config import Config
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.ledger import request
from jaxllm.ledger.report import groups, picture
from jaxllm.ledger.request import BillRequest


def bills(model="gemma2-27b", device="h100", **mesh):
    config = Config()
    config.model.name, config.data.sequence_length = model, 1024
    config.train.batch_size = 8
    for axis, size in mesh.items():
        setattr(config.mesh, axis, size)
    asked = BillRequest(config, detect.by_name(device), None, 1, None, 128)
    return [request.train(asked), request.infer(asked)]


@pytest.fixture(autouse=True)
def _matplotlib():
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")


def test_bars_are_the_phases_of_the_bill():
    (train, _) = bills(data=8, zero=1)
    bars = picture.draw([train]).axes[0]
    drawn = sum(patch.get_width() for patch in bars.patches) * 2**30
    assert drawn == pytest.approx(sum(phase.total for phase in groups.phases(train)), rel=1e-9)
    assert bars.get_xlim()[1] >= train.capacity_bytes / 2**30


@pytest.mark.parametrize("model", ["gemma2-27b", "gpt2"])
def test_no_text_lies_on_another(model):
    figure = picture.draw(bills(model, data=8, zero=1))
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    texts = list(figure.texts)
    for axes in figure.axes:
        texts += [*axes.get_xticklabels(), *axes.get_yticklabels(), axes.xaxis.label, axes.yaxis.label, axes.title]
    boxes = [
        (text.get_text(), text.get_window_extent(renderer)) for text in texts if text.get_text() and text.get_visible()
    ]
    page = figure.bbox
    for (one, a), (other, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (one, other)
    for text, box in boxes:
        assert page.contains(box.x0, box.y0), text
        assert page.contains(box.x1, box.y1), text


def test_same_bytes_each_time(tmp_path):
    for name in ("a.png", "b.png"):
        picture.write(bills(data=8, zero=3), str(tmp_path / name))
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_line_names_the_extra(monkeypatch):
    monkeypatch.setattr(picture.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'jaxllm\[plots\]'"):
        picture.require()
