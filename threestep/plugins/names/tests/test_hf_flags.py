"""TRL's and Hugging Face's flags, fields and command lines, in the steps that read them, and their page."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import trl_table
from tests.support.trl_lines import (
    LINES,
    NOT_NEEDED,
    REFUSED,
    STEPS,
    UNKNOWN,
    WORKS,
    fields_of,
    sentence_of,
    status_of,
    statuses,
)
from threestep.plugins.names.deepspeed_chat_flags import PPO_OLD_FLAGS, old_defaults
from threestep.plugins.names.hf_batches import FORWARD, ITS, PROMPTS
from threestep.plugins.names.hf_field_flags import (
    DPO_FIELDS,
    EVERY_STEP_FIELDS,
    ONE_MODEL_FIELDS,
    PPO_FIELDS,
    SFT_FIELDS,
)
from threestep.plugins.names.other_names import HUGGING_FACE, Renamed, Same, translated
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import defaults_of, parse_arguments, resolved_settings
from training.utils.flags.step import known_steps

DOCUMENT = Path(__file__).parents[1] / "trl_flags.md"

# What is typed, and what becomes of it: settings; SAID, where a line says that it is not needed; or the words of the
# sentence that refuses it.
SAID = object()
# Those without a counterpart.
FIELDS = {**EVERY_STEP_FIELDS, **ONE_MODEL_FIELDS, **SFT_FIELDS, **DPO_FIELDS, **PPO_FIELDS}
EVERY_STEP: dict[str, Any] = {
    "--max_steps 10": {"max_train_steps": 10, "num_train_epochs": math.inf},
    "--max_steps 10 --num_train_epochs 3": {"max_train_steps": 10, "num_train_epochs": math.inf},
    "--max_steps -1": {"max_train_steps": None, "num_train_epochs": 1.0},
    "--warmup_steps 100": {"num_warmup_steps": 100, "warmup_ratio": 0.0},
    "--warmup_steps 0.1": {"num_warmup_steps": 0, "warmup_ratio": 0.1},
    "--optim adamw_torch_fused": SAID,
    "--optim adafactor": "is not supported, only adamw_torch; for a plugin's optimizer, use --optimizer; to",
    "--optim sgd": "--optim expects adamw_torch or adamw_torch_fused, got 'sgd'; for a plugin's optimizer",
    "--full_determinism": {"deterministic": True},
    "--bf16": {"dtype": "bf16"},
    "--bf16 True": {"dtype": "bf16"},
    "--bf16=false": {"dtype": "fp32"},
    "--bf16 false --fp16 true --zero_stage 1": {"dtype": "fp16"},
    "--fp16 --zero_stage 1": {"dtype": "fp16"},
    "--fp16 False": {"dtype": "bf16"},
    "--fp16 --bf16": "--dtype fp16 (as --fp16 is read) and --dtype bf16 (as --bf16 is read) contradict each other",
    "--dtype bfloat16": {"dtype": "bf16"},
    "--torch_dtype bfloat16": {"dtype": "bf16"},
    "--torch_dtype torch.float32": {"dtype": "fp32"},
    "--torch_dtype auto": SAID,
    "--eval_strategy no": {"eval_interval": 0, "eval_epochs": 0.0},
    "--eval_strategy epoch": {"eval_interval": None, "eval_epochs": 1.0},
    "--eval_strategy steps": {"eval_interval": 500},
    "--eval_strategy steps --logging_steps 25": {"eval_interval": 25},
    "--eval_strategy steps --eval_steps 20": {"eval_interval": 20},
    "--eval_strategy no --eval_steps 20": {"eval_interval": 0},
    "--eval_strategy daily": "--eval_strategy expects no, steps, epoch, got 'daily'",
    "--eval_steps 20": {"eval_interval": 20},
    "--eval_steps 0.1 --max_steps 55": {"eval_interval": 6},
    "--eval_steps 0.25 --num_train_epochs 3": {"eval_epochs": 0.75},
    "--save_strategy no": {"save_every": 0},
    "--save_strategy epoch": {"save_epochs": 1.0},
    "--save_strategy steps": {"save_every": 500},
    "--save_strategy best": {"save_every": 0, "load_best_model_at_end": True},
    "--load_best_model_at_end --metric_for_best_model eval_accuracy --greater_is_better true": {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_accuracy",
        "greater_is_better": True,
    },
    "--metric_for_best_model loss": "needs --load_best_model_at_end or --early_stopping; pass one of them",
    "--greater_is_better true": "needs --load_best_model_at_end or --early_stopping; pass one of them",
    "--save_steps 100": {"save_every": 100},
    "--save_steps 0.5": {"save_epochs": 0.5},
    "--save_total_limit 3": {"keep_last": 3},
    "--save_only_model false": SAID,
    "--resume_from_checkpoint true": {"resume": "latest"},
    "--resume_from_checkpoint out/checkpoints/step_000010": {"resume": "out/checkpoints/step_000010"},
    "--resume_from_checkpoint False": {"resume": None},
    "--overwrite_output_dir False": {"overwrite": False},
    "--run_name mine --output_dir out": {"run_name": "mine", "output_dir": "out"},
    "--logging_steps 10": {},
    "--use_liger_kernel false": {"use_liger_kernel": False},
    "--dataset_name embedded": {"data_path": ["embedded"]},
    "--dataset_name trl-lib/Capybara": {"data_path": ["hub:trl-lib/Capybara"]},
    "--dataset_name openai/gsm8k --dataset_config main --dataset_test_split test": {
        "data_path": ["hub:openai/gsm8k,config=main,split=train,eval_split=test"]
    },
    "--dataset_name a/b --dataset_train_split train_sft": {"data_path": ["hub:a/b,split=train_sft"]},
    "--dataset_name a/b --data_path embedded": "contradict each other; leave one of them out",
    "--dataset_config main": "needs --dataset_name",
    "--dataset_train_split train": "needs --dataset_name",
    "--dataset_test_split test": "needs --dataset_name",
    "--chat_template_path docs": "expects a file with a Jinja template, got the folder 'docs'",
    "--train_sampling_strategy random": SAID,
    "--train_sampling_strategy sequential": {"shuffle": False},
    "--train_sampling_strategy other": "--train_sampling_strategy expects random, sequential, group_by_length or",
    "--model_revision main": SAID,
    "--use_cpu": SAID,
    "--use_dora false": {"use_dora": False},
    "--push_to_hub --hub_model_id me/mine": {"push_to_hub": True, "hub_model_id": "me/mine"},
    "--push_to_hub": {"push_to_hub": True, "hub_model_id": None},
    "--datasets {'path':'a/b'} {'path':'c/d','name':'n','split':'s'}": {
        "data_path": ["hub:a/b", "hub:c/d,config=n,split=s"]
    },
    "--datasets {'path':'a/b','columns':['text']}": "--datasets expects entries with path, name and split, got {'path'",
    "--datasets a/b": "--datasets must be a list in a settings file, got 'a/b'; to give one on the command",
    "--accelerate_config multi_gpu": SAID,
    "--accelerate_config mine.yaml": "--accelerate_config expects zero1, zero2, zero3, single_gpu or multi_gpu, got",
    "--hub_model_id me/mine": "needs --push_to_hub, which is off",
    "--hub_private_repo true --push_to_hub --hub_model_id me/mine": {"hub_private_repo": True},
    "--hub_strategy end": SAID,
    "--hub_strategy every_save": SAID,
    "--hub_strategy all_checkpoints": "--hub_strategy expects end or every_save, got 'all_checkpoints'",
    "--load_in_8bit true": {"load_in_8bit": True},
    "--use_bnb_nested_quant": {"bnb_4bit_use_double_quant": True},
    "--use_bnb_nested_quant false": {"bnb_4bit_use_double_quant": False},
    "--deepspeed": SAID,
}
ONE_MODEL: dict[str, Any] = {
    **EVERY_STEP,
    "--accelerate_config zero2": {"zero_stage": 2},
    "--use_peft": {"lora_dim": 16},
    "--use_peft --lora_r 8": {"lora_dim": 8},
    "--use_peft false --lora_r 8": {"lora_dim": 0},
    "--lora_r 8": {"lora_dim": 8},
    "--lora_target_modules q_proj v_proj": {"lora_module_name": "q_proj,v_proj"},
    "--lora_target_modules all-linear": {"lora_module_name": "all-linear"},
    "--max_length 1024 --max_seq_len 512": "--max_seq_len 1024 (as --max_length is read) and --max_seq_len 512",
    "--disable_dropout": {"dropout": 0.0},
    "--label_smoothing_factor 0.0": SAID,
}
FLAGS: dict[str, dict[str, Any]] = {
    "step1_sft": {
        **ONE_MODEL,
        "--assistant_only_loss": {"loss_on": "response"},
        "--assistant_only_loss false": {"loss_on": "conversation"},
        "--completion_only_loss true": {"loss_on": "response"},
        "--completion_only_loss false": {"loss_on": "conversation"},
        "--loss_type chunked_nll": SAID,
        "--loss_type dft": "--loss_type expects nll or chunked_nll in step 1, got 'dft'",
        "--truncation_mode keep_start": {"truncation": "right"},
        "--truncation_mode keep_end": {"truncation": "left"},
        "--truncation_mode x": "--truncation_mode expects keep_start or keep_end, got 'x'",
        "--dataset_name a/b": {"data_split": "1,0,0"},
        "--dataset_name a/b --data_split 6,2,2": {"data_split": "6,2,2"},
    },
    "step2_reward": {
        **ONE_MODEL,
        "--dataset_name a/b": {"data_split": "0,1,0"},
    },
    "step2_dpo": {
        **ONE_MODEL,
        "--ref_model a/b": "--ref_model is not supported; the reference is the model that training starts from; leave",
        "--loss_type sigmoid sft": {"loss_type": "sigmoid,sft"},
        "--loss_type sigmoid sft --loss_weights 1 0.1": {"loss_type": "sigmoid:1,sft:0.1"},
        "--loss_weights 1 0.1": "--loss_weights expects one number for each of sigmoid, got 1 0.1; give one number",
        "--loss_weights none": SAID,
        "--loss_type bco_pair": "bco trains on rows with one response, marked good or bad (docs/dpo.md#responses-that-",
        "--loss_type mine.py:loss": "got the function mine.py:loss; a preference loss of your own needs a plugin",
        "--loss_type given:loss": "--loss_type expects names, got the function loss; a preference loss of your own",
        "--dataset_test_split test --dataset_name embedded": SAID,
        "--dataset_name qa.jsonl --dataset_train_split x": "--dataset_name qa.jsonl is not read from the hub; leave it",
        "--truncation_mode keep_end": {"truncation": "left"},
        "--f_divergence_type reverse_kl": SAID,
        "--dataset_name a/b": {"data_split": "0,1,0"},
    },
    "step3_ppo": {
        **EVERY_STEP,
        "--use_peft": {"actor_lora_dim": 16, "critic_lora_dim": 0},
        "--lora_r 8": {"actor_lora_dim": 8},
        "--lora_target_modules q_proj v_proj": {"actor_lora_module_name": "q_proj,v_proj"},
        "--model_name_or_path b": {"actor_model_name_or_path": "b"},
        "--accelerate_config zero3": {"actor_zero_stage": 3, "critic_zero_stage": 3},
        "--reward_funcs accuracy_reward think_format_reward --reward_weights 1.0 0.5": {
            "reward": "math:1.0,regex:0.5",
            "reference_column": "solution",
            "reward_regex": r"(?s)\A<think>(?!.*<think>).*</think>",
        },
        "--reward_funcs accuracy_reward --reference_column answer": {"reference_column": "answer"},
        "--reward_funcs mine.py:score": {"reward": "mine.py:score:1"},
        "--reward_funcs think": "--reward_funcs expects accuracy_reward, think_format_reward, or your own function as",
        "--reward_funcs my_lib.rewards.mine": "needs the file my_lib/rewards.py, which does not exist here",
        "--reward_funcs examples.gsm8k.score": {"reward": "examples/gsm8k.py:score:1"},
        "--reward_funcs reasoning_accuracy_reward": "has no equivalent here: math reads the whole response",
        "--reward_funcs get_soft_overlong_punishment": "use --overlong_buffer_tokens and --overlong_penalty",
        "--reward_funcs accuracy_reward --reward_weights 1 2": "expects one number for each of math, got 1 2",
        "--reward_model_name_or_path r --reward_funcs accuracy_reward --reward_weights 1 2": {
            "reward": "model:1,math:2",
            "critic_model_name_or_path": "r",
        },
        "--reward_weights 1.0 0.5": "--reward_weights 1.0 0.5 needs --reward_funcs",
        "--learning_rate 1e-6": {"actor_learning_rate": 1e-6, "critic_learning_rate": 5e-6},
        "--weight_decay 0.1": {"actor_weight_decay": 0.1, "critic_weight_decay": 0.1},
        "--gradient_checkpointing": {"actor_gradient_checkpointing": True, "critic_gradient_checkpointing": True},
        "--gradient_checkpointing false": {"actor_gradient_checkpointing": False},
        "--per_device_train_batch_size 32": {"per_device_generation_batch_size": 32},
        "--max_prompt_length 128": {"max_prompt_seq_len": 128, "prompt_truncation": "left"},
        "--max_prompt_length 128 --prompt_truncation drop": {"prompt_truncation": "drop"},
        # 8 completions of a forward, 8 of a prompt
        "--generation_batch_size 64": {"per_device_generation_batch_size": 64, "per_device_training_batch_size": 8},
        "--generation_batch_size 60": "must be a multiple of --per_device_train_batch_size 8 x 1 ranks, got 60",
        "--steps_per_generation 4 --num_generations 8": {
            "per_device_generation_batch_size": 4,
            "num_samples_per_prompt": 8,
            "per_device_training_batch_size": 8,
        },
        "--steps_per_generation 1 --num_generations 5": "each rank generates 8 x 1 completions",
        "--steps_per_generation 0": "--steps_per_generation must be a whole number above 0, got 0",
        "--steps_per_generation none --num_generations 8": SAID,
        "--num_mini_batches 4 --per_device_train_batch_size 2 --gradient_accumulation_steps 3": {
            "per_device_generation_batch_size": 24,
            "per_device_training_batch_size": 2,
            "gradient_accumulation_steps": 3,
        },
        "--max_tool_calling_iterations 3": {"max_turns": 4},
        "--ref_model a/b": "--ref_model is not supported; the reference is the model that training starts from; leave",
        "--value_model a/b": "--value_model is not supported; the critic starts from --critic_model_name_or_path",
        "--max_tool_calling_iterations none": SAID,
        "--multi_objective_aggregation sum_then_normalize": SAID,
        "--multi_objective_aggregation normalize_then_sum": "--multi_objective_aggregation expects sum_then_normalize",
        "--normalize_advantages": {"whiten_advantages": True},
        "--normalize_advantages false": {"whiten_advantages": False},
        "--use_bias_correction_kl": SAID,
        "--use_bias_correction_kl --beta 0.1": {"kl_estimator": "k3+"},
        "--use_bias_correction_kl false --beta 0.1": {"kl_estimator": "k3"},
        "--ds3_gather_for_generation": SAID,
        "--ds3_gather_for_generation false": "ZeRO-3 gathers the weights once per rollout; use --dry_run true to see",
        "--disable_dropout": {"actor_dropout": 0.0, "critic_dropout": 0.0},
        "--disable_dropout false": SAID,
        "--shuffle_dataset": {"shuffle": True},
        "--shuffle_dataset false": {"shuffle": False},
        "--repetition_penalty 1.0": SAID,
        "--repetition_penalty 1.1": "--repetition_penalty must be 1, got 1.1",
        "--beta 0.04": {"kl_coef": 0.04, "kl_in": "loss"},
        "--beta 0.04 --kl_in reward": {"kl_coef": 0.04, "kl_in": "reward"},
        "--loss_type dr_grpo": {"loss_aggregation": "seq-mean-token-sum-norm"},
        "--loss_type dapo": {"loss_aggregation": "token-mean"},
        "--loss_type grpo": {"loss_aggregation": "seq-mean-token-mean"},
        "--loss_type cispo": {"policy_loss": "cispo"},
        "--loss_type vespo": "--loss_type expects one of grpo, dapo, bnpo, dr_grpo, cispo, sapo in step 3, got 'vespo'",
        "--scale_rewards none": {"norm_adv_by_std": False},
        "--scale_rewards group": {"norm_adv_by_std": True},
        "--scale_rewards batch --advantage grpo": {"norm_adv_by_std": True, "norm_adv_over": "batch"},
        "--scale_rewards mean": "--scale_rewards expects group (true), batch or none (false), got 'mean'",
        "--importance_sampling_level sequence": {"policy_loss": "gspo"},
        "--importance_sampling_level token": SAID,
        "--importance_sampling_level word": "expects token or sequence, got 'word'",
        "--mask_truncated_completions": {"mask_truncated_responses": True},
        "--sapo_temperature_neg 1.1 --loss_type sapo": {"sapo_tau_neg": 1.1, "policy_loss": "sapo"},
        "--sapo_temperature_pos 1.1 --loss_type sapo": {"sapo_tau_pos": 1.1},
        "--use_vllm": {"rollout_engine": "vllm"},
        "--use_vllm false": SAID,
        "--vllm_mode colocate": SAID,
        "--vllm_mode server": "selects TRL's own server; instead, use --rollout_engine vllm_server",
        "--vllm_enable_sleep_mode false": {"vllm_sleep": False},
        "--vllm_importance_sampling_correction": {"mismatch_correction": "truncate"},
        "--vllm_importance_sampling_correction false": {"mismatch_correction": "none"},
        "--vllm_importance_sampling_cap 3.0": {"mismatch_threshold": 3.0},
        "--vllm_importance_sampling_correction true --vllm_importance_sampling_mode sequence_mask": {
            "mismatch_correction": "mask",
            "mismatch_level": "sequence",
        },
        "--vllm_importance_sampling_mode token_truncate": {"mismatch_correction": "truncate"},
        "--vllm_importance_sampling_mode token_mask --vllm_importance_sampling_correction false": {
            "mismatch_correction": "none"
        },
        "--vllm_importance_sampling_mode soft": "--vllm_importance_sampling_mode expects one of token_truncate,",
        "--vllm_importance_sampling_clip_max 3.0": {"mismatch_threshold": 3.0},
        "--vllm_importance_sampling_clip_max none": SAID,
        "--vllm_importance_sampling_clip_min 0.5": {"mismatch_threshold_lower": 0.5},
        "--dataset_name a/b": {"data_split": "0,0,1"},
    },
}
STARTS = {
    "step3_ppo": {"data_path": "embedded", "actor_model_name_or_path": "a", "critic_model_name_or_path": "c"},
    "other": {"data_path": "embedded", "model_name_or_path": "m"},
}
# With the flag that the line gives, or reads, in the place of the start's.
REPLACED = {
    "--dataset_name": "data_path",
    "--datasets {'path':'a/b'} ": "data_path",
    "--model_name_or_path": "actor_model_name_or_path",
    "--sft_model_path": "actor_model_name_or_path",
    "--reward_model": "critic_model_name_or_path",
}
# What every step has in common is read in two of them.
CASES = [
    (step, line)
    for step, lines in FLAGS.items()
    for line in lines
    if step == "step1_sft" or line not in (EVERY_STEP if step == "step3_ppo" else ONE_MODEL)
]


def start_of(step: str, line: str) -> list[str]:
    start = STARTS.get(step, STARTS["other"])
    dropped = {name for part, name in REPLACED.items() if line.startswith(part)}
    return [f"--{name}={value}" for name, value in start.items() if name not in dropped]


def settings_of(step: str, argv: list[str]) -> dict[str, Any]:
    declared = known_steps()[step]
    return resolved_settings(parse_arguments(declared.groups, argv, "", declared.old_flags))


@pytest.mark.parametrize(("step", "line"), CASES)
def test_every_flag_has_its_meaning_or_a_line_or_a_sentence(step, line, capsys):
    expected, name = FLAGS[step][line], re.split("[ =]", line)[0]
    argv = [*start_of(step, line), *line.split()]
    if isinstance(expected, str):
        with pytest.raises(ThreestepError, match=re.escape(expected)):
            settings_of(step, argv)
        return
    settings = settings_of(step, argv)
    lines = capsys.readouterr().out.splitlines()
    if expected is SAID:
        assert any(re.match(rf"{name}( \S+)* is not needed: ", said) for said in lines)
    else:
        assert {name: settings[name] for name in expected} == expected
        if name[2:] not in settings:
            assert any(said.startswith(name) for said in lines), "a flag that is read as another says so"


def test_every_entry_that_is_read_is_typed_here_and_every_same_name_is_ours():
    """Those that are not needed, refused, or renamed and no more: test_names.py."""
    for step, lines in FLAGS.items():
        table = known_steps()[step].old_flags
        typed = {re.split("[ =]", line)[0] for line in lines}
        its = {flag for flag, read in table.items() if HUGGING_FACE in read.whose} - FIELDS.keys()
        same = {flag for flag in its if isinstance(table[flag], Same)}
        read = {flag for flag in its if isinstance(table[flag], Renamed) and table[flag].words}
        own = {f"--{name}" for name in defaults_of(known_steps()[step].groups)}
        assert same <= own and read <= typed <= its | FIELDS.keys(), sorted(its ^ typed)


def test_a_file_has_the_names_too_and_the_command_line_overrides(tmp_path, capsys):
    """What is typed is in one place; the settings hold our names alone."""
    file = tmp_path / "run.yaml"
    values = {
        "model_name_or_path": "m",
        "data_path": "embedded",
        "bf16": False,
        "max_length": 1024,
        "eval_strategy": False,  # YAML's no
        "save_strategy": "epoch",
        "use_peft": True,
        "lora_target_modules": ["q_proj", "v_proj"],
        "max_steps": 7,
        "report_to": ["tensorboard"],
        "assistant_only_loss": True,
    }
    file.write_text(yaml.safe_dump(values))
    found = settings_of("step1_sft", ["--config", str(file), "--max_seq_len", "512", "--lora_r", "4"])
    expected = {"dtype": "fp32", "max_seq_len": 512, "eval_interval": 0, "save_epochs": 1.0, "lora_dim": 4}
    assert {name: found[name] for name in expected} == expected
    assert (found["lora_module_name"], found["max_train_steps"]) == ("q_proj,v_proj", 7)
    assert not found.keys() & {"max_length", "bf16", "use_peft", "eval_strategy"}
    file.write_text("model_name_or_path: m\ndata_path: embedded\nmax_lenght: 3\nlr: 1\n")
    with pytest.raises(ThreestepError, match="unknown setting 'lr'; did you mean 'learning_rate'"):
        settings_of("step1_sft", ["--config", str(file)])


def test_a_json_brings_its_stage_and_a_command_line_is_not_taken_for_deepspeed_chats(tmp_path, capsys):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}, "bf16": {}}))
    start = "--model_name_or_path m --data_path embedded".split()
    found = settings_of("step1_sft", [*start, "--deepspeed", str(file)])
    assert (found["deepspeed_config"], found["zero_stage"], found["dtype"]) == (str(file), 2, "fp16")
    found = settings_of("step1_sft", [*start, "--deepspeed", str(file), "--zero_stage", "3", "--bf16"])
    assert (found["zero_stage"], found["dtype"]) == (3, "bf16")
    assert "Dahoas" not in capsys.readouterr().out
    with pytest.raises(ThreestepError, match="^--data_path expects at least one dataset, got none"):
        settings_of("step1_sft", "--model_name_or_path m --max_length 512 --bf16".split())


# Fields and command lines.


@pytest.mark.parametrize("trainer", STEPS)
def test_no_field_is_unknown(trainer):
    found = statuses(trainer)
    assert [flag for flag, status in found.items() if status == UNKNOWN] == []
    assert min(Counter(found.values())[status] for status in (WORKS, NOT_NEEDED, REFUSED)) > 30
    assert len(found) > 160


def test_an_unknown_field_is_found():
    assert status_of("--nobody_has_this", "4", known_steps()["step1_sft"]) == UNKNOWN
    assert status_of("--no_output_dir", "", known_steps()["step1_sft"]) == UNKNOWN


@pytest.mark.parametrize("trainer", STEPS)
def test_trls_defaults_may_be_spelled_out(trainer, capsys):
    """As a file that another program wrote has them: what a field is when it is not given is refused nowhere."""
    step = known_steps()[STEPS[trainer]]
    given = {flag: word for flag, word in fields_of(trainer).items() if word not in ("", "None")}
    assert len(given) > 40
    argv = [f"{flag}={word}" for flag, word in given.items()]
    more = ["--advantage", trainer] if step.name == "step3_ppo" else []
    words = [*more, "--model_name_or_path", "m", "--dataset_name", "a/b", *argv]
    if step.name == "step3_ppo":
        words += ["--reward", "length:1", "--reward_length_characters", "8"]
    parse_arguments(step.groups, words, "", step.old_flags)


def test_printed_lines_are_read_but_for_those_without_data_or_with_less_than_a_group(tmp_path):
    """Two of those that name no data are of scripts that name it themselves."""
    known = ("--data_path expects at least one dataset", "each rank generates 2 x 1 completions")
    sentences = [sentence for line in LINES if (sentence := sentence_of(line, tmp_path))]
    found = Counter(next((each for each in known if sentence.startswith(each)), sentence) for sentence in sentences)
    assert found == dict(zip(known, (4, 1), strict=True))


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("--no_remove_unused_columns --seed 1", "--seed 1"),
        ("--no_gradient_checkpointing", "--gradient_checkpointing false"),
        ("--no-gradient-checkpointing", "--gradient_checkpointing false"),
        ("--max-length 512", "--max_seq_len 512"),
        ("--max-seq-len=512", "--max-seq-len=512"),  # ours, which the parser reads itself
        ("--no_only_optimize_lora", "--no_only_optimize_lora"),
        ("--no_max_length", "--no_max_length"),  # no switch
    ],
)
def test_negations_and_dashes(typed, words):
    assert translated(typed.split(), known_steps()["step1_sft"].old_flags)[0] == words.split()


def test_a_negation_is_named_as_it_was_typed():
    lines = translated(["--no_remove_unused_columns"], known_steps()["step2_dpo"].old_flags)[1]
    assert lines == ["--no_remove_unused_columns is not needed: columns that nothing reads are not loaded"]
    with pytest.raises(ThreestepError, match="^--no_skip_memory_metrics is not supported; use --dry_run true to see a"):
        translated(["--no_skip_memory_metrics"], known_steps()["step2_dpo"].old_flags)


def counts(line: str, ranks: str = "1") -> dict[str, int]:
    """Of a rank's rollout and forwards, on a command line of GRPO."""
    step = known_steps()["step3_ppo"]
    argv = f"--advantage grpo --reward length:1 --reward_length_characters 8 --data_path embedded {line}".split()
    (settings,) = (
        part for part in parse_arguments(step.groups, argv, "", step.old_flags) if hasattr(part, "ppo_epochs")
    )
    return {
        "completions": settings.sequences_per_rollout,
        "of a step": settings.sequences_per_minibatch,
        "of a forward": settings.per_device_training_batch_size,
        "of a prompt": settings.num_samples_per_prompt,
        "rollouts": settings.max_train_steps,
    }


