"""Fields of TRL's and transformers' settings that no flag of ours stands for: why each is not needed, or is refused.

With the tables of `hf_flags` and `hf_ppo_flags` these are every field that TRL's commands take. trl_flags.md beside it
shows them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from threestep.plugins.names.hf_words import (
    NO_DICTIONARY,
    NO_VALUE,
    needless,
    needless_switch,
    refused,
    refused_switch,
    renamed,
    renamed_switch,
)
from threestep.plugins.names.other_names import OldFlag, is_false
from training.utils.base.errors import ThreestepError

_LOADER = "rows are tokenized before training, and laid out while the device computes"
_ENGINE = "DeepSpeed reduces the gradients"
_FIGURES = "an evaluation sums figures over batches and ranks, and keeps no outputs"
_LOG = "the main rank alone writes the log"
_SYNC = "is for --sync_ref_model, which is not built"
_TRACKIO = "is not built; trackio's project is TRACKIO_PROJECT of the environment, and its place trackio's own settings"
_DEFAULTS_ALONE = "is not read: --torch_compile compiles with torch's defaults; leave it out"
SYNC_FIELDS: dict[str, OldFlag] = {
    "--sync_ref_model": refused_switch("is not built; the reference stays what training starts from"),
    "--ref_model_mixup_alpha": needless(_SYNC),
    "--ref_model_sync_steps": needless(_SYNC),
}


def _memory_metrics(value: str, _given: Mapping[str, str]) -> str:
    if is_false(value):
        raise ThreestepError(
            "--no_skip_memory_metrics is not built; --dry_run true tells the memory of a rank, part by part"
        )
    return "a run reports no memory"


def _processes(value: str, _given: Mapping[str, str]) -> str:
    if value != (os.environ.get("WORLD_SIZE") or "1"):
        raise ThreestepError(
            f"--num_processes {value} is the launcher's, which starts ranks; give it to `threestep`, as --num_ranks or "
            "in the file of settings"
        )
    return "the launcher has started as many ranks"


# Of every step.
EVERY_STEP_FIELDS: dict[str, OldFlag] = {
    "--accelerator_config": refused(
        "is Accelerate's, which does not run here; batches and seeds have flags of their own", takes_list=True,
        unless=NO_DICTIONARY
    ),
    "--batch_eval_metrics": needless_switch(_FIGURES),
    "--bf16_full_eval": needless_switch("evaluations compute in --dtype"),
    "--fp16_full_eval": needless_switch("evaluations compute in --dtype"),
    "--dataloader_in_order": needless_switch(_LOADER),
    "--dataloader_multiprocessing_context": needless(_LOADER),
    "--ddp_broadcast_buffers": needless_switch(_ENGINE),
    "--ddp_bucket_cap_mb": needless(_ENGINE),
    "--ddp_static_graph": needless_switch(_ENGINE),
    "--ignore_bias_buffers": needless_switch(_ENGINE),
    "--debug": refused(
        "is not built; a loss or gradient that is not finite skips its step and says so (--max_bad_steps)",
        takes_list=True, unless=NO_VALUE
    ),
    "--disable_tqdm": needless_switch("bars are for terminals; elsewhere a line at most every --logging_seconds"),
    "--do_predict": refused_switch("is not a step's; `threestep evaluate` reads a finished model"),
    "--enable_jit_checkpoint": needless_switch("a run that is stopped by a signal writes a checkpoint"),
    "--eval_accumulation_steps": needless(_FIGURES),
    "--eval_do_concat_batches": needless_switch(_FIGURES),
    "--eval_use_gather_object": needless_switch(_FIGURES),
    "--prediction_loss_only": needless_switch(_FIGURES),
    "--eval_delay": refused(
        "is not built: a run is evaluated before training, then as --eval_strategy says; leave it out",
        unless=("0", "0.0", *NO_VALUE)
    ),
    "--fsdp_config": refused(
        "is not used here; --zero_stage 3 shards weights, gradients and optimizer", takes_list=True,
        unless=NO_DICTIONARY
    ),
    "--parallelism_config": refused(
        "is Accelerate's, which does not run here; --zero_stage shards a model over ranks", takes_list=True,
        unless=NO_DICTIONARY
    ),
    "--hub_always_push": needless_switch("the model is uploaded once, at the end of the run"),
    "--hub_revision": refused("is main here: a run uploads to no other branch", unless=("main", *NO_VALUE)),
    "--ignore_data_skip": refused_switch("is not built: a resumed run goes on with the row that comes next"),
    "--restore_callback_states_from_checkpoint": needless_switch("a resumed run restores all of its state"),
    "--include_for_metrics": refused(
        "feeds a compute_metrics of Python, which a step has not; its figures are its own (docs/watching.md)",
        takes_list=True, unless=NO_VALUE
    ),
    "--include_num_input_tokens_seen": needless_switch("metrics.jsonl has tokens a second at every step"),
    "--label_names": needless("labels are made of the rows' tokens", takes_list=True),
    "--length_column_name": needless("rows are planned by their lengths in tokens"),
    "--liger_kernel_config": needless("losses read logits in chunks without it", takes_list=True),
    "--log_level": needless(_LOG),
    "--log_level_replica": needless(_LOG),
    "--log_on_each_node": needless_switch(_LOG),
    "--logging_nan_inf_filter": needless_switch("figures are logged as they are"),
    "--lora_target_parameters": refused(
        "is not built: adapters belong to linear layers, which --lora_target_modules names", takes_list=True,
        unless=NO_VALUE
    ),
    "--lora_task_type": needless("the step says what the model is trained for"),
    "--model_init_kwargs": refused(
        "is a dictionary in TRL; its values are flags here: --dtype, --attn_implementation, --trust_remote_code",
        takes_list=True, unless=NO_DICTIONARY
    ),
    "--num_processes": renamed("--num_ranks", "behind `threestep`, and in its file of settings", words=_processes),
    "--optim_target_modules": refused(
        "is for optimizers that project gradients, and none here does", takes_list=True, unless=NO_VALUE
    ),
    "--project": refused(
        "is an environment's here: WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME names the project",
        unless=("huggingface", *NO_VALUE)
    ),
    "--trackio_space_id": refused(_TRACKIO, unless=("trackio", *NO_VALUE)),
    "--trackio_bucket_id": refused(_TRACKIO, unless=NO_VALUE),
    "--trackio_static_space_id": refused(_TRACKIO, unless=NO_VALUE),
    "--save_on_each_node": refused_switch("is not built: the main rank alone writes the model, into --output_dir"),
    "--skip_memory_metrics": renamed_switch(
        "no memory figures", "false is refused", words=_memory_metrics, reads_false=True
    ),
    "--streaming": refused_switch(
        "is not done here: rows are tokenized once, into files that are read as they are needed "
        "(docs/reference/cache.md)"
    ),
    "--test_split_size": renamed("--eval_fraction", "of a dataset without rows to evaluate on"),
    "--torch_compile_backend": refused(_DEFAULTS_ALONE, unless=("inductor", *NO_VALUE)),
    "--torch_compile_mode": refused(_DEFAULTS_ALONE, unless=("default", *NO_VALUE)),
    "--torch_empty_cache_steps": needless("the allocator's segments grow, and memory stays in one piece"),
    "--use_cache": needless_switch("training keeps no cache of keys and values; rollouts and answers do"),
}  # fmt: skip
_OFFLOADING = renamed_switch(
    "--activation_offload", "layer inputs beside --gradient_checkpointing, not all that autograd saves"
)
_ONLY_SFT = refused("is for step 1 here", unless=("0", "0.0", *NO_VALUE))
ONE_MODEL_FIELDS: dict[str, OldFlag] = {
    "--activation_offloading": _OFFLOADING,
    "--neftune_noise_alpha": _ONLY_SFT,
}  # fmt: skip
SFT_FIELDS: dict[str, OldFlag] = {
    "--dataset_kwargs": refused(
        "is a dictionary in TRL; here --text_column, --prompt_column and the other columns' flags say how rows are "
        "read", takes_list=True, unless=NO_DICTIONARY
    ),
}  # fmt: skip
DPO_FIELDS: dict[str, OldFlag] = {
    **SYNC_FIELDS,
    "--discopop_tau": needless("is for the loss discopop, which is not built"),
    "--f_alpha_divergence_coef": needless("is for --f_divergence_type alpha_divergence, which is refused"),
    "--loss_weights": refused(
        "weighs several losses, as --loss_type does here: --loss_type sigmoid:0.8,sft:0.2", takes_list=True,
        unless=("1", "1.0", *NO_VALUE)
    ),
    "--precompute_ref_batch_size": needless("the reference reads as many rows at a time as an evaluation does"),
    "--use_weighting": refused_switch("is not built: every pair weighs the same"),
}  # fmt: skip
_SERVER = "is for TRL's own server; --rollout_engine vllm_server draws by servers of scripts/serve.sh, --vllm_servers"
_ADAPTIVE = "is for --use_adaptive_entropy, which is not built"
_VESPO = "is for the loss vespo, which is not built"
_BATCHING = refused_switch("is not built; --rollout_engine vllm batches continuously")
PPO_FIELDS: dict[str, OldFlag] = {
    **SYNC_FIELDS,
    "--attn_implementation": needless("the fastest that computes the model's own numbers is chosen"),
    "--cache_implementation": needless("rollouts decode with a cache of their own"),
    "--cast_lm_head_to_fp32": refused_switch(
        "is not built; log-probabilities are computed in float32 from logits of --dtype, and --dtype fp32 computes "
        "all of them so"
    ),
    "--label_smoothing_factor": refused("has no counterpart in this step's loss", unless=("0", "0.0", *NO_VALUE)),
    "--log_completions_hub_repo": refused(
        "is not built; OUTPUT_DIR/samples.jsonl has what evaluations drew, and `hf upload` takes it", unless=NO_VALUE
    ),
    "--log_multimodal": needless_switch("the media of a sample stand beside it"),
    "--log_unique_prompts": needless_switch("samples.jsonl has every prompt once, with its responses"),
    "--neftune_noise_alpha": _ONLY_SFT,
    "--off_policy_mask_threshold": refused(
        "is not built; --mismatch_rejection drops responses by their ratio", unless=NO_VALUE
    ),
    "--pad_to_multiple_of": needless("rows are packed, not padded"),
    "--reward_clip_range": refused(
        "is two bounds in TRL; here --clip_reward bounds the reward model's scores on both sides of 0",
        takes_list=True, unless=NO_VALUE
    ),
    "--top_entropy_quantile": refused("is not built: all tokens train", unless=("1", "1.0")),
    "--torch_compile": refused_switch("is for steps 1 and 2"),
    "--use_adaptive_entropy": refused_switch("is not built; --entropy_coef stays what it is"),
    **dict.fromkeys(
        ("--entropy_coef_min", "--entropy_coef_max", "--entropy_coef_delta", "--entropy_target"), needless(_ADAPTIVE)
    ),
    **dict.fromkeys(
        ("--vespo_k_pos", "--vespo_k_neg", "--vespo_lambda_pos", "--vespo_lambda_neg"), needless(_VESPO)
    ),
    "--use_transformers_continuous_batching": _BATCHING,
    "--use_transformers_paged": _BATCHING,
    "--transformers_continuous_batching_config": needless(
        "is for --use_transformers_continuous_batching, which is not built", takes_list=True
    ),
    **dict.fromkeys(
        ("--vllm_server_base_url", "--vllm_server_host", "--vllm_server_port", "--vllm_server_timeout",
         "--vllm_group_port"),
        needless(_SERVER),
    ),
    "--vllm_max_model_length": needless("--max_prompt_seq_len and --max_answer_seq_len say how long a text gets"),
    "--vllm_model_impl": refused("is vllm here: vLLM's own models draw", unless=("vllm", "auto", *NO_VALUE)),
    "--vllm_structured_outputs_regex": refused(
        "is not built: responses are drawn from the policy itself; --reward regex scores their form", unless=NO_VALUE
    ),
}  # fmt: skip
