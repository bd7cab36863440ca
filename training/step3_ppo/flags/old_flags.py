"""Flags of other programs that step 3 reads: DeepSpeed-Chat's here, and Hugging Face's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from training.step3_ppo.flags.hf_flags import HF_PPO_FLAGS
from training.utils.compat.old_flags import (
    DEEPSPEED_CHAT,
    HUGGING_FACE,
    OLD_FLAGS,
    Needless,
    OldFlag,
    Refused,
    Renamed,
    no_dropout,
    whole_number,
)


def _test_steps(_value: str, given: Mapping[str, str]) -> list[str]:
    steps = whole_number("--test_stop_step", given.get("--test_stop_step", "0"))
    return ["--max_train_steps", str(max(1, steps))]


_CONFIG = Refused("is for steps 1 and 2; step 3's two engines are configured by --actor_zero_stage, --offload, --dtype")

PPO_OLD_FLAGS: dict[str, OldFlag] = {
    **HF_PPO_FLAGS,
    **OLD_FLAGS,
    "--deepspeed": replace(
        _CONFIG, takes_list=True, unless=("", "true", "false"), whose=(DEEPSPEED_CHAT, HUGGING_FACE)
    ),
    "--deepspeed_config": _CONFIG,
    "--deepscale_config": _CONFIG,
    "--preprocessing_num_workers": Renamed("--num_workers"),
    "--per_device_train_batch_size": Renamed(
        "--per_device_generation_batch_size",
        "an older spelling",
        differs="DeepSpeed-Chat counts prompts, TRL counts responses",
        whose=(DEEPSPEED_CHAT, HUGGING_FACE),
    ),
    "--per_device_mini_train_batch_size": Renamed("--per_device_training_batch_size", "an older spelling"),
    "--generation_batch_numbers": Renamed("--generation_batches", "an older spelling"),
    "--disable_actor_dropout": no_dropout("actor_"),
    "--disable_critic_dropout": no_dropout("critic_"),
    "--enable_hybrid_engine": Needless(
        "rollouts decode with a cache at any ZeRO stage, and ZeRO-3 gathers the weights once a rollout; "
        "--rollout_engine hybrid asks for DeepSpeed's own engine",
        takes_value=False,
    ),
    "--unpin_actor_parameters": Needless("rollouts keep no second, pinned copy of the weights", takes_value=False),
    "--release_inference_cache": Needless("the cache of a rollout is freed when the rollout ends", takes_value=False),
    "--inference_tp_size": Needless(
        "every rank draws its own responses from whole weights, which ZeRO-3 gathers for a rollout; --dry_run tells "
        "whether a rank can hold them"
    ),
    "--tp_gather_partition_size": Needless("no layer is split over ranks"),
    "--enable_mixed_precision_lora": Needless(
        "frozen weights stay in --dtype, which ZeRO-3 shards over the ranks", takes_value=False
    ),
    "--align_overflow": Needless(
        "bf16, the default, has no overflow; with fp16 actor and critic each leave out their own step",
        takes_value=False,
    ),
    "--print_answers": Needless(
        "every evaluation writes prompts, answers and scores to OUTPUT_DIR/samples.jsonl", takes_value=False
    ),
    "--print_answers_interval": Needless("--eval_interval says how often samples.jsonl is added to"),
    "--enable_test_mode": Renamed(
        "--max_train_steps STEPS", "STEPS is --test_stop_step's", takes_value=False, words=_test_steps
    ),
    "--test_stop_step": Needless("with --enable_test_mode it is read as --max_train_steps, without it has no use"),
}
