"""What every competitor is given: the same model folder and the same texts.

A Llama shape with random weights, a byte-level BPE tokenizer trained on the texts, and GSM8K as JSON lines: `sft.jsonl`
(prompt, chosen), `pairs.jsonl` (prompt, chosen, rejected), `pairs_half.jsonl` (the same with prompts as long as the
responses) and `ranked2`, `ranked4`, `ranked8` (a prompt and K responses, the prompt half of each sequence).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from transformers import LlamaConfig

SHAPES = {
    # hidden, layers, heads, intermediate: with 8,192 tokens 5.1, 27.7, 108 and 1,270 million weights
    "5m": (192, 4, 6, 576),
    "25m": (512, 6, 8, 1536),
    "100m": (768, 12, 12, 2304),
    "1300m": (2048, 24, 16, 5632),
    "tiny": (64, 2, 4, 128),
}
VOCABULARY = 8192
RANKED = (2, 4, 8)


@dataclass(frozen=True)
class Workload:
    """Folders and files of one workload."""

    folder: Path

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def sft(self) -> Path:
        return self.folder / "sft.jsonl"

    @property
    def pairs(self) -> Path:
        return self.folder / "pairs.jsonl"

    def ranked(self, responses: int) -> Path:
        return self.folder / f"ranked{responses}" / "benchmark_ranked" / "rows.jsonl"

    def marked(self) -> Path:
        """Each response of `pairs` as a row of its own, with a mark; made where it is missing."""
        path = self.folder / "marked.jsonl"
        if not path.exists():
            rows = []
            for line in self.pairs.read_text().splitlines():
                pair = json.loads(line)
                for name in ("chosen", "rejected"):
                    rows.append({"prompt": pair["prompt"], "completion": pair[name], "label": name == "chosen"})
            _write(path, rows)
        return path

    def tokens(self, file: str) -> tuple[int, int]:
        """Tokens of a file of prompts with several responses: each prompt once, and once a response."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.model)
        shared = unshared = 0
        for line in (self.folder / file).read_text().splitlines():
            row = json.loads(line)
            responses = row.get("responses") or [row["chosen"], row["rejected"]]
            prompt, *others = (len(ids) for ids in tokenizer([row["prompt"], *responses])["input_ids"])
            shared += prompt + sum(others) + len(others)
            unshared += len(others) * (prompt + 1) + sum(others)
        return shared, unshared


def make_workload(folder: Path, shape: str, data_dir: Path) -> Workload:
    """Return the workload in `folder`, made there where it is missing. `data_dir` holds GSM8K as published."""
    workload = Workload(folder / shape)
    if (workload.folder / "done").exists():
        return workload
    for name in ("train.jsonl", "model_solutions.jsonl"):
        if not (data_dir / name).is_file():
            raise ThreestepError(f"--data_dir expects GSM8K's files, and {data_dir / name} is missing")
    workload.folder.mkdir(parents=True, exist_ok=True)
    rows = [json.loads(line) for line in (data_dir / "train.jsonl").read_text().splitlines()]
    # The checker of a GRPO step reads the ground truth.
    answered = [{"prompt": _prompt(row), "chosen": " " + row["answer"], "ground_truth": row["answer"]} for row in rows]
    _write(workload.sft, answered)
    pairs = _pairs(data_dir / "model_solutions.jsonl")
    _write(workload.pairs, pairs)
    questions = [row["question"] for row in rows]
    _write(workload.folder / "pairs_half.jsonl", [_with_half_prompt(row, questions, i) for i, row in enumerate(pairs)])
    for count in RANKED:
        workload.ranked(count).parent.mkdir(parents=True, exist_ok=True)
        _write(workload.ranked(count), _ranked(rows, count))
    _make_model(workload, shape, [_prompt(row) + " " + row["answer"] for row in rows])
    (workload.folder / "done").touch()
    return workload


def config_of(shape: str) -> LlamaConfig:
    """The model of a shape. Its end and pad tokens are those of the workload's tokenizer."""
    from transformers import LlamaConfig

    hidden, layers, heads, intermediate = SHAPES[shape]
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=intermediate,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )


def save_scalar_model(language_model: Path, folder: Path) -> None:
    """Write the same body with a new random scalar head, and the tokenizer: a reward model and critic of that shape."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_pretrained(language_model, num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(language_model).save_pretrained(folder)


def _prompt(row: dict) -> str:
    return f"Human: {row['question']} Assistant:"


def _pairs(path: Path) -> list[dict]:
    pairs = []
    for line in path.read_text().splitlines():
        row = json.loads(line)
        for answer in row.values():
            if isinstance(answer, dict) and not answer["is_correct"]:
                chosen, rejected = " " + row["ground_truth"], " " + answer["solution"]
                pairs.append({"prompt": _prompt(row), "chosen": chosen, "rejected": rejected})
    return pairs


def _with_half_prompt(row: dict, questions: list[str], index: int) -> dict:
    """The pair with more questions before its own, until the prompt is about as long as a response."""
    # A question has 1.35 times the characters a token that a worked solution has.
    wanted = int(1.35 * (len(row["chosen"]) + len(row["rejected"])) / 2)
    return {**row, "prompt": _as_long_as(row["prompt"], wanted, questions, index)}


def _as_long_as(prompt: str, characters: int, questions: list[str], index: int) -> str:
    while len(prompt) < characters:
        room = characters - len(prompt)
        prompt = f"{questions[index % len(questions)][:room]} {prompt}"
        index += 1
    return prompt


def _ranked(rows: list[dict], count: int) -> list[dict]:
    """Rows of a prompt and `count` answers, those to other questions behind its own: what is learnt does not
    matter here."""
    made = []
    for index, row in enumerate(rows[:1000]):
        responses = [" " + rows[(index + 997 * step) % len(rows)]["answer"] for step in range(count)]
        wanted = int(1.35 * sum(len(text) for text in responses) / count)
        questions = [other["question"] for other in (rows + rows)[index + 1 : index + 20]]
        made.append({"prompt": _as_long_as(_prompt(row), wanted, questions, 0), "responses": responses})
    return made


def _write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _make_model(workload: Workload, shape: str, texts: list[str]) -> None:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>", model_max_length=512
    ).save_pretrained(workload.model)
    torch.manual_seed(0)
    LlamaForCausalLM(config_of(shape)).save_pretrained(workload.model)
