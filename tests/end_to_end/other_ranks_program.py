"""Run as `python -m tests.end_to_end.other_ranks_program PLACE [NAMES]`: each chain, or those of LONG of these names,
once unbroken, and once stopped after each of its first steps and gone on with on another number of ranks, other ZeRO
stages, and with rows over other numbers of ranks. Each leaves folders in PLACE."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.forked_runs import Files, import_everything, make_files, run, start_flags

STEPS = 4


@dataclass(frozen=True)
class Chain:
    """places: (ranks, ZeRO stage, ranks that share a row) of each part, the first also of the unbroken run."""

    name: str
    program: str
    places: tuple[tuple[int, int, int], ...]
    more: str = ""


_GRPO = "--advantage grpo --num_samples_per_prompt 2"
CHAINS = (
    Chain("sft", "sft", ((2, 2, 1), (1, 3, 1)), "--weight_decay 0.1 --mtp_num_layers 2 --mtp_detach false"),
    # The actor's first checkpoint is from before its first update: the critic warms up.
    Chain(
        "ppo",
        "ppo",
        ((2, 3, 1), (1, 0, 1)),
        "--enable_ema --ema_decay 0.5 --actor_weight_decay 0.1 --critic_warmup 1 --mtp_num_layers 1",
    ),
    # Half of the groups are equal, and the sampler has seen what replaced them.
    Chain(
        "drawn",
        "ppo",
        ((1, 0, 1), (2, 2, 2)),
        f"{_GRPO} --dynamic_sampling_tries 2 --reward regex --reward_regex e "
        "--prompt_sampler examples/curriculum.py:WorstAgain --adam_epsilon 1e-3 --actor_learning_rate 1e-2",
    ),
)

# Rows over two ranks, then over one, then over four; and the other way.
_DOWN, _UP = ((2, 2, 2), (1, 0, 1), (4, 3, 4), (4, 2, 2)), ((1, 0, 1), (4, 3, 4), (2, 1, 2), (4, 2, 2))
LONG = (
    Chain("sft_down", "sft", _DOWN),
    Chain("sft_up", "sft", _UP, "--mtp_num_layers 1"),
    Chain("reward_up", "reward", _UP),
    Chain("dpo_down", "dpo", _DOWN),
    Chain("ppo_down", "ppo", _DOWN, "--enable_ema --ema_decay 0.5 --critic_warmup 1"),
    Chain(
        "ppo_up", "ppo", _UP, "--advantage grpo --num_samples_per_prompt 2 --reward length --reward_length_characters 9"
    ),
)


def flags(chain: Chain, place: tuple[int, int, int], files: Files) -> list[str]:
    """Four sequences an optimizer step on any number of ranks. Float32 and no dropout: what differs is rounding."""
    ranks, stage, sharing = place
    dealt = ranks if chain.program == "ppo" else ranks // sharing  # step 3 draws on every rank
    batch = min(2, 4 // dealt)
    shared = (
        f"{start_flags(chain.program, files)} --eval_fraction 0.2 --dtype fp32 "
        f"--max_train_steps {STEPS} --num_train_epochs 9 --gradient_accumulation_steps {4 // dealt // batch} "
        f"--max_seq_len 100 --sequence_parallel_size {sharing}"
    )
    if chain.program == "ppo":
        own = (
            f"--actor_zero_stage {stage} --critic_zero_stage {3 - stage} --per_device_training_batch_size {batch} "
            f"--per_device_generation_batch_size {4 // ranks} --max_answer_seq_len 6 --kl_control adaptive "
            "--kl_target 0.1 --kl_horizon 100 --actor_learning_rate 1e-4 --critic_learning_rate 1e-4 "
            f"--unsupervised_dataset_name jsonl:{files.texts}"
        )
    else:
        own = f"--zero_stage {stage} --per_device_train_batch_size {batch} --learning_rate 1e-3 --eval_interval 2"
    return [*shared.split(), *own.split(), *chain.more.split()]


def main(place: Path, names: list[str]) -> None:
    import_everything()
    files = make_files(place, rows=60, heads=4 if names else 2)
    for chain in [chain for chain in LONG if chain.name in names] or CHAINS:
        folders = ["--data_output_path", str(place / "cache"), "--output_dir"]
        begun = flags(chain, chain.places[0], files)
        whole = run(chain.program, chain.places[0][0], [*begun, *folders, str(place / chain.name)], place / "log.txt")
        assert not any(whole.codes), whole.said
        for number, at in enumerate(chain.places):
            own = [*flags(chain, at, files), *folders, str(place / f"{chain.name}_moved"), "--resume"]
            if number + 1 < len(chain.places):
                own += ["--stop_before", "1s"]  # time is always short: it ends after its first step
            part = run(chain.program, at[0], own, place / f"{chain.name}_{number}.txt")
            assert not any(part.codes), part.said


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
