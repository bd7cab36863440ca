"""A training loop with one model: what its trainer is given, the bookkeeping that such loops share, their result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from training.utils.base.console import LogPace, log
from training.utils.checkpoints.folder import check_keys, record_of
from training.utils.contracts.guests import Guests
from training.utils.contracts.run import Checkpoints, EvaluationObserver, StepObservers, StepTaken
from training.utils.engine.accumulate import TakenStep, Trainee, accumulate
from training.utils.engine.bad_steps import BadSteps
from training.utils.layout.order import ShuffledStream, completes_epochs, evaluates_by_default
from training.utils.run.ahead import Ahead
from training.utils.run.divergence import DivergenceWatch
from training.utils.run.progress import ShownFigure, progress_bar, show

if TYPE_CHECKING:
    from training.utils.contracts.documents import Document
    from training.utils.contracts.media import RunMedia
    from training.utils.engine.ranks.startup import Ranks
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.layout.planner import PlanSettings
    from training.utils.models.flops import ComputeMeter
    from training.utils.run.divergence import Uniform
    from training.utils.run.metrics import MetricsWriter
    from training.utils.run.run_folder import RunFolder

_EVAL_LOSS = "eval/loss"


class NumberedRow(Protocol):
    """A training row; `row_id` finds it in its dataset."""

    @property
    def row_id(self) -> int: ...


Row = TypeVar("Row", bound=NumberedRow, covariant=True)
Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class LoopSettings:
    """Settings of the loops of steps 1 and 2.

    items_per_step: rows of one optimizer step (step 1: sentences, step 2: prompts), over all ranks.
    eval_interval: in optimizer steps; eval_epochs: in epochs; both 0: evaluates only before and after training.
        eval_interval None, without eval_epochs: as `evaluates_by_default`.
    media: of the rows; None if no row has any.
    meter: None if MFU is not reported.
    evaluation_observer: of each evaluation.
    shuffle: epochs have an order of their own, each; otherwise that of the rows.
    name: of what is trained, in the log, e.g. `SFT`.
    """

    total_steps: int
    items_per_step: int
    train_plan: PlanSettings
    eval_plan: PlanSettings
    eval_interval: int | None
    pad_token_id: int
    seed: int
    media: RunMedia | None = None
    meter: ComputeMeter | None = None
    step_observers: StepObservers = StepObservers()
    eval_epochs: float = 0.0
    log_pace: LogPace = LogPace()
    shuffle: bool = True
    evaluation_observer: EvaluationObserver = EvaluationObserver()
    name: str = "model"


@dataclass(frozen=True)
class NextStep(Generic[Prepared]):
    """An optimizer step. taken: indices of its training rows. ready: to be called once; returns what was prepared of
    them, as soon as it is, and begins to prepare the step after it. started: as `time.monotonic` has it."""

    number: int
    taken: Sequence[int]
    ready: Callable[[], Prepared]
    started: float = field(default_factory=time.monotonic)


@dataclass(frozen=True)
class TrainingRun(Generic[Row]):
    """One model in training.

    folder: for samples; None: they are not written
    added_tokens: those that the tokenizer gained at the start; the model draws their embeddings
    """

    engine: TrainingEngine
    train_rows: Sequence[Row]
    eval_rows: Sequence[Row]
    settings: LoopSettings
    metrics: MetricsWriter
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    bad_steps: BadSteps = field(default_factory=BadSteps)
    guests: Guests = Guests()
    folder: RunFolder | None = None
    added_tokens: int = 0

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks

    @property
    def steps_per_epoch(self) -> float:
        return len(self.train_rows) / self.settings.items_per_step

    @property
    def prepares_ahead(self) -> bool:
        """True if a thread lays out the next step while one runs. Not on a CPU: it would take the cores that the step
        computes on."""
        return self.ranks.device.type == "cuda"

    def sampled_rows(self, step: int) -> Sequence[int]:
        """Return indices of the held-out rows whose scores `write_samples` takes after `step`."""
        is_first_or_last = step in (0, self.settings.total_steps)
        return self.settings.evaluation_observer.wanted(around_training=is_first_or_last)

    def write_samples(self, step: int, scores: Mapping[int, Sequence[float]]) -> None:
        """Write the samples of an evaluation, if plugins make some. A collective. scores: see
        `EvaluationObserver.scored`."""
        observer = self.settings.evaluation_observer
        samples = [{"step": step, **sample} for sample in observer.scored(scores)]
        if self.folder is None or not samples:
            return
        self.folder.append_samples(samples)
        self.metrics.write_samples(step, samples)
        observer.samples(step, samples)

    def row_ids(self, taken: Sequence[int]) -> list[int]:
        """The rows of the dataset at these indices of the training rows."""
        return [self.train_rows[index].row_id for index in taken]

    def work_of(self, documents: Sequence[Document], outputs: int) -> dict[str, float]:
        """A step's work on `documents`, to be summed over the ranks: `tokens`, and `flops` if the loop has a meter.
        outputs: tokens or scores that the model predicts there."""
        work = {"tokens": float(sum(document.tokens for document in documents))}
        if self.settings.meter is not None:
            work["flops"] = self.settings.meter.flops(documents, outputs)
        return work

    def speed_figures(self, work: Mapping[str, float], seconds: float) -> dict[str, float]:
        """train/pairs_per_second of work with `pairs`, train/tokens_per_second, and train/mfu if the loop has a meter.
        work: `work_of` all ranks."""
        figures = {f"train/{one}_per_second": work[one] / seconds for one in ("pairs", "tokens") if one in work}
        if self.settings.meter is not None:
            figures["train/mfu"] = work["flops"] / seconds / self.settings.meter.peak_flops_per_second
        return figures

    def take(
        self, step: NextStep[Any], trainee: Trainee, work: Mapping[str, float], seen: Callable[..., StepTaken]
    ) -> TakenStep:
        """Take an optimizer step, seen by the observers; return it with the figures of its speed. A collective.
        work: `work_of` this rank. seen: number of the step, figures, row ids -> what observers see of it"""
        observed = self.settings.step_observers.begin(step.number)
        totals, figures = accumulate([observed.watched(trainee)], work)
        observed.taken(seen(step.number, {**totals, **figures}, partial(self.row_ids, step.taken)))
        return TakenStep(totals, {**self.speed_figures(totals, time.monotonic() - step.started), **figures})


@dataclass(frozen=True)
class TrainingResult:
    """before, after: the evaluations; None without evaluation rows
    summary: the run's closing figures
    sentence: the same in words, up to the seconds
    signs: that the run has diverged, to be put behind the last line; "" for none
    reports: further JSON files of the run's folder by name, written once the model is
    """

    before: Any
    after: Any
    summary: dict[str, float | None]
    sentence: str
    signs: str = ""
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)


class TrainingLoop:
    """The bookkeeping of a loop: resuming, evaluations, progress, checkpoints. Resumes, or evaluates, when created.

    evaluate: given a step, returns a dataclass with `in_words`, or None without evaluation rows
    evaluation_from: the inverse of dataclasses.asdict
    uniform: the loss of equal choices, of evaluations and, if `of_training`, of training; None if there is none
    """

    def __init__(
        self,
        run: TrainingRun,
        evaluate: Callable[[int], Any],
        evaluation_from: Callable[..., Any],
        uniform: Uniform | None = None,
        *,
        of_training: bool = True,
    ) -> None:
        self._run, self._evaluate, self._evaluation_from = run, evaluate, evaluation_from
        loss = "train/loss" if of_training else ""
        self._divergence = DivergenceWatch(run.metrics.folder, run.ranks.is_main, uniform, loss, eval_loss=_EVAL_LOSS)
        self._done, saved = run.checkpoints.restore()
        if saved:
            check_keys(saved, ("before", "after"), "the loop's state")
            self.before, self.after = (self._evaluation_in(saved, name) for name in ("before", "after"))
        else:
            self.before = self.after = self._evaluated(0)

    def result(
        self, figures: Callable[[Any, Any], dict[str, float | None]], sentence: Callable[[Any, Any], str]
    ) -> TrainingResult:
        """The result of the loop, to be called at its end. figures, sentence: of the evaluations before and after; the
        second is called if there are evaluation rows."""
        before, after = self.before, self.after
        summary = {**figures(before, after), "seconds": self._run.metrics.seconds}
        said = "trained without evaluation rows" if after is None else sentence(before, after)
        return TrainingResult(before, after, summary, said, self._divergence.closing())

    def steps(self, prepare: Callable[[Sequence[int]], Prepared]) -> Iterator[NextStep[Prepared]]:
        """Every optimizer step that is left; evaluates and saves after those at which it is due.

        prepare: makes of the indices of a step's training rows what the step computes on. It may run in a thread, while
            the step before computes, and must be pure.
        """
        run, settings = self._run, self._run.settings
        total = settings.total_steps
        stream = ShuffledStream(len(run.train_rows), settings.seed, settings.shuffle)

        def taken(step: int) -> tuple[int, ...]:
            return tuple(stream.take((step - 1) * settings.items_per_step, settings.items_per_step))

        ahead: Ahead[tuple[int, ...], Prepared] = Ahead(prepare, run.prepares_ahead)
        with (
            contextlib.closing(ahead),
            progress_bar(total, settings.name, run.ranks.is_main, done=self._done, pace=settings.log_pace) as self._bar,
        ):
            end = self._done if run.checkpoints.ends(self._done) else total
            for step in settings.step_observers.each(range(self._done + 1, end + 1)):
                rows = taken(step)

                def ready(step: int = step, rows: tuple[int, ...] = rows) -> Prepared:
                    made = ahead.made(rows)
                    if step < total:
                        ahead.begin(taken(step + 1))
                    return made

                yield NextStep(step, rows, ready)
                self._done = step
                last = step == total or run.checkpoints.ends(step)
                if last or self._evaluates_after(step):
                    self.after = self._evaluated(step)
                    last = last or run.checkpoints.ends(step)
                if run.checkpoints.due(step, step if last else total):
                    states = {"before": self.before, "after": self.after}
                    run.checkpoints.save(step, {name: state and asdict(state) for name, state in states.items()})
                if last:
                    break
        earlier = run.checkpoints.load_final(self._done)
        if earlier is not None:
            self.after = self._evaluation_in(earlier, "after")
            self._run.settings.evaluation_observer.restored()

    def _evaluation_in(self, saved: dict[str, Any], name: str) -> Any:
        """The evaluation that a checkpoint holds under `name`; None where the run has no evaluation rows."""
        plain = saved[name]
        return plain and record_of(lambda **fields: self._evaluation_from(fields), plain, f"the evaluation {name}")

    def _evaluates_after(self, step: int) -> bool:
        settings, total = self._run.settings, self._run.settings.total_steps
        if settings.eval_interval is None and not settings.eval_epochs:
            rows = total * settings.items_per_step
            return evaluates_by_default(step, total, rows, len(self._run.eval_rows))
        interval = settings.eval_interval or 0
        by_steps = interval > 0 and step % interval == 0
        return by_steps or completes_epochs(step, settings.eval_epochs, self._run.steps_per_epoch)

    def record(self, step: int, figures: dict[str, float], taken: Sequence[int]) -> None:
        """Write the figures of an optimizer step on the rows `taken`, check them and show them in the bar."""
        run = self._run
        run.metrics.write(step, figures)
        run.bad_steps.check(step, figures, run.row_ids(taken))
        self._divergence.see(step, figures)
        show(
            self._bar,
            ShownFigure("loss", figures["train/loss"]),
            ShownFigure("learning rate", figures["train/learning_rate"], ".2e", is_mean=False),
            ShownFigure("", figures["train/tokens_per_second"], ",.0f", "tok/s"),
        )

    def _evaluated(self, step: int) -> Any:
        found = self._evaluate(step)
        self._run.metrics.write_beside(step, self._run.settings.evaluation_observer.figures(step))
        self._run.checkpoints.evaluated(step)
        if found is not None and found.loss is not None:
            self._divergence.see(step, {_EVAL_LOSS: found.loss})
        if found is not None and found.in_words:
            when = f"after step {step:,}" if step else "before training"
            log(f"{self._run.settings.name}: evaluation {when}: {found.in_words}", self._run.ranks.is_main)
        return found
