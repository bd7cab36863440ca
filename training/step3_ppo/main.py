"""Step 3: PPO, GRPO and related algorithms with a reward model or other rewards.

    python -m training.step3_ppo.main --actor_model_name_or_path SFT_MODEL --critic_model_name_or_path REWARD_MODEL \\
        --data_path jsonl:prompts.jsonl --output_dir OUT
"""

from __future__ import annotations

from collections.abc import Sequence

from training.step3_ppo import STEP
from training.step3_ppo.flags.ppo_flags import PpoFlags
from training.utils.flags.arguments import parse_arguments
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.run.program import quick_imports, run_program
from training.utils.setup.flags import CheckedStep
from training.utils.setup.step_program import StepProgram, look_first


def checked(argv: Sequence[str]) -> CheckedStep:
    """Parse and check the flags."""
    flags = PpoFlags(
        *parse_arguments(
            STEP.groups, argv, __doc__ or "", STEP.old_flags, first_flags=STEP.first_flags, unread=STEP.set_aside
        )
    )
    for path in (flags.roles.actor_model_name_or_path, flags.roles.critic_model_name_or_path):
        if path:
            check_model_folder(path)
    flags.reward.check_files()
    look_first(STEP, flags)
    with quick_imports():
        from training.step3_ppo.flags.checks import checked_components

    return CheckedStep(flags, components=checked_components(flags))


def train(step: CheckedStep) -> None:
    """Train."""
    with quick_imports():
        from training.step3_ppo.run import run

    run(step.flags, step.components)
    step.components.partners.close()


main = StepProgram(checked, train)

if __name__ == "__main__":
    run_program(main, output_is_log=True)
