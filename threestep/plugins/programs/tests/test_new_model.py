"""New models: what the folder holds, that it repeats, and the mistakes a user can make."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer
from transformers.utils import logging

import threestep
from tests.support.data_flags import data_flags
from threestep.plugins.programs import new_model
from training.utils.base.errors import ThreestepError
from training.utils.engine.zero3 import full_tensors
from training.utils.loading.configurations import check_positions
from training.utils.loading.models import load_causal_lm, load_scalar_model
from training.utils.loading.saving import save_model
from training.utils.models.families import copy_files, processor_files
from training.utils.models.settings import ModelSettings

pytestmark = pytest.mark.unit

SMALL = ["--hidden_size=32", "--num_hidden_layers=1", "--num_attention_heads=2", "--intermediate_size=64"]
TEXT = "Human: 12 and 1999? Assistant: 42 nine"
ROWS = [
    {"prompt": "Human: What is 12 + 30? Assistant:", "chosen": " It is 42.", "rejected": " Forty"},
    {"prompt": "Human: And 3 + 4? Assistant:", "chosen": " Seven, é.", "rejected": None},
] * 20


@pytest.fixture
def make(tmp_path: Path):
    """Run the program on a small file of rows; returns the folder."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")

    def run(name: str = "model", *flags: str) -> Path:
        new_model.main(
            [f"--out={tmp_path / name}", "--data_path", f"jsonl:{rows}", "--vocab_size=300", "--seed=1", *SMALL, *flags]
        )
        return tmp_path / name

    return run


def load(folder: Path):
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def test_plain_transformers_loads_the_folder_and_shapes_and_tokens_are_as_asked(make, capsys):
    folder = make("model", "--rope_theta=100", "--max_position_embeddings=64", "--initializer_range=0.1")
    model, tokenizer = load(folder)
    assert (folder / "model.safetensors").is_file()
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|endoftext|>", "<|pad|>")
    assert tokenizer.padding_side == "right" and tokenizer.model_max_length == 64
    assert (model.config.eos_token_id, model.config.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert model.config.bos_token_id is None
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.get_input_embeddings().weight.shape == (len(tokenizer), 32)
    assert model.config.rope_parameters["rope_theta"] == 100.0
    assert model.config.intermediate_size == 64
    assert model.lm_head.weight.std().item() == pytest.approx(0.1, rel=0.1)
    assert 258 < len(tokenizer) <= 300
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert f"{model.num_parameters():,} parameters" in line
    assert f"{len(tokenizer)} tokens" in line and str(folder) in line


def test_pad_may_be_eos(make):
    model, tokenizer = load(make("model", "--pad_is_eos"))
    assert tokenizer.pad_token == tokenizer.eos_token == "<|endoftext|>"
    assert "<|pad|>" not in tokenizer.get_vocab()
    assert model.config.pad_token_id == tokenizer.eos_token_id


def test_the_tokenizer_loses_no_byte_adds_no_space_and_parts_digits(make):
    _, tokenizer = load(make())
    for text in (TEXT, "", " two  spaces\n\n", "naïve 東京 \x00\x7f", "Human", " Human", "don't", "a , b ."):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert tokenizer.tokenize(" 1999 42") == ["Ġ1", "9", "9", "9", "Ġ4", "2"]
    assert tokenizer.tokenize("Human: What") == ["Human", ":", "ĠWhat"]  # learned from the prompts
    assert tokenizer.tokenize(" Seven Forty") == ["ĠSeven", "ĠForty"]  # from chosen and rejected texts
    assert tokenizer("Human").input_ids == tokenizer("Human", add_special_tokens=False).input_ids
    for row in ROWS[:2]:  # a prompt is a prefix of itself with its response
        prompt = tokenizer(row["prompt"]).input_ids
        assert tokenizer(row["prompt"] + row["chosen"]).input_ids[: len(prompt)] == prompt


def test_the_seed_decides_the_weights_and_nothing_else_does(make):
    torch.manual_seed(5)
    first, first_tokenizer = load(make("first"))
    torch.manual_seed(6)
    state = torch.get_rng_state()
    second, second_tokenizer = load(make("second"))
    assert torch.equal(torch.get_rng_state(), state)
    other, _ = load(make("other", "--seed=2"))
    assert first_tokenizer.get_vocab() == second_tokenizer.get_vocab()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, second.state_dict()[name]), name
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_feed_forward_layers_are_8_thirds_wide_where_nothing_is_said():
    tokenizer = new_model.train_tokenizer(["a b"], vocab_size=260, max_length=32)
    config = new_model.model_config(new_model.NewModelArguments(hidden_size=256), tokenizer)
    assert config.intermediate_size == 704  # 8/3 of 256 is 682.7, and 22 x 32 = 704 is the next multiple of 32


