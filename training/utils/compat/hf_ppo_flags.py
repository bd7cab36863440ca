"""TRL's flags of GRPO, RLOO and PPO, and how step 3 reads them. docs/from_trl.md shows the table."""

from __future__ import annotations

from collections.abc import Mapping

from training.utils.base.errors import ThreestepError
from training.utils.compat.hf_flags import (
    HF_FLAGS,
    dataset_name,
    either_way,
    lora,
    needless,
    number,
    refused,
    renamed,
    switch_as,
)
from training.utils.compat.old_flags import OldFlag, Same, Words, is_false

_NONE = ("none", "null", "")
_BATCHES = (
    "is another count here: --per_device_generation_batch_size prompts with --num_samples_per_prompt responses are a "
    "rollout, and --per_device_training_batch_size x --gradient_accumulation_steps sequences a minibatch"
)
_REFERENCE = "is not built; the reference stays the actor's start"
_SERVER = "asks for vLLM's server, and here vLLM runs beside training on the same GPUs; leave it out"


def _of_both(name: str) -> Words:
    """For a flag that actor and critic have each."""
    return lambda value, _given: [word for role in ("actor", "critic") for word in (f"--{role}_{name}", value)]


def _checkpointing(value: str, _given: Mapping[str, str]) -> list[str]:
    on = "false" if is_false(value) else "true"
    return [word for role in ("actor", "critic") for word in (f"--{role}_gradient_checkpointing", on)]


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


def _loss_type(value: str, _given: Mapping[str, str]) -> list[str]:
    if value not in _LOSSES:
        raise ThreestepError(f"--loss_type expects one of {', '.join(_LOSSES)} in step 3, got '{value}'")
    return _LOSSES[value]


def _scale_rewards(value: str, _given: Mapping[str, str]) -> list[str]:
    if value.lower() == "batch":
        return ["--norm_adv_by_std", "true", "--norm_adv_over", "batch"]
    known = {"true": "true", "group": "true", "false": "false", "none": "false"}
    if value.lower() not in known:
        raise ThreestepError(f"--scale_rewards expects group (true), batch or none (false), got '{value}'")
    return ["--norm_adv_by_std", known[value.lower()]]


def _ratios(value: str, _given: Mapping[str, str]) -> list[str] | str:
    if value == "token":
        return "a ratio is a token's, unless --policy_loss says otherwise"
    if value != "sequence":
        raise ThreestepError(f"--importance_sampling_level expects token or sequence, got '{value}'")
    return ["--policy_loss", "gspo"]


def _vllm(value: str, _given: Mapping[str, str]) -> list[str] | str:
    return "--rollout_engine says what draws" if is_false(value) else ["--rollout_engine", "vllm"]


def _vllm_mode(value: str, _given: Mapping[str, str]) -> str:
    if value != "colocate":
        raise ThreestepError(f"--vllm_mode {value} {_SERVER}, or give colocate")
    return "vLLM runs beside training on the same GPUs"


def _penalty(value: str, _given: Mapping[str, str]) -> str:
    if number("--repetition_penalty", value) != 1:
        raise ThreestepError(f"--repetition_penalty expects 1, got {value}: responses are drawn from the policy itself")
    return "responses are drawn from the policy itself"


