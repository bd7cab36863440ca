"""DeepSpeed-Chat's command lines: flag by flag in the step that they are for, and those of its own scripts."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import deepspeed_chat_table
from tests.support.deepspeed_chat_lines import EVALUATION_LINES, LINES, ScriptLine
from tests.support.tiny_models import tiny_config
from threestep.plugins.evaluation import chat
from threestep.plugins.evaluation import evaluate as training_evaluate
from threestep.plugins.evaluation.reward_evaluation import __main__ as evaluate
from threestep.plugins.names.deepspeed_chat_flags import ANSWERING_OLD_FLAGS, SCORING_OLD_FLAGS, read_flags
from threestep.plugins.names.other_names import DEEPSPEED_CHAT, Same, translated
from training.step1_sft import main as sft
from training.step2_dpo import main as dpo
from training.step2_reward import main as reward
from training.step3_ppo import main as ppo
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import defaults_of, parse_arguments, resolved_settings
from training.utils.flags.step import known_steps
from training.utils.run.launch import as_variables

DOCUMENT = Path(__file__).parents[1] / "deepspeed_chat_flags.md"

# Flags of DeepSpeed-Chat's four programs, as it spells them: those of the same name and meaning here.
EVERYWHERE = """data_path data_split data_output_path num_train_epochs gradient_accumulation_steps lr_scheduler_type
    num_warmup_steps output_dir seed offload dtype only_optimize_lora local_rank"""
ONE_MODEL = f"""{EVERYWHERE} model_name_or_path per_device_train_batch_size per_device_eval_batch_size max_seq_len
    learning_rate weight_decay gradient_checkpointing dropout zero_stage lora_dim lora_module_name lora_learning_rate
    deepspeed_config"""
SAME = {
    "sft": f"{ONE_MODEL} sft_only_data_path",
    "reward": f"{ONE_MODEL} eval_interval",
    "dpo": f"{ONE_MODEL} beta label_smoothing",
    "ppo": f"""{EVERYWHERE} offload_reference_model unsupervised_dataset_name unsupervised_dataset_config_name
        unsup_coef
        actor_model_name_or_path critic_model_name_or_path per_device_generation_batch_size
        per_device_training_batch_size generation_batches ppo_epochs max_prompt_seq_len max_answer_seq_len
        actor_learning_rate critic_learning_rate actor_weight_decay critic_weight_decay offload_reward_model
        actor_zero_stage critic_zero_stage actor_gradient_checkpointing critic_gradient_checkpointing actor_dropout
        critic_dropout actor_lora_dim actor_lora_module_name critic_lora_dim critic_lora_module_name
        actor_lora_learning_rate critic_lora_learning_rate enable_ema""",
}
# Those that are not needed; test_names.py reads each.
SAID = {
    "every": """compute_fp32_loss enable_tensorboard tensorboard_path eot_token deepspeed deepscale
        num_padding_at_beginning""",
    "sft": "print_loss",
    "reward": "",
    "dpo": "print_loss offload_reference_model",
    "ppo": """enable_hybrid_engine unpin_actor_parameters release_inference_cache inference_tp_size
        tp_gather_partition_size enable_mixed_precision_lora align_overflow print_answers print_answers_interval""",
}
# Those of another name, or in a form of their own, and the settings that they become.
READ_EVERYWHERE = {
    "--deepspeed": {},
    "--add_eot_token": {"end_of_conversation_token": "<|endoftext|>"},
    "--add_eot_token --eot_token <end>": {"end_of_conversation_token": "<end>"},
    "--eot_token <end>": {"end_of_conversation_token": None},
}
READ_OF_ONE_MODEL = {
    **READ_EVERYWHERE,
    "--disable_dropout": {"dropout": 0.0},
    "--deepscale_config ds.json": {"deepspeed_config": "ds.json"},
}
READ = {
    "sft": READ_OF_ONE_MODEL,
    "reward": {
        **READ_OF_ONE_MODEL,
        "--eval_iters 100": {"max_eval_rows": 1600},
        "--eval_iters 10 --per_device_eval_batch_size=4": {"max_eval_rows": 40},
    },
    "dpo": READ_OF_ONE_MODEL,
    "ppo": {
        **READ_EVERYWHERE,
        "--preprocessing_num_workers 4": {"num_workers": 4},
        "--disable_actor_dropout": {"actor_dropout": 0.0},
        "--disable_critic_dropout": {"critic_dropout": 0.0},
        "--enable_test_mode --test_stop_step 20": {"max_train_steps": 20},
        "--test_stop_step=20": {"max_train_steps": None},
        "--per_device_train_batch_size 16": {"per_device_generation_batch_size": 16},
        "--per_device_mini_train_batch_size 8": {"per_device_training_batch_size": 8},
        "--generation_batch_numbers 2": {"generation_batches": 2},
        "--deepspeed_config ds.json": ThreestepError,
        "--deepscale_config ds.json": ThreestepError,
    },
}
PROGRAMS = {"sft": sft, "reward": reward, "dpo": dpo, "ppo": ppo}
STARTS = {
    "ppo": "--data_path embedded --actor_model_name_or_path a --critic_model_name_or_path c --actor_zero_stage 1 "
    "--critic_zero_stage 1",
    "other": "--data_path embedded --model_name_or_path m --zero_stage 1",
}


@pytest.mark.parametrize(("step", "flag"), [(step, flag) for step, flags in READ.items() for flag in flags])
def test_a_flag_of_another_name_becomes_a_setting_and_says_so(step, flag, capsys):
    groups, old_flags = PROGRAMS[step].STEP.groups, PROGRAMS[step].STEP.old_flags
    argv = [*STARTS.get(step, STARTS["other"]).split(), *flag.split()]
    expected, name = READ[step][flag], re.split("[ =]", flag)[0]
    if expected is ThreestepError:
        with pytest.raises(ThreestepError, match=f"{name} applies to steps 1 and 2; in step 3, configure"):
            parse_arguments(groups, argv, "", old_flags)
        return
    settings = resolved_settings(parse_arguments(groups, argv, "", old_flags))
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith((f"{name} is not needed: ", f"{name} is read as --")) for line in lines)
    assert {name: settings[name] for name in expected} == expected


def flags_in(words: str) -> set[str]:
    return {f"--{word}" for word in words.split()}


def test_the_tables_hold_its_flags_and_the_same_are_ours():
    for step, program in PROGRAMS.items():
        old_flags = program.STEP.old_flags
        same = flags_in(SAME[step])
        read = {part.partition("=")[0] for flag in READ[step] for part in flag.split() if part.startswith("--")}
        its = {flag for flag, old in old_flags.items() if DEEPSPEED_CHAT in old.whose}
        assert its <= same | read | flags_in(SAID["every"] + " " + SAID[step])
        own = {f"--{name}" for name in (*defaults_of(program.STEP.groups), "local_rank")}
        assert same <= own and not own & its, "a flag of ours would never be reached"
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
    reason = "DeepSpeed-Chat's default, because the command line uses its flags but names no"
    assert capsys.readouterr().out.splitlines()[-4:-2] == [
        f"--data_path is Dahoas/rm-static, {reason} data",
        f"--data_split is 2,4,4, {reason} fractions of the data",
    ]
    assert settings_of("--deepspeed")["data_split"] == "2,4,4"
    assert settings_of("--deepspeed --data_split 1,1,0")["data_split"] == "1,1,0"
    assert settings_of("--data_path embedded")["data_split"] == "auto"  # nothing is DeepSpeed-Chat's
    capsys.readouterr()
    assert data_of("--num_padding_at_beginning 1", reward.STEP) == ["Dahoas/rm-static"]
    assert data_of("--deepspeed --data_path embedded --local_rank -1") == ["embedded"]
    (tmp_path / "run.yaml").write_text("data_path: embedded\n")
    assert data_of(f"--deepspeed --config {tmp_path}/run.yaml") == ["embedded"]
    assert capsys.readouterr().out.count("--data_path is Dahoas/rm-static, DeepSpeed-Chat's default") == 1
    with pytest.raises(ThreestepError, match="^--data_path expects at least one dataset, got none; pass files .jsonl:"):
        data_of("--lora_dim 8")


def test_counts_of_rows_and_steps_and_one_rank_says_the_lines(monkeypatch, capsys):
    for step, flags, name in ((reward, "--eval_iters all", "eval_iters"),
                              (ppo, "--enable_test_mode --test_stop_step x", "test_stop_step")):  # fmt: skip
        with pytest.raises(ThreestepError, match=f"--{name} must be a whole number, got '{flags.split()[-1]}'"):
            translated(flags.split(), step.STEP.old_flags)
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert translated("--eval_iters 10".split(), reward.STEP.old_flags)[0] == ["--max_eval_rows", "640"]
    monkeypatch.setenv("RANK", "1")
    parse_arguments(
        sft.STEP.groups, "--model_name_or_path m --data_path embedded --deepspeed".split(), "", sft.STEP.old_flags
    )
    assert capsys.readouterr().out == ""


def test_its_evaluation_scripts_are_read(capsys):
    (program, line), (other, scored) = EVALUATION_LINES.values()
    parsed = resolved_settings(parse_arguments(training_evaluate.GROUPS, line.split(), "", ANSWERING_OLD_FLAGS))
    assert (parsed["baseline"], parsed["model_name_or_path"]) == ("XXX", "XXX")
    assert program.endswith("win_rate") and other == "threestep evaluate pairs"
    argv = [*scored.split(), "--data_path", "embedded"]  # which rw_eval.py does not read: it has its pairs inside
    assert resolved_settings(parse_arguments(evaluate.GROUPS, argv, "", SCORING_OLD_FLAGS))["data_path"] == ["embedded"]
    with pytest.raises(ThreestepError, match="^--num_beams is not supported: responses are generated token by token"):
        parse_arguments(training_evaluate.GROUPS, [*line.split(), "--num_beams", "4"], "", ANSWERING_OLD_FLAGS)
    for flag in ("--num_beam_groups 2", "--num_return_sequences 2", "--language Chinese"):
        with pytest.raises(
            ThreestepError, match=f"^{flag.split()[0]} (is not supported|selects one of six built-in prompts)"
        ):
            parse_arguments(training_evaluate.GROUPS, [*line.split(), *flag.split()], "", ANSWERING_OLD_FLAGS)


@pytest.mark.parametrize(
    ("step", "words", "line"),
    [
        ("step1_sft", "--deepspeed --lora_dim 128", "--learning_rate 1e-3 (here 2e-05), --dtype fp16 (here bf16), "
         "--only_optimize_lora false (here true), --lora_alpha 1 (here 16.0), "
         "--lora_learning_rate 5e-4 (here the learning rate), --lora_module_name decoder.layers. (here all-linear)"),
        ("step2_reward", "--num_padding_at_beginning 1 --dtype bf16", "--learning_rate 5e-5 (here 1e-05)"),
        ("step2_dpo", "--deepspeed --dtype bf16", "--learning_rate 1e-3 (here 1e-06)"),
        ("step3_ppo", "--num_padding_at_beginning 1 --dtype bf16", "--num_warmup_steps 100 (here 0)"),
        ("step3_ppo", "--deepspeed --dtype bf16 --num_warmup_steps 0 --no_only_optimize_lora --actor_lora_dim 8",
         "--lora_alpha 1 (here 16.0), --actor_lora_learning_rate 5e-4 (here the learning rate), "
         "--actor_lora_module_name decoder.layers. (here all-linear)"),
        ("step1_sft", "--deepspeed --dtype bf16 --learning_rate 1e-3", None),
        ("step1_sft", "--lora_dim 128", None),
    ],
)  # fmt: skip
def test_its_defaults_that_differ_are_one_line(step, words, line):
    """`single_gpu/run_1.3b.sh` leaves the rate out, and trained at 2e-5 in silence."""
    typed = [*words.split(), "--data_path", "embedded", "--data_split", "2,4,4"]
    _, _, lines = read_flags([], typed, known_steps()[step].old_flags)
    found = [each for each in lines if "defaults" in each]
    beginning, end = "DeepSpeed-Chat's defaults that differ here: ", "; set these flags to train as DeepSpeed-Chat does"
    assert found == ([] if line is None else [f"{beginning}{line}{end}"])


@pytest.mark.parametrize("step", ["step1_sft", "step2_reward", "step2_dpo", "step3_ppo"])
def test_its_behavior_that_differs_is_one_line_with_the_page(step):
    """A team that kept its flags saw the differing dtype named, and nothing of prompts, loss masks and end tokens."""
    typed = ["--deepspeed" if step != "step3_ppo" else "--enable_hybrid_engine", "--data_path", "embedded"]
    *_, lines = read_flags([], [*typed, "--learning_rate", "1e-3"], known_steps()[step].old_flags)
    [told] = [line for line in lines if line.startswith("behavior that differs from DeepSpeed-Chat's: ")]
    page, _, part = told.rpartition(" ")[2].partition("#")
    assert re.sub("[^a-z]+", "-", "Behavior that differs under the same flags".lower()) == part
    assert f"## {part.replace('-', ' ').capitalize()}\n" in (DOCUMENT.parents[3] / page).read_text()
    restoring = re.findall(r"(--\w+)[^()]*\)", told)
    assert {flag.removeprefix("--") for flag in restoring} <= known_steps()[step].defaults.keys()
    *_, lines = read_flags([], [*typed, restoring[0], "1"], known_steps()[step].old_flags)
    assert restoring and restoring[0] in told and not any(restoring[0] in line for line in lines if "behavior" in line)
    *_, lines = read_flags([], ["--data_path", "embedded", "--learning_rate", "1e-3"], known_steps()[step].old_flags)
    assert not any("behavior" in line for line in lines)  # nothing says that the command line is DeepSpeed-Chat's


def test_the_document_has_the_tables():
    text = DOCUMENT.read_text()
    assert deepspeed_chat_table.scripts_as_markdown() in text, "python -m tests.support.deepspeed_chat_table prints it"
    assert deepspeed_chat_table.as_markdown() in text, "python -m tests.support.deepspeed_chat_table prints them"
    part = text.split("## Same name and meaning")[1].split("## Other flags")[0]
    listed = set(re.findall(r"`(--\w+)`", part))
    assert listed == set().union(*map(flags_in, SAME.values()))


# A small configuration in the place of each model, by a part of its name.
FAMILIES = {"opt": "opt", "llama": "llama", "bloom": "bloom", "mgpt": "gpt2", "actor": "opt", "critic": "opt"}
LONG_ENOUGH = {"opt": "max_position_embeddings", "llama": "max_position_embeddings", "gpt2": "n_positions"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """By family, a folder with a configuration of it and nothing else."""
    place = tmp_path_factory.mktemp("models")
    for family in set(FAMILIES.values()):
        more = {LONG_ENOUGH[family]: 512} if family in LONG_ENOUGH else {}
        config = tiny_config(family, **more)
        config.architectures = [f"{type(config).__name__.removesuffix('Config')}ForCausalLM"]
        config.save_pretrained(place / family)
    return {family: str(place / family) for family in set(FAMILIES.values())}


def words_of(line: ScriptLine, folders: dict[str, str]) -> list[str]:
    """Its flags, with a folder in the place of a model."""
    words = line.flags.split()
    for place, word in enumerate(words[:-1]):
        if word.endswith("model_name_or_path"):
            name = words[place + 1].lower()
            words[place + 1] = folders[next(family for part, family in FAMILIES.items() if part in name)]
    return words


def values_of(words: list[str]) -> dict[str, list[str]]:
    """By flag, the last values given to it."""
    found: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            values = found[word[2:]] = []
        else:
            values.append(word)
    return found


def same(setting: Any, values: list[str]) -> bool:
    if isinstance(setting, list):
        return setting == values
    return setting and not values if isinstance(setting, bool) else setting == type(setting)(values[0])


def test_there_are_as_many_as_its_scripts_run():
    assert Counter(line.step for line in LINES) == {"sft": 20, "dpo": 9, "reward": 9, "ppo": 29}


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.step}-{line.name}")
def test_it_resolves_as_it_is(line, folders, tmp_path, capsys):
    words = words_of(line, folders)
    rest, variables, _ = as_variables([*line.launcher.split(), *words], {})
    assert rest == words and len(variables) == len([flag for flag in line.launcher.split() if "nodes" not in flag]) / 2
    PROGRAMS[line.step].main([*words, "--output_dir", str(tmp_path / "out"), "--dry_run"])
    said = capsys.readouterr().out
    assert not (tmp_path / "out").exists() and "most at once" in said
    settings = yaml.safe_load(said.split("settings:\n")[1].split("\n\n")[0])
    given = values_of(words)
    assert settings["data_path"] == given.get("data_path", ["Dahoas/rm-static"])
    if line.step == "ppo":  # rollouts of one minibatch are drawn together
        given["generation_batches"] = given.get("gradient_accumulation_steps", ["1"])
    wrong = {flag: (settings[flag], values) for flag, values in given.items() if flag in settings}
    assert {flag: both for flag, both in wrong.items() if not same(*both)} == {}
    unknown = {flag for flag in given if flag not in settings}
    assert all(f"--{flag} is not needed: " in said or f"--{flag} is read as " in said for flag in unknown)
