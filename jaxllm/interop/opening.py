"""Opens a pretrained model by name: a Hugging Face folder, a GGUF file, or a Hugging Face hub id."""

import dataclasses
import pathlib

from jaxllm.errors import UserError
from jaxllm.interop.gguf import model as gguf
from jaxllm.interop.huggingface import hub
from jaxllm.interop.huggingface import model as huggingface
from jaxllm.interop.pretrained import Pretrained


def open_model(spec: str) -> Pretrained:
    """Opens a pretrained model without reading its weights.

    Args:
      spec: a folder with config.json, a .gguf file, or an id "organisation/name" of the Hugging Face hub.
    Raises:
      UserError: `spec` is none of these, or cannot be read.
    """
    path = pathlib.Path(spec).expanduser()
    if path.is_dir():
        if (path / huggingface.CONFIG).is_file():
            return dataclasses.replace(huggingface.open_folder(path), source=spec)
        files = sorted(path.glob("*.gguf"))
        also = f"; give a file in it, for instance {files[0]}" if files else ""
        raise UserError(
            f"{spec} is not the workdir of a training run (it has no checkpoints/) and no Hugging Face folder (it has "
            f"no {huggingface.CONFIG}){also or '; give one of these'}"
        )
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            return gguf.open_file(path)
        raise UserError(f"{spec} is a file, and no .gguf; give the folder of a model, or a .gguf file")
    if path.suffix.lower() != ".gguf" and hub.is_id(spec):
        return dataclasses.replace(huggingface.open_folder(hub.download(spec)), source=spec)
    raise UserError(
        f"{spec} is not here; give the workdir of a training run, a Hugging Face folder, a .gguf file, or an id of the "
        "Hugging Face hub (organisation/name)"
    )
