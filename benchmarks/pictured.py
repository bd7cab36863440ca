"""A model of images and text of a workload's shape, and conversations about pictures that are drawn here.

A LLaVA: its language model is of the workload's shape, its CLIP tower as wide and half as deep, and a picture is 256
tokens. LLaVA, because TRL reads it without torchvision. Prompts and completions are GSM8K's questions and answers: of
one picture, of two, and of a picture whose first question is answered before the second. A picture is asked about in
four rows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.workload import VOCABULARY, Workload, config_of

ROWS, ROWS_OF_PICTURE = 400, 4
SIDE_PIXELS, PATCH_PIXELS = 224, 14
IMAGE, START, END = "<image>", "<|im_start|>", "<|im_end|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Pictured(NamedTuple):
    """Folders. rows: train.jsonl, test.jsonl and their pictures."""

    model: Path
    rows: Path


def make_pictured(workload: Workload, shape: str) -> Pictured:
    """Return the folders of `workload`, made where they are missing."""
    folder = workload.folder / "pictured"
    made = Pictured(folder / "model", folder / "rows")
    if not (folder / "done").exists():
        texts = [json.loads(line) for line in workload.sft.read_text().splitlines()]
        lines = [json.dumps(_row(texts, index)) + "\n" for index in range(ROWS)]
        (made.rows / "pictures").mkdir(parents=True, exist_ok=True)
        for number in range(ROWS // ROWS_OF_PICTURE):
            (made.rows / "pictures" / f"{number}.jpg").write_bytes(_picture(number))
        (made.rows / "train.jsonl").write_text("".join(lines[8:]))
        (made.rows / "test.jsonl").write_text("".join(lines[:8]))
        _make_model(workload, shape, made.model)
        (folder / "done").touch()
    return made


def _picture(number: int) -> bytes:
    """A JPEG of rectangles, sides of 240 to 480 pixels."""
    import io
    import random

    from PIL import Image, ImageDraw

    draw = random.Random(number)
    size = (draw.randint(240, 480), draw.randint(240, 480))
    picture = Image.new("RGB", size, tuple(draw.randint(0, 255) for _ in range(3)))
    pen = ImageDraw.Draw(picture)
    for _ in range(12):
        left, top = draw.randint(0, size[0] - 40), draw.randint(0, size[1] - 40)
        box = (left, top, left + draw.randint(10, 160), top + draw.randint(10, 160))
        pen.rectangle(box, fill=tuple(draw.randint(0, 255) for _ in range(3)))
    file = io.BytesIO()
    picture.save(file, format="JPEG", quality=90)
    return file.getvalue()


def _row(texts: list[dict[str, str]], index: int) -> dict[str, Any]:
    first, second = texts[index], texts[index + ROWS]
    pictures = [index // ROWS_OF_PICTURE]
    prompt = [{"role": "user", "content": _question(first)}]
    answer = first["chosen"]
    if index % 4 == 1:
        pictures.append((pictures[0] + 7) % (ROWS // ROWS_OF_PICTURE))
    if index % 4 >= 2:
        prompt += [
            {"role": "assistant", "content": first["chosen"].strip()},
            {"role": "user", "content": _question(second)},
        ]
        answer = second["chosen"]
    return {
        "images": [f"pictures/{number}.jpg" for number in pictures],
        "prompt": prompt,
        "completion": [{"role": "assistant", "content": answer.strip()}],
        "ground_truth": answer.strip(),
    }


def _question(text: dict[str, str]) -> str:
    return text["prompt"].removeprefix("Human: ").removesuffix(" Assistant:")


def _make_model(workload: Workload, shape: str, folder: Path) -> None:
    import torch
    from transformers import (
        AutoTokenizer,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    tokenizer = AutoTokenizer.from_pretrained(workload.model)
    tokenizer.add_tokens([IMAGE, START, END], special_tokens=True)
    tokenizer.eos_token, tokenizer.chat_template, tokenizer.model_max_length = END, TEMPLATE, 2048
    text = config_of(shape)
    text.vocab_size, text.eos_token_id = len(tokenizer), tokenizer.eos_token_id
    assert len(tokenizer) <= VOCABULARY + 3
    tower = CLIPVisionConfig(
        hidden_size=text.hidden_size,
        intermediate_size=4 * text.hidden_size,
        num_hidden_layers=max(1, text.num_hidden_layers // 2),
        num_attention_heads=text.num_attention_heads,
        image_size=SIDE_PIXELS,
        patch_size=PATCH_PIXELS,
    )
    config = LlavaConfig(
        vision_config=tower,
        text_config=text,
        image_token_id=tokenizer.convert_tokens_to_ids(IMAGE),
        image_seq_length=(SIDE_PIXELS // PATCH_PIXELS) ** 2,
        vision_feature_layer=-1,  # as deep as it is: the last layer of a real one is left out
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    sides = {"height": SIDE_PIXELS, "width": SIDE_PIXELS}
    pixels = CLIPImageProcessorPil(size={"shortest_edge": SIDE_PIXELS}, crop_size=sides)
    LlavaProcessor(
        image_processor=pixels,
        tokenizer=tokenizer,
        patch_size=PATCH_PIXELS,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
        image_token=IMAGE,
    ).save_pretrained(folder)
