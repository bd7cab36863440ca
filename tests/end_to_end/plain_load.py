"""Loads finished model folders by transformers alone, in a process that knows nothing of Threestep.

Argument: a JSON file, {name: {"kind": "causal" | "scalar", "folder", "dtype", "rows"}}. Prints one JSON object.
causal rows: [ids, loss_mask]; gives {"loss"}, the mean over all tokens whose mask is set. scalar rows: [prompt ids,
[response ids, ...]]; gives {"scores": [[one a response], ...]}.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer


def causal_loss(folder: str, dtype: torch.dtype, rows: list) -> dict:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer.pad({"input_ids": [ids for ids, _ in rows]}, return_tensors="pt", padding_side="right")
    labels = torch.full_like(batch["input_ids"], -100)
    for row, (ids, mask) in enumerate(rows):
        labels[row, : len(ids)] = torch.where(torch.tensor(mask), torch.tensor(ids), -100)
    with torch.no_grad():
        return {"loss": float(model(**batch, labels=labels).loss)}


def scalar_scores(folder: str, dtype: torch.dtype, rows: list) -> dict:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    scores = []
    for prompt, responses in rows:
        sentences = [prompt + response for response in responses]
        batch = tokenizer.pad({"input_ids": sentences}, return_tensors="pt", padding_side="right")
        with torch.no_grad():
            scores.append(model(**batch).logits.squeeze(-1).float().tolist())
    return {"scores": scores}


def main() -> None:
    with open(sys.argv[1]) as file:
        wanted = json.load(file)
    found = {}
    for name, one in wanted.items():
        read = {"causal": causal_loss, "scalar": scalar_scores}[one["kind"]]
        found[name] = read(one["folder"], getattr(torch, one["dtype"]), one["rows"])
    strangers = [name for name in sys.modules if name.split(".")[0] in ("training", "deepspeed", "peft")]
    if strangers:
        raise AssertionError(f"this process is to be plain, and it has imported {strangers}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
