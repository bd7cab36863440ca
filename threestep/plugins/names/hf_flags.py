"""Hugging Face's flags (TRL's, and transformers' TrainingArguments) that all steps share, and those of the steps that
train one model: how they are read here. trl_flags.md shows these tables.

A flag of ours that has the same name is listed too, as `Same`, with what differs.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping
from pathlib import Path

from threestep.plugins.names.hf_field_flags import DPO_FIELDS, EVERY_STEP_FIELDS, ONE_MODEL_FIELDS, SFT_FIELDS
from threestep.plugins.names.hf_words import (
    NO_VALUE,
    by_value,
    either_way,
    listed,
    needless,
    needless_switch,
    number,
    refused,
    refused_switch,
    renamed,
    renamed_switch,
    same,
)
from threestep.plugins.names.other_names import OldFlag, Same, Words, is_false
from training.utils.base.errors import ThreestepError
from training.utils.base.user_files import GIVEN

_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "half": "fp16", "float": "fp32"}
_ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf", "adamw")
_DEFAULT_INTERVAL_STEPS = "500"  # of transformers' logging_steps, eval_steps and save_steps


def dtype_of(words: list[str]) -> list[str]:
    """torch's names of the types as ours."""
    return [_DTYPES.get(word.removeprefix("torch."), word) for word in words]


def _torch_dtype(value: str, _given: Mapping[str, str]) -> list[str] | str:
    if value == "auto":
        return "master weights are always kept in float32, and --dtype sets the precision of forwards"
    return ["--dtype", *dtype_of([value])]


def _bf16(value: str, given: Mapping[str, str]) -> list[str] | str:
    if not is_false(value):
        return ["--dtype", "bf16"]
    if {"--dtype", "--torch_dtype"} & given.keys() or not is_false(given.get("--fp16", "false") or "true"):
        return "another flag sets the precision"
    return ["--dtype", "fp32"]


def _use_cpu(_value: str, _given: Mapping[str, str]) -> str:
    from torch import cuda

    if cuda.is_available():
        raise ThreestepError("--use_cpu is set in the environment here: put CUDA_VISIBLE_DEVICES= before the command")
    return "the run uses the CPU, because no GPU is visible"


def max_steps(value: str, _given: Mapping[str, str]) -> list[str] | str:
    steps = number("--max_steps", value)
    if steps <= 0:
        return "the number of epochs sets the length of the run"
    return ["--max_train_steps", f"{steps:g}", "--num_train_epochs", "inf"]


def _warmup_steps(value: str, _given: Mapping[str, str]) -> list[str]:
    steps = number("--warmup_steps", value)
    return ["--warmup_ratio", value] if 0 < steps < 1 else ["--num_warmup_steps", f"{steps:g}"]


def _interval(flag: str, value: str, given: Mapping[str, str], steps_flag: str, *, epochs_flag: str) -> list[str]:
    """A number of steps; below 1 it is a share of the run, whose length is known in steps or in epochs."""
    steps = number(flag, value)
    if steps <= 0 or steps >= 1:
        return [steps_flag, f"{max(steps, 0):g}"]
    longest = number("--max_steps", given.get("--max_steps") or given.get("--max_train_steps") or "0")
    if longest > 0:
        return [steps_flag, str(math.ceil(steps * longest))]
    epochs = number("--num_train_epochs", given.get("--num_train_epochs") or "1")
    return [epochs_flag, f"{steps * epochs:g}"]


def _strategy(kind: str, steps_flag: str, epochs_flag: str) -> Words:
    """--eval_strategy and --save_strategy. kind: eval or save"""

    def words(value: str, given: Mapping[str, str]) -> list[str] | str:
        if value == "no" or is_false(value):  # YAML reads no as false
            return [steps_flag, "0"]
        if value == "epoch":
            return [epochs_flag, "1"]
        if value == "best" and kind == "save":
            return ["--load_best_model_at_end", "true"]
        if value != "steps":
            choices = "no, steps, epoch" + (" or best" if kind == "save" else "")
            raise ThreestepError(f"--{kind}_strategy expects {choices}, got '{value}'")
        if f"--{kind}_steps" in given or steps_flag in given:
            return f"--{kind}_steps sets how often"
        default = given.get("--logging_steps") if kind == "eval" else None
        return _interval(
            f"--{kind}_steps", default or _DEFAULT_INTERVAL_STEPS, given, steps_flag, epochs_flag=epochs_flag
        )

    return words


