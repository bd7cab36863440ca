"""A model trained on chats whose turns end in another token than eos, served by plain transformers and by our chat."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from tests.end_to_end.conftest import run_step, save_start
from tests.support.chat_templates import chat_template, chat_tokenizer

pytestmark = pytest.mark.timeout(900)  # on a busy machine

QUESTION, ANSWER = "Sort: pear fig apple", "    apple fig\n  pear"


@pytest.fixture(scope="module")
def model(place: Path) -> Path:
    """Trained to answer one question without a thought, on a tokenizer whose eos ends no turn."""
    start = save_start(place / "start_served", tokenizer=chat_tokenizer(chat_template("empty_thought")))
    chats = place / "served.jsonl"
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    chats.write_text((json.dumps({"messages": messages}) + "\n") * 160)
    flags = f"--model_name_or_path {start} --data_path jsonl:{chats} --output_dir {place / 'served'} --dtype fp32 "
    flags += '--chat_template_kwargs {"enable_thinking":false} '
    flags += "--learning_rate 1e-2 --per_device_train_batch_size 4 --max_seq_len 90 "
    flags += "--data_split 1,0,0 --eval_fraction 0"
    ran = run_step(1, [*flags.split(), "--data_output_path", place / "served_cache"])
    assert ran.code == 0, ran.words
    said = "prompt style: chat_template, enable_thinking false, responses end with <|im_end|> "
    assert said + "(the tokenizer has a template)" in ran.stdout.splitlines()
    return place / "served" / "model"


def test_plain_transformers_stops_and_our_chat_gives_the_same_answer(model, monkeypatch, capsys):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from threestep.plugins.evaluation import chat

    tokenizer = AutoTokenizer.from_pretrained(model)
    prompt = [{"role": "user", "content": QUESTION}]
    asked = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    inputs = tokenizer.apply_chat_template(prompt, enable_thinking=False, **asked)
    served = AutoModelForCausalLM.from_pretrained(model)
    assert tokenizer.eos_token == "<|endoftext|>" and isinstance(served.generation_config.eos_token_id, list)
    drawn = served.generate(**inputs, do_sample=False, max_new_tokens=40)[0, inputs["input_ids"].shape[1] :]
    answer = tokenizer.decode(drawn)
    assert answer == ANSWER + "<|im_end|>"

    stdin = io.StringIO(QUESTION)
    monkeypatch.setattr(sys, "stdin", stdin)
    chat.main([str(model), "--temperature", "0", "--max_new_tokens", "40"])
    said = capsys.readouterr()
    assert said.out == ANSWER + "\n"
    assert f"enable_thinking false, responses end with <|im_end|> (saved with '{model}')" in said.err
