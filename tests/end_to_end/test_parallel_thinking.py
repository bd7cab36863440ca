"""Steps 1 and 2 on responses with parallel paths, from a model that has never seen the tags."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SHARED, run_step, save_start

pytestmark = pytest.mark.timeout(900)  # on a busy machine

TAGS = ["<Parallel>", "<Path>", "</Path>", "</Parallel>"]


@pytest.fixture(scope="module")
def blocks_file(place: Path) -> Path:
    """Forty prompts whose chosen response has one or two blocks of two or three paths, and whose rejected has none."""
    rows = []
    for number in range(40):
        paths = "".join(f"<Path>{' fig' * (1 + (number + path) % 4)}</Path>" for path in range(2 + number % 2))
        chosen = f" pear <Parallel>{paths}</Parallel> apple" * (1 + number % 5 // 4)
        rows.append({"prompt": f"Human: Sort {number}. Assistant:", "chosen": chosen, "rejected": " fig fig pear"})
    path = place / "blocks.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def flags(place: Path, blocks_file: Path) -> list[object]:
    shared = [*SHARED.split(), "--data_path", f"jsonl:{blocks_file}", "--data_output_path", place / "blocks_cache"]
    trained = "--parallel_thinking true --max_train_steps 2 --learning_rate 1e-3 --dtype fp32"
    return [*shared, *trained.split()]


@pytest.fixture(scope="module")
def trained(place: Path, flags: list[object]) -> dict[str, Path]:
    """Step 1 packed on two ranks under ZeRO-3, born sharded, and padded on one rank: the same optimizer steps."""
    start = without_spare_rows(save_start(place / "start_without_tags"))
    folders = {"sharded": place / "blocks_sharded", "padded": place / "blocks_padded"}
    own = {
        "sharded": (2, ["--per_device_train_batch_size", 2, "--zero_stage", 3]),
        "padded": (1, ["--per_device_train_batch_size", 4, "--padded", "true"]),
    }
    for name, folder in folders.items():
        ranks, more = own[name]
        ran = run_step(1, ["--model_name_or_path", start, *flags, *more, "--output_dir", folder], ranks)
        assert ran.code == 0, ran.words
        assert ran.stdout.count("parallel thinking: ") == 2  # train and eval, in the line of the data
    return folders


def without_spare_rows(folder: Path) -> Path:
    """As many embeddings as the tokenizer has tokens: they must grow, under ZeRO-3 born in shards."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(AutoTokenizer.from_pretrained(folder)))
    model.save_pretrained(folder)
    return folder


def numbers(folder: Path, *names: str) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line[name] for line in lines for name in names if name in line]


def test_sharded_and_packed_is_padded(trained):
    """Same rows, same steps. The new embeddings are drawn anew, within 1e-4 of the mean: so near are the losses."""
    sharded, padded = (numbers(trained[name], "train/loss", "eval/loss") for name in ("sharded", "padded"))
    assert len(sharded) == 4 and sharded == pytest.approx(padded, rel=1e-3)
    assert sharded[-1] < sharded[0]


def test_the_model_left_has_the_tags(trained):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for folder in trained.values():
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        model = AutoModelForCausalLM.from_pretrained(folder / "model")
        ids = tokenizer.convert_tokens_to_ids(TAGS)
        assert ids == list(range(len(tokenizer) - 4, len(tokenizer)))
        rows = model.get_input_embeddings().weight.detach()[ids]
        assert model.config.vocab_size == len(tokenizer) == model.get_input_embeddings().weight.shape[0]
        assert float((rows[0] - rows[1]).abs().max()) > 1e-4  # they were one, and have trained


def test_step_2_goes_on_from_it(place: Path, trained, flags):
    found = {}
    for padded in ("false", "true"):
        folder = place / f"blocks_step2_{padded}"
        more = ["--per_device_train_batch_size", 4, "--padded", padded, "--output_dir", folder]
        ran = run_step(2, ["--model_name_or_path", trained["padded"] / "model", *flags, *more])
        assert ran.code == 0, ran.words
        found[padded] = numbers(folder, "train/loss", "eval/loss")
    assert len(found["true"]) == 4 and found["true"] == pytest.approx(found["false"], rel=1e-4)


def test_preferences_of_a_model_without_the_tags(place: Path, trained, flags):
    """DPO's reference has the embeddings that were just drawn, which no file could know again."""
    folder = place / "blocks_dpo"
    more = ["--per_device_train_batch_size", 4, "--output_dir", folder]
    ran = run_step("dpo", ["--model_name_or_path", place / "start_without_tags", *flags, *more])
    assert ran.code == 0, ran.words
    before, after = numbers(folder, "eval/loss")
    assert before == pytest.approx(math.log(2), abs=1e-6) and after < before
    assert "reference: " not in ran.stdout and numbers(folder, "reference/pairs_per_second")