def _interval_steps(kind: str, steps_flag: str, epochs_flag: str) -> Words:
    """--eval_steps and --save_steps, which the strategy can overrule."""

    def words(value: str, given: Mapping[str, str]) -> list[str] | str:
        strategy = given.get(f"--{kind}_strategy") or given.get(f"--{kind}uation_strategy") or "steps"
        if is_false(strategy) or strategy in ("epoch", "best"):
            return f"--{kind}_strategy {strategy} is given"
        return _interval(f"--{kind}_steps", value, given, steps_flag, epochs_flag=epochs_flag)

    return words


def _resume(value: str, _given: Mapping[str, str]) -> list[str] | str:
    if is_false(value) or value.lower() in NO_VALUE:
        return "without it, a run starts from the beginning"
    return ["--resume"] if value.lower() == "true" else ["--resume", value]


def _optimizer(value: str, _given: Mapping[str, str]) -> list[str] | str:
    if value in _ADAMW:
        return "training always uses AdamW with torch's fused kernel"
    if "8bit" in value or value in ("adafactor", "lomo", "adalomo", "paged_adamw", "paged_adamw_32bit"):
        saving = (
            "to save memory: --zero_stage 1, --offload, --bf16_optimizer_states (10 bytes per weight) or --lora_dim"
        )
        raise ThreestepError(
            f"--optim {value} is not supported, only adamw_torch; for a plugin's optimizer, use --optimizer; {saving}"
        )
    raise ThreestepError(
        f"--optim expects adamw_torch or adamw_torch_fused, got '{value}'; for a plugin's optimizer, use --optimizer"
    )


def lora(flag: str) -> dict[str, OldFlag]:
    """PEFT's flags. flag: ours of the rank"""
    names_rank = ("--lora_r", flag)

    def use_peft(value: str, given: Mapping[str, str]) -> list[str] | str:
        if is_false(value):
            return [flag, "0"]
        given_rank = [name for name in names_rank if name in given]
        return f"{given_rank[0]} asks for LoRA" if given_rank else [flag, "16"]

    def rank(value: str, given: Mapping[str, str]) -> list[str] | str:
        return "--use_peft is false" if is_false(given.get("--use_peft", "true")) else [flag, value]

    return {
        "--use_peft": renamed(
            f"{flag} 16", "if --lora_r gives no rank", takes_value=False, words=use_peft, reads_false=True
        ),
        "--lora_r": renamed(flag, words=rank),
    }


def _dataset(value: str, given: Mapping[str, str]) -> list[str]:
    """A name on the hub, with configuration and splits; a path, a name without an owner and what --data_path reads by a
    prefix stay as they are."""
    if value.lower() in NO_VALUE:
        return []
    config = given.get("--dataset_config") or given.get("--dataset_config_name")
    train, test = (given.get(f"--dataset_{kind}_split") for kind in ("train", "test"))
    if _is_ours(value):
        return ["--data_path", value]
    parts = [f"config={config}"] if config else []
    if train or test:
        parts.append(f"split={train or 'train'}")
    if test:
        parts.append(f"eval_split={test}")
    return ["--data_path", ",".join([f"hub:{value}", *parts])]


def _is_ours(value: str) -> bool:
    """True of a dataset that is not read from the hub by this name: a path, a registered name, an address."""
    return Path(value).exists() or "/" not in value or ":" in value or value.startswith(("/", "./", "../", "~"))


