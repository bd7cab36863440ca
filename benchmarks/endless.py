"""Actor and reward model of a workload whose responses never end, so that every program decodes the same tokens.

The end and pad tokens' logits are pushed down for good: the first hidden feature is positive at every token, the head
reads it for these two alone, with a large negative weight. The other weights are the workload's random ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from benchmarks.workload import Workload, save_scalar_model

PROMPTS = 32
# The other weights are 0.02 wide: beside a 1, what the layers add to the feature does not turn its sign.
_FEATURE, _PULL = 1.0, -100.0


class Endless(NamedTuple):
    """actor, reward_model: folders. prompts: a folder of train.jsonl, PROMPTS rows that every step reads, and
    test.jsonl, one more."""

    actor: Path
    reward_model: Path
    prompts: Path


def make_endless(workload: Workload) -> Endless:
    """Return the folders of `workload`, made where they are missing."""
    folder = workload.folder / "endless"
    made = Endless(folder / "actor", folder / "reward_model", folder / "prompts")
    if not (folder / "done").exists():
        made.prompts.mkdir(parents=True, exist_ok=True)
        rows = [json.loads(line) for line in workload.sft.read_text().splitlines()[: PROMPTS + 1]]
        lines = [json.dumps(row) + "\n" for row in rows]
        (made.prompts / "train.jsonl").write_text("".join(lines[:PROMPTS]))
        (made.prompts / "test.jsonl").write_text(lines[PROMPTS])
        _save_actor(workload.model, made.actor)
        save_scalar_model(made.actor, made.reward_model)
        (folder / "done").touch()
    return made


def _save_actor(start: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(start)
    tokenizer = AutoTokenizer.from_pretrained(start)
    with torch.no_grad():
        model.get_input_embeddings().weight[:, 0] = _FEATURE
        head = model.get_output_embeddings().weight
        head[:, 0] = 0.0
        head[[tokenizer.eos_token_id, tokenizer.pad_token_id], 0] = _PULL
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