def test_the_embedded_task_needs_no_more_than_its_name(tmp_path):
    new_model.main(["--data_path", "embedded", f"--out={tmp_path / 'm'}", "--vocab_size=512", *SMALL])
    _, tokenizer = load(tmp_path / "m")
    assert tokenizer.tokenize("Human: Put owl last: fox 4 Assistant:") == [
        "Human", ":", "ĠPut", "Ġowl", "Ġlast", ":", "Ġfox", "Ġ4", "ĠAssistant", ":"
    ]  # fmt: skip


def test_an_earlier_model_is_replaced_and_other_files_are_not(make, tmp_path):
    make("model", "--seed=1")
    make("model", "--seed=2")
    other = tmp_path / "papers"
    other.mkdir()
    (other / "thesis.txt").write_text("years")
    with pytest.raises(ThreestepError, match="--out .*papers' contains files that do not belong to a model"):
        make("papers")
    assert (other / "thesis.txt").read_text() == "years"
    with pytest.raises(ThreestepError, match="^--out expects a folder, got '.*rows.jsonl', which is a file; choose"):
        make("rows.jsonl")
    with pytest.raises(ThreestepError, match="^--out '.*rows.jsonl/model' cannot be written: .*a file is in the way"):
        make("rows.jsonl/model")


def test_a_model_that_sees_describes_a_picture_by_plain_transformers(make):
    folder = make("seeing", "--vision", "--max_image_tokens=6", "--rope_theta=100")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor = AutoImageProcessor.from_pretrained(folder)
    assert tokenizer.eos_token == "<|im_end|>" and model.config.get_text_config().eos_token_id == tokenizer.eos_token_id
    assert model.config.get_text_config().rope_parameters["mrope_section"] == [2, 3, 3]
    image = processor(Image.new("RGB", (300, 150), (200, 0, 0)), return_tensors="pt")
    assert image["image_grid_thw"].tolist() == [[1, 2, 6]]  # 3 tokens: at most 6, and about twice as wide as high
    parts = [{"type": "image"}, {"type": "text", "text": "12?"}]
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>12?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * 3), return_tensors="pt").input_ids
    assert (ids == model.config.image_token_id).sum() == 3
    read = [
        model(
            input_ids=ids,
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
            image_grid_thw=image["image_grid_thw"],
            pixel_values=pixels,
        ).logits
        for pixels in (image["pixel_values"], -image["pixel_values"])
    ]
    assert read[0].isfinite().all() and not torch.allclose(read[0][0, -1], read[1][0, -1])


def test_the_steps_refuse_a_model_that_sees_in_one_sentence(make):
    settings = ModelSettings(str(make("seeing", "--vision")))
    for load_it in (
        lambda: check_positions(settings, 8, "--max_seq_len"),  # before data are built
        lambda: load_causal_lm(settings, torch.float32, 300),
        lambda: load_scalar_model(settings, torch.float32, None, must_have_head=False),
    ):
        with pytest.raises(
            ThreestepError, match=r"seeing': expected a text-only causal .*, got an image-text model \(qw"
        ):
            load_it()


def test_step_1_loads_it_and_saves_it_with_its_processor(make, tmp_path):
    folder = make("seeing", "--vision")
    settings, tokenizer = ModelSettings(str(folder), takes_media=True), AutoTokenizer.from_pretrained(folder)
    check_positions(settings, 8, "--max_seq_len")
    model = load_causal_lm(settings, torch.float32, len(tokenizer))
    tensors = {name: tensor.detach().clone() for name, tensor in full_tensors(model, zero_stage=0)}
    processor = processor_files(folder)
    save_model(tmp_path / "saved", model, tensors, tokenizer, write_more=lambda path: copy_files(processor, path))
    start, saved = (AutoModelForImageTextToText.from_pretrained(path) for path in (folder, tmp_path / "saved"))
    assert type(saved) is type(start)
    weights = dict(start.named_parameters())
    assert all(torch.equal(weight, weights[name]) for name, weight in saved.named_parameters())
    processors = [AutoImageProcessor.from_pretrained(path).to_dict() for path in (folder, tmp_path / "saved")]
    assert processors[0] == processors[1]


