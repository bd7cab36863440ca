"""Step 2 without a reward model: direct preference optimisation of the policy itself, on the same ranked responses.

python -m training.step2_dpo.main --model_name_or_path SFT_MODEL --data_path jsonl:pairs.jsonl --output_dir OUT
"""

from training.step2_dpo import STEP
from training.step2_dpo.arguments import DpoArguments
from training.utils.opening.one_model import OneModelFlags, one_model, one_model_program
from training.utils.preference.arguments import check_reference
from training.utils.run.program import run_program


@one_model_program(STEP, __doc__, responses=2, check=check_reference)
def main(flags: OneModelFlags, dpo: DpoArguments) -> None:
    """Open the run, read the reference, train on pairs, save."""
    from training.step2_dpo.trainer import DpoTrainer
    from training.utils.preference.reference import open_references

    with one_model(flags, phase=2, rereads_start=True) as opened:
        references = open_references(dpo.reference, opened)
        result = DpoTrainer(opened.training, references, dpo.objective()).train()
        opened.finish(result)


if __name__ == "__main__":
    run_program(main)
