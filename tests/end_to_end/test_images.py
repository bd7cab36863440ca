"""SFT, DPO, the reward model and GRPO on rows with images, by their command lines: the first loss, and a score, are
those of plain transformers on the row as the model's own processor makes it, and what is saved loads with plain
transformers."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.end_to_end.conftest import Ran, run_module, run_step
from tests.support.json_lines import read_lines, write_lines
from threestep.plugins.programs import export, new_model

pytestmark = pytest.mark.timeout(900)  # on a busy machine
ANSWER = "red and blue"
SHARED = "--max_seq_len 96 --per_device_train_batch_size 4 --dtype fp32 --report_mfu false"


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return filled(tmp_path_factory.mktemp("images"))


def filled(folder: Path, width: int = 32) -> Path:
    """Put a tiny model, a row with two pictures in two turns, many times, and pairs of its answers into `folder`."""
    from PIL import Image

    shape = "--num_hidden_layers=1 --num_attention_heads=2 --vocab_size=300 --max_image_tokens=4"
    size = [f"--hidden_size={width}", *shape.split()]
    new_model.main([f"--out={folder / 'start'}", "--data_path", "embedded", "--vision", *size])
    for name, size in (("red", (56, 28)), ("blue", (30, 60))):
        Image.new("RGB", size, name).save(folder / f"{name}.png")
    said = (("user", "What is <image>?"), ("assistant", "red"), ("user", "And <image>, both?"))
    asked = [{"role": role, "content": content} for role, content in said]
    chosen, rejected = ([{"role": "assistant", "content": text}] for text in (ANSWER, "no"))
    rows = {
        "rows": {"messages": [*asked, *chosen]},
        "pairs": {"prompt": asked, "chosen": chosen, "rejected": rejected},
        "prompts": {"prompt": asked, "ground_truth": ANSWER},
    }
    for name, row in rows.items():
        write_lines(folder / f"{name}.jsonl", [{**row, "images": ["red.png", "blue.png"]}] * 12)
    return folder


def run(place: Path, step: int | str, start: str, rows: str, out: str, flags: str) -> Ran:
    words = [*f"{SHARED} {flags}".split(), "--data_output_path", place / "cache", "--output_dir", place / out]
    ran = run_step(step, ["--model_name_or_path", place / start, "--data_path", f"jsonl:{place / rows}", *words])
    assert ran.code == 0, ran.words
    return ran


def plain_inputs(folder: Path, place: Path, answer: str) -> tuple[dict[str, torch.Tensor], list[bool]]:
    """The row with this last answer, by the folder's own processor; and which tokens are of its answers or their
    ends."""
    from PIL import Image
    from transformers import AutoImageProcessor, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    pictures = [Image.open(place / f"{name}.png").convert("RGB") for name in ("red", "blue")]
    made = processor(images=pictures, return_tensors="pt")
    first, second = ("<|image_pad|>" * int(grid.prod() // 4) for grid in made["image_grid_thw"])
    around = "<|vision_start|>{}<|vision_end|>"
    parts = [
        (f"<|im_start|>user\nWhat is {around.format(first)}?<|im_end|>\n<|im_start|>assistant\n", False),
        ("red<|im_end|>", True),
        (f"\n<|im_start|>user\nAnd {around.format(second)}, both?<|im_end|>\n<|im_start|>assistant\n", False),
        (f"{answer}<|im_end|>", True),
    ]
    ids, targets = list[int](), list[bool]()
    for text, is_target in parts:
        new = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, targets = ids + new, targets + [is_target] * len(new)
    ids_1T = torch.tensor([ids])
    is_image = (ids_1T == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    return {"input_ids": ids_1T, "mm_token_type_ids": is_image, **made}, targets


def plain_loss(folder: Path, place: Path) -> float:
    """Of the row's two answers with their ends."""
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    inputs, targets = plain_inputs(folder, place, ANSWER)
    ids_1T = inputs["input_ids"]
    with torch.no_grad():
        logits = model(**inputs).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, ids_1T[0, 1:].unsqueeze(-1)).squeeze(-1)
    return float(-logprobs[torch.tensor(targets)[1:]].mean())


