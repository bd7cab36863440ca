"""Step 1: supervised fine-tuning on chosen responses.

python -m training.step1_sft.main --model_name_or_path DIR --data_path jsonl:chosen.jsonl --output_dir OUT

The loss falls on the tokens of the responses, or of whole conversations (--loss_on conversation).
"""

from training.step1_sft import STEP
from training.step1_sft.arguments import SftArguments
from training.utils.opening.one_model import OneModelFlags, one_model, one_model_program
from training.utils.run.program import run_program


@one_model_program(STEP, __doc__)
def main(flags: OneModelFlags, sft: SftArguments) -> None:
    """Open the run, train on sentences, save."""
    from training.step1_sft.trainer import SftTrainer

    with one_model(flags, phase=1) as opened:
        trainer = SftTrainer(opened.training, sft.settings())
        opened.finish(trainer.train())


if __name__ == "__main__":
    run_program(main)