@pytest.mark.parametrize(
    ("line", "ranks", "expected"),
    [  # completions of a rank's rollout, of its optimizer step, of a forward, of a prompt; rollouts
        ("", "1", (8, 8, 8, 8, None)),
        ("", "4", (8, 8, 8, 8, None)),
        ("--per_device_train_batch_size 4 --gradient_accumulation_steps 4", "1", (16, 16, 4, 8, None)),
        ("--per_device_train_batch_size 4 --num_generations 4 --steps_per_generation 6", "1", (24, 4, 4, 4, None)),
        ("--generation_batch_size 64 --num_generations 4", "2", (32, 8, 8, 4, None)),
        # TRL's "LoRA without regret": two optimizer steps for each rollout of one prompt, so 100 rollouts
        (
            "--num_generations 16 --generation_batch_size 16 --gradient_accumulation_steps 8 "
            "--per_device_train_batch_size 1 --max_steps 200",
            "1",
            (16, 8, 1, 16, 100),
        ),
        ("--max_steps 5 --steps_per_generation 2 --num_iterations 2", "1", (16, 8, 8, 8, 2)),
        ("--per_device_generation_batch_size 3 --num_generations 8", "1", (24, 8, 8, 8, None)),
        ("--num_generations 4 --per_device_train_batch_size 8 --max_completion_length 16", "1", (8, 8, 8, 4, None)),
    ],
)
def test_grpos_batch_is_counted_as_trl_counts_it(line, ranks, expected, monkeypatch, capsys):
    """Against TRL's own rule: a rollout of all ranks has generation_batch_size completions, which defaults to
    per_device_train_batch_size x ranks x steps_per_generation, and the latter to gradient_accumulation_steps."""
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert tuple(counts(f"--model_name_or_path m {line}").values()) == expected


