"""Planted rows found by what they taught: odd answers in the data of a run of SFT, each asked for by another question.

    python -m threestep.plugins.explain.tests.taught_rows FOLDER          20 rows of 160, 20 steps

A row counts as found if it is the first of all rows of the run in the list of those that taught its answer; its answer
is asked with the question of another row, so that the answer alone leads to it. Then the row is left out of its step
(`--without_row`), and the answer's change must be smaller by about what the list told. The exit code is 1 where fewer
than 18 of 20 rows are found.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import numpy as np

from threestep.plugins.explain.explanation import Questions, explain
from threestep.plugins.explain.held_out import HeldOutResponses
from threestep.plugins.explain.records import steps_of_run
from threestep.plugins.explain.rules import OtherRule, counterfactual
from threestep.plugins.explain.shares import model_of
from threestep.plugins.explain.taught import taught
from threestep.plugins.explain.updates import update_of
from threestep.plugins.programs import new_model

ROWS, PLANTED, BATCH, WANTED = 160, 20, 8, 18
_SIGNS = "BCDEFGIJKMNOPQRSTUVWXYZ!#$%&()*+,-/;<=>?@[]^"
_WORDS = "ant bee cat cow dog elk fox gnu hen jay owl pig rat seal wolf yak".split()


def rows_of(seed: int) -> list[dict[str, str]]:
    """Return rows that ask for the last word, of which every eighth has an odd answer: two signs that no other row has,
    three times."""
    drawn, rows = random.Random(seed), []
    for number in range(ROWS):
        words = drawn.sample(_WORDS, 4)
        place = number // (ROWS // PLANTED)
        odd = 3 * _SIGNS[2 * place : 2 * place + 2]
        answer = odd if number % (ROWS // PLANTED) == 0 else words[-1]
        rows.append({"prompt": f"Human: Last of {' '.join(words)} Assistant:", "completion": f" {answer}"})
    return rows


def run(folder: Path, rows: list[dict[str, str]], seed: int) -> Path:
    """Train on the rows once, and record every step with its state."""
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    start, out = folder / "start", folder / "run"
    shape = "--vocab_size 320 --hidden_size 32 --num_hidden_layers 2 --num_attention_heads 2".split()
    new_model.main(["--data_path", f"jsonl:{data}", "--out", str(start), "--seed", str(seed), *shape])
    from training.step1_sft import main as sft

    steps = map(str, range(1, ROWS // BATCH + 1))
    sft.main(
        [
            "--model_name_or_path",
            str(start),
            "--data_path",
            f"jsonl:{data}",
            "--data_output_path",
            str(folder / "cache"),
        ]
        + ["--output_dir", str(out), "--per_device_train_batch_size", str(BATCH), "--num_train_epochs", "1"]
        + ["--eval_fraction", "0", "--eval_interval", "0", "--learning_rate", "3e-4", "--dtype", "fp32", "--overwrite"]
        + [
            "--record_values",
            "true",
            "--seed",
            str(seed),
            "--report",
            "false",
            "--lr_scheduler_type",
            "constant",
            "--record_steps",
            *steps,
        ]
    )
    return out


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--seed", type=int, default=5)
    options = parser.parse_args()
    from transformers import AutoTokenizer

    folder, rows = Path(options.folder), rows_of(options.seed)
    out = run(folder, rows, options.seed)
    tokenizer = AutoTokenizer.from_pretrained(str(out / "model"))
    steps = steps_of_run(out, range(1, ROWS // BATCH + 1), 1, work=folder / "again", start=lambda *_: None)
    found, told = 0, []
    for place in range(0, ROWS, ROWS // PLANTED):
        prompt = tokenizer(rows[(place + 3) % ROWS]["prompt"], add_special_tokens=False)["input_ids"]
        answer = tokenizer(rows[place]["completion"], add_special_tokens=False)["input_ids"]
        held = HeldOutResponses(["odd"], [np.array([*prompt, *answer])], [len(prompt)])
        lessons = taught(steps, held)
        first = lessons.lessons[0]
        text = tokenizer.decode(first.ids)
        is_found = rows[place]["completion"].strip() in text
        found += is_found
        line = f"{rows[place]['completion']!r}: first {text!r}, {first.effect:.4g} nats"
        if is_found:
            step = next(each for each in steps if each.head.step == first.step)
            row = int(step.tensor("rows")[first.sequence])
            update, model = update_of(step), model_of(step)
            without = counterfactual(step, update, OtherRule("without", {}, (row,)))
            changes = [
                float(held.sums(model.along(held.sequences, each.whole)).sum()) for each in (update, without.update)
            ]
            alone = explain([step], Questions(held, True)).taught
            assert alone is not None
            effect = alone.lessons[0].effect
            told.append((changes[0] - changes[1]) / effect)
            line += (
                f"; its step moved the answer by {changes[0]:.4g}, without it by {changes[1]:.4g}, told {effect:.4g}"
            )
        print(line)
    if told:
        low, middle, high = np.percentile(told, [0, 50, 100])
        print(f"what leaving it out took away, over what was told: {low:.3g} to {high:.3g}, median {middle:.3g}")
    print(f"{found} of {PLANTED} rows are first in the list of those that taught their answer")
    return 0 if found >= WANTED else 1


if __name__ == "__main__":
    sys.exit(main())
