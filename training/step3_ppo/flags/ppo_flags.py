"""All flags of step 3, as its programs receive them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from training.step3_ppo.advantages import NO_ADVANTAGE
from training.step3_ppo.flags.arguments import AlgorithmArguments, PpoArguments
from training.step3_ppo.flags.roles_arguments import RolesArguments
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.arguments import CheckpointArguments
from training.utils.data.arguments import RolloutDataArguments
from training.utils.flags.added import AddedFlags
from training.utils.flags.arguments import resolved_settings
from training.utils.generation.table import RolloutEngineFlags
from training.utils.plugins.registry import asked_for
from training.utils.rewards.arguments import ScoringArguments
from training.utils.run.run_arguments import FaultArguments, RunArguments
from training.utils.run.trackers import LogArguments
from training.utils.setup.guests import GuestFeatures, guest_features

if TYPE_CHECKING:
    from training.utils.contracts.rollout_engine import RolloutEngine, RolloutSettings
    from training.utils.models.settings import ModelSettings


class PpoFlags(NamedTuple):
    """The groups of flags, in the order of `--help`."""

    run: RunArguments
    checkpoints: CheckpointArguments
    faults: FaultArguments
    reporting: LogArguments
    data: RolloutDataArguments
    roles: RolesArguments
    ppo: PpoArguments
    algorithm: AlgorithmArguments
    reward: ScoringArguments
    engines: RolloutEngineFlags
    added: AddedFlags = AddedFlags()

    @property
    def settings(self) -> dict[str, Any]:
        """Every value by its flag's name."""
        return resolved_settings(self)

    def model(self, role: str) -> ModelSettings:
        """role: actor or critic."""
        return self.roles.model(role, self.added)

    @property
    def trains_critic(self) -> bool | None:
        """None where --advantage is unknown."""
        from training.step3_ppo.flags.algorithm import estimator_named

        try:
            return estimator_named(self.algorithm.advantage).needs_critic
        except ThreestepError:
            return None

    @property
    def longest_tokens(self) -> int:
        """The maximum number of tokens of a prompt with its response."""
        return self.data.rows.max_prompt_seq_len + self.ppo.max_answer_seq_len

    @property
    def prompt_source(self) -> str | None:
        """The address of the opener of the prompt source (`prompt_sources` of plugins); None for the dataset."""
        return asked_for("prompt_sources", self.settings, "prompts can have only one source")[1]

    @property
    def guests(self) -> GuestFeatures:
        """Features that train beside actor and critic, or add to their losses."""
        return guest_features(self)

    @property
    def needs_no_reward(self) -> bool:
        """The actor learns from a guest's loss and nothing else."""
        unset = type(self.reward)()
        is_unset = (self.reward.reward, self.reward.combination) == (unset.reward, unset.combination)
        return self.algorithm.advantage == NO_ADVANTAGE and is_unset and not self.roles.critic_model_name_or_path

    def settings_of_engine(self, engine: type[RolloutEngine]) -> RolloutSettings:
        """Return the settings of --rollout_engine, which selects `engine`."""
        from training.utils.contracts.rollout_engine import RolloutSettings  # torch, which --help does without

        return RolloutSettings(self.longest_tokens, self.engines.of(engine.arguments))