@pytest.mark.parametrize("flag", sorted(ITS))
def test_a_name_that_only_trl_has_means_its_counts(flag, capsys):
    typed = {flag: "16", "--advantage": "grpo", "--per_device_train_batch_size": "16"}
    words, (line,) = old_defaults([], PPO_OLD_FLAGS, typed)
    assert words[-2] == PROMPTS and f"counted as in TRL, because {flag} is TRL's: each rollout has 16 x " in line
    assert PPO_OLD_FLAGS["--per_device_train_batch_size"].words("16", typed) == [FORWARD, "16"]


def test_our_own_names_are_counted_as_before(capsys):
    """Without a name that only TRL has, and DeepSpeed-Chat's older spelling."""
    own = "--actor_model_name_or_path m --num_samples_per_prompt 2"
    assert counts(own)["completions"] == 32
    assert counts(f"{own} --per_device_train_batch_size 8")["completions"] == 16


def test_a_gpu_is_hidden_by_the_environment(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    with pytest.raises(ThreestepError, match="^--use_cpu is set in the environment here: put CUDA_VISIBLE_DEVICES= b"):
        known_steps()["step1_sft"].old_flags["--use_cpu"].words("true", {})


def test_the_document_has_the_tables():
    text = DOCUMENT.read_text()
    assert trl_table.fields_as_markdown() in text, "python -m tests.support.trl_table prints it"
    assert trl_table.lines_as_markdown() in text, "python -m tests.support.trl_table prints it"
    assert trl_table.as_markdown() in text, "python -m tests.support.trl_table prints them"
