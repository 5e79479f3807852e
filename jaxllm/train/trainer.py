"""Training loop: runs steps and, between them, evaluation, checkpoints, metrics, profiling and stop signals."""

import contextlib
import functools
import math
import pathlib
import signal
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from rich.console import Console

from jaxllm import architectures, programs
from jaxllm.checkpoints import frozen
from jaxllm.checkpoints import open_any as start_lib
from jaxllm.checkpoints import workdir as workdir_lib
from jaxllm.checkpoints.checkpoint import Checkpointer
from jaxllm.config import Config
from jaxllm.data import pipeline, sources
from jaxllm.data.streams import Batch
from jaxllm.errors import RunError
from jaxllm.job.distributed import Job
from jaxllm.job.stop_signals import StopSignals
from jaxllm.job.watchdog import Watchdog
from jaxllm.ledger.advice import out_of_memory
from jaxllm.ledger.runtime.training import TrainingBill
from jaxllm.parallel import mesh
from jaxllm.train import batch_rows
from jaxllm.train.evaluation import Evaluation, evaluate
from jaxllm.train.metrics import MetricsWriter
from jaxllm.train.progress import Display
from jaxllm.train.timer import PhaseTimer


class Trainer:
    """One training run in one workdir, started or resumed, up to its last step.

    Args:
      config: configuration of the run.
      workdir: created if missing; contains config.json, checkpoints/, metrics.jsonl and ledger.json.
      console: receives all user-facing output.
      job: the processes that train together, each with its own Trainer; process 0 writes the workdir.
      watch: watchdog of this process over the others.
    Raises:
      UserError: the configuration, the data or the workdir is not usable; nothing has been changed.
    """

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        console: Console,
        job: Job | None = None,
        watch: Watchdog | None = None,
    ):
        self.clock = PhaseTimer()
        self._job = job or Job()
        self._watch = watch or Watchdog(self._job)
        self._start = start_lib.prepare(config, workdir)
        config = self._start.config
        self._config, self._workdir, self._console = config, workdir, console
        self._model = architectures.resolve_config(config)
        self._mesh = mesh.make_mesh(config.mesh)
        self._step_spec = programs.make_step_spec(config, self._model, jax.default_backend())
        self._bill = TrainingBill(config, self._model, console)
        vocab_size, text = self._model.vocab_size, self._start.text
        split = sources.split(config.data, vocab_size, text)
        for note in split.notes:
            self._say(f"data: {note}")
        size = config.train.batch_size
        self._batches = mesh.batch_sharding(self._mesh)
        streams = batch_rows.streams_of_processes(
            batch_rows.rows_of_processes(self._batches, size), size, config.data.streams
        )
        self._owned = [str(stream) for stream in batch_rows.owned_streams(streams, self._job.index)]
        self._data = pipeline.train_iterator(
            config.data, size, streams[self._job.index], vocab_size=vocab_size, split=split, text=text
        )
        self._held_out = pipeline.validation_batches(
            config.data, config.train.batch_size, config.eval.batches, vocab_size=vocab_size, split=split, text=text
        )
        # In chat data the end tokens of answers are targets too, and have no bytes of text.
        tokenizer = None if text is None or config.data.source in ("tokens", "chat") else text.tokenizer
        self._byte_lengths = None if tokenizer is None else tokenizer.byte_lengths()
        self._tracing = False
        self._doing = "at start-up"  # for messages

    def run(self) -> int:
        """Trains to the last step and returns the exit status: 0, or 128 + the signal that stopped the run."""
        with contextlib.ExitStack() as stack:
            if self._job.is_leader:
                self._workdir.mkdir(parents=True, exist_ok=True)
                stack.enter_context(workdir_lib.exclusive_lock(self._workdir))
            checkpoints = stack.enter_context(Checkpointer(self._workdir, self._config, self._say, self._job))
            self._watch.last_good = lambda: checkpoints.last_good
            with out_of_memory.explained(lambda error: self._explain_oom(error, checkpoints)):
                return self._run(checkpoints)

    def _explain_oom(self, error: BaseException, checkpoints: Checkpointer) -> str:
        if self._job.is_alone:  # a checkpoint of a good step may still be in the background
            checkpoints.wait()
        return self._bill.oom_message(self._doing, error, checkpoints.last_good)

    def _run(self, checkpoints: Checkpointer) -> int:
        config = self._config
        abstract = programs.abstract_state(config, self._step_spec, self._mesh)
        restored = checkpoints.restore(abstract)
        first = restored.step if restored else 0
        if first >= config.train.steps:
            self._say(
                f"{self._workdir} is done: {first:,} of {config.train.steps:,} steps. Raise config.train.steps to "
                f"train on, or sample from it:\n{self._next_command()}"
            )
            return 0
        if self._job.is_leader:
            workdir_lib.write_config(self._workdir, config)
            if self._start.source and config.data.tokenizer == workdir_lib.OWN_FILES and self._start.text:
                workdir_lib.write_text(self._workdir, self._start.text)
            self._bill.show()
        if restored:
            self._data.set_state(restored.data_state)
            state = frozen.attached(restored.state, abstract, self._workdir, self._job)
            self._say(f"resuming {self._workdir} after step {first:,}")
            if config.init_from:
                self._say(f"config.init_from ({config.init_from}) is not read again")
        elif self._start.source:
            state = programs.state_from(config, self._step_spec, self._mesh, self._start.source.load)
            self._say(f"starting from the weights of {config.init_from}")
            if state.frozen is not None:
                frozen.write(self._workdir, state.frozen, self._job)
        else:
            state = programs.init_state(config, self._step_spec, self._mesh).jitted()
        del restored
        self.clock.lap("start-up")
        self._doing = "while the training step was compiled"
        train_step = programs.train_step(config, self._step_spec, self._mesh).compile()
        eval_step = programs.eval_step(config, self._step_spec, self._mesh).compile()
        self._say(f"compiled in {self.clock.lap('compile'):.1f} s")
        recorded = self._workdir if self._job.is_leader else None
        with MetricsWriter(recorded, first, config.log.tensorboard) as metrics, StopSignals(self._job, first) as stop:
            self._watch.tick, self._watch.is_hurried = stop.tick, lambda: stop.is_agreeing
            told = {"jax": jax.__version__, "attention": self._step_spec.attention.line}
            metrics.write("event", first, event="resume" if first else "start", **told)
            return self._steps(first, state, train_step, eval_step, checkpoints, metrics, stop)

    def _steps(
        self,
        first: int,
        state: Any,
        train_step: jax.stages.Compiled,
        eval_step: jax.stages.Compiled,
        checkpoints: Checkpointer,
        metrics: MetricsWriter,
        stop: StopSignals,
    ) -> int:
        config, clock, last = self._config, self.clock, self._config.train.steps
        display = Display(
            self._console, first, last, self._bill.model_flops_per_token, self._bill.peak_flops, config.log.every
        )

        def settle(step: int, values: dict[str, Any], documents: np.ndarray) -> None:
            """Waits for the metrics of a step and records them.

            Raises:
              RunError: the loss or the gradient norm is not finite, and a loss scale does not explain it.
            """
            self._doing = f"in step {step:,}"  # dispatch is asynchronous: an error of that step is raised here
            numbers = {name: float(value) for name, value in values.items()}
            seconds = clock.lap("steps")
            # Extrapolated from the rows of this process; exact if it has the whole batch.
            padding = float(np.mean(documents < 0)) * config.train.batch_size * config.data.sequence_length
            metrics.write("step", step, **numbers, padding=padding, seconds=seconds)
            read = config.train.batch_size * config.data.sequence_length - padding
            display.update(step, numbers["loss"], read, seconds)
            for name in ("loss", "grad_norm"):
                if not (math.isfinite(numbers[name]) or _is_overflow(numbers, name)):
                    metrics.write("event", step, event="not finite", field=name)
                    checkpoints.wait()  # a checkpoint of a good step may still be in the background
                    raise RunError(
                        f"{name} is {numbers[name]} at step {step}; its batch held documents "
                        f"{_listed(self._data.document_names(documents))}; {checkpoints.last_good}"
                    )

        with contextlib.ExitStack() as stack:
            stack.callback(display.stop)
            stack.callback(self._end_trace)
            display.start()
            waiting: tuple[int, dict[str, Any], np.ndarray] | None = None
            wrong = ""  # error of the ledger check, if it ends the run
            for step in range(first + 1, last + 1):
                self._trace(step, first)
                self._doing = f"in step {step:,}"
                batch = next(self._data)
                stop.begin(step)
                state, values = train_step(state, self._place(batch, self._data.rows))
                if waiting:  # one step behind the dispatch, so that the device never waits for the host
                    settle(*waiting)
                waiting = (step, values, batch["documents"])
                checkpoints.poll()

                stopping = stop.after(step)  # read once: a signal may arrive at any line below
                evaluating = step == last or _due(step, config.eval.every)
                saving = step == last or _due(step, config.checkpoint.every) or stopping > 0
                if not (evaluating or saving or step == first + 2):
                    continue
                settle(*waiting)
                waiting = None
                if step == first + 2:
                    reconcile = functools.partial(self._bill.reconcile, self._workdir, train_step, state)
                    wrong = self._job.decide("ledger", reconcile)
                    del reconcile  # it references the state
                    clock.lap("ledger")
                if saving or wrong:
                    checkpoints.save(step, state, self._data.get_state(), self._owned)
                    metrics.write("event", step, event="save")
                    clock.lap("checkpoints")
                if wrong:
                    checkpoints.wait()
                    raise RunError(f"{wrong}; {checkpoints.last_good}")
                if evaluating:
                    self._doing = f"in the evaluation after step {step:,}"
                    self._evaluate(step, eval_step, (state.params, state.frozen), metrics)
                    clock.lap("evaluation")
                if stopping:
                    checkpoints.wait()
                    display.stop()
                    name = signal.Signals(stopping).name
                    metrics.write("event", step, event="stop", signal=name)
                    self._say(f"{name}: saved after step {step:,}; the same command goes on from there")
                    return 128 + stopping
        checkpoints.wait()
        clock.lap("checkpoints")
        self._report(first, state)
        return 0

    def _place(self, batch: Batch, rows: np.ndarray) -> dict[str, jax.Array]:
        return batch_rows.place(batch, rows, self._batches, self._config.train.batch_size)

    def _evaluate(self, step: int, eval_step: Callable[..., Any], weights: Any, metrics: MetricsWriter) -> Evaluation:
        every_row = np.arange(self._config.train.batch_size)  # every process reads all rows of these few batches
        result = evaluate(
            eval_step, weights, self._held_out, lambda batch: self._place(batch, every_row), self._byte_lengths
        )
        metrics.write("eval", step, **result._asdict())
        bits = f", {result.bits_per_byte:.3f} bits per byte" if result.bits_per_byte is not None else ""
        kind = "answer tokens" if self._config.data.source == "chat" else "tokens"
        self._say(f"step {step:,}: validation loss {result.loss:.3f}{bits} ({result.tokens:,} {kind})")
        return result

    def _trace(self, step: int, first: int) -> None:
        """Starts and stops the profiler trace around the configured steps."""
        log = self._config.log
        begin = max(log.profile_start, first + 1)
        if log.profile_steps and step == begin and self._job.is_leader:
            jax.profiler.start_trace(str(self._workdir / "profile"))
            self._tracing = True
            self._say(f"tracing {log.profile_steps:,} steps from step {begin:,} into {self._workdir / 'profile'}")
        if step == begin + log.profile_steps:
            self._end_trace()

    def _end_trace(self) -> None:
        """Stops and writes the profiler trace, if one is running; also called when the run ends early."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def _report(self, first: int, state: Any) -> None:
        if state.loss_scale is not None:
            last, applied = self._config.train.steps, int(state.step)
            self._say(f"{applied:,} updates applied, {last - applied:,} skipped where fp16 gradients overflowed")
        clock, steps = self.clock, self._config.train.steps - first
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in clock.seconds.items())
        self._say(f"{steps:,} steps in {clock.total:.1f} s: {parts}")
        self._say(f"done. Sample from it:\n{self._next_command()}")

    def _next_command(self) -> str:
        text = self._start.text
        talks = self._config.data.source == "chat" and text is not None and text.chat_template is not None
        return f"  python -m jaxllm.sample --model {self._workdir} " + ("--chat" if talks else '--prompt "def "')

    def _say(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _is_overflow(numbers: dict[str, float], name: str) -> bool:
    """Returns True if fp16 overflow explains a non-finite metric: the step was skipped and the loss scale drops.

    A non-finite loss at a scale of 1 is not explained by it.
    """
    return numbers.get("skipped", 0.0) > 0 and (numbers["loss_scale"] > 1 or name != "loss")


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _listed(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