def _datasets(value: str) -> list[str]:
    """TRL's list of datasets, as our file of settings writes its entries on a command line: dictionaries."""
    found: list[str] = []
    for entry in re.findall(r"\{[^{}]*\}", value):
        fields = {name: each for name, each in ast.literal_eval(entry).items() if each is not None}
        unread = sorted(fields.keys() - {"path", "name", "split"})
        if "path" not in fields or unread:
            raise ThreestepError(
                f"--datasets expects entries with path, name and split, got {entry}; write each as --data_path "
                "hub:OWNER/NAME,config=...,split=... (docs/data.md)"
            )
        given = {"--dataset_config": fields.get("name", ""), "--dataset_train_split": fields.get("split", "")}
        found += _dataset(str(fields["path"]), given)[1:]
    if not found:
        raise ThreestepError(
            f"--datasets must be a list in a settings file, got '{value}'; to give one on the command line, use "
            "--dataset_name"
        )
    return found


def _with_dataset(value: str, given: Mapping[str, str]) -> str:
    if "--dataset_name" not in given:
        raise ThreestepError(
            f"'{value}' is a dataset's configuration or split and needs --dataset_name; or use --data_path "
            "hub:OWNER/NAME,config=...,split=...,eval_split=..."
        )
    dataset = given["--dataset_name"]
    if _is_ours(dataset):
        if value in ("train", "test"):  # TRL's defaults
            return f"{dataset} is not read from the hub; --eval_fraction sets the share that is held out"
        raise ThreestepError(
            f"'{value}' is a hub dataset's configuration or split, but --dataset_name {dataset} is not read from the "
            "hub; leave it out, or put files named train and test in one folder and give the folder"
        )
    return "it is used together with --dataset_name"


def _chat_template(value: str, _given: Mapping[str, str]) -> list[str]:
    if Path(value).is_dir():
        raise ThreestepError(
            f"--chat_template_path expects a file with a Jinja template, got the folder '{value}'; give the "
            "chat_template.jinja in it"
        )
    return ["--chat_template", value]


def _losses(words: list[str]) -> list[str]:
    """Several losses of TRL's DPO, each of weight 1, as the one word that they are here."""
    for name in ",".join(words).split(","):
        if ".py:" in name or name.startswith(GIVEN):
            raise ThreestepError(
                f"--loss_type expects names, got the function {name.removeprefix(GIVEN)}; a preference loss of your "
                "own needs a plugin (threestep/plugins/objectives/README.md#your-own-preference-loss)"
            )
        if name == "bco_pair":
            raise ThreestepError(
                "--loss_type bco_pair is not supported: bco trains on rows with one response, marked good or bad "
                "(docs/dpo.md#responses-that-are-marked-one-by-one); write each pair as two such rows and use "
                "--loss_type bco"
            )
    return [",".join(words)]


def _loss_weights(value: str, given: Mapping[str, str]) -> list[str] | str:
    if value.lower() in NO_VALUE:
        return "every loss has weight 1"
    losses, weights = (text.replace(",", " ").split() for text in (given.get("--loss_type", "sigmoid"), value))
    if len(losses) != len(weights):
        raise ThreestepError(
            f"--loss_weights expects one number for each of {', '.join(losses)}, got {' '.join(weights)}; give one "
            "number per loss"
        )
    return ["--loss_type", ",".join(map(":".join, zip(losses, weights, strict=True)))]


_LOSS_ON = either_way(["--loss_on", "response"], ["--loss_on", "conversation"])
_TRUNCATION = by_value(
    {"keep_start": ["--truncation", "right"], "keep_end": ["--truncation", "left"]},
    "--truncation_mode expects keep_start or keep_end, got '{}'; or use --truncation",
)
_SFT_LOSS = by_value(
    dict.fromkeys(
        ("nll", "chunked_nll"),
        "the loss is the negative log-likelihood of the tokens that carry loss, computed in chunks",
    ),
    "--loss_type expects nll or chunked_nll in step 1, got '{}'",
)
_AT_THE_END = "the model is uploaded once, at the end of the run"
_HUB = by_value(
    dict.fromkeys(("end", "every_save"), _AT_THE_END),
    "--hub_strategy expects end or every_save, got '{}'; checkpoints are not uploaded",
)
_SAMPLED = "rows are drawn in an order set by the seed, and grouped by length"
_SAMPLING = by_value(
    {**dict.fromkeys(("random", "group_by_length", "batch_rebalance"), _SAMPLED), "sequential": ["--shuffle", "false"]},
    "--train_sampling_strategy expects random, sequential, group_by_length or batch_rebalance, got '{}'",
)
_STEPS = "metrics.jsonl and the trackers get every step"
_LOADER = "rows are tokenized before training, and batches are prepared while the device computes"
_ENGINE = "DeepSpeed reduces the gradients"

