"""Flags of a run, and of a step that trains one model, as records. Cheap to import: `--help` reaches this module."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_type_hints

from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.data.build.arguments import DataArguments
from training.utils.engine.config.arguments import SEQUENCES_OF_A_FORWARD, EngineArguments
from training.utils.flags.added import AddedFlags
from training.utils.flags.arguments import resolved_settings
from training.utils.flags.step import Step
from training.utils.models.arguments import ModelArguments
from training.utils.models.settings import ModelSettings
from training.utils.run.run_arguments import FaultArguments, RunArguments
from training.utils.run.trackers import LogArguments
from training.utils.setup.guests import GuestFeatures, guest_features


class RunFlags(NamedTuple):
    """The flags that every run has.

    settings: every value by its flag's name
    trains: False evaluates alone, and saves no model
    """

    step: Step
    run: RunArguments
    checkpoints: CheckpointArguments
    faults: FaultArguments
    data: DataArguments
    settings: dict[str, Any]
    trains: bool = True


@dataclass(frozen=True)
class OneModelFlags:
    """The parsed flags of a step: all groups, each of them by name, the step's own, and those that plugins add.

    settings: every value by its flag's name
    """

    step: Step
    groups: tuple[Any, ...]
    run: RunArguments
    checkpoints: CheckpointArguments
    faults: FaultArguments
    reporting: LogArguments
    data: DataArguments
    model: ModelArguments
    engine: EngineArguments
    of_step: Any
    added: AddedFlags = AddedFlags()

    @property
    def settings(self) -> dict[str, Any]:
        return resolved_settings(self.groups)

    @property
    def of_run(self) -> RunFlags:
        settings = self.settings
        if settings["per_device_train_batch_size"] is None:  # a resumed run is compared by the step's sequences
            settings["per_device_train_batch_size"] = SEQUENCES_OF_A_FORWARD
        return RunFlags(self.step, self.run, self.checkpoints, self.faults, self.data, settings)

    def with_forwards_of(self, sequences: int) -> OneModelFlags:
        """The flags with a step of as many sequences as by default, in forwards of so many of them."""
        step = SEQUENCES_OF_A_FORWARD * self.engine.gradient_accumulation_steps
        engine = replace(
            self.engine, per_device_train_batch_size=sequences, gradient_accumulation_steps=step // sequences
        )
        return replace(self, engine=engine)

    @property
    def start(self) -> ModelSettings:
        """Settings for loading the model to train."""
        new_head = getattr(self.of_step, "new_head", False)  # of the step that trains reward models
        return replace(self.model.settings(self.added), takes_media=self.step.reads_media, new_head=new_head)

    @property
    def guests(self) -> GuestFeatures:
        """Features that train beside the model, or add to its loss."""
        return guest_features(self)


# From `run` to `engine`. STEP.groups of such a step are these and its own, which has a learning_rate.
ONE_MODEL_GROUPS: tuple[type, ...] = tuple(get_type_hints(OneModelFlags).values())[2:-2]

# What a first run of such a step needs, in the order of `--help`.
FIRST_FLAGS = (
    "model_name_or_path",
    "data_path",
    "output_dir",
    "data_split",
    "max_seq_len",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "learning_rate",
    "num_train_epochs",
    "eval_interval",
    "num_ranks",
    "config",
)
