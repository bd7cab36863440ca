"""TRL's flags of GRPO, RLOO and PPO, and how step 3 reads them. trl_flags.md shows the table."""

from __future__ import annotations

from collections.abc import Mapping

from threestep.plugins.names.hf_batches import FORWARD, PROMPTS, is_trls, prompts, rollouts
from threestep.plugins.names.hf_field_flags import PPO_FIELDS
from threestep.plugins.names.hf_flags import HF_FLAGS, dataset_name, lora, max_steps, zero_stages
from threestep.plugins.names.hf_rewards import reward_words, weight_words
from threestep.plugins.names.hf_words import (
    NO_VALUE,
    by_value,
    either_way,
    listed,
    needless_switch,
    number,
    refused,
    refused_switch,
    renamed,
    renamed_switch,
    same,
)
from threestep.plugins.names.other_names import DEEPSPEED_CHAT, HUGGING_FACE, OldFlag, Same, Words, is_false
from training.utils.base.errors import ThreestepError

_COLOCATE = "vLLM runs beside training on the same GPUs"
_SERVER = "selects TRL's own server; instead, use --rollout_engine vllm_server --vllm_servers URLS"


def _of_both(name: str) -> Words:
    """For a flag that actor and critic have each."""
    return lambda value, _given: [word for role in ("actor", "critic") for word in (f"--{role}_{name}", value)]


def _beta(value: str, given: Mapping[str, str]) -> list[str]:
    return ["--kl_coef", value, *([] if "--kl_in" in given else ["--kl_in", "loss"])]


def _max_prompt_length(value: str, given: Mapping[str, str]) -> list[str]:
    cut = [] if "--prompt_truncation" in given else ["--prompt_truncation", "left"]
    return ["--max_prompt_seq_len", value, *cut]


_LOSSES = {
    "grpo": ["--loss_aggregation", "seq-mean-token-mean"],
    "dapo": ["--loss_aggregation", "token-mean"],
    "bnpo": ["--loss_aggregation", "token-mean"],
    "dr_grpo": ["--loss_aggregation", "seq-mean-token-sum-norm"],
    "cispo": ["--policy_loss", "cispo"],
    "sapo": ["--policy_loss", "sapo"],
}
_RATIOS = by_value(
    {"token": "ratios are per token unless --policy_loss says otherwise", "sequence": ["--policy_loss", "gspo"]},
    "--importance_sampling_level expects token or sequence, got '{}'",
)
_CHECKPOINTING = either_way(
    ["--actor_gradient_checkpointing", "true", "--critic_gradient_checkpointing", "true"],
    ["--actor_gradient_checkpointing", "false", "--critic_gradient_checkpointing", "false"],
)


_MODES = {
    f"{level}_{correction}": ["--mismatch_correction", correction, "--mismatch_level", level]
    for level in ("token", "sequence")
    for correction in ("truncate", "mask")
}
_AGGREGATION = by_value(
    {"sum_then_normalize": "the weighted rewards are summed and then turned into advantages"},
    "--multi_objective_aggregation expects sum_then_normalize, the only supported way, got '{}'",
)


def _counted(value: str, given: Mapping[str, str]) -> list[str] | str:
    """TRL's counts that decide how many prompts a rollout has."""
    return "this is the default" if value.lower() in NO_VALUE else [PROMPTS, str(prompts(given))]


def _train_batch(value: str, given: Mapping[str, str]) -> list[str]:
    return [FORWARD if is_trls(given) else PROMPTS, value]


def _max_steps(value: str, given: Mapping[str, str]) -> list[str] | str:
    words = max_steps(value, given)
    if not isinstance(words, str) and is_trls(given):
        words[1] = str(rollouts(int(number("--max_steps", value)), given))
    return words


def _correction(value: str, given: Mapping[str, str]) -> list[str] | str:
    if not is_false(value) and "--vllm_importance_sampling_mode" in given:
        return "--vllm_importance_sampling_mode sets how"
    return ["--mismatch_correction", "none" if is_false(value) else "truncate"]