# Of every step.
HF_FLAGS: dict[str, OldFlag] = {
    **same(
        "--warmup_ratio --adam_beta1 --adam_epsilon --max_grad_norm --gradient_accumulation_steps "
        "--trust_remote_code --hub_private_repo --bnb_4bit_quant_type --bnb_4bit_use_double_quant "
        "--router_aux_loss_coef"
    ),
    "--use_liger_kernel": Same("fuses norms, gates and rotations; losses always read logits in chunks"),
    **EVERY_STEP_FIELDS,
    "--output_dir": Same("default: runs/last"),
    "--num_train_epochs": Same("default: 1, not 3"),
    "--max_steps": renamed(
        "--max_train_steps N --num_train_epochs inf", "overrides --num_train_epochs; -1 sets no limit",
        words=max_steps, overrides=("--num_train_epochs",)
    ),
    "--warmup_steps": renamed(
        "--num_warmup_steps", "values below 1 become --warmup_ratio, as in transformers 5", words=_warmup_steps
    ),
    "--lr_scheduler_type": Same("default: cosine, not linear"),
    "--lr_scheduler_kwargs": refused(
        "is a dictionary in TRL; set its values with --min_lr_ratio and --stable_ratio",
        unless=NO_VALUE
    ),
    "--optim": renamed(
        "AdamW", "adamw_torch and adamw_torch_fused match what Threestep uses; others are refused", words=_optimizer
    ),
    "--optim_args": refused("has no effect here: AdamW's settings are --adam_beta1, --adam_beta2 and --adam_epsilon"),
    "--adam_beta2": Same("default: 0.95, not 0.999"),
    "--seed": Same("default: 1234, not 42"),
    "--data_seed": refused("has no equivalent: --seed also sets the order of the rows", unless=NO_VALUE),
    "--full_determinism": renamed_switch("--deterministic", words=either_way(["--deterministic", "true"])),
    "--bf16": renamed_switch(
        "--dtype bf16", "false: --dtype fp32; master weights stay float32", words=_bf16, reads_false=True
    ),
    "--fp16": renamed_switch("--dtype fp16", words=either_way(["--dtype", "fp16"])),
    "--dtype": Same("bfloat16, float16 and float32 are accepted for bf16, fp16 and fp32", spelled=dtype_of),
    "--torch_dtype": renamed(
        "--dtype", words=_torch_dtype, differs="sets the precision of forwards; master weights are always float32"
    ),
    "--tf32": refused_switch(
        "is not a Threestep setting; set NVIDIA_TF32_OVERRIDE=1 in the environment to turn TF32 on; --dtype bf16 "
        "does not need it"
    ),
    "--eval_strategy": renamed(
        "--eval_interval or --eval_epochs", "no: 0; steps: --eval_steps; epoch: --eval_epochs 1",
        words=_strategy("eval", "--eval_interval", "--eval_epochs"),
        differs="a run is also evaluated before and after training"
    ),
    "--eval_steps": renamed(
        "--eval_interval", "values below 1 are a fraction of the run",
        words=_interval_steps("eval", "--eval_interval", "--eval_epochs")
    ),
    "--eval_on_start": needless_switch("a run is evaluated before training"),
    "--do_train": needless_switch("a step trains"),
    "--do_eval": needless_switch("a run is evaluated before and after training"),
    "--save_strategy": renamed(
        "--save_every or --save_epochs",
        "no: 0; steps: --save_steps, 500 by default; epoch: --save_epochs 1; best: --load_best_model_at_end",
        words=_strategy("save", "--save_every", "--save_epochs")
    ),
    "--save_steps": renamed(
        "--save_every", "values below 1 are a fraction of the run",
        words=_interval_steps("save", "--save_every", "--save_epochs")
    ),
    "--save_total_limit": renamed("--keep_last", "0 keeps all; default: 2"),
    "--load_best_model_at_end": Same(
        "no: 0; steps: --save_steps, 500 by default; epoch: --save_epochs 1; best: --load_best_model_at_end"
    ),
    "--metric_for_best_model": Same("default: loss, in step 3 reward; eval_loss is read as eval/loss"),
    "--greater_is_better": Same("default: true, unless the metric is a loss"),
    "--save_only_model": refused_switch(
        "does not fit checkpoints here: they hold what --resume needs; the finished model is in OUTPUT_DIR/model, "
        "and `threestep export` turns a checkpoint into a model"
    ),
    "--save_safetensors": needless_switch("models are saved as safetensors"),
    "--resume_from_checkpoint": renamed(
        "--resume", "true resumes the latest checkpoint; a path selects one in OUTPUT_DIR/checkpoints", words=_resume
    ),
    "--overwrite_output_dir": renamed_switch("--overwrite"),
    "--report_to": Same(
        "default: tensorboard; names separated by spaces or commas", spelled=lambda words: [",".join(words)]
    ),
    "--run_name": Same("trackers show it; without --output_dir, the output folder is runs/NAME"),
    "--logging_dir": needless("the curves are in OUTPUT_DIR/tensorboard"),
    "--logging_steps": needless("the log gets at most one line every --logging_seconds; metrics.jsonl has every step"),
    "--logging_strategy": needless(_STEPS),
    "--logging_first_step": needless_switch(_STEPS),
    "--gradient_checkpointing_kwargs": needless("gradient checkpointing needs no settings here", takes_list=True),
    "--average_tokens_across_devices": needless_switch(
        "a loss is divided by the count over all ranks and micro-batches"
    ),
    "--auto_find_batch_size": refused_switch(
        "is not supported; --dry_run shows the memory per rank, and --max_tokens_per_micro_batch limits it"
    ),
    "--dataset_config": renamed("--data_path hub:NAME,config=CONFIG", words=_with_dataset),
    "--dataset_train_split": renamed("--data_path hub:NAME,split=SPLIT", words=_with_dataset),
    "--dataset_test_split": renamed("--data_path hub:NAME,eval_split=SPLIT", words=_with_dataset),
    "--dataset_streaming": refused_switch(
        "is not supported: rows are tokenized once, into files that are read as needed (docs/reference/cache.md)"
    ),
    "--dataset_num_proc": renamed("--num_workers"),
    "--dataset_text_field": renamed("--text_column"),
    "--eos_token": renamed("--end_of_conversation_token"),
    "--pad_token": Same("for a tokenizer that has none"),
    "--chat_template_path": renamed("--chat_template", "a file", words=_chat_template),
    "--remove_unused_columns": needless_switch("columns that nothing reads are not loaded"),
    "--shuffle_dataset": needless_switch("every epoch has its own order, set by --seed"),
    "--dataloader_num_workers": needless(_LOADER),
    "--dataloader_prefetch_factor": needless(_LOADER),
    "--dataloader_pin_memory": needless_switch(_LOADER),
    "--dataloader_persistent_workers": needless_switch(_LOADER),
    "--dataloader_drop_last": needless_switch("epochs follow each other without a gap, so every step is full"),
    "--group_by_length": needless_switch("rows are grouped by length"),
    "--train_sampling_strategy": renamed(
        "--shuffle false",
        "accepts sequential; the others are not needed, because rows are drawn in an order set by the seed "
        "and grouped by length", words=_SAMPLING
    ),
    "--ddp_find_unused_parameters": needless_switch(_ENGINE),
    "--ddp_backend": needless("the device decides: nccl on GPUs, gloo on CPUs"),
    "--ddp_timeout": renamed("--rank_timeout", "seconds"),
    "--fsdp": refused(
        "is not used here; --zero_stage 3 shards weights, gradients and optimizer states", takes_list=True
    ),
    "--use_cpu": renamed_switch(
        "CUDA_VISIBLE_DEVICES=", "set in the environment to hide the GPUs; without a GPU, not needed", words=_use_cpu
    ),
    "--model_revision": refused(
        "is not supported: hub names are read at their main revision; download another revision and give its "
        "folder",
        unless=("main", *NO_VALUE)
    ),
    "--lora_alpha": Same("default: 16, not 32"),
    "--lora_dropout": Same("default: 0, not 0.05"),
    "--lora_modules_to_save": refused(
        "has no equivalent; --only_optimize_lora false trains all other weights beside the adapters", takes_list=True,
        unless=NO_VALUE
    ),
    "--use_rslora": Same("with LoRA"),
    "--use_dora": Same("with LoRA"),
    "--push_to_hub": Same("at the end of the run, with a model card generated from it"),
    "--hub_model_id": Same("default: the name of --output_dir, under the logged-in account"),
    "--hub_strategy": renamed(
        "end", "every_save is accepted too, but only the model is uploaded; others are refused", words=_HUB
    ),
    "--load_in_4bit": Same("with LoRA; needs the bitsandbytes package"),
    "--load_in_8bit": Same("with LoRA; quantizes only weights, not activations"),
    "--use_bnb_nested_quant": renamed_switch(
        "--bnb_4bit_use_double_quant", "TRL's name",
        words=either_way(["--bnb_4bit_use_double_quant", "true"], ["--bnb_4bit_use_double_quant", "false"]),
        reads_false=True
    ),
    "--bnb_4bit_compute_dtype": needless("layers compute in --dtype"),
    "--bnb_4bit_quant_storage": needless("quantized weights are stored as bytes, which ZeRO does not shard"),
    "--hub_token": refused(
        "would be visible to everyone who lists the machine's processes; set HF_TOKEN, or run `hf auth login`"
    ),
}  # fmt: skip


