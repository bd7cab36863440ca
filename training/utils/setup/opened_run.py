"""A run of any step: its ranks, its folder, where it resumes, what its loop reports to, and what it leaves."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import training
from training.utils.base.console import WHOLE_RUN_VARIABLE, counted, log
from training.utils.base.seeds import seed_everything
from training.utils.base.user_files import named_object
from training.utils.checkpoints.loop import checkpointed_run
from training.utils.checkpoints.other_runs import only_run_in, remove_earlier_run
from training.utils.checkpoints.plan import CheckpointPlan, plan_checkpoints
from training.utils.contracts.run import EvaluatedRun, EvaluationObservers, HeldOutRows, ObservedRun, StepObservers
from training.utils.data.files.digests import digest_files
from training.utils.data.rows.arguments import CHAT_TEMPLATE
from training.utils.engine.bad_steps import BadSteps
from training.utils.engine.ranks.collectives import on_main
from training.utils.engine.ranks.devices import backend_of, device_sentence, make_deterministic
from training.utils.engine.ranks.startup import DTYPES, Ranks, sharing_rows, started_process_group
from training.utils.flags.flags import AUTO, AutoChoice, sentence
from training.utils.loading.configurations import load_config, model_files
from training.utils.models.token_model import CHUNK_MB, chunk_mb_for
from training.utils.plugins.registry import added, hooks
from training.utils.run.run_folder import BAD_STEPS, EndedRun, RunFolder
from training.utils.setup.saving import FinalModels, check_saving
from training.utils.setup.setup import least_free_bytes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from training.utils.checkpoints.parts import CheckpointParts
    from training.utils.contracts.guests import Guests
    from training.utils.contracts.run import Checkpoints, RunCourse
    from training.utils.data.cache.shards import BuildReport
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.engine.whole_model import WholeModel
    from training.utils.flags.step import Step
    from training.utils.run.metrics import MetricsWriter


class RunData(NamedTuple):
    """The rows of a run. report: of their build. fingerprint: of those to train on. steps_per_epoch: not rounded."""

    report: BuildReport
    fingerprint: str
    steps_per_epoch: float


@contextlib.contextmanager
def open_run(
    step: Step, flags: Any, settings: dict[str, Any], *, trains: bool = True, shares_gpu: bool = False
) -> Iterator[OpenedRun]:
    """Start the ranks, lock the run's folder, and find the checkpoint that the run resumes from.

    flags: `OneModelFlags` or `PpoFlags`. settings: every value by its flag's name. trains: False evaluates alone, and
    saves no model. shares_gpu: as in `started_process_group`
    """
    place = flags.run.output_dir
    with started_process_group(flags.faults.rank_timeout, shares_gpu) as ranks, only_run_in(place, ranks):
        plan = plan_checkpoints(
            flags.checkpoints,
            place,
            step.program,
            settings,
            ranks=ranks,
            defaults=step.defaults,
            may_change=step.may_change,
        )
        began_with = None if plan.resume_from is None else plan.began_with
        ranks = replace(ranks, backend=backend_of(settings, ranks.device, began_with))
        split = flags.data.split.of_phase(int(step.number), WHOLE_RUN_VARIABLE in os.environ)
        if flags.data.split.data_split == AUTO and (began := plan.began_with("data_split")) is not None:
            split = replace(split, data_split=began)
        plan = plan.decided({"data_split": split.data_split, **ranks.backend.decided})
        flags = flags._replace(data=replace(flags.data, split=split))
        ranks = sharing_rows(ranks, flags.added)
        yield OpenedRun(step, flags, ranks, plan, RunFolder(place, ranks.is_main), trains)


@dataclass
class OpenedRun:
    """A run, from its flags to its end.

    flags: with the shares of the data that --data_split auto stands for
    plan: has the settings, which `decide` changes
    trains: False evaluates alone, and saves no model
    course: the say of plugins in it, from `start` on
    """

    step: Step
    flags: Any
    ranks: Ranks
    plan: CheckpointPlan
    folder: RunFolder
    trains: bool = True
    course: Sequence[RunCourse] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Every value by its flag's name, as far as it is decided."""
        return self.plan.flags_in_use

    def start(self, prompt_style: str, path: str, predicts_tokens: bool = True) -> None:
        """Decide the settings that the flags left open, write all of them and what the run runs on to its folder, and
        seed this rank. A collective.

        path: of the model that is trained. predicts_tokens: False for a reward model
        """
        run, ranks, plan = self.flags.run, self.ranks, self.plan.decided({"prompt_style": prompt_style})
        if plan.settings["eval_interval"] is None:  # a resumed run keeps its own
            plan = plan.decided({"eval_interval": plan.began_with("eval_interval")})
        if predicts_tokens:
            plan = with_head_chunk(plan, path, ranks)
        self.plan = plan
        if plan.resume_from is None:
            kept = not plan.flags.overwrite
            on_main(lambda: remove_earlier_run(plan.folder, figures_alone=kept), ranks.is_main)
        on_main(lambda: [at_start(self.settings) for at_start in hooks("at_start")], ranks.is_main)
        self._write_settings()
        seed_everything(run.seed, ranks.rank)
        if run.deterministic:
            make_deterministic(ranks.device, os.environ)
        device = device_sentence(ranks.device, ranks.world_size, run.deterministic, os.environ)
        log("; ".join(filter(None, (device, ranks.backend.words))), ranks.is_main)
        if ranks.is_main:
            self.folder.write_json("environment.json", environment_of(device.partition("; ")[0]))
        opened = (named_object(place)(plan.settings) for place in added("run_courses", ()).values())
        self.course = [part for part in opened if part is not None]

    def decide(self, settings: Mapping[str, Any]) -> None:
        """Decide settings that the flags left open; write them to the run's folder, if they differ from before."""
        before, self.plan = self.plan, self.plan.decided(settings)
        if self.plan.settings != before.settings:
            self._write_settings()

    def settle(self, choices: Sequence[AutoChoice], **others: Any) -> None:
        """Decide on flags that were left to `auto`, and name the choices with the chunks of the output layer in a line
        of the log. others: settings that follow from them."""
        chunk_mb = self.plan.settings.get("head_chunk_mb")
        if chunk_mb and not self.plan.given["head_chunk_mb"]:
            choices = [*choices, AutoChoice("head_chunk_mb", chunk_mb, "MiB of logits at a time")]
        log(sentence(choices), self.ranks.is_main and bool(choices))
        self.decide({**others, **{choice.name: choice.value for choice in choices}})

    def _write_settings(self) -> None:
        """Write every setting to config.yaml, which `--config` reads back; a resumed run chooses again what the flags
        left to the program."""
        self.folder.write_config(self.settings, f"A run of {counted(self.ranks.world_size, 'rank')}.", self.plan.chosen)

    def step_observers(self, chat: ChatArguments, tokenizer: PreTrainedTokenizerBase) -> StepObservers:
        """Return the observers of the run's optimizer steps that plugins add. chat, tokenizer: see `ObservedRun`."""
        run = ObservedRun(self.step.program, self.settings, self.folder.path, self.ranks, chat, tokenizer)
        found = (open_observer(run) for open_observer in hooks("step_observer"))
        return StepObservers(observer for observer in found if observer is not None)

    def evaluation_observers(
        self, model: WholeModel, tokenizer: PreTrainedTokenizerBase, *, batch: int, held_out: HeldOutRows | None = None
    ) -> EvaluationObservers:
        """Return the observers of the run's evaluations that plugins add. batch: rows that are read at once."""
        templated = self.settings["prompt_style"] == CHAT_TEMPLATE
        template = self.flags.data.chat.template_kwargs if templated else None
        run = EvaluatedRun(self.settings, self.folder, model, tokenizer, template, batch, held_out)
        found = (open_observer(run) for open_observer in hooks("evaluation_observer"))
        return EvaluationObservers([observer for observer in found if observer is not None])

    @contextlib.contextmanager
    def recorded(
        self, parts: CheckpointParts, data: RunData, read_again: Mapping[str, str]
    ) -> Iterator[tuple[MetricsWriter, Checkpoints, BadSteps]]:
        """Check that the models can be saved, and give what records the loop; inside, signals wait for the end of a
        step, and the backend of the ranks holds. A collective.

        parts: what is trained and saved. read_again: paths of the models that a run loads at each start, by flag, whose
        files must stay the same; "" for one that a resumed run does not read again
        """
        folder, is_main = self.folder, self.ranks.is_main
        folder.write_json("data_report.json", asdict(data.report))
        if self.trains:
            check_saving(folder.path, parts, self.settings["trust_remote_code"])
            keeps = sum(part.keeps for part in self.course)
            for part in self.course:
                on_main(partial(part.check, folder.path, parts, keeps), is_main)
        files = {flag: model_files(path) if path else [] for flag, path in read_again.items()}
        run = checkpointed_run(
            self.plan,
            folder,
            parts,
            data.fingerprint,
            model_digests={
                flag: partial(digest_files, found, self.flags.data.cache.cache_dir) for flag, found in files.items()
            },
            steps_per_epoch=data.steps_per_epoch,
            course=self.course,
        )
        with run as records, self.ranks.backend.held():
            lines = folder.run_log(BAD_STEPS)
            yield *records, BadSteps(self.flags.faults.max_bad_steps, lines, is_main, self.settings["dtype"])

    def finish(
        self, parts: CheckpointParts, guests: Guests, figures: Mapping[str, dict[str, Any]], closing: str
    ) -> None:
        """Write the models, and then all else that a run leaves. A collective, and the last use of the models.

        guests: of the first model. figures: closing figures, by file. closing: the last line of the log
        ThreestepError if a model is not where it belongs.
        """
        final = FinalModels(self.folder.path, self.course, self.ranks)
        if self.trains:
            final.write_all(parts, guests)
        for name, content in figures.items():
            self.folder.write_figures(name, content)
        self.folder.settle()
        ended = EndedRun(self.folder, self.settings, self.trains)
        more = "".join(at_end(ended) or "" for at_end in hooks("at_end")) if self.ranks.is_main else ""
        final.check()
        log(closing + more, self.ranks.is_main)


