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
from jaxllm.checkpoints import frozen, open_any
from jaxllm.checkpoints import workdir as workdir_lib
from jaxllm.checkpoints.checkpoint import Checkpointer
from jaxllm.config import Config
from jaxllm.data import Batch, pipeline, sources
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
from jaxllm.train.progress import Display, PhaseTimer


class Trainer:
    """One training run in one workdir, started or resumed, up to its last step.

    Args:
      config: configuration of the run.
      workdir: created if missing; contains config.json, checkpoints/, metrics.jsonl and ledger.json.
      console: receives all user-facing output.
      job: the processes that train together, each with its own Trainer; process 0 writes the workdir.
      watchdog: monitor of the other processes.
    Raises:
      UserError: the configuration, the data or the workdir is not usable; nothing has been changed.
    """

    def __init__(
        self,
        config: Config,
        workdir: pathlib.Path,
        console: Console,
        job: Job | None = None,
        watchdog: Watchdog | None = None,
    ):
        self.timer = PhaseTimer()
        self._job = job or Job()
        self._watchdog = watchdog or Watchdog(self._job)
        self._init = open_any.prepare(config, workdir)
        config = self._init.config
        self._config, self._workdir, self._console = config, workdir, console
        self._model = architectures.resolve_config(config)
        self._mesh = mesh.make_mesh(config.mesh)
        self._step_spec = programs.make_step_spec(config, self._model, jax.default_backend())
        self._bill = TrainingBill(config, self._model, console)
        vocab_size, text = self._model.vocab_size, self._init.text
        split = sources.split(config.data, vocab_size, text)
        for note in split.notes:
            self._log(f"data: {note}")
        size = config.train.batch_size
        self._batches = mesh.batch_sharding(self._mesh)
        streams = batch_rows.streams_of_processes(
            batch_rows.rows_of_processes(self._batches, size), size, config.data.streams
        )
        self._owned_streams = [str(stream) for stream in batch_rows.owned_streams(streams, self._job.index)]
        self._data = pipeline.train_iterator(
            config.data, size, streams[self._job.index], vocab_size=vocab_size, split=split, text=text
        )
        self._validation_batches = pipeline.validation_batches(
            config.data, config.train.batch_size, config.eval.batches, vocab_size=vocab_size, split=split, text=text
        )
        # In chat data the end tokens of answers are targets too, and have no bytes of text.
        tokenizer = None if text is None or config.data.source in ("tokens", "chat") else text.tokenizer
        self._byte_lengths = None if tokenizer is None else tokenizer.byte_lengths()
        self._tracing = False
        self._activity = "at start-up"  # for messages

    def run(self) -> int:
        """Trains to the last step and returns the exit status: 0, or 128 + the signal that stopped the run."""
        with contextlib.ExitStack() as stack:
            if self._job.is_leader:
                self._workdir.mkdir(parents=True, exist_ok=True)
                stack.enter_context(workdir_lib.exclusive_lock(self._workdir))
            checkpoints = stack.enter_context(Checkpointer(self._workdir, self._config, self._log, self._job))
            self._watchdog.checkpoint_status = lambda: checkpoints.status
            with out_of_memory.explained(lambda error: self._explain_oom(error, checkpoints)):
                return self._run(checkpoints)

    def _explain_oom(self, error: BaseException, checkpoints: Checkpointer) -> str:
        if self._job.is_alone:  # a checkpoint of a good step may still be in the background
            checkpoints.wait()
        return self._bill.oom_message(self._activity, error, checkpoints.status)

    def _run(self, checkpoints: Checkpointer) -> int:
        config = self._config
        abstract = programs.abstract_state(config, self._step_spec, self._mesh)
        restored = checkpoints.restore(abstract)
        first_step = restored.step if restored else 0
        if first_step >= config.train.steps:
            self._log(
                f"{self._workdir} is done ({first_step:,} of {config.train.steps:,} steps); raise config.train.steps "
                f"to continue training, or sample from the model:\n{self._sample_command()}"
            )
            return 0
        if self._job.is_leader:
            workdir_lib.write_config(self._workdir, config)
            if self._init.source and config.data.tokenizer == workdir_lib.OWN_FILES and self._init.text:
                workdir_lib.write_text(self._workdir, self._init.text)
            self._bill.show()
        if restored:
            self._data.set_state(restored.data_state)
            state = frozen.attach(restored.state, abstract, self._workdir, self._job)
            self._log(f"resuming {self._workdir} after step {first_step:,}")
            if config.init_from:
                self._log(f"not reading config.init_from ({config.init_from}) again")
        elif self._init.source:
            state = programs.state_from(config, self._step_spec, self._mesh, self._init.source.load)
            self._log(f"starting from the weights of {config.init_from}")
            if state.frozen is not None:
                frozen.write(self._workdir, state.frozen, self._job)
        else:
            state = programs.init_state(config, self._step_spec, self._mesh).jitted()
        del restored
        self.timer.end_phase("start-up")
        self._activity = "while the training step was compiled"
        train_step = programs.train_step(config, self._step_spec, self._mesh).compile()
        eval_step = programs.eval_step(config, self._step_spec, self._mesh).compile()
        self._log(f"compiled in {self.timer.end_phase('compile'):.1f} s")
        recorded = self._workdir if self._job.is_leader else None
        metrics = MetricsWriter(recorded, first_step, config.log.tensorboard)
        with metrics, StopSignals(self._job, first_step) as stop:
            self._watchdog.on_poll, self._watchdog.needs_fast_polling = stop.poll, lambda: stop.is_pending
            versions = {"jax": jax.__version__, "attention": self._step_spec.attention.line}
            metrics.write("event", first_step, event="resume" if first_step else "start", **versions)
            return self._steps(first_step, state, train_step, eval_step, checkpoints, metrics, stop)

    def _steps(
        self,
        first_step: int,
        state: Any,
        train_step: jax.stages.Compiled,
        eval_step: jax.stages.Compiled,
        checkpoints: Checkpointer,
        metrics: MetricsWriter,
        stop: StopSignals,
    ) -> int:
        config, timer, last = self._config, self.timer, self._config.train.steps
        display = Display(
            self._console, first_step, last, self._bill.model_flops_per_token, self._bill.peak_flops, config.log.every
        )

        def record_metrics(step: int, values: dict[str, Any], documents: np.ndarray) -> None:
            """Waits for the metrics of a step and records them.

            Raises:
              RunError: the loss or the gradient norm is not finite, and a loss scale does not explain it.
            """
            self._activity = f"in step {step:,}"  # dispatch is asynchronous: an error of that step is raised here
            scalars = {name: float(value) for name, value in values.items()}
            seconds = timer.end_phase("steps")
            # Extrapolated from the rows of this process; exact if it has the whole batch.
            padding = float(np.mean(documents < 0)) * config.train.batch_size * config.data.sequence_length
            metrics.write("step", step, **scalars, padding=padding, seconds=seconds)
            read = config.train.batch_size * config.data.sequence_length - padding
            display.update(step, scalars["loss"], read, seconds)
            for name in ("loss", "grad_norm"):
                if not (math.isfinite(scalars[name]) or _is_overflow(scalars, name)):
                    metrics.write("event", step, event="not finite", field=name)
                    checkpoints.wait()  # a checkpoint of a good step may still be in the background
                    raise RunError(
                        f"{name} is {scalars[name]} at step {step}; its batch contains the documents "
                        f"{_join_names(self._data.document_names(documents))}; {checkpoints.status}"
                    )

        with contextlib.ExitStack() as stack:
            stack.callback(display.stop)
            stack.callback(self._end_trace)
            display.start()
            pending: tuple[int, dict[str, Any], np.ndarray] | None = None
            ledger_error = ""  # set if the ledger check ends the run
            for step in range(first_step + 1, last + 1):
                self._trace(step, first_step)
                self._activity = f"in step {step:,}"
                batch = next(self._data)
                stop.begin(step)
                state, values = train_step(state, self._place(batch, self._data.rows))
                if pending:  # one step behind the dispatch, so that the device never waits for the host
                    record_metrics(*pending)
                pending = (step, values, batch["documents"])
                checkpoints.poll()

                stopping = stop.after(step)  # read once: a signal may arrive at any time
                evaluating = step == last or _is_scheduled(step, config.eval.every)
                saving = step == last or _is_scheduled(step, config.checkpoint.every) or stopping > 0
                if not (evaluating or saving or step == first_step + 2):
                    continue
                record_metrics(*pending)
                pending = None
                if step == first_step + 2:
                    reconcile = functools.partial(self._bill.reconcile, self._workdir, train_step, state)
                    ledger_error = self._job.broadcast("ledger", reconcile)
                    del reconcile  # it references the state
                    timer.end_phase("ledger")
                if saving or ledger_error:
                    checkpoints.save(step, state, self._data.get_state(), self._owned_streams)
                    metrics.write("event", step, event="save")
                    timer.end_phase("checkpoints")
                if ledger_error:
                    checkpoints.wait()
                    raise RunError(f"{ledger_error}; {checkpoints.status}")
                if evaluating:
                    self._activity = f"in the evaluation after step {step:,}"
                    self._evaluate(step, eval_step, (state.params, state.frozen), metrics)
                    timer.end_phase("evaluation")
                if stopping:
                    checkpoints.wait()
                    display.stop()
                    name = signal.Signals(stopping).name
                    metrics.write("event", step, event="stop", signal=name)
                    self._log(f"{name}: saved after step {step:,}; run the same command again to resume")
                    return 128 + stopping
        checkpoints.wait()
        timer.end_phase("checkpoints")
        self._log_summary(first_step, state)
        return 0

    def _place(self, batch: Batch, rows: np.ndarray) -> dict[str, jax.Array]:
        return batch_rows.place(batch, rows, self._batches, self._config.train.batch_size)

    def _evaluate(self, step: int, eval_step: Callable[..., Any], weights: Any, metrics: MetricsWriter) -> Evaluation:
        every_row = np.arange(self._config.train.batch_size)  # every process reads all rows of these few batches
        place = functools.partial(self._place, rows=every_row)
        result = evaluate(eval_step, weights, self._validation_batches, place, self._byte_lengths)
        metrics.write("eval", step, **result._asdict())
        bits = f", {result.bits_per_byte:.3f} bits per byte" if result.bits_per_byte is not None else ""
        kind = "answer tokens" if self._config.data.source == "chat" else "tokens"
        self._log(f"step {step:,}: validation loss {result.loss:.3f}{bits} ({result.tokens:,} {kind})")
        return result

    def _trace(self, step: int, first_step: int) -> None:
        """Starts and stops the profiler trace around the configured steps."""
        log = self._config.log
        begin = max(log.profile_start, first_step + 1)
        if log.profile_steps and step == begin and self._job.is_leader:
            jax.profiler.start_trace(str(self._workdir / "profile"))
            self._tracing = True
            self._log(f"profiling {log.profile_steps:,} steps from step {begin:,} into {self._workdir / 'profile'}")
        if step == begin + log.profile_steps:
            self._end_trace()

    def _end_trace(self) -> None:
        """Stops and writes the profiler trace, if one is running; also called when the run ends early."""
        if self._tracing:
            jax.profiler.stop_trace()
            self._tracing = False

    def _log_summary(self, first_step: int, state: Any) -> None:
        if state.loss_scale is not None:
            last, applied = self._config.train.steps, int(state.step)
            self._log(f"{applied:,} updates applied, {last - applied:,} skipped because fp16 gradients overflowed")
        timer, steps = self.timer, self._config.train.steps - first_step
        parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in timer.seconds.items())
        self._log(f"{steps:,} steps in {timer.total:.1f} s: {parts}")
        self._log(f"done; sample from the model:\n{self._sample_command()}")

    def _sample_command(self) -> str:
        text = self._init.text
        is_chat = self._config.data.source == "chat" and text is not None and text.chat_template is not None
        return f"  python -m jaxllm.sample --model {self._workdir} " + ("--chat" if is_chat else '--prompt "def "')

    def _log(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def _is_overflow(scalars: dict[str, float], name: str) -> bool:
    """Returns True if fp16 overflow explains a non-finite metric: the step was skipped and the loss scale drops.

    A non-finite loss at a scale of 1 is not explained by it.
    """
    return scalars.get("skipped", 0.0) > 0 and (scalars["loss_scale"] > 1 or name != "loss")


def _is_scheduled(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _join_names(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