def plain_score(folder: Path, place: Path, answer: str) -> float:
    """At the end of the row with this last answer: transformers' body and the weight beside it."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    body, told = AutoModel.from_pretrained(folder, output_loading_info=True)
    assert not told["missing_keys"] and told["unexpected_keys"] == {"score.weight"}
    inputs, _ = plain_inputs(folder, place, answer)
    with torch.no_grad():
        state_H = body.eval()(**inputs).last_hidden_state[0, -1]
    return float(state_H @ load_file(folder / "model.safetensors")["score.weight"][0])


def test_sft_sees_what_the_processor_makes_and_saves_a_model_that_loads(place):
    run(place, 1, "start", "rows.jsonl", "sft", "--data_split 1,0,0 --max_train_steps 3 --learning_rate 1e-2")
    summary = json.loads((place / "sft" / "summary.json").read_text())
    assert summary["eval_loss_before"] == pytest.approx(plain_loss(place / "start", place), abs=1e-5)
    assert summary["eval_loss_after"] == pytest.approx(plain_loss(place / "sft" / "model", place), abs=1e-5)
    assert summary["eval_loss_after"] < summary["eval_loss_before"] - 0.1
    samples = read_lines(place / "sft" / "samples.jsonl")
    assert samples and all({"response", "loss"} <= sample.keys() for sample in samples)
    one, other = (place / name / "preprocessor_config.json" for name in ("start", "sft/model"))
    assert one.read_bytes() == other.read_bytes()


REWARD = """
def color(prompts, responses, *, images, **columns):
    sizes = [[(one.mode, one.size, one.getpixel((0, 0))) for one in pictures] for pictures in images]
    assert sizes == [[("RGB", (56, 28), (255, 0, 0)), ("RGB", (30, 60), (0, 0, 255))]] * len(responses), sizes
    return [float(sum(map(ord, text)) % 5) for text in responses]
