"""A run of any step: its ranks, its folder, where it resumes, what its loop reports to, and what it leaves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from training.utils.base.console import WHOLE_RUN_VARIABLE, log
from training.utils.base.user_files import named_object
from training.utils.checkpoints.loop import checkpointed_run
from training.utils.checkpoints.other_runs import only_run_in, remove_earlier_run, remove_figures
from training.utils.checkpoints.plan import CheckpointPlan, plan_checkpoints
from training.utils.data.files.digests import digest_files
from training.utils.engine.bad_steps import BadSteps
from training.utils.engine.ranks.backends import backends_of
from training.utils.engine.ranks.collectives import on_main
from training.utils.engine.ranks.startup import Ranks, started_process_group
from training.utils.flags.flags import AUTO, AutoChoice, sentence
from training.utils.loading.configurations import model_files
from training.utils.models.families.parts import write_beside
from training.utils.models.saved.saving import save_model
from training.utils.plugins.registry import added, hooks
from training.utils.run.run_folder import BAD_STEPS, EndedRun, RunFolder
from training.utils.setup.final_models import FinalModels
from training.utils.setup.saving_check import SavedModel, check_saving
from training.utils.setup.setup import start_run, with_head_chunk, write_settings

if TYPE_CHECKING:
    from training.utils.checkpoints.parts import CheckpointParts
    from training.utils.contracts.guests import Guests
    from training.utils.contracts.run import Checkpoints, RunCourse
    from training.utils.data.cache.reports import BuildReport
    from training.utils.models.settings import ModelSettings
    from training.utils.run.metrics import MetricsWriter
    from training.utils.setup.flags import RunFlags


@contextlib.contextmanager
def planned_run(flags: RunFlags, shares_gpu: bool = False) -> Iterator[PlannedRun]:
    """Start the ranks, lock the run's folder, and find the checkpoint that the run resumes from.

    shares_gpu: as in `started_process_group`
    """
    run, step = flags.run, flags.step
    with started_process_group(flags.faults.rank_timeout, shares_gpu) as ranks, only_run_in(run.output_dir, ranks):
        plan = plan_checkpoints(
            flags.checkpoints,
            run.output_dir,
            step.program,
            flags.settings,
            ranks=ranks,
            defaults=step.defaults,
            may_change=step.may_change,
        )
        began_with = None if plan.resume_from is None else plan.began_with
        ranks = replace(ranks, backends=backends_of(flags.settings, ranks.device, began_with))
        split = flags.data.split.of_phase(int(step.number), WHOLE_RUN_VARIABLE in os.environ)
        if flags.data.split.data_split == AUTO and (began := plan.began_with("data_split")) is not None:
            split = replace(split, data_split=began)
        decided = {"data_split": split.data_split, **ranks.backends.decided}
        flags = flags._replace(data=replace(flags.data, split=split), settings={**flags.settings, **decided})
        yield PlannedRun(flags, ranks, plan.decided(decided))


@dataclass(frozen=True)
class PlannedRun:
    """A run that has not written anything yet. flags: with the shares of the data that --data_split auto stands for."""

    flags: RunFlags
    ranks: Ranks
    plan: CheckpointPlan

    def opened(self, prompt_style: str, model: ModelSettings, dtype: str, predicts_tokens: bool = True) -> OpenedRun:
        """Decide the settings that the flags left open, and write all of them to the run's folder. A collective.

        model, dtype: of the model that is trained. predicts_tokens: False for a reward model
        """
        plan = self.plan.decided({"prompt_style": prompt_style})
        if plan.settings["eval_interval"] is None:  # a resumed run keeps its own
            plan = plan.decided({"eval_interval": plan.began_with("eval_interval")})
        if predicts_tokens:
            plan = with_head_chunk(plan, model, dtype, self.ranks)
        if plan.flags.overwrite and plan.resume_from is None:
            on_main(lambda: remove_earlier_run(plan.folder), self.ranks.is_main)
        if plan.resume_from is None:
            on_main(lambda: remove_figures(plan.folder), self.ranks.is_main)
        folder = start_run(self.flags.run, plan.flags_in_use, self.ranks, plan.chosen)
        model = replace(model, head_chunk_mb=plan.settings["head_chunk_mb"])
        opened = (named_object(place)(plan.settings) for place in added("run_courses", ()).values())
        course = [part for part in opened if part is not None]
        return OpenedRun(self.flags, self.ranks, plan, folder, model, dtype, course)


class RunData(NamedTuple):
    """The rows of a run. report: of their build. fingerprint: of those to train on. steps_per_epoch: not rounded."""

    report: BuildReport
    fingerprint: str
    steps_per_epoch: float


@dataclass(frozen=True)
class OpenedRun:
    """A run with its folder. model, dtype: of the model that is trained. course: the say of plugins in it."""

    flags: RunFlags
    ranks: Ranks
    plan: CheckpointPlan
    folder: RunFolder
    model: ModelSettings
    dtype: str
    course: Sequence[RunCourse] = ()

    def styled(self, prompt_style: str) -> OpenedRun:
        """The run with the prompt style that its rows have, which is written to its settings."""
        if prompt_style == self.plan.settings["prompt_style"]:
            return self
        return self._decided({"prompt_style": prompt_style})

    def settled(self, choices: Sequence[AutoChoice], **others: Any) -> OpenedRun:
        """The run with what was chosen for flags that were left to `auto`, which is written to its settings and, with
        the chunks of the output layer, named in a line of the log. others: settings that follow from them."""
        chunk_mb = self.plan.settings.get("head_chunk_mb")
        if chunk_mb and not self.flags.settings["head_chunk_mb"]:
            choices = [*choices, AutoChoice("head_chunk_mb", chunk_mb, "MiB of logits at a time")]
        log(sentence(choices), self.ranks.is_main and bool(choices))
        return self._decided({**others, **{choice.name: choice.value for choice in choices}})

    def _decided(self, settings: Mapping[str, Any]) -> OpenedRun:
        plan = self.plan.decided(settings)
        write_settings(self.folder, plan.flags_in_use, self.ranks, plan.chosen)
        return replace(self, plan=plan)

    @contextlib.contextmanager
    def recorded(
        self, parts: CheckpointParts, data: RunData, digests: Mapping[str, Callable[[], str]]
    ) -> Iterator[tuple[MetricsWriter, Checkpoints, BadSteps]]:
        """Check that the models can be saved, and give what records the loop; inside, signals wait for the end of a
        step, and the backends of the ranks hold. A collective.

        parts: what is trained and saved. digests: `start_digests` of the models that a resumed run loads again
        """
        folder, flags, is_main = self.folder, self.flags, self.ranks.is_main
        folder.write_json("data_report.json", asdict(data.report))
        if flags.trains:
            trust = self.model.trust_remote_code
            check_saving(folder.path, [*_saved(parts).values()], parts.processor, trust, is_main=is_main)
            keeps = sum(part.keeps for part in self.course)
            for part in self.course:
                on_main(partial(part.check, folder.path, parts, keeps), is_main)
        run = checkpointed_run(
            self.plan,
            folder,
            parts,
            data.fingerprint,
            model_digests=digests,
            steps_per_epoch=data.steps_per_epoch,
            course=self.course,
        )
        with run as records, self.ranks.backends.held():
            yield *records, BadSteps(flags.faults.max_bad_steps, folder.run_log(BAD_STEPS), is_main, self.dtype)

    def finish(
        self, parts: CheckpointParts, guests: Guests, figures: Mapping[str, dict[str, Any]], closing: str
    ) -> None:
        """Write the models, and then all else that a run leaves. A collective, and the last use of the models.

        guests: of the first model. figures: closing figures, by file. closing: the last line of the log
        ThreestepError if a model is not where it belongs.
        """
        final = FinalModels(self.folder.path, self.course, self.ranks)
        if self.flags.trains:
            _write_models(final, parts, guests)
        for name, content in figures.items():
            self.folder.write_figures(name, content)
        self.folder.settle()
        ended = EndedRun(self.folder, self.flags.settings, self.flags.trains)
        more = "".join(at_end(ended) or "" for at_end in hooks("at_end")) if self.folder.is_main_rank else ""
        final.check()
        log(closing + more, self.folder.is_main_rank)


def start_digests(paths: Mapping[str, str], cache_dir: str) -> dict[str, Callable[[], str]]:
    """Return what digests the files of models that a run loads at each start, by flag. paths: of the models; "" for one
    that a resumed run does not read again."""
    files = {flag: model_files(path) if path else [] for flag, path in paths.items()}
    return {flag: partial(digest_files, found, cache_dir) for flag, found in files.items()}


def _saved(parts: CheckpointParts) -> dict[str, SavedModel]:
    """Models that are saved, by the engines' names."""
    return {
        name: SavedModel(engine.module.model, tokenizer)  # type: ignore[arg-type]
        for name, engine in parts.engines.items()
        if (tokenizer := parts.tokenizers.get(name)) is not None  # a guest's engine has none
    }


def _write_models(final: FinalModels, parts: CheckpointParts, guests: Guests) -> None:
    """Write model/, further engines' folders by their names, and then those of other weights, which take the place of
    the first engine's. A collective."""
    saved = _saved(parts)
    first = next(iter(saved))
    folders = {"model" if name == first else name: name for name in saved}
    others = {each.folder: each for each in parts.others}
    for folder, name in {**folders, **dict.fromkeys(others, first)}.items():
        if folder in others:
            others[folder].put_in_place()
        model, tokenizer = saved[name]
        tensors = parts.engines[name].full_state(model)
        beside = partial(write_beside, guests.model_writer() if folder == "model" else None, parts.processor)
        final.write(folder, partial(save_model, model=model, tensors=tensors, tokenizer=tokenizer, write_more=beside))
