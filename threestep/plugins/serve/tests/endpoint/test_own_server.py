"""An engine's own server: the template that it is given writes what training wrote, and it is started and ended."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import threading
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.support.chat_templates import chat_template, chat_tokenizer
from threestep.plugins.serve.endpoint.model import open_model
from threestep.plugins.serve.endpoint.own_server import run_server, template_of, why_not_alike
from training.utils.data.chat.style import SavedStyle, save_style
from training.utils.data.rows.arguments import ChatArguments
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.table import ServerCommand

HI = [{"role": "user", "content": "Hi"}]
THINKS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if depth is defined %}{{ depth }}{{ names['a'] }}"
    "{% endif %}{% endif %}"
)


def opened(folder: str, **chat):
    return open_model(folder, SamplingArguments(), ChatArguments(**chat))


def test_human_assistant_is_written_as_a_template(save_model):
    model = opened(save_model("plain"))
    assert model.prompt_style == "human_assistant" and why_not_alike(model) is None
    text = ImmutableSandboxedEnvironment().from_string(template_of(model)).render(messages=HI)
    assert text == "Human: Hi Assistant:" and model.dtype == "float32"


@pytest.mark.parametrize(("begin", "end"), [(" ", ""), ("\n\n", "\n\nAssistant:"), ("", " Assistant: ")])
def test_white_space_around_human_assistant_is_in_the_template(save_model, begin, end):
    tokenizer = chat_tokenizer(None)
    save_style(tokenizer, SavedStyle("human_assistant", prompt_begin=begin, prompt_end=end))
    model = opened(save_model("plain", tokenizer=tokenizer))
    assert why_not_alike(model) is None
    text = ImmutableSandboxedEnvironment().from_string(template_of(model)).render(messages=HI)
    assert text == f"{begin}Human: Hi{end or ' Assistant:'}"


def test_the_models_template_gets_the_variables_that_were_saved_with_it(save_model):
    folder = save_model("chat", tokenizer=chat_tokenizer(THINKS))
    kwargs = json.dumps({"depth": 'a "b"', "names": {"a": [1, None, True]}})
    model = opened(folder, chat_template_kwargs=kwargs, end_of_conversation_token="<|im_end|>")
    text = ImmutableSandboxedEnvironment().from_string(template_of(model)).render(messages=HI, add_generation_prompt=1)
    assert text.endswith("<|im_start|>assistant\n" + 'a "b"[1, None, True]')
    assert model.rendered(template_of(model), HI) == model.ids_of(HI)


def test_a_model_that_would_be_asked_otherwise_has_a_reason(save_model, tmp_path, monkeypatch):
    folder = save_model("chat", tokenizer=chat_tokenizer(chat_template("chatml")))
    model = opened(folder)
    assert why_not_alike(model) == f"its folder does not name {model.end_token} as the end token"
    settings = {"eos_token_id": model.tokenizer.convert_tokens_to_ids(model.end_token)}
    (tmp_path / "chat" / "generation_config.json").write_text(json.dumps(settings))
    assert why_not_alike(opened(folder)) is None
    monkeypatch.setattr("threestep.plugins.serve.endpoint.own_server._TURN", "Human:")
    assert "would tokenize a conversation of user differently from training" in why_not_alike(
        opened(save_model("plain"))
    )
    adapter = tmp_path / "adapter"
    shutil.copytree(folder, adapter)
    (adapter / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": folder, "peft_type": "LORA"}))
    (adapter / "adapter_model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    assert why_not_alike(opened(str(adapter))) == "it is an adapter, which Threestep must merge into its base model"


CHILD = """
import os, signal, sys, time
print(open(sys.argv[1]).read(), os.environ["ITS_KEY"], flush=True)
signal.signal(signal.SIGTERM, lambda *_: (print("ended", flush=True), sys.exit(5)))
if sys.argv[2] == "waits":
    while True:
        time.sleep(0.05)
sys.exit(3)
"""


def child(words: str):
    return lambda file: ServerCommand([sys.executable, "-c", CHILD, file, words], {"ITS_KEY": "the key"})


def test_a_child_that_ends_by_itself_gives_its_code(capfd):
    announced = []
    assert run_server(child("ends"), "the template", lambda: announced.append(1)) == 3
    assert capfd.readouterr().out == "the template the key\n" and announced == [1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_child_is_asked_to_end_where_the_program_is(capfd, number):
    before = signal.getsignal(number)
    threading.Thread(target=lambda: (time.sleep(1.5), os.kill(os.getpid(), number)), daemon=True).start()
    assert run_server(child("waits"), "", lambda: None) == 0
    assert capfd.readouterr().out.endswith("ended\n") and signal.getsignal(number) == before
