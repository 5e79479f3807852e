"""Claim: the planner's choice beats the obvious one by 5 % or more for each shipped configuration of H100s.

    python experiments/planner_configs.py             # with XLA's peaks if the extra cuda12 is installed
    python experiments/planner_configs.py --bills     # writes the peaks into the docstrings of configs/*.py

The obvious choice is the usual starting point: ZeRO-3 over all GPUs, every block recomputed, and micro-batches halved
until they fit; on one GPU nothing is sharded and nothing recomputed. The planner's choice is the first of
`jaxllm.plan`. The third choice is the shipped configuration. Each has two lower bounds of the step time:

    roofline   everything overlaps with everything; the planner ranks by this
    in order   adds what cannot overlap: `tensor` activation exchanges between the matmuls that depend on them,
               offloaded activations that are moved out during the forward pass and back during the backward pass,
               and an offloaded optimizer's state, which moves while nothing else runs

A gain in the first bound only is due to its optimism. XLA's peaks are saved, so an interrupted run resumes where it
stopped; all else is recomputed. Writes `results/planner_configs.json`.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import runpy
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
from rich.console import Console
from rich.table import Table

from jaxllm import architectures
from jaxllm.config import Config, overrides
from jaxllm.errors import UserError
from jaxllm.hardware import detect
from jaxllm.ledger.compiled import absent
from jaxllm.ledger.formula import communication, flops, roofline, training_memory
from jaxllm.ledger.formula.exact import run as run_lib
from jaxllm.ledger.formula.exact.run import TrainingRun
from jaxllm.ledger.rows import Figure, Unknown, figure_to_json, format_bytes
from jaxllm.parallel import mesh
from jaxllm.plan import training
from jaxllm.plan.training_space import TrainingSpace

HERE = pathlib.Path(__file__).parent
CONFIGS, RESULTS = HERE.parent / "configs", HERE / "results" / "planner_configs.json"
DEVICE = "h100"
MARGIN = 0.05  # fraction of the memory left free
WORTH = 1.05  # least speedup; less is within the formulas' error
WIDTH = 100

# The usual starting point.
_ALL_DATA: dict[str, Any] = {
    "mesh.replica": 1,
    "mesh.tensor": 1,
    "mesh.zero": 3,
    "remat.policy": "full",
    "train.loss_chunk": 4096,
    "train.attention_chunk": 0,
    "optimizer.offload": "none",
}
OBVIOUS: dict[str, dict[str, Any]] = {
    # One GPU, as in nanoGPT: 16 sequences per micro-batch, all activations saved.
    "gpt2_124m": _ALL_DATA | {"mesh.zero": 0, "remat.policy": "none", "train.accumulate": 32},
    "llama3_8b": _ALL_DATA | {"mesh.data": 8, "train.accumulate": 2},
    "llama3_70b": _ALL_DATA | {"mesh.data": 64, "train.accumulate": 2},
    "gpt3_175b": _ALL_DATA | {"mesh.data": 64, "train.accumulate": 12},
    "mixtral_8x7b": _ALL_DATA | {"mesh.data": 32, "train.accumulate": 2},
    "qwen3_30b_a3b": _ALL_DATA | {"mesh.data": 16, "train.accumulate": 1},
}
KINDS = ("obvious", "planner", "shipped")


@dataclasses.dataclass(frozen=True)
class Run:
    """Predicted step times and peaks of one choice for a configuration.

    Attributes:
      fields: the fields that a plan sets, by dotted path.
      seconds, in_order: lower bounds of the step time, in seconds (see the module).
      bound: the resource that limits `seconds`.
      formula: peak bytes of one device by formula.
      xla: peak bytes of one device as compiled, or Unknown.
    """

    fields: dict[str, Any]
    seconds: float
    in_order: float
    bound: str
    formula: int
    xla: Figure

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"xla": figure_to_json(self.xla)}


def load(name: str) -> Config:
    return runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()


def changed(config: Config, fields: Mapping[str, Any]) -> Config:
    """Returns a copy of a configuration with new values at the given dotted paths."""
    values = overrides.to_dict(config)
    for path, value in fields.items():
        section, field = path.split(".")
        values[section][field] = value
    return overrides.from_dict(values)


def count_of(config: Config) -> int:
    count = 1
    for size in mesh.axis_sizes(config.mesh).values():
        count *= size
    return count


def planned(config: Config) -> dict[str, Any]:
    """Returns the fields of the planner's first choice for the configuration's number of devices."""
    device = detect.by_name(DEVICE)
    space = TrainingSpace(
        base=config,
        model=architectures.resolve_config(config),
        count=count_of(config),
        platform=device.platform,
        precisions=(config.precision.policy,),
        moments=(config.optimizer.moment_dtype,),
    )
    budget = int((device.memory_bytes or 0) * (1 - MARGIN))
    return training.search(space, device, budget).fitting[0].choice.fields


def in_order(config: Config) -> float:
    """Returns a lower bound of the step time, in seconds, without overlap of dependent work."""
    device = detect.by_name(DEVICE)
    run = _run_of(config)
    least = roofline.train_step(run, device)
    exchanged = _exchange_seconds(run)
    busy = {**least.seconds_of, roofline.INTERCONNECT: least.seconds_of.get(roofline.INTERCONNECT, 0.0) - exchanged}
    link = busy.pop(roofline.HOST_LINK, 0.0)
    inside = max(busy.values())
    activations = roofline.host_link_bytes(_run_of(changed(config, {"optimizer.offload": "none"})))
    moved = activations / (device.host_link or float("inf"))
    forward = inside * _forward_share(run)
    waits = max(moved - forward, 0) + max(moved - (inside - forward), 0)
    return inside + exchanged + waits + (link - moved)


def _run_of(config: Config) -> TrainingRun:
    model = architectures.resolve_config(config)
    return run_lib.make(model, config, config.precision.policy, detect.by_name(DEVICE).platform)


def _exchange_seconds(run: TrainingRun) -> float:
    """Returns the seconds of the activation exchanges along `tensor`."""
    seconds = 0.0
    for transfer in communication.transfers(run):
        if transfer.axes == ("tensor",) and "activations" in transfer.name:
            rate = roofline.ring_rate(transfer, run.mesh, detect.by_name(DEVICE))
            assert rate is not None
            seconds += transfer.ring_bytes / rate
    return seconds


def _forward_share(run: TrainingRun) -> float:
    work = flops.step(run)
    return work.flops_of["forward"] / work.flops


def compiled_peak(config: Config, kept: dict[str, Any]) -> Figure:
    """Returns XLA's peak bytes, cached in `kept`; Unknown if its compiler is not installed or refuses the run."""
    key = json.dumps(overrides.to_dict(config), sort_keys=True)
    if key not in kept:
        try:
            (found,) = absent.inspect(config, DEVICE, count_of(config)).values()
        except UserError as error:
            return Unknown(str(error))
        kept[key] = {"jax": jax.__version__, "peak": figure_to_json(found.figures["peak"])}
    peak = kept[key]["peak"]
    return peak if isinstance(peak, int) else Unknown(peak["unknown"])


