"""Claim: the attention kernels are correct on this GPU. Also measures the speed of kernels, train step and generator.

    python experiments/gpu_suite.py                # one GPU, under 9 minutes; writes results/gpu_suite_<device>.json
    python experiments/gpu_suite.py --only attention,tiles
    python experiments/gpu_suite.py --tiny         # the same code on a CPU: small sizes, interpreted kernels

Each section runs in its own process with its own time limit, so a crash or hang ends that section alone:

    correctness   kernels against float64 over a grid of shapes, masks and dtypes; ten repeats
    attention     TFLOP/s compared with cuDNN and the kernels in JAX's source tree, 1,024 to 32,768 tokens
    ledger        peak memory by the ledger, by XLA and measured on the device, for ten configurations
    training      MFU of train steps of 1B-class models
    generation    prompt and new tokens per second of the generator
    decode        bytes per second of decode attention, as a fraction of a copy's
    tiles         the fastest tile sizes of the kernels on this device

Exit status: 1 if a kernel is wrong or the correctness section did not finish; else 0.
"""

import argparse
import datetime
import importlib
import json
import os
import pathlib
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from suite import records
from suite.records import Context, Record

# Section -> (module, weight of its time limit), in execution order.
SECTIONS = {
    "correctness": ("correctness", 30),
    "attention": ("attention", 22),
    "ledger": ("memory", 14),
    "training": ("training", 24),
    "generation": ("generation", 16),
    "decode": ("bandwidth", 10),
    "tiles": ("tune", 20),
}
SECONDS = 500.0  # for all sections together
_GRACE = 10.0  # seconds past its limit before a section is killed
RESULTS = pathlib.Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Returns the device kind, platform and JAX version of this process."""
    import jax  # initializes the device, so only in a section's process

    device = jax.devices()[0]
    return {"device": device.device_kind, "platform": device.platform, "jax": jax.__version__}


def require_gpu(tiny: bool) -> None:
    """Exits if JAX has found no GPU, since the full sizes only make sense on one.

    Raises:
      SystemExit: status 2, after one line on stderr, if there is no GPU and `tiny` is false.
    """
    found = environment()
    if not tiny and found["platform"] != "gpu":
        print(f"JAX runs on {found['device']} here, not on a GPU: install jax[cuda12], or add --tiny", file=sys.stderr)
        raise SystemExit(2)


def driver() -> str:
    """Returns the NVIDIA driver's version, or "none" if there is none."""
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "none"
    return lines[0] if lines else "none"


def section(context: Context) -> None:
    """Runs one section in this process."""
    if context.section != "ledger":  # its child processes use the device
        require_gpu(context.tiny)
        context.add("environment", detail=environment(), note="the device that ran it")
    try:
        importlib.import_module(f"suite.{SECTIONS[context.section][0]}").run(context)
    except Exception as error:  # recorded here; the other sections still run
        context.add("section", note=f"failed: {records.one_line(error)}")
        raise
    context.add("section", note="ended")


def child(name: str, path: pathlib.Path, seconds: float, tiny: bool) -> None:
    """Runs a section in its own process and kills its process group when its time is over."""
    command = [sys.executable, __file__, "--section", name, "--records", str(path), "--seconds", str(seconds)]
    log = path.with_suffix(f".{name}.log")
    with log.open("w") as out:
        process = subprocess.Popen(
            command + ["--tiny"] * tiny, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(seconds + _GRACE)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status:
        last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        add(path, name, f"exit status {status}: {' '.join(last)}"[:240])
    elif status is None:
        add(path, name, f"killed after {seconds + _GRACE:.0f} s, its time limit")


def add(path: pathlib.Path, name: str, note: str) -> None:
    Context(name, False, 0.0, path).add("section", note=note)


def is_correct(found: Sequence[Record]) -> bool:
    """Returns True if the correctness section finished with at least one check and no failed check."""
    own = [record for record in found if record.section == "correctness"]
    ended = any(record.name == "section" and record.note == "ended" for record in own)
    checks = [record.ok for record in own if record.ok is not None]
    return ended and bool(checks) and all(checks)


def document(found: Sequence[Record], seconds: float, tiny: bool, only: Sequence[str]) -> dict[str, Any]:
    """Returns the JSON document of a run."""
    device = next((dict(record.detail) for record in found if record.name == "environment"), {})
    return {
        "device": device.get("device", "unknown"),
        "platform": device.get("platform", "unknown"),
        "driver": driver(),
        "jax": device.get("jax", "unknown"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "tiny": tiny,
        "seconds": round(seconds, 1),
        "correct": is_correct(found) if "correctness" in only else True,
        "records": [vars(record) for record in found if record.name != "environment"],
    }


def suite(arguments: argparse.Namespace) -> int:
    """Runs the requested sections, prints the table, writes the JSON and returns the exit status."""
    only = arguments.only.split(",")
    unknown = set(only) - set(SECTIONS)
    if unknown:
        print(
            f"--only: unknown section {', '.join(sorted(unknown))}; sections are {', '.join(SECTIONS)}", file=sys.stderr
        )
        return 2
    chosen = [name for name in SECTIONS if name in only]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "records.jsonl"
        for index, name in enumerate(chosen):
            # Time that a section does not use goes to later ones.
            left = arguments.seconds - (time.monotonic() - begun)
            shares = [SECTIONS[later][1] for later in chosen[index:]]
            seconds = max(left, 0.0) * shares[0] / sum(shares)
            print(f"{name}: {seconds:.0f} s at most", file=sys.stderr, flush=True)
            child(name, path, seconds, arguments.tiny)
        found = records.read(path)
    found.sort(key=lambda record: chosen.index(record.section))  # stable: keeps the order within a section
    result = document(found, time.monotonic() - begun, arguments.tiny, chosen)
    records.check(result)
    shown = [record for record in found if record.name != "environment" and record.note != "ended"]
    versions = f"{result['device']}, driver {result['driver']}, JAX {result['jax']}"
    print(f"{versions}, {result['date']}, {result['seconds']:.0f} s")
    print("\n".join(records.table_lines(shown)))
    write(result, arguments)
    return 0 if result["correct"] else 1


def write(result: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Writes the JSON to `--out`, or else to `results/`; a tiny run is written only if `--out` is given."""
    out = arguments.out
    if out is None and not arguments.tiny:
        slug = re.sub(r"[^a-z0-9]+", "_", result["device"].lower()).strip("_")
        out = RESULTS / f"gpu_suite_{slug}.json"
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten to {out}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--only", default=",".join(SECTIONS), help="comma-separated sections")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time limit of all sections together")
    parser.add_argument("--out", type=pathlib.Path, help="path of the JSON")
    for name, kind in (("--section", str), ("--cell", int), ("--records", pathlib.Path)):
        parser.add_argument(name, type=kind, help=argparse.SUPPRESS)  # for child processes
    return parser.parse_args()


def main() -> int:
    arguments = parse()
    if arguments.section is None and arguments.cell is None:
        return suite(arguments)
    name = arguments.section or "ledger"
    context = Context(name, arguments.tiny, time.monotonic() + arguments.seconds, arguments.records)
    if arguments.cell is None:
        section(context)
    else:
        require_gpu(context.tiny)
        from suite import memory  # imports JAX, which the parent process must not

        memory.cell(context, arguments.cell)
    return 0


if __name__ == "__main__":
    sys.exit(main())
