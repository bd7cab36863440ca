"""DeepSpeed-Chat's flags, and the flags of other programs that each step reads: these and Hugging Face's."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from threestep.plugins.names.hf_batches import batch_words, is_trls
from threestep.plugins.names.hf_flags import HF_DPO_FLAGS, HF_REWARD_FLAGS, HF_SFT_FLAGS
from threestep.plugins.names.hf_ppo_flags import HF_PPO_FLAGS
from threestep.plugins.names.launcher_flags import refuse_launcher_flags
from threestep.plugins.names.other_names import (
    DEEPSPEED_CHAT,
    FALSE,
    HUGGING_FACE,
    TRUE,
    Needless,
    OldFlag,
    Refused,
    Renamed,
    flags_with_values,
    translated,
    whole_number,
)
from threestep.plugins.names.removed_flags import REMOVED_FLAGS
from training.utils.flags.step import known_steps

# DeepSpeed-Chat's defaults that differ from those here (training/*/main.py of DeepSpeedExamples 45b4b71).
_ITS_DEFAULTS = {
    "dtype": "fp16",
    "only_optimize_lora": "false",
    "lora_alpha": "1",
    "lora_learning_rate": "5e-4",
    "lora_module_name": "decoder.layers.",
    "actor_lora_learning_rate": "5e-4",
    "critic_lora_learning_rate": "5e-4",
    "actor_lora_module_name": "decoder.layers.",
    "critic_lora_module_name": "decoder.layers.",
}
_ITS_DEFAULTS_OF_STEPS = {
    "sft": {"learning_rate": "1e-3"},
    "reward": {"learning_rate": "5e-5"},
    "dpo": {"learning_rate": "1e-3"},
    "ppo": {"num_warmup_steps": "100"},
}
# What the same flags do otherwise here, by kind of step: the flag that restores it, and the words.
_PAGE = "threestep/plugins/names/from_deepspeed_chat.md#behavior-that-differs-under-the-same-flags"
_EVALUATION = ("--eval_epochs", "evaluation up to ten times (--eval_epochs 1)")
_END = ("--end_of_conversation_token", "one end token in every step (--end_of_conversation_token)")
_STYLE = (
    "--prompt_style",
    "the tokenizer's chat template, if it has one, formats prompts (--prompt_style human_assistant)",
)
_PAD = ("--pad_token", "the token [PAD] is added where a tokenizer has none (--pad_token)")
_SAVED = ("", "the model is saved as safetensors in OUTPUT_DIR/model")
_ITS_BEHAVIOR = {
    "sft": (
        _STYLE,
        ("--loss_on", "loss on the response alone (--loss_on conversation)"),
        _END,
        _PAD,
        _EVALUATION,
        _SAVED,
    ),
    "reward": (
        ("--loss_from", "loss from the scores at the responses' ends (--loss_from first_difference)"),
        _END,
        _PAD,
        _EVALUATION,
        _SAVED,
    ),
    "dpo": (_END, _EVALUATION, _SAVED),
    "ppo": (
        ("--top_k", "rollouts are sampled (--top_k 1)"),
        ("--whiten_advantages", "advantages are whitened (--whiten_advantages false)"),
        ("--max_eval_rows", "held-out prompts are evaluated (fewer: --max_eval_rows)"),
        _SAVED,
    ),
}
_ITS_DATA = (("--data_path", "Dahoas/rm-static", "data"), ("--data_split", "2,4,4", "fractions of the data"))


def read_flags(
    config_flags: Sequence[str], argv: Sequence[str], old_flags: Mapping[str, OldFlag]
) -> tuple[list[str], list[str], list[str]]:
    """Return the words of a file and of a command line by the names of flags here, with what other programs take by
    default, and a line for each flag that was read so."""
    if old_flags:
        refuse_launcher_flags([*config_flags, *argv], old_flags)
    typed = {**flags_with_values(config_flags), **flags_with_values(argv)}
    settings, lines = translated(config_flags, old_flags, typed)
    words, more_lines = translated(argv, old_flags, typed)
    defaults, default_lines = old_defaults([*settings, *words], old_flags, typed)
    return [*defaults, *settings], words, [*lines, *more_lines, *default_lines]


def old_defaults(
    given: Sequence[str], old_flags: Mapping[str, OldFlag], typed: Mapping[str, str]
) -> tuple[list[str], list[str]]:
    """Defaults of other programs for flags that a command line of theirs leaves out, as words, and a line for each.

    given: the words of the command line, by today's names
    typed: its flags as they were typed, with their words
    """
    present = {word.partition("=")[0] for word in given}
    if "--num_generations" in old_flags and is_trls(typed):
        return batch_words(typed, present)
    return _data_of_deepspeed_chat(old_flags, typed, present)


def _data_of_deepspeed_chat(
    old_flags: Mapping[str, OldFlag], typed: Mapping[str, str], present: set[str]
) -> tuple[list[str], list[str]]:
    """Its data and its shares of them, unless no flag is its alone: nothing says then that the command line is."""
    of_a_step = old_flags.keys() >= OLD_FLAGS.keys()
    its = (flag for flag in typed if flag in old_flags and old_flags[flag].whose == (DEEPSPEED_CHAT,))
    is_its = any(its) or typed.get("--deepspeed") == ""  # Hugging Face's names a file
    if not of_a_step or not is_its:
        return [], []
    missing = [(flag, value, what) for flag, value, what in _ITS_DATA if flag not in present]
    reason = "DeepSpeed-Chat's default, because the command line uses its flags but names no"
    words = [word for flag, value, _ in missing for word in (flag, value)]
    lines = [f"{flag} is {value}, {reason} {what}" for flag, value, what in missing]
    return words, [*lines, *_defaults_that_differ(old_flags, present)]


def _defaults_that_differ(old_flags: Mapping[str, OldFlag], present: set[str]) -> list[str]:
    """Return a line for DeepSpeed-Chat's other defaults that differ here and that the command line leaves out, and one
    for what differs under the same flags."""
    tables = {"sft": SFT_OLD_FLAGS, "reward": REWARD_OLD_FLAGS, "dpo": DPO_OLD_FLAGS, "ppo": PPO_OLD_FLAGS}
    kind = next((kind for kind, table in tables.items() if table.keys() == old_flags.keys()), None)
    if kind is None:
        return []
    ours = next(step for step in known_steps().values() if step.kind == kind).defaults
    theirs = {**_ITS_DEFAULTS_OF_STEPS[kind], **{flag: value for flag, value in _ITS_DEFAULTS.items() if flag in ours}}
    ranks = {flag.removeprefix("--").removesuffix("lora_dim") for flag in present if flag.endswith("lora_dim")}
    differ = [
        f"--{flag} {value} (here {'the learning rate' if ours[flag] is None else str(ours[flag]).lower()})"
        for flag, value in theirs.items()
        if f"--{flag}" not in present and f"--no_{flag}" not in present and _concerns(flag, ranks)
    ]
    line = (
        f"DeepSpeed-Chat's defaults that differ here: {', '.join(differ)}; set these flags to train as "
        "DeepSpeed-Chat does"
    )
    given = {flag.replace("--no_", "--", 1) for flag in present}
    behaves = [words for flag, words in _ITS_BEHAVIOR[kind] if flag not in given]
    behavior = f"behavior that differs from DeepSpeed-Chat's: {'; '.join(behaves)}; all of it: {_PAGE}"
    return [*([line] if differ else []), behavior]


def _concerns(flag: str, roles: set[str]) -> bool:
    """True if a flag concerns a run with LoRA in these roles, "actor_", "critic_" or "" for the only one."""
    role = next((role for role in ("actor_", "critic_") if flag.startswith(role)), None)
    return "lora" not in flag or bool(roles if role is None else role in roles)


def no_dropout(role: str = "") -> Renamed:
    """--disable_dropout, of actor or critic with `role`."""
    flag = f"--{role}dropout"
    whose = (DEEPSPEED_CHAT,) if role else (DEEPSPEED_CHAT, HUGGING_FACE)
    return Renamed(flag, takes_value=False, words=lambda _value, _given: [flag, "0.0"], whose=whose)


def _end_token(_value: str, given: Mapping[str, str]) -> list[str]:
    token = given.get("--end_of_conversation_token") or given.get("--eot_token") or "<|endoftext|>"
    return ["--end_of_conversation_token", token, "--add_end_of_conversation_token", "true"]


def _deepspeed(value: str, given: Mapping[str, str]) -> list[str] | str:
    """DeepSpeed-Chat's switch; or Hugging Face's JSON, which says the stage and the precision too."""
    if value.lower() in ("", *TRUE, *FALSE):
        return _EVERY_RUN
    words = ["--deepspeed_config", value]
    try:
        config = json.loads(Path(value).read_text(encoding="utf-8"))
        stage, is_fp16 = (config.get(part, {}).get(key) for part, key in (("zero_optimization", "stage"), _FP16))
    except (OSError, ValueError, RecursionError, AttributeError):
        return words  # what is wrong with the file, its reader says
    if isinstance(stage, int) and "--zero_stage" not in given:
        words += ["--zero_stage", str(stage)]
    if is_fp16 is True and not {"--dtype", "--torch_dtype", "--bf16", "--fp16"} & given.keys():
        words += ["--dtype", "fp16"]
    return words


def _eval_rows(value: str, given: Mapping[str, str]) -> list[str]:
    batch = whole_number("--per_device_eval_batch_size", given.get("--per_device_eval_batch_size", "16"))
    rows = whole_number("--eval_iters", value) * batch * int(os.environ.get("WORLD_SIZE", "1"))
    return ["--max_eval_rows", str(rows)]


def _test_steps(_value: str, given: Mapping[str, str]) -> list[str]:
    steps = whole_number("--test_stop_step", given.get("--test_stop_step", "0"))
    return ["--max_train_steps", str(max(1, steps))]


_EVERY_RUN = "every run uses DeepSpeed"
_FP16 = ("fp16", "enabled")
_PADDING = Needless("lengths, not pad tokens, show where a text begins and ends")

OLD_FLAGS: dict[str, OldFlag] = {
    "--num_padding_at_beginning": _PADDING,
    "--deepspeed": Renamed(
        "--deepspeed_config",
        "its ZeRO stage and fp16 setting become --zero_stage and --dtype if these are not given; without a file "
        "it is not needed, because every run uses DeepSpeed", takes_list=True, words=_deepspeed, whose=(DEEPSPEED_CHAT,
        HUGGING_FACE)
    ),
    "--deepscale": Needless(_EVERY_RUN, takes_value=False),
    "--compute_fp32_loss": Needless(
        "losses and log-probabilities are always computed in float32, whatever --dtype is", takes_value=False
    ),
    "--enable_tensorboard": Needless("every run writes OUTPUT_DIR/tensorboard", takes_value=False),
    "--tensorboard_path": Needless("the curves are written to OUTPUT_DIR/tensorboard"),
    "--add_eot_token": Renamed(
        "--end_of_conversation_token TOKEN --add_end_of_conversation_token true",
        "TOKEN comes from --eot_token, else it is <|endoftext|>; it ends every response in every step",
        takes_value=False,
        words=_end_token
    ),
    "--eot_token": Needless("with --add_eot_token it is read as --end_of_conversation_token; alone it has no effect"),
}  # fmt: skip
ONE_MODEL_OLD_FLAGS: dict[str, OldFlag] = {
    **OLD_FLAGS,
    "--deepscale_config": Renamed("--deepspeed_config"),
    "--disable_dropout": no_dropout(),
}  # fmt: skip
_PRINT_LOSS = Needless("the progress bar and metrics.jsonl show the loss of every step", takes_value=False)
# Of the program that scores with a finished reward model, whose tokenizer has what step 2 added.
SCORING_OLD_FLAGS: dict[str, OldFlag] = {
    "--num_padding_at_beginning": _PADDING,
    "--add_eot_token": Renamed(
        "--end_of_conversation_token <|endoftext|>", takes_value=False,
        words=lambda _value, _given: ["--end_of_conversation_token", "<|endoftext|>"]
    ),
}  # fmt: skip
# Of prompt_eval.py, whose place `threestep evaluate win_rate` takes.
ANSWERING_OLD_FLAGS: dict[str, OldFlag] = {
    "--model_name_or_path_baseline": Renamed("--baseline"),
    "--model_name_or_path_finetune": Renamed("--model_name_or_path"),
    "--add_eot_token": SCORING_OLD_FLAGS["--add_eot_token"],
    "--num_beams": Refused(
        "is not supported: responses are generated token by token, greedily with --temperature 0", unless=("1",)
    ),
    "--num_beam_groups": Refused("is not supported: responses are generated token by token", unless=("1",)),
    "--penalty_alpha": Needless("responses are generated without a penalty; prompt_eval.py ignores the flag too"),
    "--num_return_sequences": Refused("is not supported: each model answers a prompt once", unless=("1",)),
    "--language": Refused(
        "selects one of six built-in prompts there; here, --data_path names the prompts", unless=("English",)
    ),
}  # fmt: skip
SFT_OLD_FLAGS: dict[str, OldFlag] = {
    **REMOVED_FLAGS,
    **HF_SFT_FLAGS,
    **ONE_MODEL_OLD_FLAGS,
    "--print_loss": _PRINT_LOSS,
}  # fmt: skip
REWARD_OLD_FLAGS: dict[str, OldFlag] = {
    **REMOVED_FLAGS,
    **HF_REWARD_FLAGS,
    **ONE_MODEL_OLD_FLAGS,
    "--eval_iters": Renamed(
        "--max_eval_rows ROWS", "ROWS is eval_iters x per_device_eval_batch_size x ranks", words=_eval_rows
    ),
}  # fmt: skip
DPO_OLD_FLAGS: dict[str, OldFlag] = {
    **REMOVED_FLAGS,
    **HF_DPO_FLAGS,
    **ONE_MODEL_OLD_FLAGS,
    "--print_loss": _PRINT_LOSS,
    "--offload_reference_model": Needless(
        "the reference's log-probabilities are computed once and kept, and no reference stays in memory during "
        "training",
        takes_value=False
    ),
}  # fmt: skip

_CONFIG = Refused(
    "applies to steps 1 and 2; in step 3, configure the two engines with --actor_zero_stage, --offload and --dtype"
)

PPO_OLD_FLAGS: dict[str, OldFlag] = {
    **REMOVED_FLAGS,
    **HF_PPO_FLAGS,
    **OLD_FLAGS,
    "--deepspeed": replace(
        _CONFIG, takes_list=True, unless=("", *TRUE, *FALSE), otherwise=_EVERY_RUN, whose=(DEEPSPEED_CHAT, HUGGING_FACE)
    ),
    "--deepspeed_config": _CONFIG,
    "--deepscale_config": _CONFIG,
    "--preprocessing_num_workers": Renamed("--num_workers"),
    "--per_device_mini_train_batch_size": Renamed("--per_device_training_batch_size", "an older spelling"),
    "--generation_batch_numbers": Renamed("--generation_batches", "an older spelling"),
    "--disable_actor_dropout": no_dropout("actor_"),
    "--disable_critic_dropout": no_dropout("critic_"),
    "--enable_hybrid_engine": Needless(
        "rollouts decode with a cache at any ZeRO stage, and ZeRO-3 gathers the weights once per rollout; use "
        "--rollout_engine hybrid for DeepSpeed's own engine", takes_value=False
    ),
    "--unpin_actor_parameters": Needless("rollouts use no second, pinned copy of the weights", takes_value=False),
    "--release_inference_cache": Needless("the cache is freed when a rollout ends", takes_value=False),
    "--inference_tp_size": Needless(
        "every rank generates its own responses from the full weights, which ZeRO-3 gathers for a rollout; "
        "--dry_run shows whether they fit on a rank"
    ),
    "--tp_gather_partition_size": Needless("no layer is split across ranks"),
    "--enable_mixed_precision_lora": Needless(
        "frozen weights stay in --dtype, and ZeRO-3 shards them across the ranks", takes_value=False
    ),
    "--align_overflow": Needless(
        "bf16, the default, does not overflow; with fp16, actor and critic each skip only their own overflowing "
        "steps",
        takes_value=False
    ),
    "--print_answers": Needless(
        "every evaluation writes prompts, responses and scores to OUTPUT_DIR/samples.jsonl", takes_value=False
    ),
    "--print_answers_interval": Needless("--eval_interval sets how often samples.jsonl is extended"),
    "--enable_test_mode": Renamed(
        "--max_train_steps STEPS", "STEPS comes from --test_stop_step", takes_value=False, words=_test_steps
    ),
    "--test_stop_step": Needless("with --enable_test_mode it is read as --max_train_steps; alone it has no effect"),
}  # fmt: skip
