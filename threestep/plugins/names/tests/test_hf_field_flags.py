"""TRL 1.16's four trainers and RLOO, whole: every field of their parsers, and every command line that is printed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

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
from threestep.plugins.names.other_names import Refused, translated
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments
from training.utils.flags.step import known_steps

DOCUMENT = Path(__file__).parents[1] / "from_trl.md"
# Of the lines that TRL prints, those that name no data (two of them of scripts that name it themselves), and one whose
# batch is less than a group.
NO_DATA, LESS_THAN_A_GROUP = "--data_path expects at least one dataset", "a rank draws 2 x 1 completions"
REASONS = [*[NO_DATA] * 4, LESS_THAN_A_GROUP]


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
def test_a_refused_field_is_named_by_its_sentence(trainer):
    table = known_steps()[STEPS[trainer]].old_flags
    for flag in fields_of(trainer):
        old = table.get(flag)
        if isinstance(old, Refused):
            is_switch = not old.takes_value and not old.takes_list
            with pytest.raises(ThreestepError, match=f"^{flag} "):
                translated([flag, *([] if is_switch else ["a_value_that_nobody_gives"])], table)
            assert not is_switch or translated([flag, "false"], table)[0] == []


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


@pytest.mark.parametrize("line", LINES, ids=lambda line: f"{line.trainer}-{line.page}".replace(" ", "_"))
def test_a_printed_line_is_read_or_refused_for_a_known_reason(line, tmp_path):
    sentence = sentence_of(line, tmp_path)
    assert sentence == "" or sentence.startswith(tuple(REASONS)), sentence


def test_as_many_lines_are_refused_as_name_no_data_or_less_than_a_group(tmp_path):
    sentences = [sentence_of(line, tmp_path) for line in LINES]
    assert sorted(filter(None, sentences)) == sorted(
        sentence for sentence in sentences if sentence.startswith(tuple(REASONS))
    )
    assert len([sentence for sentence in sentences if sentence]) == len(REASONS)


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
    with pytest.raises(ThreestepError, match="^--no_skip_memory_metrics is not built; --dry_run true tells the memory"):
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
    ],
)
def test_grpos_batch_is_counted_as_trl_counts_it(line, ranks, expected, monkeypatch, capsys):
    """Against TRL's own rule: a rollout of all ranks has generation_batch_size completions, which defaults to
    per_device_train_batch_size x ranks x steps_per_generation, and the latter to gradient_accumulation_steps."""
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert tuple(counts(f"--model_name_or_path m {line}").values()) == expected


def test_our_own_names_are_counted_as_before(capsys):
    """Without TRL's name of the model or its counts, and DeepSpeed-Chat's older spelling."""
    assert counts("--actor_model_name_or_path m --num_generations 2")["completions"] == 32
    assert (
        counts("--actor_model_name_or_path m --per_device_train_batch_size 8 --num_generations 2")["completions"] == 16
    )


def test_the_document_has_the_tables():
    text = DOCUMENT.read_text()
    assert trl_table.fields_as_markdown() in text, "python -m tests.support.trl_table prints it"
    assert trl_table.lines_as_markdown() in text, "python -m tests.support.trl_table prints it"
