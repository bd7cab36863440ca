"""All steps on responses with parallel paths, from a model that has never seen the tags."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.end_to_end.conftest import SHARED, run_step, save_start
from threestep.plugins.parallel_thinking.tests.parallel_texts import WRITTEN_TAGS, fond_of_tags

pytestmark = pytest.mark.timeout(900)  # on a busy machine


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
        ids = tokenizer.convert_tokens_to_ids(WRITTEN_TAGS)
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


REWARD = """
def length(prompts, responses, **columns):
    return [float(len(text)) for text in responses], {"paths": [text.count("<Path>") for text in responses]}
"""


def test_step_3_draws_them_side_by_side(place: Path, trained, flags):
    """GRPO by a function of the text: the same weights from the run's own rollouts again, and from a run that went on
    after its first step."""
    from safetensors.torch import load_file

    actor = fond_of_tags(trained["padded"] / "model", place / "fond_of_tags")
    (place / "reward.py").write_text(REWARD)
    shared = [word for word in flags if word not in ("--learning_rate", "1e-3")]
    shared += ["--actor_model_name_or_path", actor, "--reward", f"{place / 'reward.py'}:length", "--parallel_paths", 3]
    shared += "--advantage grpo --num_samples_per_prompt 4 --per_device_generation_batch_size 4 --kl_coef 0.1".split()
    shared += "--per_device_training_batch_size 16 --max_answer_seq_len 12 --actor_learning_rate 1e-3".split()
    rollouts, drawn, weights = place / "path_rollouts", place / "paths_drawn", {}
    saves = ["--rollout_dump", rollouts, "--save_every", 1, "--keep_last", 2]
    for name, folder, more in (
        ("drawn", drawn, saves),
        ("again", place / "paths_again", ["--rollout_replay", rollouts]),
        ("resumed", drawn, [*saves, "--resume", drawn / "checkpoints" / "step_000001"]),
    ):
        ran = run_step(3, [*shared, *more, "--output_dir", folder])
        assert ran.code == 0, ran.words
        weights[name] = load_file(folder / "model" / "model.safetensors")
    started = load_file(actor / "model.safetensors")
    for name, weight in weights["drawn"].items():
        assert weight.equal(weights["again"][name]) and weight.equal(weights["resumed"][name])
    assert any(float((weight - started[name]).abs().max()) > 5e-4 for name, weight in weights["drawn"].items())
    shares, paths = (numbers(drawn, name) for name in ("rollout/with_paths", "reward/length/paths"))
    assert min(shares) > 0.3 and min(paths) > 1.0
    positions, tokens = (numbers(drawn, f"rollout/response_{name}_max") for name in ("positions", "tokens"))
    assert max(positions) <= 12 < max(tokens)
