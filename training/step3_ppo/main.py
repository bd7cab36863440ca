"""Step 3: PPO, GRPO and their relatives against the reward model.

    python -m training.step3_ppo.main --actor_model_name_or_path SFT_MODEL --critic_model_name_or_path REWARD_MODEL \\
        --data_path jsonl:prompts.jsonl --output_dir OUT
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from training.step3_ppo import STEP
from training.step3_ppo.flags.ppo_flags import PpoFlags
from training.utils.base.quick_imports import quick_imports
from training.utils.flags.added import figures_of_others
from training.utils.flags.arguments import parse_arguments, resolved_settings
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.run.program import run_program
from training.utils.setup.first_look import look_first

if TYPE_CHECKING:
    from training.utils.dry_run.estimate import Estimate, ModelCounts


def main(argv: Sequence[str], counts: ModelCounts | None = None) -> Estimate | None:
    """Parse and check the flags, then plan or run. With `counts`, a dry run returns its estimate."""
    flags = PpoFlags(*parse_arguments(STEP.groups, argv, __doc__ or "", STEP.old_flags, first_flags=STEP.first_flags))
    for path in (flags.roles.actor_model_name_or_path, flags.roles.critic_model_name_or_path):
        if path:
            check_model_folder(path)
    flags.reward.check_files()
    others = figures_of_others(resolved_settings(flags))
    look_first(STEP, flags.run, flags.saving, flags.data.source, has_other_figures=others)

    with quick_imports():
        from training.step3_ppo.flags.checks import checked_components

    components = checked_components(flags)
    if flags.run.dry_run:
        from training.step3_ppo.dry_run import dry_run, estimated

        if counts is not None:
            return estimated(flags, components, counts)
        dry_run(flags, components)
        return None
    with quick_imports():
        from training.step3_ppo.run import run

    run(flags, components)
    components.partners.close()
    return None


if __name__ == "__main__":
    run_program(main, output_is_log=True)
