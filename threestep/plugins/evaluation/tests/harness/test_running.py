"""The package lm_eval on models of random weights, held to log-probabilities and responses by plain transformers. Skips
where lm_eval is not installed (`pip install lm_eval`)."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.evaluation import evaluate

pytest.importorskip("lm_eval", reason="lm_eval is not installed: pip install lm_eval")
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'user' %}Human: {{ m['content'] }} {% else %}"
    "Assistant:{{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
WORDS = ("fig", "pear", "apple", "plum", "quince", "lemon")
CHOICE = """task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""


@pytest.fixture
def folders(tmp_path, tiny_tokenizer):
    """A model with a chat template, adapters of it, a task and its rows."""
    own = {"vocab_size": len(tiny_tokenizer), "eos_token_id": tiny_tokenizer.eos_token_id}
    model = tiny_causal_lm("llama", **own, pad_token_id=tiny_tokenizer.pad_token_id)
    tiny_tokenizer.chat_template = TEMPLATE
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    base = type(model).from_pretrained(tmp_path / "model")
    adapted = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "lora")
    tiny_tokenizer.save_pretrained(tmp_path / "lora")
    rows = [{"question": word, "choices": [f" {word}", " no"], "gold": n % 2} for n, word in enumerate(WORDS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "choice.yaml").write_text(CHOICE.format(rows=tmp_path / "rows.jsonl"))
    return {"model": model, "lora": adapted.merge_and_unload()}


@pytest.mark.parametrize("name", ["model", "lora"])
def test_log_probabilities_are_those_of_the_rendered_chat(folders, name, tmp_path, tiny_tokenizer, capsys):
    line = ["harness", "--model_name_or_path", f"{tmp_path}/{name}", "--output_dir", f"{tmp_path}/out"]
    evaluate.main([*line, "--tasks", f"{tmp_path}/choice.yaml", "--per_device_eval_batch_size", "4"])
    found = json.loads((tmp_path / "out" / "harness.json").read_text())["tasks"]["choice"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "harness.jsonl").read_text().splitlines()]
    assert found["rows"] == len(lines) == len(WORDS) and found["chat_template"] is True
    right = 0
    for sample in sorted(lines, key=lambda sample: sample["doc_id"]):
        sums = []
        for choice in sample["doc"]["choices"]:
            messages = [{"role": "user", "content": sample["doc"]["question"]}]
            prompt = tiny_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            whole = tiny_tokenizer(prompt + choice, add_special_tokens=False)["input_ids"]
            begin = len(tiny_tokenizer(prompt, add_special_tokens=False)["input_ids"])
            with torch.no_grad():
                logits = folders[name].eval()(torch.tensor([whole])).logits[0].double().log_softmax(-1)
            sums.append(sum(float(logits[at - 1, whole[at]]) for at in range(begin, len(whole))))
        got = [float(response[0][0]) for response in sample["resps"]]
        assert got == pytest.approx(sums, abs=1e-4)
        right += sums.index(max(sums)) == sample["doc"]["gold"]
    assert found["metrics"]["acc"]["value"] == pytest.approx(right / len(WORDS))
    assert "choice acc" in capsys.readouterr().out
