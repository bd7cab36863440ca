"""Pictures in a chat: the answer is transformers' own to the model's processor, what is saved can be trained on, and
what reads no pictures says so."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from tests.support.image_readers import picture
from threestep.plugins.evaluation import chat, evaluate, web
from threestep.plugins.evaluation.model import ChatModel, load_chat_model
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.evaluation.tests.conftest import CPU
from threestep.plugins.images.run import chat_images
from threestep.plugins.images.run.chat_images import open_picture
from threestep.plugins.programs import new_model
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.flags.arguments import parse_arguments
from training.utils.generation.arguments import SamplingArguments
from training.utils.models.families import scalar_model_class

GREEDY = SamplingArguments(temperature=0.0, max_new_tokens=5)


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    return seen(tmp_path_factory.mktemp("chat"))


def seen(folder: Path, width: int = 32) -> Path:
    """Put a tiny Qwen2-VL and two pictures into `folder`."""
    shape = "--num_hidden_layers=1 --num_attention_heads=2 --vocab_size=300 --max_image_tokens=4"
    size = [f"--hidden_size={width}", "--initializer_range=0.3"]  # so that a picture changes the most likely token
    new_model.main([f"--out={folder / 'model'}", "--data_path", "embedded", "--vision", *size, *shape.split()])
    for name, sides, colour in (("red", (56, 28), (200, 30, 30)), ("blue", (30, 60), (30, 30, 200))):
        (folder / f"{name}.png").write_bytes(picture(*sides, colour))
    write_reward_models(folder)
    return folder


def write_reward_models(folder: Path) -> None:
    """reward: with the model's processor. coarse: with one of other settings. blind: without a processor."""
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    torch.manual_seed(3)
    reward = scalar_model_class(config).from_config(config)
    for name in ("reward", "coarse", "blind"):
        shutil.copytree(folder / "model", folder / name)
        reward.save_pretrained(folder / name)
    settings = folder / "coarse" / "preprocessor_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "image_mean": [0.4, 0.5, 0.5]}))
    for path in (folder / "blind").glob("*processor_config.json"):
        path.unlink()


@pytest.fixture(scope="module")
def sees(place) -> ChatModel:
    return load_chat_model(str(place / "model"), None, DataArguments(), CPU)


def own_answer(place: Path, pictures: list[str], texts: list[str]) -> str:
    """Transformers' greedy answer to turns of the user, of which the first has the pictures; texts[1::2] are the
    model's."""
    tokenizer, drawn = AutoTokenizer.from_pretrained(place / "model"), own_drawn(place, pictures, texts)
    return tokenizer.decode(drawn[:-1] if drawn[-1] == tokenizer.eos_token_id else drawn)


def own_drawn(place: Path, pictures: list[str], texts: list[str]) -> list[int]:
    """See `own_answer`: its tokens."""
    model, inputs = AutoModelForImageTextToText.from_pretrained(place / "model"), own_inputs(place, pictures, texts)
    ids = inputs["input_ids"]
    drawn = model.generate(**inputs, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=5)
    return drawn[0, ids.shape[1] :].tolist()


def own_inputs(place: Path, pictures: list[str], texts: list[str]) -> dict[str, Any]:
    """See `own_answer`: of the conversation up to the next answer."""
    folder = place / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    processor: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
    made = processor(images=[Image.open(place / f"{name}.png") for name in pictures], return_tensors="pt")
    images = "".join(
        f"<|vision_start|>{'<|image_pad|>' * int(grid.prod() // 4)}<|vision_end|>" for grid in made["image_grid_thw"]
    )
    turns = [f"<|im_start|>{'user' if n % 2 == 0 else 'assistant'}\n{text}<|im_end|>\n" for n, text in enumerate(texts)]
    text = turns[0].replace("user\n", f"user\n{images}", 1) + "".join(turns[1:]) + "<|im_start|>assistant\n"
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    is_image = (ids == tokenizer.convert_tokens_to_ids("<|image_pad|>")).int()
    return {"input_ids": ids, "mm_token_type_ids": is_image, **made}


def chatting(place: Path, reward: str) -> Talk:
    words = [str(place / "model"), "--reward_model", str(place / reward), "--temperature", "0", "--max_new_tokens", "5"]
    return chat.loaded(chat.ChatFlags(*parse_arguments(chat.GROUPS, chat.with_flag(words), "")))()


