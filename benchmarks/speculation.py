"""Models with a trained head for multi-token prediction, for rollouts by guesses: one by SFT on a few rows of GSM8K,
which it soon knows well enough that most of its head's guesses are right, as those of a trained model are; and one by
SFT on the embedded task, spelt letter by letter, which is asked what it was not trained on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.workload import SHAPES, Workload
from threestep.plugins.embedded.task import generate

ROWS = 16
# Rounds of training, each from where the last ended, until so many guesses are right.
WANTED, _ROUNDS, _STEPS = 0.7, 6, 60
# The embedded task: hardly more tokens than bytes, so that a response has some 12 of them, and steps of 32 sentences.
_LETTERS, _EMBEDDED_STEPS, _EMBEDDED_LAYERS = 264, 600, 8
ROOT = Path(__file__).parents[1]


def make_drafting(workload: Workload, prompts: int) -> tuple[Path, Path, str]:
    """Return the folder of the model, made where it is missing, the rows that it knows, and a sentence on its guesses
    for the first `prompts` of them."""
    folder, rounds = workload.folder / "drafting", 0
    folder.mkdir(exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text("".join(workload.sft.read_text().splitlines(keepends=True)[:ROWS]))
    while not (folder / "done").exists():
        start = folder / f"round{rounds}" / "model" if rounds else workload.model
        rounds += 1
        _train(start, rows, folder / f"round{rounds}")
        share, _ = _measured(folder / f"round{rounds}" / "model", rows, prompts)
        print(f"drafting model: after {rounds * _STEPS} steps {share:.2f} of the guesses are right", file=sys.stderr)
        if share >= WANTED or rounds == _ROUNDS:
            (folder / "done").write_text(f"round{rounds}")
    model = folder / (folder / "done").read_text() / "model"
    return model, rows, _measured(model, rows, prompts)[1]


def make_embedded_drafting(workload: Workload, shape: str, prompts: int) -> tuple[Path, Path, str]:
    """As `make_drafting`, of the embedded task: the rows are held out, and the model is as wide as `shape`."""
    folder = workload.folder / "embedded_drafting"
    folder.mkdir(exist_ok=True)
    rows, model = folder / "rows.jsonl", folder / "sft" / "model"
    rows.write_text("".join(json.dumps({"prompt": row.prompt}) + "\n" for row in generate(1)["eval"]))
    if not (folder / "done").exists():
        hidden, _, heads, _ = SHAPES[shape]
        sizes = f"--vocab_size {_LETTERS} --hidden_size {hidden} --num_attention_heads {heads} "
        sizes += f"--max_position_embeddings 256 --num_hidden_layers {_EMBEDDED_LAYERS}"
        _run("new_model", f"--data_path embedded {sizes} --out {folder / 'base'}")
        flags = f"--model_name_or_path {folder / 'base'} --data_path embedded --data_split 1,0,0 --max_seq_len 128 "
        flags += f"--max_train_rows 12000 --data_output_path {folder / 'cache'} --output_dir {folder / 'sft'} "
        flags += "--zero_stage 0 --dtype fp32 --mtp_num_layers 1 --mtp_loss_coef 1 --learning_rate 5e-4 "
        flags += f"--per_device_train_batch_size 32 --max_train_steps {_EMBEDDED_STEPS} --num_train_epochs 4 "
        flags += "--max_eval_rows 64 --report false --overwrite"
        _run("step1_sft.main", flags)
        (folder / "done").touch()
    return model, rows, _measured(model, rows, prompts)[1]


def _train(start: Path, rows: Path, out: Path) -> None:
    flags = f"--model_name_or_path {start} --data_path jsonl:{rows} --data_split 1,0,0 --dtype fp32 "
    flags += f"--data_output_path {rows.parent / 'cache'} --output_dir {out} --max_train_steps {_STEPS} --zero_stage 0 "
    flags += "--mtp_num_layers 1 --mtp_loss_coef 1 --learning_rate 1e-3 --per_device_train_batch_size 4 "
    flags += "--num_train_epochs 1000 --max_eval_rows 1 --report false --overwrite"
    _run("step1_sft.main", flags)


def _run(program: str, flags: str) -> None:
    command = [sys.executable, "-m", f"training.{program}", *flags.split()]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def _measured(model: Path, rows: Path, prompts: int) -> tuple[float, str]:
    """Return the share of right guesses, and a sentence."""
    program = [sys.executable, "-m", "benchmarks.competitors.speculation", "--model", str(model), "--how", "note"]
    given = [*program, "--rows", str(rows), "--prompts", str(prompts)]
    done = subprocess.run(given, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    share, sentence = done.stdout.strip().splitlines()[-1].split(" ", 1)
    return float(share), sentence