def dataset_name(alone: str) -> dict[str, OldFlag]:
    """TRL's --dataset_name and its list of datasets, of which a step takes every row. alone: the --data_split that
    gives it them"""

    def words(value: str, given: Mapping[str, str]) -> list[str]:
        return [*_dataset(value, given), *([] if "--data_split" in given else ["--data_split", alone])]

    def of_a_list(value: str, given: Mapping[str, str]) -> list[str]:
        return ["--data_path", *_datasets(value), *([] if "--data_split" in given else ["--data_split", alone])]

    note = (
        f"hub:NAME for a name with an owner, otherwise a path or a registered name; with --data_split {alone}, "
        "uses all rows"
    )
    entries = "a list in a file, with path, name and split for each entry; other keys are refused"
    return {
        "--dataset_name": renamed("--data_path", note, words=words),
        "--datasets": renamed("--data_path", entries, words=of_a_list, takes_list=True),
    }


def zero_stages(*flags: str) -> dict[str, OldFlag]:
    """TRL's --accelerate_config: one of its files by name. flags: ours of the stage"""
    names = ("zero1", "zero2", "zero3")
    words: dict[str, list[str] | str] = {name: [word for flag in flags for word in (flag, name[-1])] for name in names}
    one = "--num_ranks sets the number of ranks; the default is one per GPU"
    otherwise = (
        "--accelerate_config expects zero1, zero2, zero3, single_gpu or multi_gpu, got '{}'; Accelerate is not "
        f"used here: --num_ranks sets the number of ranks, and {' and '.join(flags)} what ZeRO shards (3 does what "
        "FSDP does)"
    )
    reading = by_value({**words, "single_gpu": one, "multi_gpu": one}, otherwise)
    return {"--accelerate_config": renamed(" ".join(f"{flag} N" for flag in flags), "zeroN by name", words=reading)}


