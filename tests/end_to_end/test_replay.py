"""A run that replays another's rollouts ends with the same weights, without generating anything."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from tests.end_to_end.conftest import SHARED, run_step, save_scorer, save_start
from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.json_lines import read_lines, write_lines

pytestmark = pytest.mark.timeout(900)  # on a busy machine


def test_a_replayed_run_ends_with_the_same_weights(place, pairs_file):
    start = save_start(place / "start_of_replay", pad_is_eos=True)
    critic = save_scorer(place / "critic_of_replay", start)
    shared = [
        *("--actor_model_name_or_path", start, "--critic_model_name_or_path", critic),
        *("--data_path", f"jsonl:{pairs_file}", "--data_output_path", place / "replay_cache", *SHARED.split()),
        *"--dtype fp32 --actor_learning_rate 1e-3 --critic_learning_rate 1e-4 --max_train_steps 2".split(),
        *"--per_device_generation_batch_size 4 --per_device_training_batch_size 4 --max_answer_seq_len 8".split(),
        *("--temperature", 0.9, "--top_p", 0.95, "--min_p", 0.01, "--stop", "q", "--bad_words", "the", "apple"),
    ]
    rollouts, folders = place / "rollouts", [place / "dumped", place / "replayed"]
    for flag, folder in zip(("--rollout_dump", "--rollout_replay"), folders, strict=True):
        ran = run_step(3, [*shared, flag, rollouts, "--output_dir", folder])
        assert ran.code == 0, ran.words
    for model in ("model", "critic"):
        dumped, replayed = (load_file(folder / model / "model.safetensors") for folder in folders)
        assert all(dumped[name].equal(replayed[name]) for name in dumped) and dumped.keys() == replayed.keys()
    texts = [sample["response"] for sample in read_lines(folders[0] / "samples.jsonl")]
    assert any("q" in text for text in texts) and not any("apple" in text for text in texts)
    # The responses to held-out prompts are those of the first run's weights.
    assert not (folders[1] / "samples.jsonl").exists() and "eval/" not in (folders[1] / "metrics.jsonl").read_text()
    assert "eval/reward" in (folders[0] / "metrics.jsonl").read_text() and "without an evaluation" in ran.stdout
    summary = json.loads((folders[1] / "summary.json").read_text())
    assert not any("reward" in name for name in summary)
    for words in ((folders[1] / "model" / "README.md").read_text(), ran.stdout):
        assert "reward_after" not in words and "mean reward" not in words
    assert f"the run that filled {rollouts}" in (folders[1] / "report.html").read_text()


ENVIRONMENT = '''
import time


class Uneven:
    """Ends at once for half of the rows, and never for the other half; every answer takes a moment."""

    def reset(self, row):
        self.talks = int(row["ground_truth"]) % 2
        return row["messages"], None

    def step(self, message):
        time.sleep(0.02)
        reward = float(len(message.text) % 7)
        messages = [{"role": "user", "content": "more"}] if self.talks else []
        return messages, reward, not self.talks, {"heard": 1}

    def close(self):
        pass
'''


@pytest.mark.long
@pytest.mark.parametrize("template", ["chatml", "empty_thought"])  # the second rewrites earlier turns
def test_conversations_of_uneven_ranks_replayed_and_resumed(place, template):
    """With an environment, on two ranks under ZeRO-3; the replay asks no environment."""
    place, forks = place / template, template == "empty_thought"
    place.mkdir()
    start = save_start(place / "start_of_talk", tokenizer=chat_tokenizer(chat_template(template)))
    rows = write_lines(place / "talk.jsonl", [{"prompt": f"Say {n}.", "ground_truth": str(n)} for n in range(24)])
    environment, rollouts = place / "uneven.py", place / "talks"
    environment.write_text(ENVIRONMENT)
    shared = [
        *("--actor_model_name_or_path", start, "--data_path", f"jsonl:{rows}"),
        *("--data_output_path", place / "talk_cache", "--environment", f"{environment}:Uneven", "--max_turns", 6),
        *"--data_split 0,0,1 --eval_fraction 0.2 --max_prompt_seq_len 40 --max_answer_seq_len 80 --dtype fp32".split(),
        *"--reward environment --advantage grpo --num_samples_per_prompt 2 --kl_coef 0.1 --max_train_steps 2".split(),
        *"--per_device_generation_batch_size 1 --per_device_training_batch_size 2 --actor_learning_rate 1e-3".split(),
        *("--actor_zero_stage", 3, "--stop", "a", "e", "i", "o", "t", "s", "n"),
        *(("--chat_template_kwargs", '{"enable_thinking": false}') if forks else ()),
    ]
    drawn, weights = place / "talked", {}
    saves = ["--rollout_dump", rollouts, "--save_every", 1, "--keep_last", 2]
    for name, folder, more in (
        ("drawn", drawn, saves),
        ("resumed", drawn, [*saves, "--resume", drawn / "checkpoints" / "step_000001"]),
        ("replayed", place / "talked_again", ["--rollout_replay", rollouts]),
    ):
        if name == "replayed":
            environment.write_text("raise RuntimeError('asked by a replay')")
        ran = run_step(3, [*shared, *more, "--output_dir", folder], ranks=2)
        assert ran.code == 0, ran.words
        weights[name] = load_file(folder / "model" / "model.safetensors")
    started = load_file(start / "model.safetensors")
    assert any(float((weight - started[name]).abs().max()) > 5e-4 for name, weight in weights["drawn"].items())
    for name, weight in weights["drawn"].items():
        assert weight.equal(weights["resumed"][name]) and weight.equal(weights["replayed"][name])
    assert not (place / "talked_again" / "samples.jsonl").exists()
    turns = [sample["turns"] for sample in read_lines(drawn / "samples.jsonl")]
    # Before each turn that template puts an empty thought, of 16 tokens: 80 hold fewer turns.
    assert 1 in turns and max(turns) > (2 if forks else 3)
    lines = [line for line in read_lines(drawn / "metrics.jsonl") if "conversation/turns" in line]
    assert all(line["environment/heard"] >= 1 for line in lines)
    assert lines and all((line["conversation/forks"] > 0) == forks for line in lines)
