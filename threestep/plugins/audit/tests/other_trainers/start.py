"""A tiny model, a reference unlike it, a scored model and a chat dataset on disk, for programs in other environments.

python -m threestep.plugins.audit.tests.other_trainers.start FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.end_to_end.conftest import save_start
from tests.support.tiny_tokenizers import SENTENCES

WORDS = "pear apple fig plum cherry quince lemon".split()
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}A:\n{% generation %}{{ message['content'] }}"
    "{{ eos_token }}{% endgeneration %}{% else %}U: {{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:\n{% endif %}"
)


def save(folder: Path) -> Path:
    """Return the folder: model/, reference/, score/, rows.jsonl, pairs.jsonl, chats.json."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    save_start(folder / "model", sentences=[*SENTENCES, *WORDS], chat_template=TEMPLATE)
    save_start(folder / "reference", sentences=[*SENTENCES, *WORDS], chat_template=TEMPLATE)
    torch.manual_seed(1)
    for name, noise in (("model", 0.0), ("reference", 0.02)):
        model = AutoModelForCausalLM.from_pretrained(folder / name)
        model.get_input_embeddings().weight.data[0] *= 5.0  # responses that end, of many lengths
        for weight in model.parameters():
            weight.data += noise * torch.randn_like(weight)
        model.save_pretrained(folder / name)
    save_start(folder / "score", sentences=[*SENTENCES, *WORDS], chat_template=TEMPLATE)
    scored = AutoModelForSequenceClassification.from_pretrained(folder / "score", num_labels=1)
    scored.config.pad_token_id = 1
    scored.save_pretrained(folder / "score")
    for name in ("model", "reference", "score"):  # older releases of transformers do not know the newest class
        path = folder / name / "tokenizer_config.json"
        described = json.loads(path.read_text()) | {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "attention_mask"],
        }
        path.write_text(json.dumps(described))
    rows = [{"prompt": f"Sort {WORDS[i % 7]}:", "completion": " " + " ".join(WORDS[: 1 + i % 6])} for i in range(16)]
    pairs = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": " no"} for row in rows]
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"Sort {' '.join(WORDS[i % 7 :])}"},
                {"role": "assistant", "content": " ".join(WORDS[: 1 + i % 6])},
            ]
        }
        for i in range(16)
    ]
    for name, lines in (("rows", rows), ("pairs", pairs), ("chats", chats)):
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        (folder / name).mkdir()  # the same for us: no training row is held out
        for split, part in (("train", text), ("test", json.dumps(lines[0]) + "\n")):
            (folder / name / f"{split}.jsonl").write_text(part, encoding="utf-8")
    return folder


if __name__ == "__main__":
    save(Path(sys.argv[1]))