# Of the steps that train one model.
HF_ONE_MODEL_FLAGS: dict[str, OldFlag] = {
    **same("--model_name_or_path --torch_compile"),
    **HF_FLAGS,
    **ONE_MODEL_FIELDS,
    **lora("--lora_dim"),
    **zero_stages("--zero_stage"),
    "--lora_target_modules": renamed(
        "--lora_module_name", "parts of layer names, or all-linear", takes_list=True,
        words=listed("--lora_module_name")
    ),
    "--attn_implementation": Same("default: auto, the fastest that reproduces the model's own numbers"),
    "--learning_rate": Same("default: depends on the step"),
    "--weight_decay": Same("on matrices alone"),
    "--per_device_train_batch_size": Same("counts sequences (step 2: prompts); default: 16, not 8"),
    "--per_device_eval_batch_size": Same("default: 16, not 8"),
    "--gradient_checkpointing": Same("default: off, as in transformers; TRL's is on", takes_value=False),
    "--max_length": renamed("--max_seq_len", "default: 512, not 1024"),
    "--max_seq_length": renamed("--max_seq_len", "TRL's older name"),
    "--pad_to_multiple_of": needless("rows are packed, not padded"),
    "--padding_free": needless_switch("rows are packed: several documents share a row without seeing each other"),
    "--label_smoothing_factor": refused("has no equivalent in this step's loss", unless=("0", "0.0")),
}  # fmt: skip

