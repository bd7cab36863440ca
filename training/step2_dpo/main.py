"""Step 2 without a reward model: direct preference optimization of the policy itself on the same ranked responses.

python -m training.step2_dpo.main --model_name_or_path SFT_MODEL --data_path jsonl:pairs.jsonl --output_dir OUT
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from training.step2_dpo import STEP
from training.step2_dpo.arguments import (
    DpoArguments,
    check_marks,
    check_reference,
    kind_of_rows,
    needs_reference,
    objectives_of,
    schedule_of,
)
from training.step2_dpo.loss import reads_mismatched
from training.utils.setup.step_program import one_model_program

if TYPE_CHECKING:
    from training.utils.setup.flags import OneModelFlags
    from training.utils.setup.training_run import TrainingResult, TrainingRun


def train(run: TrainingRun[Any], flags: OneModelFlags) -> TrainingResult:
    """Read the reference, train on pairs."""
    from training.step2_dpo.trainer import DpoTrainer, Mismatch
    from training.utils.preference.batches import mismatched
    from training.utils.preference.reference import open_references

    dpo: DpoArguments = flags.of_step
    reference, objectives = dpo.reference if needs_reference(dpo) else None, objectives_of(dpo)
    references, others = open_references(reference, run, flags, dpo.ld_alpha), None
    if reads_mismatched(objectives):
        most = flags.data.rows.max_seq_len
        others = Mismatch(mismatched(run, most), open_references(reference, run, flags, most_tokens=most))
    return DpoTrainer(run, references, objectives, schedule=schedule_of(dpo), others=others).train()


main = one_model_program(
    __name__,
    STEP,
    train,
    rows=kind_of_rows,
    rereads_start=needs_reference,
    check=check_reference,
    check_rows=check_marks,
)
