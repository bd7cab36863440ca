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

_LOADER = "rows are tokenized before training, and batches are prepared while the device computes"
_ENGINE = "DeepSpeed reduces the gradients"
_FIGURES = "an evaluation adds up its metrics over batches and ranks, and keeps no model outputs"
_LOG = "only the main rank writes the log"
_SYNC = "applies to --sync_ref_model, which is not supported"
_TRACKIO = (
    "is not supported; set trackio's project with TRACKIO_PROJECT in the environment, and its location with "
    "trackio's own settings"
)
_DEFAULTS_ALONE = "is not supported: --torch_compile always uses torch's defaults; leave it out"
SYNC_FIELDS: dict[str, OldFlag] = {
    "--sync_ref_model": refused_switch("is not supported; the reference stays the model that training starts from"),
    "--ref_model_mixup_alpha": needless(_SYNC),
    "--ref_model_sync_steps": needless(_SYNC),
}


def _memory_metrics(value: str, _given: Mapping[str, str]) -> str:
    if is_false(value):
        raise ThreestepError(
            "--no_skip_memory_metrics is not supported; use --dry_run true to see a rank's memory, part by part"
        )
    return "a run reports no memory figures"


def _processes(value: str, _given: Mapping[str, str]) -> str:
    if value != (os.environ.get("WORLD_SIZE") or "1"):
        raise ThreestepError(
            f"--num_processes {value} applies to the launcher, which starts the ranks; pass it to `threestep` as "
            "--num_ranks, or set it in the settings file"
        )
    return "the launcher has already started this number of ranks"