def _correction_mode(value: str, given: Mapping[str, str]) -> list[str] | str:
    if is_false(given.get("--vllm_importance_sampling_correction", "true") or "true"):
        return "--vllm_importance_sampling_correction is false"
    if value not in _MODES:
        raise ThreestepError(
            f"--vllm_importance_sampling_mode expects one of {', '.join(_MODES)}, got '{value}'; choose one of these"
        )
    return _MODES[value]


def _or_none(flag: str) -> Words:
    return lambda value, _given: "there is none by default" if value.lower() in NO_VALUE else [flag, value]


def _tool_calls(value: str, _given: Mapping[str, str]) -> list[str] | str:
    if value.lower() in NO_VALUE:
        return "--max_turns limits the model's turns"
    return ["--max_turns", f"{number('--max_tool_calling_iterations', value) + 1:g}"]


def _kl_correction(value: str, given: Mapping[str, str]) -> list[str] | str:
    if not {"--beta", "--kl_in"} & given.keys():
        return "it applies to the KL in the loss, which --beta turns on"
    return ["--kl_estimator", "k3" if is_false(value) else "k3+"]


def _gathered(value: str, _given: Mapping[str, str]) -> str:
    if is_false(value):
        raise ThreestepError(
            "--no_ds3_gather_for_generation is not supported, because ZeRO-3 gathers the weights once per "
            "rollout; use --dry_run true to see whether they fit on a rank"
        )
    return "ZeRO-3 gathers the weights once per rollout"


def _scale_rewards(value: str, _given: Mapping[str, str]) -> list[str]:
    if value.lower() == "batch":
        return ["--norm_adv_by_std", "true", "--norm_adv_over", "batch"]
    known = {"true": "true", "group": "true", "false": "false", "none": "false"}
    if value.lower() not in known:
        raise ThreestepError(
            f"--scale_rewards expects group (true), batch or none (false), got '{value}'; choose one of these"
        )
    return ["--norm_adv_by_std", known[value.lower()]]


def _penalty(value: str, _given: Mapping[str, str]) -> str:
    if number("--repetition_penalty", value) != 1:
        raise ThreestepError(
            f"--repetition_penalty must be 1, got {value}, because responses are generated from the policy itself; "
            "leave it out"
        )
    return "responses are generated from the policy itself"