HF_PPO_FLAGS: dict[str, OldFlag] = {
    **HF_FLAGS,
    **dataset_name("0,0,1"),
    **lora("--actor_lora_dim"),
    "--lora_target_modules": renamed(
        "--actor_lora_module_name",
        "parts of the layers' names, or all-linear",
        takes_list=True,
        words=lambda value, _given: ["--actor_lora_module_name", ",".join(value.split())],
    ),
    "--max_steps": renamed(
        "--max_train_steps N --num_train_epochs inf",
        "it overrides --num_train_epochs; -1 asks for nothing",
        words=HF_FLAGS["--max_steps"].words,  # type: ignore[union-attr]
        overrides=("--num_train_epochs",),
        differs="step 3 counts rollouts with their updates",
    ),
    "--model_name_or_path": renamed("--actor_model_name_or_path", "the reference too"),
    "--sft_model_path": renamed("--actor_model_name_or_path"),
    "--reward_model_path": renamed("--critic_model_name_or_path", "where a critic is trained, its start too"),
    "--reward_model_name_or_path": renamed("--critic_model_name_or_path", "where a critic is trained, its start too"),
    "--reward_funcs": refused(
        "names TRL's functions or models; here --reward NAME:WEIGHT,... names rules, your own as FILE.py:NAME, and "
        "model, which is --critic_model_name_or_path's",
        takes_list=True,
    ),
    "--reward_weights": refused("stands with the names here: --reward NAME:WEIGHT,...", takes_list=True),
    "--learning_rate": renamed("--actor_learning_rate", "--critic_learning_rate is the critic's"),
    "--weight_decay": renamed("--actor_weight_decay V --critic_weight_decay V", words=_of_both("weight_decay")),
    "--gradient_checkpointing": renamed(
        "--actor_gradient_checkpointing --critic_gradient_checkpointing",
        takes_value=False,
        words=_checkpointing,
        reads_false=True,
    ),
    "--per_device_eval_batch_size": Same("prompts; default: 64"),
    "--gradient_accumulation_steps": Same(differs="of a minibatch, which is one optimizer step"),
    "--max_prompt_length": renamed(
        "--max_prompt_seq_len N --prompt_truncation left", "longer prompts are cut as TRL cuts them",
        words=_max_prompt_length,
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
    "--temperature": Same(),
    "--top_k": Same(),
    "--top_p": Same(),
    "--min_p": Same(),
    "--repetition_penalty": renamed("no penalty", "1 alone; others are refused", words=_penalty),
    "--generation_kwargs": refused(
        "is a dictionary in TRL; here --temperature, --top_k, --top_p, --min_p, --stop and --bad_words are flags",
        takes_list=True, unless=_NONE,
    ),
    "--chat_template_kwargs": Same(),
    "--beta": renamed(
        "--kl_coef V --kl_in loss", "GRPO's KL is k3 in the loss; default: 0.1 in the reward", words=_beta
    ),
    "--kl_coef": Same("default: 0.1, not 0.05"),
    "--epsilon": renamed("--clip_range"),
    "--epsilon_high": renamed("--clip_range_high"),
    "--cliprange": renamed("--clip_range"),
    "--cliprange_value": renamed("--clip_range_value"),
    "--delta": renamed("--dual_clip", differs="the bound holds where the advantage is negative"),
    "--gamma": Same(),
    "--lam": Same(),
    "--missing_eos_penalty": Same("default: 0, none"),
    "--whiten_rewards": refused("is not built; --whiten_advantages is", takes_value=False),
    "--loss_type": renamed(
        "--loss_aggregation or --policy_loss",
        "grpo: seq-mean-token-mean; dapo, bnpo: token-mean; dr_grpo: seq-mean-token-sum-norm; cispo and sapo are "
        "policy losses",
        words=_loss_type,
        differs="token-mean counts the tokens of the whole optimizer step, where bnpo counts a micro-batch's",
    ),
    "--scale_rewards": renamed(
        "--norm_adv_by_std", "group: true; none: false; batch: with --norm_adv_over batch", words=_scale_rewards
    ),
    "--importance_sampling_level": renamed(
        "--policy_loss gspo", "sequence; token is the default", words=_ratios,
        differs="gspo's clip is its authors' unless --epsilon is given",
    ),
    "--mask_truncated_completions": renamed(
        "--mask_truncated_responses", takes_value=False, words=switch_as("--mask_truncated_responses", "true")
    ),
    "--sapo_temperature_neg": renamed("--sapo_tau_neg"),
    "--sapo_temperature_pos": renamed("--sapo_tau_pos"),
    "--sync_ref_model": refused(_REFERENCE, takes_value=False),
    "--use_vllm": renamed("--rollout_engine vllm", takes_value=False, words=_vllm, reads_false=True),
    "--vllm_mode": renamed("colocate", "server is refused", words=_vllm_mode),
    "--vllm_gpu_memory_utilization": renamed("--vllm_memory_share"),
    "--vllm_tensor_parallel_size": Same(),
    "--vllm_enable_sleep_mode": renamed(
        "--vllm_sleep", "default: on", takes_value=False, reads_false=True,
        words=either_way(["--vllm_sleep", "true"], ["--vllm_sleep", "false"]),
    ),
    "--vllm_importance_sampling_correction": renamed(
        "--mismatch_correction truncate", "the default with vLLM; false: none", takes_value=False, reads_false=True,
        words=either_way(["--mismatch_correction", "truncate"], ["--mismatch_correction", "none"]),
    ),
    "--vllm_importance_sampling_cap": renamed("--mismatch_threshold"),
    "--log_completions": needless(
        "every evaluation writes prompts, answers and scores to OUTPUT_DIR/samples.jsonl", takes_value=False
    ),
    "--num_completions_to_print": renamed("--show_samples"),
}  # fmt: skip
