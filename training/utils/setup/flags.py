"""The flags of a step that trains one model, and checked flags of any step; choices for those that were left to `auto`.

Cheap to import: `--help` reaches this module.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from training.utils.base.user_files import named_object
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.data.arguments import DataArguments
from training.utils.engine.config.arguments import SEQUENCES_OF_A_FORWARD, EngineArguments
from training.utils.flags.added import AddedFlags
from training.utils.flags.arguments import resolved_settings
from training.utils.flags.step import Step
from training.utils.models.arguments import ModelArguments
from training.utils.models.settings import ModelSettings
from training.utils.plugins.registry import added
from training.utils.run.run_arguments import FaultArguments, RunArguments
from training.utils.run.trackers import LogArguments
from training.utils.setup.guests import GuestFeatures, guest_features

if TYPE_CHECKING:
    from training.utils.base.machine import PlannedDevice
    from training.utils.data.kinds.kind import RowKind
    from training.utils.flags.flags import AutoChoice


class OneModelFlags(NamedTuple):
    """The parsed flags of a step: its groups by name, in the order of `--help`, with the step's own and those that
    plugins add."""

    step: Step
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
        """Every value by its flag's name."""
        return resolved_settings(self[1:])

    def with_forwards_of(self, sequences: int) -> OneModelFlags:
        """The flags with a step of as many sequences as by default, in forwards of so many of them."""
        step = SEQUENCES_OF_A_FORWARD * self.engine.gradient_accumulation_steps
        engine = replace(
            self.engine, per_device_train_batch_size=sequences, gradient_accumulation_steps=step // sequences
        )
        return self._replace(engine=engine)

    @property
    def start(self) -> ModelSettings:
        """Settings for loading the model to train."""
        new_head = getattr(self.of_step, "new_head", False)  # of the step that trains reward models
        return replace(self.model.settings(self.added), takes_media=self.step.reads_media, new_head=new_head)

    @property
    def guests(self) -> GuestFeatures:
        """Features that train beside the model, or add to its loss."""
        return guest_features(self)


@dataclass(frozen=True)
class CheckedStep:
    """A step whose flags are parsed and checked; nothing is loaded.

    flags: `OneModelFlags`; of step 3 `PpoFlags`
    kind: of the rows of a step that trains one model. scores: that is a reward model
    components: of step 3, what the names in its flags select
    """

    flags: Any
    kind: RowKind | None = None
    scores: bool = False
    components: Any = None


def chosen_by_plugin(name: str, step: CheckedStep, device: PlannedDevice) -> AutoChoice | None:
    """Return the choice for a flag left to `auto`; None if no plugin makes it."""
    place = added("auto_choices", ()).get(name)
    return None if place is None else named_object(place)(step, device)


# From `run` to `engine`. STEP.groups of such a step are these and its own, which has a learning_rate.
ONE_MODEL_GROUPS: tuple[type, ...] = tuple(get_type_hints(OneModelFlags).values())[1:-2]

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
