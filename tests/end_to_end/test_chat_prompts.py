"""All three steps under a chat template on conversations of several turns; and what the rows of step 3 carry, from the
file to the user's rule, sampler and dataset, and into samples.jsonl."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.conftest import Chain, run_chain, save_start
from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.json_lines import read_lines, write_lines
from tests.support.sorted_words import conversations
from training.utils.data.chat.style import SavedStyle, saved_style

pytestmark = pytest.mark.timeout(900)  # on a busy machine

OWN = """
from threestep.plugins.curriculum.prompts import PromptDataset, PromptSampler

class InOrder(PromptSampler):
    def __init__(self, prompts, seed):
        self.prompts, self.seen = prompts, []
    def take(self, first, count):
        print("taken from", len(self.prompts), self.seen)
        return list(range(len(self.prompts)))[-count:]
    def update(self, uids, scores):
        self.seen.append(len(uids) == len(scores) == 4)
    def state_dict(self):
        return {"seen": self.seen}
    def load_state_dict(self, state):
        self.seen = state["seen"]

class Grows(PromptDataset):
    def on_batch_end(self, results):
        assert self.add([{"role": "user", "content": "Sort: fig apple"}], ground_truth="apple fig", level=9)

def leveled(prompts, responses, *, ground_truth, level, raw_prompt, data_source, **columns):
    turns = [len(messages) for messages in raw_prompt]
    return [10.0 * own for own in level], {"turns": turns, "known": [float(truth in SORTED) for truth in ground_truth]}

SORTED = ("apple fig", "cherry lemon plum")
"""


@pytest.fixture(scope="module")
def chain(place: Path) -> Chain:
    (place / "own.py").write_text(OWN)
    chats = write_lines(place / "chats.jsonl", conversations())
    start = save_start(place / "start_chat", tokenizer=chat_tokenizer(chat_template("chatml")))
    shared = f"--data_path jsonl:{chats} --max_prompt_seq_len 100 --max_seq_len 120"
    shared += " --data_split 1,1,1 --eval_fraction 0.2"
    trained = "--dtype fp32 --learning_rate 1e-3 --per_device_train_batch_size 2 --report_mfu false".split()
    own = place / "own.py"
    flags = {
        1: trained,
        2: trained,
        3: "--dtype fp32 --per_device_generation_batch_size 4 --per_device_training_batch_size 4 "
        f"--max_answer_seq_len 6 --return_columns raw_prompt --checker {own}:leveled --prompt_sampler {own}:InOrder "
        f"--prompt_dataset {own}:Grows".split(),
    }
    return run_chain(place, "chat", start, 1, shared.split(), flags)


def test_every_step_trains_on_conversations(chain):
    from transformers import AutoTokenizer

    for step, folder in chain.folders.items():
        assert "none dropped" in chain.ran[step].stdout and "0 truncated" in chain.ran[step].stdout
        assert {1, 2} <= {line["step"] for line in read_lines(folder / "metrics.jsonl")}
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        assert tokenizer.chat_template == chat_template("chatml")


def test_the_style_goes_from_step_to_step_with_the_model(chain):
    import yaml
    from transformers import AutoTokenizer, GenerationConfig

    reasons = {1: "the tokenizer has a template", 2: f"saved with '{chain.folders[1] / 'model'}'"}
    for step, folder in chain.folders.items():
        said = f"prompt style: chat_template, responses end with <|im_end|> ({reasons.get(step, reasons[2])})"
        assert said in chain.ran[step].stdout.splitlines()
        assert yaml.safe_load((folder / "config.yaml").read_text())["prompt_style"] == "chat_template"
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        assert saved_style(tokenizer) == SavedStyle("chat_template")
        if step != 2:  # a reward model writes nothing
            stops = GenerationConfig.from_pretrained(folder / "model").eos_token_id
            assert tokenizer.convert_ids_to_tokens(stops) == ["<|im_end|>", "<|endoftext|>"]
    assert saved_style(AutoTokenizer.from_pretrained(chain.folders[3] / "critic")) == SavedStyle("chat_template")
    assert "was trained with a different prompt style" not in chain.ran[3].stdout


def test_what_a_row_carries_arrives_in_the_samples(chain):
    samples = read_lines(chain.folders[3] / "samples.jsonl")
    assert [sample["step"] for sample in samples] == [0] * 8 + [2] * 8
    rows = {row["level"]: row for row in conversations()}
    for sample in samples:
        row = rows[sample["columns"]["level"]]
        carried = {name: row[name] for name in ("data_source", "level", "extra_info")}
        lifted = {"index": row["level"], "tools_kwargs": {"search": {"k": row["level"]}}}
        assert sample["columns"] == {**carried, **lifted, "raw_prompt": row["prompt"]}
        assert sample["ground_truth"] == row["ground_truth"]
        text = "".join(f"<|im_start|>{said['role']}\n{said['content']}<|im_end|>\n" for said in row["prompt"])
        assert sample["prompt"] == text + "<|im_start|>assistant\n" and "<|im_end|>" not in sample["response"]
        # what the rule was given, and what it said
        assert sample["check"] == 10.0 * row["level"] and sample["check/known"] == 1.0
        assert sample["check/turns"] == len(row["prompt"])
    before, after = ([s["uid"] for s in samples if s["step"] == step] for step in (0, 2))
    assert before == after and len(set(before)) == len({sample["prompt"] for sample in samples})
    figures = read_lines(chain.folders[3] / "metrics.jsonl")
    turns = [line["eval/check/turns"] for line in figures if "eval/check/turns" in line]
    assert turns == pytest.approx([sum(s["check/turns"] for s in samples[:8]) / 8] * 2)


def test_the_users_sampler_sees_the_scores_and_the_prompts_that_the_dataset_added(chain):
    taken = [line for line in chain.ran[3].stdout.splitlines() if line.startswith("taken from")]
    rows = int(taken[0].split()[2])
    assert taken == [f"taken from {rows} []", f"taken from {rows + 1} [True]"]