def with_head_chunk(plan: CheckpointPlan, path: str, ranks: Ranks) -> CheckpointPlan:
    """Return the plan with --head_chunk_mb decided: as given, as the resumed run has it, or by the rank with the least
    free memory. path: of the model that is trained. A collective."""
    settings = plan.settings
    chunk_mb = settings["head_chunk_mb"] or plan.began_with("head_chunk_mb")
    if not chunk_mb and ranks.device.type != "cuda":
        chunk_mb = CHUNK_MB
    elif not chunk_mb:
        vocabulary = load_config(path, settings["trust_remote_code"]).get_text_config().vocab_size
        chunk_mb = chunk_mb_for(least_free_bytes(ranks), vocabulary, DTYPES[settings["dtype"]])
        log(
            f"the output layer computes {chunk_mb} MiB of logits at a time ({chunk_mb * 2**18 // vocabulary:,} tokens),"
            f" chosen from the free memory; set --head_chunk_mb {chunk_mb} for bit-identical results on other machines",
            ranks.is_main,
        )
    return plan.decided({"head_chunk_mb": chunk_mb})


_PACKAGES = ("torch", "deepspeed", "transformers")


def environment_of(device: str) -> dict[str, Any]:
    """The content of environment.json. device: in words."""
    versions = {"threestep": training.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # on the path without being installed
            versions[name] = importlib.metadata.version(name)
    started = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    commit = commit_of(Path(training.__file__).parents[1])
    return {"device": device, "started": started, "versions": versions, **({"commit": commit} if commit else {})}


def commit_of(root: Path) -> str | None:
    """The commit of a checkout, with a `+` where files of it are changed; None for what is no checkout."""
    git = shutil.which("git")
    if git is None or not (root / ".git").exists():
        return None
    words = "describe --always --abbrev=12 --exclude=* --dirty=+".split()
    command = [git, "--no-optional-locks", "-C", str(root), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):  # it refuses the folder
        return None
    return done.stdout.strip()