def run_of(config: Config, kept: dict[str, Any], fields: Mapping[str, Any]) -> Run:
    config = changed(config, fields)
    model = architectures.resolve_config(config)
    least = roofline.train_step(_run_of(config), detect.by_name(DEVICE))
    assert isinstance(least.seconds, float)
    return Run(
        fields=dict(fields),
        seconds=least.seconds,
        in_order=in_order(config),
        bound=str(least.bound),
        formula=training_memory.training(
            model, config, config.precision.policy, detect.by_name(DEVICE).platform
        ).peak_bytes,
        xla=compiled_peak(config, kept),
    )


def measure(name: str, kept: dict[str, Any]) -> dict[str, Run]:
    """Returns the obvious, planned and shipped runs of one configuration, by kind."""
    config = load(name)
    flat = overrides.field_paths(config)
    choices = {"obvious": OBVIOUS[name], "planner": planned(config)}
    choices["shipped"] = {path: flat[path] for path in choices["planner"]}
    return {kind: run_of(config, kept, choices[kind]) for kind in KINDS}


def verdict(runs: Mapping[str, Run]) -> str:
    """Returns the verdict for one configuration: the planner's choice fits and is faster by both bounds, or why not."""
    capacity = detect.by_name(DEVICE).memory_bytes or 0
    planner, obvious = runs["planner"], runs["obvious"]
    if not isinstance(planner.xla, Unknown) and planner.xla > capacity:
        return "does not fit"
    if obvious.seconds / planner.seconds < WORTH:
        return "no"
    return "holds" if obvious.in_order / planner.in_order >= WORTH else "not in order"


def show(found: Mapping[str, Mapping[str, Run]], console: Console) -> None:
    table = Table("run", "choice", "roofline s", "in order s", "bound", "formula", "XLA", "the claim", box=None)
    for name, runs in found.items():
        for kind, run in runs.items():
            xla = "unknown" if isinstance(run.xla, Unknown) else format_bytes(run.xla)
            cells = [f"{run.seconds:.4g}", f"{run.in_order:.4g}", run.bound, format_bytes(run.formula), xla]
            table.add_row(name if kind == KINDS[0] else "", kind, *cells, verdict(runs) if kind == "planner" else "")
    console.print(table)


def write_bills(found: Mapping[str, Mapping[str, Run]]) -> None:
    """Writes the peaks of the shipped runs into the docstrings of their files."""
    for name, runs in found.items():
        path, run = CONFIGS / f"{name}.py", runs["shipped"]
        text = re.sub(r"[\d.]+ GiB at its peak", f"{format_bytes(run.formula)} at its peak", path.read_text(), count=1)
        if not isinstance(run.xla, Unknown):
            text = re.sub(r"XLA plans [\d.]+", f"XLA plans {format_bytes(run.xla).removesuffix(' GiB')}", text, count=1)
        path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bills", action="store_true", help="write the peaks into the docstrings of configs/*.py")
    arguments = parser.parse_args()
    before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    kept: dict[str, Any] = before.get("compiled", {})
    found: dict[str, dict[str, Run]] = {}
    document: dict[str, Any] = {
        "claim": f"the planner's choice is at least {WORTH:g} times as fast as the obvious one",
        "prediction": "it is for all that span several GPUs; on one the two are alike",
        "device": detect.by_name(DEVICE).name,
    }
    for name in OBVIOUS:
        found[name] = measure(name, kept)
        document["runs"] = {each: {kind: run.to_json() for kind, run in runs.items()} for each, runs in found.items()}
        document["verdicts"] = {each: verdict(runs) for each, runs in found.items()}
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(json.dumps(document | {"compiled": kept}, indent=1) + "\n")
    holds = [name for name, outcome in document["verdicts"].items() if outcome == "holds"]
    console = Console(width=WIDTH)
    for part in ("claim", "prediction"):
        console.print(f"{part + ':':<13} {document[part]}", highlight=False)
    show(found, console)
    conclusion = f"holds for {len(holds)} of {len(found)}: {', '.join(holds) or 'none'}"
    console.print(f"{'verdict:':<13} {conclusion}", highlight=False)
    if arguments.bills:
        write_bills(found)


if __name__ == "__main__":
    main()
