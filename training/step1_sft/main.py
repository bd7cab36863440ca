"""Step 1: supervised fine-tuning on chosen responses.

python -m training.step1_sft.main --model_name_or_path DIR --data_path jsonl:chosen.jsonl --output_dir OUT

The loss covers the tokens of the responses, or those of whole conversations (--loss_on conversation).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.step1_sft import STEP
from training.step1_sft.arguments import check_flags
from training.step1_sft.regularizer import regularizer_of
from training.utils.setup.step_program import one_model_program

if TYPE_CHECKING:
    from training.utils.setup.flags import OneModelFlags
    from training.utils.setup.training_run import TrainingResult, TrainingRun


def train(run: TrainingRun[Any], flags: OneModelFlags) -> TrainingResult:
    """Train on sentences."""
    from training.step1_sft.trainer import SftTrainer

    return SftTrainer(run, regularizer_of(flags.added)).train()


main = one_model_program(__name__, STEP, train, rows="sentences", check=check_flags)
