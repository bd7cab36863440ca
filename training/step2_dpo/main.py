"""Step 2 without a reward model: direct preference optimisation of the policy itself, on the same ranked responses.

python -m training.step2_dpo.main --model_name_or_path SFT_MODEL --data_path jsonl:pairs.jsonl --output_dir OUT
"""

from training.step2_dpo import STEP
from training.step2_dpo.arguments import (
    DpoArguments,
    check_reference,
    kind_of_rows,
    needs_reference,
    objectives_of,
    schedule_of,
)
from training.utils.setup.one_model import OpenedModel, TrainingResult, one_model_program


def train(opened: OpenedModel, dpo: DpoArguments) -> TrainingResult:
    """Read the reference, train on pairs."""
    from training.step2_dpo.trainer import DpoTrainer
    from training.utils.preference.reference import open_references

    references = open_references(dpo.reference if needs_reference(dpo) else None, opened, dpo.ld_alpha)
    return DpoTrainer(opened.training, references, objectives_of(dpo), schedule_of(dpo)).train()


main = one_model_program(__name__, STEP, train, rows=kind_of_rows, rereads_start=needs_reference, check=check_reference)