# Of every step.
EVERY_STEP_FIELDS: dict[str, OldFlag] = {
    "--accelerator_config": refused(
        "configures Accelerate, which is not used here; batches and seeds have their own flags", takes_list=True,
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
        "is not supported; a step with a loss or gradient that is not finite is skipped and logged "
        "(--max_bad_steps)",
        takes_list=True, unless=NO_VALUE
    ),
    "--disable_tqdm": needless_switch(
        "progress bars appear only on terminals; elsewhere the log gets at most one line every --logging_seconds"
    ),
    "--do_predict": refused_switch("is not part of a step; `threestep evaluate` evaluates a finished model"),
    "--enable_jit_checkpoint": needless_switch("a run that is stopped by a signal writes a checkpoint anyway"),
    "--eval_accumulation_steps": needless(_FIGURES),
    "--eval_do_concat_batches": needless_switch(_FIGURES),
    "--eval_use_gather_object": needless_switch(_FIGURES),
    "--prediction_loss_only": needless_switch(_FIGURES),
    "--eval_delay": refused(
        "is not supported: a run is evaluated before training and then as --eval_strategy says; leave it out",
        unless=("0", "0.0", *NO_VALUE)
    ),
    "--fsdp_config": refused(
        "is not used here; --zero_stage 3 shards weights, gradients and optimizer states", takes_list=True,
        unless=NO_DICTIONARY
    ),
    "--parallelism_config": refused(
        "configures Accelerate, which is not used here; --zero_stage shards a model across ranks", takes_list=True,
        unless=NO_DICTIONARY
    ),
    "--hub_always_push": needless_switch("the model is uploaded once, at the end of the run"),
    "--hub_revision": refused("must be main: a run uploads to no other branch", unless=("main", *NO_VALUE)),
    "--ignore_data_skip": refused_switch("is not supported: a resumed run continues with the next row"),
    "--restore_callback_states_from_checkpoint": needless_switch("a resumed run restores its whole state"),
    "--include_for_metrics": refused(
        "passes inputs to a compute_metrics function, which steps do not have; they compute their own metrics "
        "(docs/watching.md)",
        takes_list=True, unless=NO_VALUE
    ),
    "--include_num_input_tokens_seen": needless_switch("metrics.jsonl has tokens per second for every step"),
    "--label_names": needless("labels are made from the rows' tokens", takes_list=True),
    "--length_column_name": needless("rows are grouped by their lengths in tokens"),
    "--liger_kernel_config": needless("losses always read logits in chunks", takes_list=True),
    "--log_level": needless(_LOG),
    "--log_level_replica": needless(_LOG),
    "--log_on_each_node": needless_switch(_LOG),
    "--logging_nan_inf_filter": needless_switch("metrics are logged unfiltered"),
    "--lora_target_parameters": refused(
        "is not supported: adapters are placed on linear layers, which --lora_target_modules names", takes_list=True,
        unless=NO_VALUE
    ),
    "--lora_task_type": needless("each step fixes the task type"),
    "--model_init_kwargs": refused(
        "is a dictionary in TRL; set its values with --dtype, --attn_implementation and --trust_remote_code",
        takes_list=True, unless=NO_DICTIONARY
    ),
    "--num_processes": renamed("--num_ranks", "set it after `threestep`, and in its settings file", words=_processes),
    "--optim_target_modules": refused(
        "applies to optimizers that project gradients, which are not available here", takes_list=True, unless=NO_VALUE
    ),
    "--project": refused(
        "is set in the environment here: WANDB_PROJECT, TRACKIO_PROJECT or MLFLOW_EXPERIMENT_NAME names the "
        "project",
        unless=("huggingface", *NO_VALUE)
    ),
    "--trackio_space_id": refused(_TRACKIO, unless=("trackio", *NO_VALUE)),
    "--trackio_bucket_id": refused(_TRACKIO, unless=NO_VALUE),
    "--trackio_static_space_id": refused(_TRACKIO, unless=NO_VALUE),
    "--save_on_each_node": refused_switch("is not supported: only the main rank writes the model, to --output_dir"),
    "--skip_memory_metrics": renamed_switch(
        "no memory figures", "false is refused", words=_memory_metrics, reads_false=True
    ),
    "--streaming": refused_switch(
        "is not supported: rows are tokenized once, into files that are read as needed (docs/reference/cache.md)"
    ),
    "--test_split_size": renamed("--eval_fraction", "for a dataset without evaluation rows"),
    "--torch_compile_backend": refused(_DEFAULTS_ALONE, unless=("inductor", *NO_VALUE)),
    "--torch_compile_mode": refused(_DEFAULTS_ALONE, unless=("default", *NO_VALUE)),
    "--torch_empty_cache_steps": needless("the allocator's segments can grow, which avoids fragmentation"),
    "--use_cache": needless_switch("training keeps no key-value cache; only generation does"),
}  # fmt: skip
_OFFLOADING = renamed_switch(
    "--activation_offload", "moves layer inputs with --gradient_checkpointing, not everything that autograd saves"
)
_ONLY_SFT = refused("is only supported in step 1", unless=("0", "0.0", *NO_VALUE))
ONE_MODEL_FIELDS: dict[str, OldFlag] = {
    "--activation_offloading": _OFFLOADING,
    "--neftune_noise_alpha": _ONLY_SFT,
}  # fmt: skip
SFT_FIELDS: dict[str, OldFlag] = {
    "--dataset_kwargs": refused(
        "is a dictionary in TRL; --text_column, --prompt_column and the other column flags set how rows are read",
        takes_list=True, unless=NO_DICTIONARY
    ),
}  # fmt: skip
_REF_MODEL = refused("is not supported; the reference is the model that training starts from; leave it out")
DPO_FIELDS: dict[str, OldFlag] = {
    **SYNC_FIELDS,
    "--ref_model": _REF_MODEL,
    "--discopop_tau": needless("applies to the discopop loss, which is not supported"),
    "--f_alpha_divergence_coef": needless("applies to --f_divergence_type alpha_divergence, which is not supported"),
    "--precompute_ref_batch_size": needless("the reference reads the same number of rows at a time as an evaluation"),
    "--use_weighting": refused_switch("is not supported: every pair has the same weight"),
}  # fmt: skip
_SERVER = (
    "applies to TRL's own server; --rollout_engine vllm_server uses servers started with scripts/serve.sh and "
    "listed in --vllm_servers"
)
_ADAPTIVE = "applies to --use_adaptive_entropy, which is not supported"
_VESPO = "applies to the vespo loss, which is not supported"
_BATCHING = refused_switch("is not supported; --rollout_engine vllm uses continuous batching")
PPO_FIELDS: dict[str, OldFlag] = {
    **SYNC_FIELDS,
    "--ref_model": _REF_MODEL,
    "--value_model": refused("is not supported; the critic starts from --critic_model_name_or_path; leave it out"),
    "--attn_implementation": needless("the fastest implementation that reproduces the model's own numbers is chosen"),
    "--cache_implementation": needless("rollouts decode with their own cache"),
    "--cast_lm_head_to_fp32": refused_switch(
        "is not supported; log-probabilities are computed in float32 from logits in --dtype; with --dtype fp32 "
        "the logits are float32 too"
    ),
    "--label_smoothing_factor": refused("has no equivalent in this step's loss", unless=("0", "0.0", *NO_VALUE)),
    "--log_completions_hub_repo": refused(
        "is not supported; OUTPUT_DIR/samples.jsonl has the completions from evaluations, and `hf upload` can "
        "upload it", unless=NO_VALUE
    ),
    "--log_multimodal": needless_switch("a sample's media are shown next to it"),
    "--log_unique_prompts": needless_switch("samples.jsonl has each prompt once, with all its responses"),
    "--neftune_noise_alpha": _ONLY_SFT,
    "--off_policy_mask_threshold": refused(
        "is not supported; --mismatch_rejection drops responses by their ratio", unless=NO_VALUE
    ),
    "--pad_to_multiple_of": needless("rows are packed, not padded"),
    "--reward_clip_range": refused(
        "is two bounds in TRL; here, --clip_reward limits the reward model's scores to a range around 0",
        takes_list=True, unless=NO_VALUE
    ),
    "--top_entropy_quantile": refused("is not supported: all tokens are trained on", unless=("1", "1.0")),
    "--torch_compile": refused_switch("applies to steps 1 and 2"),
    "--use_adaptive_entropy": refused_switch("is not supported; --entropy_coef stays constant"),
    **dict.fromkeys(
        ("--entropy_coef_min", "--entropy_coef_max", "--entropy_coef_delta", "--entropy_target"), needless(_ADAPTIVE)
    ),
    **dict.fromkeys(
        ("--vespo_k_pos", "--vespo_k_neg", "--vespo_lambda_pos", "--vespo_lambda_neg"), needless(_VESPO)
    ),
    "--use_transformers_continuous_batching": _BATCHING,
    "--use_transformers_paged": _BATCHING,
    "--transformers_continuous_batching_config": needless(
        "applies to --use_transformers_continuous_batching, which is not supported", takes_list=True
    ),
    **dict.fromkeys(
        ("--vllm_server_base_url", "--vllm_server_host", "--vllm_server_port", "--vllm_server_timeout",
         "--vllm_group_port"),
        needless(_SERVER),
    ),
    "--vllm_max_model_length": needless("--max_prompt_seq_len and --max_answer_seq_len limit the length of a text"),
    "--vllm_model_impl": refused(
        "must be vllm: vLLM's own model implementations generate", unless=("vllm", "auto", *NO_VALUE)
    ),
    "--vllm_structured_outputs_regex": refused(
        "is not supported: responses are generated from the policy itself; --reward regex can score their form",
        unless=NO_VALUE
    ),
}  # fmt: skip
