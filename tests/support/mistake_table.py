"""Thirty mistakes for docs/lab_book/2026-q4-first-hour.md: a command, its seconds on this machine and its sentence.

python -m tests.support.mistake_table

The commands run in a folder with tiny data and folders that look like models: nothing is ever trained.
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from training.utils.data.file_dataset import POINTER

ROOT = Path(__file__).parents[2]
_MOST_CHARACTERS = 260  # of a sentence in the table
_SILENT, _CLOSED = "{silent}", "{closed}"  # addresses: of a host that never answers, and of one that refuses


@dataclass(frozen=True)
class UserMistake:
    """A command of `threestep` in the folder of `_make_place`. hub: the address that stands for the hub."""

    name: str
    command: str
    hub: str | None = None


@dataclass(frozen=True)
class Answered:
    """seconds: of the whole command."""

    code: int
    sentence: str
    seconds: float


def _sft(rows: str = "rows.csv", more: str = "", model: str = "model") -> str:
    return f"sft --model_name_or_path {model} --data_path {rows} --output_dir new {more}".strip()


_PPO = "ppo --actor_model_name_or_path model --critic_model_name_or_path model --data_path rows.csv --output_dir new"
MISTAKES = [
    UserMistake(
        "a flag names a column with the wrong capitalization",
        _sft(more="--prompt_column Question --chosen_column answer"),
    ),
    UserMistake("a flag names a column that does not exist", _sft(more="--prompt_column query --chosen_column answer")),
    UserMistake("a column name in the file is misspelled", _sft("misspelt.csv")),
    UserMistake("the columns fit no format", _sft("strange.csv")),
    UserMistake("the file does not exist", _sft("jsonl:rws.jsonl")),
    UserMistake("a data folder without a format prefix", _sft("data")),
    UserMistake("a spreadsheet", _sft("rows.xlsx")),
    UserMistake("an empty file", _sft("empty.jsonl")),
    UserMistake("a line that is not JSON", _sft("broken.jsonl")),
    UserMistake("a CSV in Latin-1", _sft("latin.csv")),
    UserMistake("answers that are true or false", _sft("truths.jsonl")),
    UserMistake("prompts without responses, for SFT", _sft("prompts.jsonl")),
    UserMistake("plain text, for a reward model", _sft("texts.jsonl").replace("sft", "reward", 1)),
    UserMistake("the name of a dataset is misspelled", _sft("enbedded")),
    UserMistake("a hub dataset, when the hub does not respond", _sft("hub:openai/gsm8k,config=main"), _SILENT),
    UserMistake("a known dataset, without a network", _sft("Dahoas/rm-static"), _CLOSED),
    UserMistake("a hub model, when the hub does not respond", _sft(model="Qwen/Qwen3-0.6B"), _SILENT),
    UserMistake("a hub model, without a network", _sft(model="Qwen/Qwen3-0.6B"), _CLOSED),
    UserMistake("the model folder does not exist", _sft(model="./modle")),
    UserMistake("a data folder as the model", _sft(model="data")),
    UserMistake("a folder with only a tokenizer as the model", _sft(model="tokenizer")),
    UserMistake("a run's folder as the model", _sft(model="finished")),
    UserMistake("truncated weights", _sft(model="cut")),
    UserMistake("pickled weights", _sft(model="pickled")),
    UserMistake("a finished run in the output folder", _sft().replace("new", "finished")),
    UserMistake("checkpoints in the output folder", _sft().replace("new", "stopped")),
    UserMistake("the same, with threestep all", "all --config all.yaml"),
    UserMistake("a flag is misspelled", _sft(more="--learning_rat 1e-5")),
    UserMistake("a value that is not a number", _sft(more="--learning_rate fast")),
    UserMistake("a split that gives no rows", _sft(more="--data_split 0,0,0")),
    UserMistake("a loss that does not exist", _sft(more="--loss_type sigmod").replace("sft", "dpo", 1)),
    UserMistake("a reward function in a missing file", f"{_PPO} --reward my_rewards.py:score"),
    UserMistake("a judge file that does not exist", f"{_PPO} --reward judge:helpfull.yaml"),
    UserMistake("a judge setting is misspelled", f"{_PPO} --reward judge:judge.yaml"),
    UserMistake("an API key in a judge file", f"{_PPO} --reward judge:key.yaml"),
    UserMistake("a command is misspelled", "rlo --data_path rows.csv"),
    UserMistake("a section of a threestep all file is misspelled", "all --config misspelt.yaml"),
]


def _make_place(place: Path) -> None:
    qa = '{"question": "Hi", "answer": "Ho"}\n'
    texts = {
        "rows.csv": "question,answer\n" + "Hi,Ho\n" * 20,
        "misspelt.csv": "questoin,answer\nHi,Ho\n",
        "strange.csv": "left,right\nHi,Ho\n",
        "data/a.jsonl": qa,
        "data/b.jsonl": qa,
        "data/notes.md": "-",
        "rows.xlsx": "PK",
        "empty.jsonl": "",
        "broken.jsonl": qa + '{"question": "Hi"\n',
        "truths.jsonl": '{"question": "Hi", "answer": true}\n',
        "prompts.jsonl": '{"prompt": "Hi"}\n',
        "texts.jsonl": '{"text": "Hi"}\n',
        "tokenizer/tokenizer_config.json": "{}",
        "tokenizer/tokenizer.json": "{}",
        "pickled/pytorch_model.bin": "",
        "finished/summary.json": "{}",
        "whole/step1_sft/summary.json": "{}",
        "stopped/checkpoints/step_000010/manifest.json": "{}",
        "judge.yaml": "model: m\nbase_url: http://127.0.0.1:8000/v1\nrubrik: Short answers.\n",
        "key.yaml": "model: m\nrubric: Short answers.\napi_key: sk-0123456789\n",
        "all.yaml": "output_dir: whole\nmodel_name_or_path: model\nshared:\n  data_path: rows.csv\n",
        "misspelt.yaml": "output_dir: other\nmodel_name_or_path: model\nshard:\n  data_path: rows.csv\n",
    }
    for name, text in texts.items():
        path = place / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    (place / "latin.csv").write_bytes("question,answer\nHi,Hé\n".encode("latin-1"))
    for name in ("model", "cut", "finished/model", "pickled"):
        folder = place / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    header = json.dumps({"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + bytes(16)
    (place / "model" / "model.safetensors").write_bytes(weights)
    (place / "finished" / "model" / "model.safetensors").write_bytes(weights)
    (place / "cut" / "model.safetensors").write_bytes(weights[:-8])


@contextmanager
def _addresses() -> Iterator[dict[str, str]]:
    """Of a host that takes connections and never answers, and of a port that nobody listens to."""
    with socket.socket() as silent, socket.socket() as closed:
        for one in (silent, closed):
            one.bind(("127.0.0.1", 0))
        silent.listen(50)
        names = {_SILENT: silent, _CLOSED: closed}
        yield {name: f"http://127.0.0.1:{one.getsockname()[1]}" for name, one in names.items()}


def answers(mistakes: Sequence[UserMistake] = MISTAKES, at_once: int = 1) -> dict[str, Answered]:
    with tempfile.TemporaryDirectory() as folder, _addresses() as hubs, ThreadPoolExecutor(at_once) as pool:
        place = Path(folder).resolve()
        _make_place(place)
        ends = pool.map(lambda mistake: _answer(mistake, place, hubs), mistakes)
        return dict(zip((mistake.name for mistake in mistakes), ends, strict=True))


def _answer(mistake: UserMistake, place: Path, hubs: dict[str, str]) -> Answered:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "THREESTEP_RANKS": "1",
        "HF_HOME": str(place / "hub"),
        "HF_HUB_OFFLINE": "0" if mistake.hub else "1",
        **({"HF_ENDPOINT": hubs[mistake.hub]} if mistake.hub else {}),
    }
    for name in ("http_proxy", "https_proxy", "all_proxy", "HF_HUB_CACHE"):
        environment.pop(name, None), environment.pop(name.upper() if name.islower() else name, None)
    words = [sys.executable, "-m", "threestep", *shlex.split(mistake.command)]
    started = time.monotonic()
    done = subprocess.run(words, cwd=place, env=environment, capture_output=True, text=True, timeout=600)
    seconds = time.monotonic() - started
    said = done.stderr.replace(str(place), "/here").strip()
    return Answered(done.returncode, said, seconds)


def as_markdown(found: dict[str, Answered]) -> str:
    rows = [f"| {name} | {max(0.1, end.seconds):.1f} | {shown(end.sentence)} |" for name, end in found.items()]
    return "\n".join(["| mistake | seconds | message |", "| --- | ---: | --- |", *rows, ""])


def shown(sentence: str) -> str:
    """The sentence as the table shows it: without `error: ` and the pointer to `threestep inspect`, and cut if long."""
    text = " ".join(sentence.removeprefix("error: ").split())
    if POINTER in text:
        text = text.partition(POINTER)[0].rstrip("; ")
    text = text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS].rstrip()} ..."
    return text.replace("|", "\\|").replace("<", "\\<")


if __name__ == "__main__":
    sys.stdout.write(as_markdown(answers()))
