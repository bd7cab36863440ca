"""TRL's flags of GRPO, RLOO and PPO, and how step 3 reads them. docs/from_trl.md shows the table."""

from __future__ import annotations

from collections.abc import Mapping

from training.utils.base.errors import ThreestepError
from training.utils.compat.hf_flags import (
    HF_FLAGS,
    by_value,
    dataset_name,
    either_way,
    listed,
    lora,
    max_steps,
    needless_switch,
    number,
    refused,
    refused_switch,
    renamed,
    renamed_switch,
    same,
)
from training.utils.compat.old_flags import OldFlag, Same, Words

_NONE = ("none", "null", "")
_BATCHES = (
    "is another count here: --per_device_generation_batch_size prompts with --num_samples_per_prompt responses are a "
    "rollout, and --per_device_training_batch_size x --gradient_accumulation_steps sequences a minibatch"
)
_REFERENCE = "is not built; the reference stays the actor's start"
_COLOCATE = "vLLM runs beside training on the same GPUs"
_SERVER = "asks for vLLM's server, and here vLLM runs beside training on the same GPUs; leave it out"


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
    {"token": "a ratio is a token's, unless --policy_loss says otherwise", "sequence": ["--policy_loss", "gspo"]},
    "--importance_sampling_level expects token or sequence, got '{}'",
)
_CHECKPOINTING = either_way(
    ["--actor_gradient_checkpointing", "true", "--critic_gradient_checkpointing", "true"],
    ["--actor_gradient_checkpointing", "false", "--critic_gradient_checkpointing", "false"],
)


def _scale_rewards(value: str, _given: Mapping[str, str]) -> list[str]:
    if value.lower() == "batch":
        return ["--norm_adv_by_std", "true", "--norm_adv_over", "batch"]
    known = {"true": "true", "group": "true", "false": "false", "none": "false"}
    if value.lower() not in known:
        raise ThreestepError(f"--scale_rewards expects group (true), batch or none (false), got '{value}'")
    return ["--norm_adv_by_std", known[value.lower()]]


def _penalty(value: str, _given: Mapping[str, str]) -> str:
    if number("--repetition_penalty", value) != 1:
        raise ThreestepError(f"--repetition_penalty expects 1, got {value}: responses are drawn from the policy itself")
    return "responses are drawn from the policy itself"