"""


def ppo(place: Path, out: str, flags: str, ranks: int = 1) -> Ran:
    (place / "reward.py").write_text(REWARD)
    shape = "--data_split 0,0,1 --max_prompt_seq_len 80 --max_answer_seq_len 6 --per_device_generation_batch_size 2"
    rest = (
        "--num_samples_per_prompt 3 --per_device_training_batch_size 6 --ppo_epochs 2 --max_train_steps 2 --dtype fp32"
    )
    how = "--advantage grpo --actor_learning_rate 1e-3 --report_mfu false --eval_fraction 0.1 --save_every 1"
    words: list[Any] = [*f"{shape} {rest} {how}".split(), "--data_output_path", place / "cache"]
    words += ["--reward", f"{place / 'reward.py'}:color", *flags.split()]
    start = ["--actor_model_name_or_path", place / "start", "--data_path", f"jsonl:{place / 'prompts.jsonl'}"]
    return run_step(3, [*start, *words, "--output_dir", place / out], ranks=ranks)


def test_grpo_draws_from_images_and_pays_by_them(place):
    ran = ppo(place, "grpo", f"--rollout_dump {place / 'dump'}")
    assert ran.code == 0, ran.words
    lines = read_lines(place / "grpo" / "metrics.jsonl")
    first = next(line for line in lines if "rollout/score" in line)
    assert first["rollout/logprob_mismatch"] < 1e-4 and first["actor/ratio"] != 1.0
    stored = [hashlib.sha256((place / f"{name}.png").read_bytes()).hexdigest() for name in ("red", "blue")]
    samples = read_lines(place / "grpo" / "samples.jsonl")
    assert samples and all(sample["images"] == stored for sample in samples)
    one, other = (place / name / "preprocessor_config.json" for name in ("start", "grpo/model"))
    assert one.read_bytes() == other.read_bytes()
    assert plain_loss(place / "grpo" / "model", place) != pytest.approx(plain_loss(place / "start", place), abs=1e-4)


@pytest.mark.long
def test_grpo_on_images_replays_and_resumes(place):
    """After `test_grpo_draws_from_images_and_pays_by_them`."""
    ran = ppo(place, "replayed", f"--rollout_replay {place / 'dump'}")
    assert ran.code == 0, ran.words
    shutil.copytree(place / "grpo", place / "resumed")
    shutil.rmtree(place / "resumed" / "model")
    again = f"--rollout_dump {place / 'dump'} --resume {place / 'resumed' / 'checkpoints' / 'step_000001'}"
    ran = ppo(place, "resumed", again)
    assert ran.code == 0, ran.words
    want = (place / "grpo" / "model" / "model.safetensors").read_bytes()
    for out in ("replayed", "resumed"):
        assert (place / out / "model" / "model.safetensors").read_bytes() == want, out


@pytest.mark.long
def test_ppo_with_a_reward_model_and_a_critic_of_images(place):
    flags = "--data_split 0,1,0 --max_train_steps 2 --learning_rate 1e-2"
    run(place, 2, "start", "pairs.jsonl", "reward", flags)
    critic = place / "reward" / "model"
    ran = ppo(place, "ppo", f"--advantage gae --reward model --critic_model_name_or_path {critic}")
    assert ran.code == 0, ran.words
    lines = read_lines(place / "ppo" / "metrics.jsonl")
    assert any(line.get("critic/value_loss", 0) > 0 for line in lines)
    names = ("start", "ppo/model", "ppo/critic")
    assert len({(place / name / "preprocessor_config.json").read_bytes() for name in names}) == 1
    other = shutil.copytree(critic, place / "other_pixels")
    settings = json.loads((other / "preprocessor_config.json").read_text())
    (other / "preprocessor_config.json").write_text(json.dumps({**settings, "image_mean": [0.1, 0.2, 0.3]}))
    ran = ppo(place, "refused", f"--advantage gae --reward model --critic_model_name_or_path {other}")
    assert ran.code != 0 and "the reward model would not see the pixels it was trained on" in ran.stderr, ran.words


@pytest.mark.long
def test_dpo_learns_pairs_of_answers_to_images_and_exports(place):
    flags = "--data_split 0,1,0 --max_train_steps 4 --learning_rate 1e-2 --save_at_end true"
    run(place, "dpo", "start", "pairs.jsonl", "dpo", flags)
    summary = json.loads((place / "dpo" / "summary.json").read_text())
    assert summary["eval_loss_before"] == pytest.approx(0.6931, abs=1e-4)
    assert summary["eval_accuracy"] == 1.0 and summary["eval_loss"] < 0.5
    export.main([str(place / "dpo"), str(place / "exported")])
    assert plain_loss(place / "exported", place) == pytest.approx(plain_loss(place / "dpo" / "model", place), abs=1e-6)


def test_the_reward_model_learns_pairs_of_answers_to_images(place):
    """Its scores, of the run and of a file of pairs, are those of plain transformers, from the model folder and from an
    export."""
    flags = "--data_split 0,1,0 --num_train_epochs 4 --learning_rate 3e-3 --save_at_end true"
    run(place, 2, "start", "pairs.jsonl", "reward", flags)
    reports = json.loads((place / "reward" / "reward_report.json").read_text())
    report = reports["evaluation"]
    folder = place / "reward" / "model"
    chosen, rejected = (plain_score(folder, place, answer) for answer in (ANSWER, "no"))
    assert report["score_gap"] == pytest.approx(chosen - rejected, abs=1e-5)
    assert report["accuracy"] == 1.0 and report["score_gap"] > reports["before"]["score_gap"] + 0.05
    assert report["chosen"]["mean"] == pytest.approx(chosen, abs=1e-5)
    words = ["--model_name_or_path", folder, "--score_file", place / "pairs.jsonl", "--output", place / "scores.jsonl"]
    ran = run_module("threestep.plugins.evaluation.reward_evaluation", [*words, "--max_seq_len", 96])
    assert ran.code == 0, ran.words
    first = read_lines(place / "scores.jsonl")[0]
    assert (first["chosen"], first["rejected"]) == pytest.approx((chosen, rejected), abs=1e-5)
    export.main([str(place / "reward"), str(place / "exported_reward")])
    assert plain_score(place / "exported_reward", place, "no") == pytest.approx(rejected, abs=1e-6)
    assert (place / "exported_reward" / "preprocessor_config.json").is_file()