def test_texts_of_rows_with_images_and_of_rows_without_text(tmp_path):
    """A model with vision takes the former, and no model can be made of the latter."""
    part = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}
    rows = [{"messages": [part, {"role": "assistant", "content": "red"}], "images": ["none.png"]}] * 9
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = data_flags(data_path=[f"jsonl:{file}"])
    assert list(new_model.dataset_texts(data, 1, vision=True)) == ["Which colour?", "red"] * 9
    with pytest.raises(ThreestepError, match="column 'images' holds images, but only text is trained on"):
        list(new_model.dataset_texts(data, 1))
    file.write_text(json.dumps({"prompt": "", "chosen": "", "rejected": ""}) + "\n")
    with pytest.raises(ThreestepError, match="^the training rows of jsonl:.*contain no text to train a tokenizer on"):
        new_model.main([f"--out={tmp_path / 'm'}", "--data_path", f"jsonl:{file}", *SMALL])


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--vision", "--vocab_size=262"], r"--vocab_size expects at least 263 \(256 bytes and 7 special tokens\)"),
        (
            ["--vision", "--hidden_size=24", "--num_attention_heads=4"],
            "--hidden_size 24 cannot be split .* of a width divisible by 8; use a multiple of 32",
        ),
        (["--vision", "--max_image_tokens=0"], "--max_image_tokens expects 1 or more, got 0"),
        (["--vocab_size=257"], r"--vocab_size expects at least 258 \(256 bytes and 2 special tokens\), got 257"),
        (["--vocab_size=256", "--pad_is_eos"], r"at least 257 \(256 bytes and 1 special token\), got 256"),
        (["--hidden_size=28", "--num_attention_heads=4"], "--hidden_size 28 cannot be split .* multiple of 8"),
        (["--num_hidden_layers=0"], "--num_hidden_layers expects 1 or more, got 0"),
        (["--intermediate_size=0"], "--intermediate_size expects 1 or more, got 0"),
        (["--initializer_range=0"], "--initializer_range expects more than 0, got 0"),
        (["--seed=-1"], "--seed expects 0 or more, got -1"),
        (["--out="], "--out expects the folder"),
        (["--data_path", "embeded"], "did you mean 'embedded'"),
        (["--hiden_size=32"], "unknown flag --hiden_size; did you mean '--hidden_size'"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(flags, sentence, tmp_path):
    given = [] if flags == ["--out="] else [f"--out={tmp_path / 'm'}"]
    with pytest.raises(ThreestepError, match=sentence):
        new_model.main([*given, *flags])
    assert not (tmp_path / "m").exists()


SUMS = [{"prompt": f"{a} + {b} =", "completion": f" {a + b}"} for a in range(5) for b in range(5)]


def test_a_model_of_rows_in_memory(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    logging.enable_progress_bar()
    folder = threestep.new_model(SUMS, "tiny", vocab_size=280, hidden_size=32, num_hidden_layers=1)
    assert folder == tmp_path / "tiny" and [path.name for path in tmp_path.iterdir()] == ["tiny"]
    said = capfd.readouterr()
    assert "new model: " in said.out and "shards" not in said.err and logging.is_progress_bar_enabled()
    model, tokenizer = load(folder)
    assert (model.config.hidden_size, model.config.num_hidden_layers) == (32, 1) and len(tokenizer) <= 280


@pytest.mark.parametrize(
    ("rows", "settings", "sentence"),
    [
        (SUMS, {"vocab_size": 3}, "^vocab_size expects at least 25"),
        (SUMS, {"hidden_sise": 3}, "^unknown argument hidden_sise; did you mean 'hidden_size'"),
        (SUMS, {"hidden_size": 6}, "^hidden_size=6 cannot be split into num_attention_heads=4 of an even width"),
        ([], {}, "^rows expects at least one row, got none$"),
    ],
)
def test_mistakes_of_rows_in_memory(rows, settings, sentence, tmp_path):
    with pytest.raises(threestep.ThreestepError, match=sentence):
        threestep.new_model(rows, tmp_path / "tiny", **settings)
    assert not (tmp_path / "tiny").exists()
