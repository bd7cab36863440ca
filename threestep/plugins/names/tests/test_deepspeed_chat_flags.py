"""DeepSpeed-Chat's command lines, flag by flag, in the step that they are for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import deepspeed_chat_table
from tests.support.deepspeed_chat_lines import EVALUATION_LINES
from threestep.plugins.evaluation import chat
from threestep.plugins.evaluation import evaluate as training_evaluate
from threestep.plugins.evaluation.reward_evaluation import __main__ as evaluate
from threestep.plugins.names.deepspeed_chat_flags import ANSWERING_OLD_FLAGS, SCORING_OLD_FLAGS
from threestep.plugins.names.other_names import DEEPSPEED_CHAT, Same, translated
from training.step1_sft import main as sft
from training.step2_dpo import main as dpo
from training.step2_reward import main as reward
from training.step3_ppo import main as ppo
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments, resolved_settings

DOCUMENT = Path(__file__).parents[1] / "from_deepspeed_chat.md"

# The flags of DeepSpeed-Chat's four programs, as it spells them, and what they are to become: a setting's value; SAID
# where the line says that it is not needed; or (setting, value) where it has another name here.
SAID = object()
EVERYWHERE = {
    "--data_path embedded embedded": ["embedded", "embedded"],
    "--data_split 6,2,2": "6,2,2",
    "--data_output_path /tmp/data_files": "/tmp/data_files",
    "--num_train_epochs 16": 16.0,
    "--gradient_accumulation_steps 1": 1,
    "--lr_scheduler_type cosine": "cosine",
    "--num_warmup_steps 100": 100,
    "--output_dir ./output": "./output",
    "--seed 1234": 1234,
    "--offload": True,
    "--dtype fp16": "fp16",
    "--dtype=bf16": "bf16",
    "--only_optimize_lora": True,
    "--local_rank=0": None,
    "--local_rank -1": None,
    "--compute_fp32_loss": SAID,
    "--enable_tensorboard": SAID,
    "--tensorboard_path step1_tensorboard": SAID,
    "--add_eot_token": ("end_of_conversation_token", "<|endoftext|>"),
    "--add_eot_token --eot_token <end>": ("end_of_conversation_token", "<end>"),
    "--eot_token <end>": ("end_of_conversation_token", None),
    "--deepspeed": SAID,
    "--deepscale": SAID,
    "--num_padding_at_beginning 1": SAID,
}
ONE_MODEL = {
    **EVERYWHERE,
    "--model_name_or_path facebook/opt-1.3b": "facebook/opt-1.3b",
    "--per_device_train_batch_size 8": 8,
    "--per_device_eval_batch_size 8": 8,
    "--max_seq_len 256": 256,
    "--learning_rate 9.65e-6": 9.65e-6,
    "--weight_decay 0.1": 0.1,
    "--gradient_checkpointing": True,
    "--dropout 0.0": 0.0,
    "--zero_stage 2": 2,
    "--lora_dim 128": 128,
    "--lora_module_name decoder.layers.": "decoder.layers.",
    "--lora_learning_rate 5e-4": 5e-4,
    "--disable_dropout": ("dropout", 0.0),
    "--deepspeed_config ds.json": "ds.json",
    "--deepscale_config ds.json": ("deepspeed_config", "ds.json"),
}
FLAGS = {
    "sft": {**ONE_MODEL, "--sft_only_data_path embedded": ["embedded"], "--print_loss": SAID},
    "reward": {
        **ONE_MODEL,
        "--eval_interval 50": 50,
        "--eval_iters 100": ("max_eval_rows", 1600),
        "--eval_iters 10 --per_device_eval_batch_size=4": ("max_eval_rows", 40),
    },
    "dpo": {
        **ONE_MODEL,
        "--print_loss": SAID,
        "--beta 0.1": 0.1,
        "--label_smoothing 0.1": 0.1,
        "--offload_reference_model": SAID,
    },
    "ppo": {
        **EVERYWHERE,
        "--offload_reference_model": True,
        "--unsupervised_dataset_name wikitext": "wikitext",
        "--unsupervised_dataset_config_name wikitext-103-v1": "wikitext-103-v1",
        "--unsup_coef 27.8": 27.8,
        "--actor_model_name_or_path facebook/opt-1.3b": "facebook/opt-1.3b",
        "--critic_model_name_or_path facebook/opt-350m": "facebook/opt-350m",
        "--per_device_generation_batch_size 32": 32,
        "--per_device_training_batch_size 8": 8,
        "--generation_batches 2": 2,
        "--ppo_epochs 2": 2,
        "--max_prompt_seq_len 128": 128,
        "--max_answer_seq_len 128": 128,
        "--actor_learning_rate 5e-4": 5e-4,
        "--critic_learning_rate 5e-6": 5e-6,
        "--actor_weight_decay 0.1": 0.1,
        "--critic_weight_decay 0.1": 0.1,
        "--preprocessing_num_workers 4": ("num_workers", 4),
        "--enable_hybrid_engine": SAID,
        "--unpin_actor_parameters": SAID,
        "--release_inference_cache": SAID,
        "--inference_tp_size 1": SAID,
        "--inference_tp_size 8": SAID,
        "--tp_gather_partition_size 8": SAID,
        "--offload_reward_model": True,
        "--actor_zero_stage 3": 3,
        "--critic_zero_stage 2": 2,
        "--actor_gradient_checkpointing": True,
        "--critic_gradient_checkpointing": True,
        "--actor_dropout 0.0": 0.0,
        "--critic_dropout 0.1": 0.1,
        "--disable_actor_dropout": ("actor_dropout", 0.0),
        "--disable_critic_dropout": ("critic_dropout", 0.0),
        "--actor_lora_dim 128": 128,
        "--actor_lora_module_name decoder.layers.": "decoder.layers.",
        "--critic_lora_dim 64": 64,
        "--critic_lora_module_name decoder.layers.": "decoder.layers.",
        "--actor_lora_learning_rate 5e-4": 5e-4,
        "--critic_lora_learning_rate 5e-4": 5e-4,
        "--enable_ema": True,
        "--enable_mixed_precision_lora": SAID,
        "--align_overflow": SAID,
        "--print_answers": SAID,
        "--print_answers_interval 5": SAID,
        "--enable_test_mode --test_stop_step 20": ("max_train_steps", 20),
        "--test_stop_step=20": ("max_train_steps", None),
        "--per_device_train_batch_size 16": ("per_device_generation_batch_size", 16),
        "--per_device_mini_train_batch_size 8": ("per_device_training_batch_size", 8),
        "--generation_batch_numbers 2": ("generation_batches", 2),
        "--deepspeed_config ds.json": ThreestepError,
        "--deepscale_config ds.json": ThreestepError,
    },
}
PROGRAMS = {
    "sft": (sft.STEP.groups, sft.STEP.old_flags),
    "reward": (reward.STEP.groups, reward.STEP.old_flags),
    "dpo": (dpo.STEP.groups, dpo.STEP.old_flags),
    "ppo": (ppo.STEP.groups, ppo.STEP.old_flags),
}
STARTS = {
    "ppo": "--data_path embedded --actor_model_name_or_path a --critic_model_name_or_path c --actor_zero_stage 1 "
    "--critic_zero_stage 1",
    "other": "--data_path embedded --model_name_or_path m --zero_stage 1",
}
CASES = [(step, flag) for step, flags in FLAGS.items() for flag in flags]


@pytest.mark.parametrize(("step", "flag"), CASES)
def test_every_flag_has_its_meaning_or_a_line(step, flag, capsys):
    groups, old_flags = PROGRAMS[step]
    argv = [*STARTS.get(step, STARTS["other"]).split(), *flag.split()]
    expected, name = FLAGS[step][flag], re.split("[ =]", flag)[0]
    if expected is ThreestepError:
        with pytest.raises(ThreestepError, match=f"{name} is for steps 1 and 2; step 3's two engines"):
            parse_arguments(groups, argv, "", old_flags)
        return
    settings = resolved_settings(parse_arguments(groups, argv, "", old_flags))
    lines = capsys.readouterr().out.splitlines()
    if expected is SAID or isinstance(expected, tuple):
        assert any(line.startswith((f"{name} is not needed: ", f"{name} is read as --")) for line in lines)
    else:
        assert lines == []
        expected = (name[2:], expected)
    if isinstance(expected, tuple) and name != "--local_rank":
        assert settings[expected[0]] == expected[1]


def test_the_tables_hold_nothing_that_is_no_flag_of_deepspeed_chat():
    for step, (groups, old_flags) in PROGRAMS.items():
        fed = {re.split("[ =]", part)[0] for flag in FLAGS[step] for part in re.findall(r"--\S+", flag)}
        its = {flag for flag, read in old_flags.items() if DEEPSPEED_CHAT in read.whose}
        assert its <= fed
        own = {f"--{name}" for group in groups for name in group.__dataclass_fields__}
        assert not own & its, "a flag of ours would never be reached"
        for flag in own & set(old_flags):
            assert isinstance(old_flags[flag], Same), "the same"


def test_its_other_programs_flags(capsys):
    """chat.py and rw_eval.py."""
    (chatting, *_) = parse_arguments(chat.GROUPS, "--path MODEL --max_new_tokens 64".split(), "")
    assert chatting.model_name_or_path == ["MODEL"]
    line = "--model_name_or_path RM --num_padding_at_beginning 1 --add_eot_token --data_path embedded"
    _, data, _ = parse_arguments(evaluate.GROUPS, line.split(), "", SCORING_OLD_FLAGS)
    assert data.chat.end_of_conversation_token == "<|endoftext|>" and not data.chat.add_end_of_conversation_token
    assert [said.split(" is ")[0] for said in capsys.readouterr().out.splitlines()] == [
        "--num_padding_at_beginning",
        "--add_eot_token",
    ]


def test_its_command_lines_without_data_take_its_data(tmp_path, capsys):
    """As its scripts for one GPU do. A flag of its steps tells the command line; a file of settings may name data."""

    def settings_of(line: str, step=sft.STEP) -> dict[str, object]:
        line += " --model_name_or_path m"
        return resolved_settings(parse_arguments(step.groups, line.split(), "", step.old_flags))

    def data_of(line: str, step=sft.STEP) -> object:
        return settings_of(line, step)["data_path"]

    assert data_of("--deepspeed") == ["Dahoas/rm-static"]
    reason = "DeepSpeed-Chat's default: the command line has flags of its, and names no"
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"--data_path is Dahoas/rm-static, {reason} data",
        f"--data_split is 2,4,4, {reason} shares of the data",
    ]
    assert settings_of("--deepspeed")["data_split"] == "2,4,4"
    assert settings_of("--deepspeed --data_split 1,1,0")["data_split"] == "1,1,0"
    assert settings_of("--data_path embedded")["data_split"] == "auto"  # nothing is DeepSpeed-Chat's
    capsys.readouterr()
    assert data_of("--num_padding_at_beginning 1", reward.STEP) == ["Dahoas/rm-static"]
    assert data_of("--deepspeed --data_path embedded") == ["embedded"]
    (tmp_path / "run.yaml").write_text("data_path: embedded\n")
    assert data_of(f"--deepspeed --config {tmp_path}/run.yaml") == ["embedded"]
    assert capsys.readouterr().out.count("--data_path is Dahoas/rm-static, DeepSpeed-Chat's default") == 1
    with pytest.raises(ThreestepError, match="^--data_path expects at least one dataset, got none; name files .jsonl:"):
        data_of("--lora_dim 8")


def test_numbers_that_are_none():
    with pytest.raises(ThreestepError, match="--eval_iters expects a whole number, got 'all'"):
        translated(["--eval_iters", "all"], reward.STEP.old_flags)
    with pytest.raises(ThreestepError, match="--test_stop_step expects a whole number, got 'x'"):
        translated("--enable_test_mode --test_stop_step x".split(), ppo.STEP.old_flags)


def test_the_evaluation_counts_every_rank(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert translated("--eval_iters 10".split(), reward.STEP.old_flags)[0] == ["--max_eval_rows", "640"]


def test_one_rank_says_the_lines(monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    parse_arguments(
        sft.STEP.groups, "--model_name_or_path m --data_path embedded --deepspeed".split(), "", sft.STEP.old_flags
    )
    assert capsys.readouterr().out == ""


def test_its_evaluation_scripts_are_read(capsys):
    (program, line), (other, scored) = EVALUATION_LINES.values()
    parsed = resolved_settings(parse_arguments(training_evaluate.GROUPS, line.split(), "", ANSWERING_OLD_FLAGS))
    assert (parsed["baseline"], parsed["model_name_or_path"]) == ("XXX", "XXX")
    assert program.endswith("win_rate") and other == "threestep reward-evaluate"
    argv = [*scored.split(), "--data_path", "embedded"]  # which rw_eval.py does not read: it has its pairs inside
    assert resolved_settings(parse_arguments(evaluate.GROUPS, argv, "", SCORING_OLD_FLAGS))["data_path"] == ["embedded"]
    with pytest.raises(ThreestepError, match="^--num_beams is not built: answers are drawn one token after the other"):
        parse_arguments(training_evaluate.GROUPS, [*line.split(), "--num_beams", "4"], "", ANSWERING_OLD_FLAGS)
    for flag in ("--num_beam_groups 2", "--num_return_sequences 2", "--language Chinese"):
        with pytest.raises(ThreestepError, match=f"^{flag.split()[0]} (is not built|has six prompts of its own there)"):
            parse_arguments(training_evaluate.GROUPS, [*line.split(), *flag.split()], "", ANSWERING_OLD_FLAGS)


def test_the_document_has_the_tables():
    text = DOCUMENT.read_text()
    assert deepspeed_chat_table.scripts_as_markdown() in text, "python -m tests.support.deepspeed_chat_table prints it"
    assert deepspeed_chat_table.as_markdown() in text, "python -m tests.support.deepspeed_chat_table prints them"
    part = text.split("## Flags with the same name and meaning")[1].split("Their defaults")[0]
    listed = set(re.findall(r"`(--\w+)`", part))
    plain = {
        re.split("[ =]", flag)[0]
        for step, flags in FLAGS.items()
        for flag, expected in flags.items()
        if isinstance(PROGRAMS[step][1].get(re.split("[ =]", flag)[0], Same()), Same) and expected is not ThreestepError
    }
    assert listed == plain
