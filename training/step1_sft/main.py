"""Step 1: supervised fine-tuning on chosen responses.

python -m training.step1_sft.main --model_name_or_path DIR --data_path jsonl:chosen.jsonl --output_dir OUT

The loss falls on the tokens of the responses, or of whole conversations (--loss_on conversation).
"""

from training.step1_sft import STEP
from training.step1_sft.arguments import SftArguments, check_flags
from training.step1_sft.regularizer import regularizer_of
from training.utils.setup.one_model import OpenedModel, TrainingResult, one_model_program


def train(opened: OpenedModel, sft: SftArguments) -> TrainingResult:
    """Train on sentences."""
    from training.step1_sft.trainer import SftTrainer

    return SftTrainer(opened.training, regularizer_of(opened.flags.added)).train()


main = one_model_program(__name__, STEP, train, rows="sentences", check=check_flags)
