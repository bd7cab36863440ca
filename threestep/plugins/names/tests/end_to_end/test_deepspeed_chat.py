"""Three command lines of DeepSpeed-Chat's own scripts, one after the other, trained as they are: data named
and not named, a model without a pad token, its launcher's flags.

What is behind each line makes it small: models, batches, steps, and places to write to.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.end_to_end.conftest import Ran, pair_rows, run_step, save_start
from tests.support.deepspeed_chat_lines import LINES

pytestmark = pytest.mark.timeout(900)  # on a busy machine

ROOT = Path(__file__).parents[5]
SMALL = "--per_device_train_batch_size 2 --max_seq_len 100 --max_train_steps 2 --report false --learning_rate 1e-3"
SMALL_PPO = """
    --per_device_generation_batch_size 2 --per_device_training_batch_size 2 --gradient_accumulation_steps 2
    --max_prompt_seq_len 64 --max_answer_seq_len 6 --actor_learning_rate 5e-3 --critic_learning_rate 5e-4
    --num_warmup_steps 0 --disable_critic_dropout --print_answers --print_answers_interval 1 --enable_test_mode
    --test_stop_step 2 --align_overflow --local_rank=0
"""


@dataclass(frozen=True)
class Chained:
    """The three runs, and their folders."""

    ran: dict[int, Ran]
    folders: dict[int, Path]


def words_of(step: str, name: str, models: Sequence[Path]) -> list[str]:
    """A script's line with `models` in the place of those that it names."""
    (line,) = (line for line in LINES if (line.step, line.name) == (step, name))
    launcher = line.launcher.split() if "--num_gpus" in line.launcher else []  # a port is nothing to a rank
    words = [*launcher, *line.flags.split()]
    given = iter(models)
    for place, word in enumerate(words):
        if word.endswith("model_name_or_path"):
            words[place + 1] = str(next(given))
    return words


def _without_spare_rows(start: Path) -> Path:
    """As Llama 2: a row of the table for each token of the tokenizer, and no more."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(start)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(start)))
    model.save_pretrained(start)
    return start


@pytest.fixture(scope="module")
def chained(place: Path) -> Chained:
    """In a folder with its datasets, as `save_to_disk` writes them: a name is then a path here."""
    import datasets

    own = place / "theirs"
    rows = datasets.Dataset.from_list([{**row, "response": row["chosen"]} for row in pair_rows(60)])
    data = datasets.DatasetDict(train=rows, test=rows.select(range(12)))
    data.save_to_disk(str(own / "Dahoas/rm-static"))
    start = _without_spare_rows(save_start(own / "start", pad_token=None))
    folders = {step: own / f"step{step}" for step in (1, 2, 3)}
    models = {1: [start], 2: [folders[1] / "model"], 3: [folders[1] / "model", folders[2] / "model"]}
    lines = {
        1: [*words_of("sft", "llama2/run_llama2_7b_lora", models[1]), *SMALL.split()],
        2: [*words_of("reward", "single_gpu/run_350m", models[2]), *SMALL.split()],
        3: [*words_of("ppo", "single_node/run_1.3b", models[3]), *SMALL_PPO.split()],
    }
    lines[1] += ["--data_path", "Dahoas/rm-static"]  # the columns of the other datasets are their own
    ran = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(own)
        for step, words in lines.items():
            places = ["--output_dir", folders[step], "--data_output_path", own / "cache"]
            through_launcher = "--num_gpus" in words
            ran[step] = run_step(
                step, [*words, *places], environment={"PYTHONPATH": str(ROOT)}, launcher=through_launcher
            )
            assert ran[step].code == 0, ran[step].words
    return Chained(ran, folders)


def test_they_run_and_say_what_they_do_not_need(chained):
    needless = {
        1: ["--deepspeed"],
        2: ["--num_padding_at_beginning", "--enable_tensorboard", "--tensorboard_path"],
        3: [
            "--deepspeed",
            "--enable_hybrid_engine",
            "--num_padding_at_beginning",
            "--print_answers",
            "--align_overflow",
        ],
    }
    for step, flags in needless.items():
        lines = chained.ran[step].stdout.splitlines()
        for flag in flags:
            assert sum(line.startswith(f"{flag} is not needed: ") for line in lines) == 1
    said = chained.ran[2].stdout
    assert "--num_gpus 1 is read as THREESTEP_RANKS=1" in said and "--data_path is Dahoas/rm-static, " in said
    assert "--enable_test_mode is read as --max_train_steps 2" in chained.ran[3].stdout


def test_the_pad_token_that_llama_lacks_is_added_and_stays(chained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    start = chained.folders[1].parent / "start"
    rows = AutoModelForCausalLM.from_pretrained(start).get_input_embeddings().num_embeddings
    assert (
        f"has no pad token, so [PAD] was added as token {rows} and to the model's embeddings" in chained.ran[1].stdout
    )
    model = AutoModelForCausalLM.from_pretrained(chained.folders[1] / "model")
    assert model.get_input_embeddings().num_embeddings == rows + 1
    for step, name in ((1, "model"), (2, "model"), (3, "model"), (3, "critic")):
        assert AutoTokenizer.from_pretrained(chained.folders[step] / name).pad_token == "[PAD]"
    assert "has no pad token" not in chained.ran[2].stdout + chained.ran[3].stdout


def test_their_settings_mean_what_they_meant(chained):
    settings = yaml.safe_load((chained.folders[3] / "config.yaml").read_text())
    assert settings["generation_batches"] == 2  # rollouts of 2, two accumulated
    assert settings["critic_dropout"] == 0.0 and settings["max_train_steps"] == 2
    lines = [json.loads(line) for line in (chained.folders[3] / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "actor/learning_rate" in line] == [1, 2]


def test_the_moving_average_is_a_model_beside(chained):
    """Two steps from the start: nearer to it than the actor is, by the share that the average has taken up."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    out = chained.folders[3]
    start, actor, average = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
        for folder in (chained.folders[1] / "model", out / "model", out / "model_ema")
    )
    assert AutoTokenizer.from_pretrained(out / "model_ema").eos_token == "<|endoftext|>"
    moved = sum(float((actor[name] - start[name]).norm()) for name in start)
    kept = sum(float((average[name] - start[name]).norm()) for name in start)
    assert moved > 0 and kept < 0.1 * moved