def own_score(place: Path, pictures: list[str], texts: list[str]) -> float:
    """Of the answer of `own_answer`: transformers' body of the reward model, and the head beside it."""
    from safetensors.torch import load_file

    inputs, ids = own_inputs(place, pictures, texts), torch.tensor([own_drawn(place, pictures, texts)])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], ids], 1)
    inputs["mm_token_type_ids"] = torch.cat([inputs["mm_token_type_ids"], torch.zeros_like(ids).int()], 1)
    with torch.no_grad():
        state_H = AutoModel.from_pretrained(place / "reward").eval()(**inputs).last_hidden_state[0, -1]
    return float(state_H @ load_file(place / "reward" / "model.safetensors")["score.weight"][0])


def answered(talk: Talk, said: str) -> str:
    talk.ask(said)
    return list(talk.answer(0))[-1].text


def test_the_answer_is_transformers_own_also_a_turn_later(sees, place):
    talk = Talk([sees], GREEDY, 1)
    told = talk.enter(f"/image {place / 'red.png'}").text
    assert told.startswith("red.png: 56 x 28 pixels (PNG, ") and told.endswith(
        "; it will be sent with your next message"
    )
    talk.attach(str(place / "blue.png"))
    first = answered(talk, "What?")
    assert first == own_answer(place, ["red", "blue"], ["What?"]) and not talk.waiting
    assert answered(talk, "And?") == own_answer(place, ["red", "blue"], ["What?", first, "And?"])
    talk.command("/reset")
    talk.attach(str(place / "blue.png"))
    talk.attach(str(place / "red.png"))
    assert answered(talk, "What?") != first
    talk.command("/retry")
    assert len(talk.turns[-1].pictures) == 2
    talk.drop_turn()
    assert [waiting.path.name for waiting in talk.waiting] == ["blue.png", "red.png"]
    talk.command("/reset")
    assert not talk.waiting


