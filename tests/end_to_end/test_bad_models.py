"""A model that is not what it is given as ends a program with one sentence and code 2, before anything is trained."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end.conftest import Ran, run_step, save_start

pytestmark = pytest.mark.timeout(1800)  # on a busy machine


@dataclass(frozen=True)
class Given:
    """A model of `MODELS` given to a step (or program) by `flag`, and the words that the sentence has to hold."""

    model: str
    step: int | str
    flag: str
    words: list[str]
    ranks: int = 1


MODEL, ACTOR, CRITIC = "--model_name_or_path", "--actor_model_name_or_path", "--critic_model_name_or_path"
DATA = "--data_path jsonl:{pairs} --max_seq_len 100 --max_prompt_seq_len 64".split()
FLAGS = {
    1: [*DATA, *f"{MODEL} {{start}} --per_device_train_batch_size 2".split()],
    2: [*DATA, *f"{MODEL} {{start}} --per_device_train_batch_size 2".split()],
    "dpo": [*DATA, *f"{MODEL} {{start}} --per_device_train_batch_size 2".split()],
    3: [*DATA, *f"{ACTOR} {{start}} {CRITIC} {{reward}} --per_device_generation_batch_size 4 "
        "--per_device_training_batch_size 2 --max_answer_seq_len 36".split()],
}  # fmt: skip

GIVEN = [
    Given("wrapped", 1, MODEL, ["'module._orig_mod.' of a wrapper in their names", "key_mapping={r'^module"]),
    Given("lacking", 2, MODEL, ["lacks the tensor model.norm.weight", "would be random"], ranks=2),
    Given("misshapen", "dpo", MODEL, ["/model.safetensors'", "model.norm.weight expects the shape [64]", "got [63]"]),
    Given("reward", 3, ACTOR, ["expected a language model, got", "sequence classification", "score.weight"]),
    Given("two_labels", 2, MODEL, ["expected a model with one label, got 2 labels"]),
    Given("headless", 2, MODEL, ["expected a reward model with score.weight", "in its place with --new_head"]),
    Given("headless", 3, CRITIC, ["expected a reward model, got one without score.weight", "step 2"]),
    Given(
        "adapter",
        1,
        MODEL,
        ["no base of the adapter '", "neither a folder here nor in the adapter's", "could be loaded from 'a/base'"],
    ),
    Given(
        "adapter",
        3,
        ACTOR,
        ["no base of the adapter '", "neither a folder here nor in the adapter's", "could be loaded from 'a/base'"],
    ),
    Given("pickled", 2, MODEL, ["pickled weights (pytorch_model.bin)", "expected safetensors", "convert them: python"]),
    Given("cut_off", 1, MODEL, ["/model.safetensors': expected at least", "the file is cut off"], ranks=2),
    Given("gguf", 1, MODEL, ["model.gguf' is a GGUF file", "give the model folder"]),
    Given("weightless", 1, MODEL, ["holds a config.json and no weights", "expected model.safetensors"]),
]


def make_models(place: Path) -> dict[str, str]:
    """Folders by the names of `GIVEN`."""
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoConfig, AutoModelForSequenceClassification

    start = save_start(place / "start")

    def copied(name: str, of: Path = start) -> Path:
        return Path(shutil.copytree(of, place / name))

    def changed(name: str, change: Callable[[dict], dict], of: Path = start) -> None:
        file = copied(name, of) / "model.safetensors"
        tensors = {key: tensor.clone() for key, tensor in load_file(file).items()}
        save_file(change(tensors), file, {"format": "pt"})

    for name, labels in (("reward", 1), ("two_labels", 2)):
        config = AutoConfig.from_pretrained(start, num_labels=labels)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(copied(name))
    changed("wrapped", lambda tensors: {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()})
    changed("lacking", lambda tensors: {name: t for name, t in tensors.items() if name != "model.norm.weight"})
    changed("misshapen", lambda tensors: {**tensors, "model.norm.weight": torch.ones(63)})
    changed("headless", lambda tensors: {n: t for n, t in tensors.items() if n != "score.weight"}, place / "reward")
    for name in ("pickled", "gguf", "weightless", "cut_off"):
        file = copied(name) / "model.safetensors"
        if name == "pickled":
            torch.save(load_file(file), file.with_name("pytorch_model.bin"))
        if name == "cut_off":
            file.write_bytes(file.read_bytes()[:-1000])
        else:
            file.unlink()
    (place / "gguf" / "model.gguf").write_bytes(b"GGUF")
    adapter = copied("adapter")
    (adapter / "model.safetensors").rename(adapter / "adapter_model.safetensors")
    (adapter / "config.json").unlink()
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a/base", "peft_type": "LORA"}))
    return {path.name: str(path) for path in place.iterdir() if path.is_dir()}


@pytest.fixture(scope="module")
def all_ran(place: Path, pairs_file: Path) -> list[tuple[Ran, Path]]:
    """Every program, two at a time, in the order of `GIVEN`."""
    (place / "models").mkdir()
    places = {"pairs": str(pairs_file), **make_models(place / "models")}

    def run(given: Given) -> tuple[Ran, Path]:
        flags = [flag.format(**places) for flag in FLAGS[given.step]]
        out = place / "models_runs" / f"{given.model}_{given.step}"
        flags += [given.flag, places[given.model], "--data_output_path", str(place / "models_runs" / "cache")]
        flags += ["--output_dir", str(out)]
        return run_step(given.step, flags, given.ranks), out

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, GIVEN))


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: f"{given.model}-{given.step}")
def test_one_sentence_and_code_two(all_ran, given: Given):
    ran, out = all_ran[GIVEN.index(given)]
    assert ran.code == 2, ran.words
    assert "Traceback" not in ran.stderr + ran.stdout, ran.words
    sentences = [line for line in ran.stderr.splitlines() if line.startswith("error: ")]
    assert len(sentences) == 1 and ran.stderr.strip() == sentences[0], ran.words
    for words in given.words:
        assert words in sentences[0], ran.words
    left = {path.name for path in out.iterdir()} if out.is_dir() else set()
    assert not left & {"model", "checkpoints", "metrics.jsonl", "reward_report.json"}, left
