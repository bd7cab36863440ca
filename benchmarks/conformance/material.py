"""The tiny model, tokenizer and rows that every trainer is given. Made on the spot, always alike; imports torch,
tokenizers and transformers alone, of any release since 4.46."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = (
    "apple river stone cloud green seven paper light morning winter garden bridge silver music ocean "
    "yellow engine market forest letter"
).split()
END = "<|im_end|>"
# ChatML with tools, as Qwen's: LLaMA-Factory knows it as its template `qwen`, the others read it from the tokenizer.
TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% if messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}

{% endif %}# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% elif messages[0]['role'] == 'system' %}<|im_start|>system
{{ messages[0]['content'] }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message['role'] == 'assistant' %}<|im_start|>assistant
{% generation %}{{ message['content'] }}
{%- if message['tool_calls'] %}{% for call in message['tool_calls'] %}<tool_call>
{"name": "{{ call['function']['name'] }}", "arguments": {{ call['function']['arguments'] | tojson }}}
</tool_call>{% endfor %}{% endif %}<|im_end|>{% endgeneration %}
{% elif message['role'] != 'system' %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "toolword",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def make_tokenizer() -> Any:
    """A byte-level BPE with a chat template. Id 0 is an ordinary token; pad and end are tokens of their own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(WORDS), "system user assistant tool"], trainer)
    named = {"eos_token": END, "pad_token": "<|pad|>", "additional_special_tokens": ["<|im_start|>"]}
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=2048, **named)
    made.chat_template = TEMPLATE
    return made


def make_model(tokenizer: Any, seed: int = 0) -> Any:
    """A Llama of two layers in float32 whose weights are large enough for positions and masks to matter."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            initializer_range=0.15,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            tie_word_embeddings=False,
        )
    )
    return model.float()


def save_start(folder: Path, padding_side: str = "right", seed: int = 0) -> Path:
    """Save the model with its tokenizer; returns the folder."""
    tokenizer = make_tokenizer()
    tokenizer.padding_side = padding_side
    make_model(tokenizer, seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def chats(count: int) -> list[dict[str, Any]]:
    """Conversations of one turn, no two alike, their answers of 1 to 18 words."""
    rows = []
    for row in range(count):
        question = " ".join(WORDS[(row * 3 + i) % 20] for i in range(2 + row * 5 % 7))
        answer = " ".join(WORDS[(row * 7 + i * i) % 20] for i in range(1 + (row * row * 5 + row) % 18))
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rows.append({"messages": turns})
    return rows


def texts(count: int) -> list[dict[str, Any]]:
    """Plain texts, all of whose tokens carry loss."""
    return [{"text": " ".join(turn["content"] for turn in row["messages"])} for row in chats(count)]


def pairs(count: int) -> list[dict[str, Any]]:
    """Preferences in TRL's form: messages of a prompt, of a chosen and of a rejected response."""
    made = []
    for row, chat in enumerate(chats(count)):
        worse = " ".join(WORDS[(row * 11 + i) % 20] for i in range(1 + row * 4 % 9))
        question, answer = chat["messages"]
        rejected = {"role": "assistant", "content": worse}
        made.append({"prompt": [question], "chosen": [answer], "rejected": [rejected]})
    return made


def marked(count: int) -> list[dict[str, Any]]:
    """Single responses in TRL's form; every fourth is bad."""
    return [
        {"prompt": row["prompt"], "completion": row["chosen"], "label": number % 4 != 1}
        for number, row in enumerate(pairs(count))
    ]


# The words say who speaks them.
TRAINED_WORDS = ("callword", "firstanswer", "secondanswer")
OTHER_WORDS = ("systemword", "toolword", "firstquestion", "toolresult", "secondquestion")


def tool_chat(arguments_as_text: bool = False) -> dict[str, Any]:
    """A conversation with a system prompt, a tool that is called, and two turns."""
    arguments: Any = {"place": "callword"}
    call = {"name": "look", "arguments": json.dumps(arguments) if arguments_as_text else arguments}
    return {
        "messages": [
            {"role": "system", "content": "systemword"},
            {"role": "user", "content": "firstquestion"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
            {"role": "tool", "content": "toolresult"},
            {"role": "assistant", "content": "firstanswer"},
            {"role": "user", "content": "secondquestion"},
            {"role": "assistant", "content": "secondanswer"},
        ],
        "tools": [LOOK],
    }
