"""The steps of a run, and what happens between them: logs, evaluations, checkpoints, faults."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ..checkpoint import Boundary, CheckpointWriter, RunState
from ..config import RunConfig
from ..config.settings import AUTO, counted
from ..data import Step, StepLoader, StreamLoader
from ..dist import from_main, gather_over_ranks, open_rank_store, print_main
from ..experts import ExpertLoad, mixtures_of
from ..export import save_trained, weights_folder
from ..lifecycle.agreement import Agreement
from ..lifecycle.bad_steps import BadSteps, RollBack
from ..lifecycle.frozen_weights import FrozenWeights
from ..lifecycle.signals import StopRequested, StopSignals
from ..lifecycle.watchdog import Watchdog
from ..observe.eval_command import scores_of, told_of
from ..observe.memory_report import MemoryWatch
from ..observe.metrics import CheckpointMetrics, ScoreRecord, SkippedMetrics, StepMetrics
from ..observe.profiling import step_profiler
from ..observe.runlog import RunLog
from ..observe.samples import Answerer
from ..observe.throughput import arithmetic
from ..plan import Plan
from .cuda_graphs import GraphedMicroBatches, micro_batch_runner
from .describe import first_step_line
from .step import train_step
from .step_log import LaggedLog

LAST_WAIT_SECONDS = (
    10  # for a checkpoint under way at an error: a rank that is gone is never heard of
)


class Training:
    """A run under way. `record` is kept beside weights that it saves, `signals` ask it to stop."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        tokenizer,
        loader: StepLoader | StreamLoader,
        state: RunState,
        boundary: Boundary,
        log: RunLog,
        writer: CheckpointWriter,
        record: dict,
        signals: StopSignals | None = None,
        answerer: Answerer | None = None,
    ):
        self.config, self.tokenizer, self.loader, self.state = config, tokenizer, loader, state
        self.boundary, self.log, self.writer, self.record = boundary, log, writer, record
        self.signals, self.answerer = signals or StopSignals(), answerer
        self.lagged = LaggedLog(
            log, state.device, self.was_read, arithmetic(plan, state.model, state.device)
        )
        self.first_step, self.scored_step = boundary.step + 1, boundary.step
        self.bad = BadSteps(config.on_bad_steps, config.max_bad_steps)
        self.watch = Watchdog(open_rank_store(), config.stall_seconds)
        self.frozen = FrozenWeights(state.model, state.device, config.verify_frozen_minutes)
        self.agree = Agreement(
            self.watch.mark,
            stop=self.signals.is_asked,
            save=writer.is_time,
            failed=writer.has_failed,
            flipped=self.frozen.has_changed,
        )
        self.max_norm = config.grad_norm if config.apply_gradient_clipping else None
        self.memory = MemoryWatch(config, plan, state.model, state.optimizer, state.device)
        self.forward_backward = micro_batch_runner(config, plan, state.model, state.device)
        mixtures = mixtures_of(state.model)
        self.expert_load = ExpertLoad(mixtures, state.device) if mixtures else None

    def run(self):
        """All steps that are left, and the evaluations that are due.

        Raises StopRequested, with the state saved, after a signal to any rank.
        """
        self.signals.can_save, self.signals.missing = True, self.watch.missing
        try:
            with self.watch.watching(), self.frozen.watching():
                self.prepare()
                while not self.ran_through():
                    self.roll_back()
                self.writer.join(self.watch.mark)
        except StopRequested:
            self.stop()
        except BaseException:
            self.writer.leave(LAST_WAIT_SECONDS)
            raise

    def prepare(self):
        """Capture graphs of the shapes that padded batches will have."""
        runner, loader, scaler = self.forward_backward, self.loader, self.state.scaler
        if not isinstance(runner, GraphedMicroBatches) or not isinstance(loader, StepLoader):
            return
        if not loader.packing:
            runner.prepare(
                self.state.model,
                loader.padded_shapes(),
                scaler and scaler.scale,
                weighted=loader.dataset.weights is not None,
                marked=loader.collation.mark_tokens,
            )

    def ran_through(self) -> bool:
        """Train to the end; False if that came to bad steps and is to be tried from a checkpoint."""
        try:
            if not self.boundary.step:
                self.answer()
            self.evaluate_if_due()  # a run that was stopped may not have come to it
            self.train_steps()
            self.lagged.flush()
            self.evaluate_if_due(is_last=True)
            self.score_if_due(is_last=True)
            self.answer()
            return True
        except RollBack:
            return False

    def train_steps(self):
        """All steps that are left, unless the held-out loss has long been no lower."""
        with step_profiler(self.config, self.state.device) as step_done:
            if self.stops_early():
                return
            for step in self.loader:
                self.step(step)
                step_done()
                if self.stops_early():
                    return

    def stops_early(self) -> bool:
        """Whether --early_stopping_patience is over; says so."""
        evaluator = self.state.evaluator
        if not evaluator or not evaluator.is_out_of_patience():
            return False
        best = evaluator.best
        since = f"below {best.eval_loss:.4f} of step {best.step}" if best else "a number"
        print_main(
            f"stopped early after step {self.boundary.step}: the held-out loss was not {since} in "
            f"{counted(evaluator.patience, 'evaluation')} (--early_stopping_patience)"
        )
        return True

    def step(self, step: Step):
        """One optimizer step, unless its rows are left out, then what is due after it."""
        state, lr = self.state, self.state.optimizer.param_groups[0]["lr"]
        self.watch.mark(f"step {step.index + 1}")
        if is_taken := step.index not in self.bad.left_out:
            with self.memory.step(step):
                result = train_step(
                    state.model,
                    state.optimizer,
                    step.micro_batches,
                    agree=self.agree,
                    max_grad_norm=self.max_norm,
                    no_sync=self.config.no_sync,
                    ranks_per_row=self.config.sequence_parallel,
                    scaler=state.scaler,
                    forward_backward=self.forward_backward,
                )
            if self.expert_load:
                result.expert_load = self.expert_load.take()
            self.bad.rows[step.index + 1] = step.row_ids
            self.lagged.add(step.index + 1, lr, step.num_rows, step.num_tokens, result)
        state.scheduler.step()
        self.boundary = state.boundary(step.index + 1)
        if is_taken:
            self.after_step()

    def after_step(self):
        """Evaluate and save where that is due; what was computed with a flipped bit is not saved."""
        if self.agree.heard["flipped"]:
            self.stop_for_flipped_bit()
        self.evaluate_if_due()
        self.score_if_due()
        if self.agree.heard["failed"]:
            self.writer.stop_all_ranks()
        if self.agree.heard["save"] or self.is_checkpoint_step():
            self.save()

    def is_checkpoint_step(self) -> bool:
        """Whether --checkpoint_every names this step."""
        every = self.config.checkpoint_every
        return every != AUTO and self.boundary.step % every == 0

    def save(self):
        """Start a checkpoint of the last boundary; not amid bad steps, which may mean bad weights."""
        self.lagged.flush()
        if self.bad.in_a_row:
            return
        self.watch.mark(f"the checkpoint after step {self.boundary.step}")
        held = self.writer.save(self.boundary, self.watch.mark)
        self.log.record(CheckpointMetrics(self.boundary.step, held))
        self.lagged.restart_clock()

    def evaluate_if_due(self, is_last: bool = False):
        """Loss on held-out rows; the weights with the lowest so far are kept beside the last ones."""
        evaluator, step = self.state.evaluator, self.boundary.step
        if not evaluator or not step or not evaluator.is_due(step, is_last):
            return
        if evaluator.last and evaluator.last.step == step:
            return
        self.lagged.flush()
        self.watch.mark(f"the evaluation after step {step}")
        best, metrics = evaluator.best, evaluator.run(self.state.model, step, self.agree)
        self.log.log_evaluation(metrics)
        self.answer()
        if metrics.is_best and self.config.save_model and not self.has_saved_best():
            metrics.is_best, evaluator.best = False, best  # whose weights are those in the folder
        self.lagged.restart_clock()

    def score_if_due(self, is_last: bool = False):
        """Run --eval_command on the weights as they are; if it fails, the run goes on."""
        config, step, every = self.config, self.boundary.step, self.config.eval_every
        is_due = is_last or every != AUTO and step % every == 0
        if not config.eval_command or not is_due or step in (0, self.scored_step):
            return
        self.lagged.flush()
        self.scored_step, started = step, time.perf_counter()
        with self.watch.paused("--eval_command"):
            try:
                folder = weights_folder(config, "-scored")
                save_trained(self.state.model, folder, self.tokenizer, self.record)
                scores = from_main(lambda: self.scores(step, folder))
                self.log.record(ScoreRecord(step, scores, time.perf_counter() - started))
            except (ValueError, OSError) as error:
                print_main(f"warning: after step {step}, {error}; the run goes on")
        self.lagged.restart_clock()

    def scores(self, step: int, folder: Path) -> dict[str, float]:
        """What the command measures, on rank 0; the others wait for it less than --timeout_minutes."""
        return scores_of(
            self.config.eval_command or "",
            told_of(step, folder, self.config.model_name, self.config.output_dir),
            0.9 * 60 * self.config.timeout_minutes,
            lambda: bool(self.signals.is_asked()),
        )

    def has_saved_best(self) -> bool:
        """Save the best weights beside the last ones; False on a full disk, which keeps the previous ones."""
        folder = weights_folder(self.config, "-best")
        with self.watch.paused("saving the best weights"):
            try:
                save_trained(self.state.model, folder, self.tokenizer, self.record)
            except OSError as error:
                step = self.boundary.step
                print_main(f"warning: could not write {folder} after step {step} ({error})")
                return False
        return True

    def answer(self):
        """What the model answers now, if that is asked and not known."""
        step = self.boundary.step
        if not self.answerer or self.answerer.last_step == step:
            return
        self.watch.mark(f"the answers after step {step}")
        self.log.record(self.answerer.run(self.state.model, step, self.agree))
        self.lagged.restart_clock()

    def was_read(self, metrics: StepMetrics):
        """A step's loss and norm are known; raises what --on_bad_steps says after too many bad ones."""
        if metrics.step == self.first_step:
            print_main(first_step_line(metrics.seconds, self.lagged.compile_seconds()))
        rows = self.bad.see(metrics)
        if rows is None:
            return
        self.log.record(SkippedMetrics(metrics.step, list(rows)))
        print_main(
            f"warning: step {metrics.step} skipped, {_why_skipped(metrics)}; its rows: "
            f"{shortened(rows)}"
        )
        self.bad.decide()

    def roll_back(self):
        """Resume from the last good checkpoint, without the rows of the bad steps."""
        self.lagged.pending = None
        self.writer.join()
        folder = from_main(lambda: self.writer.verified)
        self.bad.leave_out(folder)
        with self.writer.disks.at_hand(folder):
            self.boundary = self.state.restore(folder)
        self.log.rewind(self.boundary.step)
        print_main(
            f"rolled back to {folder} without the rows of steps "
            + ", ".join(str(i + 1) for i in sorted(self.bad.left_out))
        )

    def stop_for_flipped_bit(self):
        """Raise on every rank what one of them found."""
        found = gather_over_ranks(self.frozen.explain(dist.get_rank()))
        raise OSError("; ".join(text for text in found if text))

    def stop(self):
        """Save where the run stands, on all ranks, and end it."""
        with suppress(RollBack):
            self.lagged.flush()  # the next start rolls back as well
        if self.boundary.step:
            self.save()
        self.writer.join()
        where = from_main(self.where_it_stopped)
        dist.barrier()  # as at the end of `process_group`
        raise StopRequested(f"stopped after step {self.boundary.step}; {where}")

    def where_it_stopped(self) -> str:
        """What of a run that stops is on the disk, in words; on rank 0."""
        folder, step = self.writer.verified, self.boundary.step
        if not step:
            return "there was nothing to save; the same command starts over"
        if self.writer.has(step):
            return f"saved in {folder}; rerun the same command to resume"
        why = self.bad.reason() if self.bad.in_a_row else self.writer.failure
        then = f"resumes from {folder}" if folder else "starts over"
        return f"this was not saved ({why}); the same command {then}"


def _why_skipped(metrics: StepMetrics) -> str:
    """What was wrong with a step that no rank took."""
    if metrics.overflowed:
        return f"an fp16 overflow at loss scale {metrics.loss_scale:g}, now halved"
    return (
        f"its loss or gradient is not finite (loss {metrics.loss}, grad_norm {metrics.grad_norm})"
    )


def shortened(rows, most: int = 20) -> str:
    """The first of the rows' ids."""
    more = f" and {len(rows) - most} more" if len(rows) > most else ""
    return ", ".join(map(str, rows[:most])) + more