def test_what_is_saved_is_read_as_rows_with_images(sees, place, tmp_path):
    from training.utils.data.file_dataset import FileDataset
    from training.utils.data.formats.formats import FileColumns

    talk = Talk([sees], GREEDY, 1)
    talk.attach(str(place / "red.png"))
    answered(talk, "What?")
    talk.command(f"/save {tmp_path / 'talk.jsonl'}")
    line = json.loads((tmp_path / "talk.jsonl").read_text())
    assert line["images"] == ["talk.jsonl.images/1.png"]
    assert line["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "What?"}]
    assert (tmp_path / line["images"][0]).read_bytes() == (place / "red.png").read_bytes()
    rows = FileDataset(f"jsonl:{tmp_path / 'talk.jsonl'}", FileColumns(), None, str(tmp_path))
    rows.reads_images = True
    (row,) = rows.get_train_data()
    assert rows.get_images(row) == line["images"] and rows.get_messages(row)[0] == line["messages"][0]


def test_what_reads_no_pictures_says_so(sees, asked, place):
    with pytest.raises(
        ThreestepError, match="'.*model' does not support images here: it is a text-only model, its folder"
    ):
        Talk([sees, asked], GREEDY, 1).attach(str(place / "red.png"))
    with pytest.raises(ThreestepError, match="expected a text-only causal language model, got an image-text model"):
        load_chat_model(str(place / "model"), None, DataArguments(), CPU, with_media=False)


def test_evaluate_answers_rows_with_images_and_shows_them(place, tmp_path):
    rows = [
        {
            "prompt": [{"role": "user", "content": f"<image>What? {n}"}],
            "completion": [{"role": "assistant", "content": "red"}],
            "answer": own_answer(place, [name], [f"What? {n}"]),
            "images": [f"{name}.png"],
            "sha256": [hashlib.sha256((place / f"{name}.png").read_bytes()).hexdigest()],
        }
        for n in range(2)
        for name in ("red", "blue")
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = f"--model_name_or_path {place}/model --data_path jsonl:{place}/rows.jsonl --output_dir {tmp_path}/out"
    shared += f" --data_output_path {tmp_path}/cache --split train --eval_fraction 0"
    drawn = "--data_split 0,0,1 --temperature 0 --max_new_tokens 5 --reference_column answer"
    evaluate.main(["reward", *shared.split(), *drawn.split(), "--reward", "exact_match"])
    found = json.loads((tmp_path / "out" / "reward.json").read_text())
    lines = [json.loads(line) for line in (tmp_path / "out" / "reward.jsonl").read_text().splitlines()]
    assert found["prompts"] == len(lines) == 4 and len({tuple(line["images"]) for line in lines}) == 2
    assert found["reward"]["value"] == 1.0  # each answer is transformers' own
    assert (tmp_path / "out" / "reward.html").read_text().count("<img src=") == 4
    evaluate.main(["perplexity", *shared.split(), "--data_split", "1,0,0"])
    assert json.loads((tmp_path / "out" / "perplexity.json").read_text())["rows"] == 4
    words = ["reward", *shared.split(), *drawn.split(), "--reward", "model", "--reward_model"]
    evaluate.main([*words, f"{place}/reward"])
    lines = [json.loads(line) for line in (tmp_path / "out" / "reward.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for line in lines:
        own = [row for row in rows if row["sha256"] == line["images"]]
        [row] = [row for row in own if row["prompt"][0]["content"].removeprefix("<image>") in line["prompt"]]
        asked = row["prompt"][0]["content"].removeprefix("<image>")
        found = own_score(place, [row["images"][0].removesuffix(".png")], [asked])
        assert line["scores"] == [pytest.approx(found, abs=1e-5)]
    with pytest.raises(ThreestepError, match="`model`, but rows have images: .*blind' reads only text,"):
        evaluate.main([*words, f"{place}/blind"])


def test_a_reward_model_of_images_scores_answers_about_pictures(place):
    talk = chatting(place, "reward")
    for name in ("red", "blue"):
        talk.command("/reset")
        talk.attach(str(place / f"{name}.png"))
        texts = []
        for said in ("What?", "And?"):
            texts.append(said)
            found, answer = own_score(place, [name], texts), answered(talk, said)
            assert talk.score(0) == pytest.approx(found, abs=1e-5)
            texts.append(answer)
    assert talk.models[0].sampling(GREEDY).bad_words == ((talk.models[0].model.config.image_token_id,),)
    talk.command("/reset")
    answered(talk, "A text")
    assert talk.score(0) is not None


@pytest.mark.parametrize(
    ("reward", "why"),
    [("blind", "reads only text, or its folder"), ("coarse", "has different image processor set")],
)
def test_a_reward_model_that_sees_no_or_other_pixels_says_so(place, reward, why):
    talk = chatting(place, reward)
    answered(talk, "What?")
    assert talk.score(0) is not None  # of texts
    with pytest.raises(ThreestepError, match=f"{reward}' {why}.*; to chat about images, remove --reward_model"):
        talk.attach(str(place / "red.png"))


def test_files_that_are_no_pictures_are_told(sees, place, tmp_path, monkeypatch):
    talk = Talk([sees], GREEDY, 1)
    (tmp_path / "x.png").write_bytes(b"text")
    for line, sentence in [
        ("/image", "/image expects an image file, got none; type /image FILE"),
        (f"/image {tmp_path / 'none.png'}", "'.*none.png' cannot be read as an image file: No such file or dir"),
        (f"/image {tmp_path}", "'.*' cannot be read as an image file: Is a directory; use another file"),
        (f"/image {tmp_path / 'x.png'}", "'.*x.png': expected an image .*, got other bytes"),
    ]:
        with pytest.raises(ThreestepError, match=sentence):
            talk.command(line)
    monkeypatch.setattr(chat_images, "MOST_FILE_BYTES", 10)
    with pytest.raises(ThreestepError, match="red.png': expected an image of at most 10 bytes, got .*; make it"):
        open_picture(str(place / "red.png"))
    assert not talk.waiting


def test_the_page_takes_pictures_by_upload_alone(sees, place):
    talk = Talk([sees], dataclasses.replace(GREEDY, max_new_tokens=2), 1)
    assert list(web.respond(talk, f"/image {place / 'red.png'}")) == ["/image is available only in the terminal"]
    same, columns = web._attach(lambda: talk, str(place / "red.png"), None)
    assert same is talk and columns[-1]["content"].startswith("red.png: 56 x 28 pixels")
    _, columns = web._attach(lambda: talk, str(place / "none.png"), talk)
    assert columns[-1]["content"].endswith("No such file or directory; use another file")
    list(web.respond(talk, "What?"))
    assert web._columns(talk, "")[0][0]["content"].startswith("*red.png: 56 x 28 pixels")