HF_PPO_FLAGS: dict[str, OldFlag] = {
    **same("--temperature --top_k --top_p --min_p --chat_template_kwargs --gamma --lam --vllm_tensor_parallel_size"),
    **HF_FLAGS,
    **dataset_name("0,0,1"),
    **lora("--actor_lora_dim"),
    "--lora_target_modules": renamed(
        "--actor_lora_module_name", "parts of the layers' names, or all-linear", takes_list=True,
        words=listed("--actor_lora_module_name")
    ),
    "--max_steps": renamed(
        "--max_train_steps N --num_train_epochs inf", "it overrides --num_train_epochs; -1 asks for nothing",
        words=max_steps, overrides=("--num_train_epochs",),
        differs="step 3 counts rollouts with their updates"
    ),
    "--model_name_or_path": renamed("--actor_model_name_or_path", "the reference too"),
    "--sft_model_path": renamed("--actor_model_name_or_path"),
    "--reward_model_path": renamed("--critic_model_name_or_path", "where a critic is trained, its start too"),
    "--reward_model_name_or_path": renamed("--critic_model_name_or_path", "where a critic is trained, its start too"),
    "--reward_funcs": refused(
        "names TRL's functions or models; here --reward NAME:WEIGHT,... names rules, your own as FILE.py:NAME, and "
        "model, which is --critic_model_name_or_path's", takes_list=True
    ),
    "--reward_weights": refused("stands with the names here: --reward NAME:WEIGHT,...", takes_list=True),
    "--learning_rate": renamed("--actor_learning_rate", "--critic_learning_rate is the critic's"),
    "--weight_decay": renamed("--actor_weight_decay V --critic_weight_decay V", words=_of_both("weight_decay")),
    "--gradient_checkpointing": renamed_switch(
        "--actor_gradient_checkpointing --critic_gradient_checkpointing", words=_CHECKPOINTING, reads_false=True
    ),
    "--per_device_eval_batch_size": Same("prompts; default: 64"),
    "--gradient_accumulation_steps": Same(differs="of a minibatch, which is one optimizer step"),
    "--max_prompt_length": renamed(
        "--max_prompt_seq_len N --prompt_truncation left", "longer prompts are cut as TRL cuts them",
        words=_max_prompt_length
    ),
    "--max_completion_length": renamed("--max_answer_seq_len"),
    "--response_length": renamed("--max_answer_seq_len"),
    "--max_length": refused(
        "is two lengths here: --max_prompt_seq_len of a prompt, --max_answer_seq_len of a response", unless=_NONE
    ),
    "--num_generations": renamed("--num_samples_per_prompt", "default: 1, not 8"),
    "--num_generations_eval": renamed("--val_samples"),
    "--generation_batch_size": refused(_BATCHES, unless=_NONE),
    "--steps_per_generation": refused(_BATCHES, unless=_NONE),
    "--num_mini_batches": refused(_BATCHES),
    "--num_iterations": renamed("--ppo_epochs"),
    "--num_ppo_epochs": renamed("--ppo_epochs", "default: 1, not 4"),
    "--repetition_penalty": renamed("no penalty", "1 alone; others are refused", words=_penalty),
    "--generation_kwargs": refused(
        "is a dictionary in TRL; here --temperature, --top_k, --top_p, --min_p, --stop and --bad_words are flags",
        takes_list=True, unless=_NONE
    ),
    "--beta": renamed(
        "--kl_coef V --kl_in loss", "GRPO's KL is k3 in the loss; default: 0.1 in the reward", words=_beta
    ),
    "--kl_coef": Same("default: 0.1, not 0.05"),
    "--epsilon": renamed("--clip_range"),
    "--epsilon_high": renamed("--clip_range_high"),
    "--cliprange": renamed("--clip_range"),
    "--cliprange_value": renamed("--clip_range_value"),
    "--delta": renamed("--dual_clip", differs="the bound holds where the advantage is negative"),
    "--missing_eos_penalty": Same("default: 0, none"),
    "--whiten_rewards": refused_switch("is not built; --whiten_advantages is"),
    "--loss_type": renamed(
        "--loss_aggregation or --policy_loss",
        "grpo: seq-mean-token-mean; dapo, bnpo: token-mean; dr_grpo: seq-mean-token-sum-norm; cispo and sapo are "
        "policy losses",
        words=by_value(_LOSSES, f"--loss_type expects one of {', '.join(_LOSSES)} in step 3, got '{{}}'"),
        differs="token-mean counts the tokens of the whole optimizer step, where bnpo counts a micro-batch's"
    ),
    "--scale_rewards": renamed(
        "--norm_adv_by_std", "group: true; none: false; batch: with --norm_adv_over batch", words=_scale_rewards
    ),
    "--importance_sampling_level": renamed(
        "--policy_loss gspo", "sequence; token is the default", words=_RATIOS,
        differs="gspo's clip is its authors' unless --epsilon is given"
    ),
    "--mask_truncated_completions": renamed_switch(
        "--mask_truncated_responses", words=either_way(["--mask_truncated_responses", "true"])
    ),
    "--sapo_temperature_neg": renamed("--sapo_tau_neg"),
    "--sapo_temperature_pos": renamed("--sapo_tau_pos"),
    "--sync_ref_model": refused_switch(_REFERENCE),
    "--use_vllm": renamed_switch(
        "--rollout_engine vllm", words=either_way(["--rollout_engine", "vllm"], "--rollout_engine says what draws"),
        reads_false=True
    ),
    "--vllm_mode": renamed(
        "colocate", "server is refused",
        words=by_value({"colocate": _COLOCATE}, f"--vllm_mode {{}} {_SERVER}, or give colocate")
    ),
    "--vllm_gpu_memory_utilization": renamed("--vllm_memory_share"),
    "--vllm_enable_sleep_mode": renamed_switch(
        "--vllm_sleep", "default: on", reads_false=True,
        words=either_way(["--vllm_sleep", "true"], ["--vllm_sleep", "false"])
    ),
    "--vllm_importance_sampling_correction": renamed_switch(
        "--mismatch_correction truncate", "the default with vLLM; false: none", reads_false=True,
        words=either_way(["--mismatch_correction", "truncate"], ["--mismatch_correction", "none"])
    ),
    "--vllm_importance_sampling_cap": renamed("--mismatch_threshold"),
    "--log_completions": needless_switch(
        "every evaluation writes prompts, answers and scores to OUTPUT_DIR/samples.jsonl"
    ),
    "--num_completions_to_print": renamed("--show_samples"),
}  # fmt: skip