HF_PPO_FLAGS: dict[str, OldFlag] = {
    **same(
        "--temperature --top_k --top_p --min_p --chat_template_kwargs --gamma --lam --vllm_tensor_parallel_size "
        "--entropy_coef"
    ),
    **HF_FLAGS,
    **PPO_FIELDS,
    **zero_stages("--actor_zero_stage", "--critic_zero_stage"),
    **dataset_name("0,0,1"),
    **lora("--actor_lora_dim"),
    "--lora_target_modules": renamed(
        "--actor_lora_module_name", "parts of layer names, or all-linear", takes_list=True,
        words=listed("--actor_lora_module_name")
    ),
    "--max_steps": renamed(
        "--max_train_steps N --num_train_epochs inf", "overrides --num_train_epochs; -1 sets no limit",
        words=_max_steps, overrides=("--num_train_epochs",),
        differs="step 3 counts rollouts with their updates, so TRL's number of steps is converted"
    ),
    "--model_name_or_path": renamed("--actor_model_name_or_path", "the reference too"),
    "--sft_model_path": renamed("--actor_model_name_or_path"),
    "--reward_model_path": renamed("--critic_model_name_or_path", "if a critic is trained, also its initial model"),
    "--reward_model_name_or_path": renamed(
        "--critic_model_name_or_path", "if a critic is trained, also its initial model"
    ),
    "--reward_funcs": renamed(
        "--reward NAME:WEIGHT,...",
        "accuracy_reward becomes math, on the column solution; think_format_reward becomes regex; MODULE.NAME "
        "becomes FILE.py:NAME",
        takes_list=True, words=reward_words
    ),
    "--reward_weights": renamed("--reward NAME:WEIGHT,...", takes_list=True, words=weight_words),
    "--learning_rate": renamed("--actor_learning_rate", "--critic_learning_rate sets the critic's"),
    "--weight_decay": renamed("--actor_weight_decay V --critic_weight_decay V", words=_of_both("weight_decay")),
    "--gradient_checkpointing": renamed_switch(
        "--actor_gradient_checkpointing --critic_gradient_checkpointing", words=_CHECKPOINTING, reads_false=True
    ),
    "--per_device_eval_batch_size": Same("prompts; default: 64"),
    "--gradient_accumulation_steps": Same(differs="in a minibatch, which is one optimizer step"),
    "--max_prompt_length": renamed(
        "--max_prompt_seq_len N --prompt_truncation left", "longer prompts are cut in the same way as in TRL",
        words=_max_prompt_length
    ),
    "--max_completion_length": renamed("--max_answer_seq_len"),
    "--response_length": renamed("--max_answer_seq_len"),
    "--max_length": refused(
        "is split in two here: --max_prompt_seq_len for the prompt, --max_answer_seq_len for the response",
        unless=NO_VALUE
    ),
    "--num_generations": renamed(
        "--num_samples_per_prompt", "the default is 8; for rloo, 2"
    ),
    "--per_device_train_batch_size": renamed(
        FORWARD, "completions per forward, with any flag that only TRL has (--num_generations, --reward_funcs, "
        f"...); otherwise, it is DeepSpeed-Chat's older name for {PROMPTS}", words=_train_batch,
        whose=(DEEPSPEED_CHAT, HUGGING_FACE)
    ),
    "--num_generations_eval": renamed("--val_samples"),
    "--generation_batch_size": renamed(
        f"{PROMPTS} P", "completions on all ranks; P prompts have this number", words=_counted
    ),
    "--steps_per_generation": renamed(
        f"{PROMPTS} P", "forwards per rollout; P prompts have this number of completions", words=_counted
    ),
    "--num_mini_batches": renamed(
        f"{PROMPTS} P", "optimizer steps per rollout (PPO); P prompts fill them", words=_counted
    ),
    "--max_tool_calling_iterations": renamed("--max_turns N+1", "the last turn makes no calls", words=_tool_calls),
    "--multi_objective_aggregation": renamed(
        "one way", "sum_then_normalize; normalize_then_sum is refused", words=_AGGREGATION
    ),
    "--normalize_advantages": renamed_switch(
        "--whiten_advantages", reads_false=True,
        words=either_way(["--whiten_advantages", "true"], ["--whiten_advantages", "false"])
    ),
    "--use_bias_correction_kl": renamed_switch(
        "--kl_estimator k3+", "with --beta; false: k3", words=_kl_correction, reads_false=True,
        differs="the gradient is that of the policy that generated the rollout"
    ),
    "--ds3_gather_for_generation": renamed_switch(
        "ZeRO-3 gathers", "false is refused", words=_gathered, reads_false=True
    ),
    "--disable_dropout": renamed_switch(
        "--actor_dropout 0.0 --critic_dropout 0.0", reads_false=True,
        words=either_way(
            ["--actor_dropout", "0.0", "--critic_dropout", "0.0"], "dropout is 0 unless --actor_dropout sets it"
        ),
    ),
    "--shuffle_dataset": renamed_switch(
        "--shuffle", "by default", words=either_way(["--shuffle", "true"], ["--shuffle", "false"]), reads_false=True
    ),
    "--num_iterations": renamed("--ppo_epochs"),
    "--num_ppo_epochs": renamed("--ppo_epochs", "default: 1, not 4"),
    "--repetition_penalty": renamed("no penalty", "only 1; others are refused", words=_penalty),
    "--generation_kwargs": refused(
        "is a dictionary in TRL; here --temperature, --top_k, --top_p, --min_p, --stop and --bad_words are "
        "separate flags",
        takes_list=True, unless=NO_VALUE
    ),
    "--beta": renamed(
        "--kl_coef V --kl_in loss", "GRPO's KL uses the k3 estimator in the loss; default: 0.1 in the reward",
        words=_beta
    ),
    "--kl_coef": Same("default: 0.1, not 0.05"),
    "--epsilon": renamed("--clip_range"),
    "--epsilon_high": renamed("--clip_range_high"),
    "--cliprange": renamed("--clip_range"),
    "--cliprange_value": renamed("--clip_range_value"),
    "--delta": renamed("--dual_clip", differs="the bound applies where the advantage is negative"),
    "--missing_eos_penalty": Same("default: 0, none"),
    "--whiten_rewards": refused_switch("is not supported; --whiten_advantages is"),
    "--loss_type": renamed(
        "--loss_aggregation or --policy_loss",
        "grpo: seq-mean-token-mean; dapo, bnpo: token-mean; dr_grpo: seq-mean-token-sum-norm; cispo and sapo are "
        "policy losses",
        words=by_value(_LOSSES, f"--loss_type expects one of {', '.join(_LOSSES)} in step 3, got '{{}}'; a loss of "
        "your own is a --policy_loss"),
        differs="token-mean counts the tokens of the whole optimizer step, whereas bnpo counts those of a micro-batch"
    ),
    "--scale_rewards": renamed(
        "--norm_adv_by_std", "group: true; none: false; batch: with --norm_adv_over batch", words=_scale_rewards
    ),
    "--importance_sampling_level": renamed(
        "--policy_loss gspo", "sequence; token is the default", words=_RATIOS,
        differs="gspo uses its authors' clip range unless --epsilon is given"
    ),
    "--mask_truncated_completions": renamed_switch(
        "--mask_truncated_responses", words=either_way(["--mask_truncated_responses", "true"])
    ),
    "--sapo_temperature_neg": renamed("--sapo_tau_neg"),
    "--sapo_temperature_pos": renamed("--sapo_tau_pos"),
    "--use_vllm": renamed_switch(
        "--rollout_engine vllm", words=either_way(["--rollout_engine", "vllm"], "--rollout_engine chooses the engine"),
        reads_false=True
    ),
    "--vllm_mode": renamed(
        "colocate", "server is refused",
        words=by_value({"colocate": _COLOCATE}, f"--vllm_mode {{}} {_SERVER}, or use colocate")
    ),
    "--vllm_gpu_memory_utilization": renamed("--vllm_memory_share"),
    "--vllm_enable_sleep_mode": renamed_switch(
        "--vllm_sleep", "default: on", reads_false=True,
        words=either_way(["--vllm_sleep", "true"], ["--vllm_sleep", "false"])
    ),
    "--vllm_importance_sampling_correction": renamed_switch(
        "--mismatch_correction truncate", "the default with vLLM; false: none", reads_false=True, words=_correction
    ),
    "--vllm_importance_sampling_mode": renamed(
        "--mismatch_correction --mismatch_level", "truncate or mask, per token or sequence; default: token_truncate",
        words=_correction_mode
    ),
    "--vllm_importance_sampling_cap": renamed("--mismatch_threshold", words=_or_none("--mismatch_threshold")),
    "--vllm_importance_sampling_clip_max": renamed(
        "--mismatch_threshold", "default: 2, not 3", words=_or_none("--mismatch_threshold")
    ),
    "--vllm_importance_sampling_clip_min": renamed(
        "--mismatch_threshold_lower", words=_or_none("--mismatch_threshold_lower")
    ),
    "--log_completions": needless_switch(
        "every evaluation writes prompts, responses and scores to OUTPUT_DIR/samples.jsonl"
    ),
    "--num_completions_to_print": renamed("--show_samples"),
}  # fmt: skip