_PACKED = "documents share rows without seeing each other, which does not change gradients; --padded turns this off"
HF_SFT_FLAGS: dict[str, OldFlag] = {
    **HF_ONE_MODEL_FLAGS,
    **SFT_FIELDS,
    **dataset_name("1,0,0"),
    "--packing": needless_switch(f"{_PACKED}; batch sizes count sequences, not packed rows"),
    "--packing_strategy": needless(_PACKED),
    "--eval_packing": needless_switch(_PACKED),
    "--assistant_only_loss": renamed_switch(
        "--loss_on response", "on by default, unlike in TRL; false: conversation", words=_LOSS_ON, reads_false=True
    ),
    "--completion_only_loss": renamed_switch(
        "--loss_on response", "the default, also for messages; false: conversation", words=_LOSS_ON, reads_false=True
    ),
    "--loss_type": renamed("the one loss", "nll and chunked_nll; dft is refused", words=_SFT_LOSS),
    "--truncation_mode": renamed(
        "--truncation", "keep_start: right; keep_end: left", words=_TRUNCATION,
        differs="left cuts the beginning of the prompt, never the response"
    ),
    "--neftune_noise_alpha": renamed("--neftune_alpha"),
}  # fmt: skip
HF_REWARD_FLAGS: dict[str, OldFlag] = {
    **HF_ONE_MODEL_FLAGS,
    **dataset_name("0,1,0"),
    "--center_rewards_coefficient": renamed("--center_coef"),
    "--num_labels": needless("a reward model has one label"),
}  # fmt: skip
HF_DPO_FLAGS: dict[str, OldFlag] = {
    **same("--beta --label_smoothing --ld_alpha"),
    **HF_ONE_MODEL_FLAGS,
    **DPO_FIELDS,
    **dataset_name("0,1,0"),
    "--loss_type": Same("several are summed; only Threestep's losses are accepted", spelled=_losses),
    "--loss_weights": renamed(
        "--loss_type NAME:WEIGHT,...", takes_list=True, words=_loss_weights, overrides=("--loss_type",)
    ),
    "--truncation_mode": renamed(
        "--truncation", "keep_start: right; keep_end: left", words=_TRUNCATION,
        differs="left cuts the beginning of the prompt, never the response"
    ),
    "--rpo_alpha": renamed("--sft_coef", differs="the log-likelihood is a mean over the tokens of each best response"),
    "--precompute_ref_log_probs": needless_switch(
        "the reference's log-probabilities are computed once and kept with the data"
    ),
    "--reference_free": refused_switch("is not supported; the reference is the model that training starts from"),
    "--f_divergence_type": refused("is not supported; only the reverse KL is", unless=("reverse_kl",)),
    "--max_prompt_length": refused(
        "has no separate limit here: --max_seq_len limits prompt and response together, and --truncation left "
        "cuts the prompt", unless=NO_VALUE
    ),
    "--max_completion_length": refused(
        "has no separate limit here: --max_seq_len limits prompt and response together, and --truncation right "
        "cuts the response", unless=NO_VALUE
    ),
    "--generate_during_eval": refused_switch(
        "is not supported; `threestep evaluate win_rate` compares the responses of finished models"
    ),
}  # fmt: skip
