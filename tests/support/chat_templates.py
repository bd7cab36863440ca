"""Chat templates of every kind that the tests read, and a tokenizer that knows their special tokens.

Each exists as it is and with `{% generation %}` marks around what the assistant writes.
"""

from __future__ import annotations

from tests.support.tiny_tokenizers import SENTENCES

SPECIAL_TOKENS = [
    "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>",
    "<|end_header_id|>", "<|eot_id|>", "<s>", "</s>", "[INST]", "[/INST]",
]  # fmt: skip

CHATML = """\
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{{ G }}{{ message.content + '<|im_end|>' }}{{ /G }}{% else %}\
{{ message.content + '<|im_end|>' }}{% endif %}

{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}"""

# Contents are trimmed; a system message is written only where it comes first.
LLAMA3 = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{ raise_exception('the system message comes first') }}{% endif %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.role == 'assistant' %}{{ G }}{{ message.content | trim + '<|eot_id|>' }}{{ /G }}
{%- else %}{{ message.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

# As reasoning models': thoughts before the last user message are left out, whether they came apart or in the content;
# with enable_thinking off, the generation prompt holds an empty thought.
STRIPS_THINKING = """\
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thought = message.reasoning_content | default('') %}
{%- if not thought and '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' }}{{ G }}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}
{%- endif %}
{{- content + '<|im_end|>' }}{{ /G }}{{ '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# With enable_thinking off, an empty thought ends the generation prompt and is written nowhere else.
EMPTY_THOUGHT = CHATML.replace(
    "<|im_start|>assistant\n{% endif -%}",
    "<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif -%}",
)

# Tool calls become JSON; tool results that follow each other become one user turn.
MERGES_TOOLS = """\
{%- if tools %}{{ '<|im_start|>system\\nTools:\\n' }}{% for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}{{ G }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\\n' }}{% endif %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}' }}
{{- '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>' }}{{ /G }}{{ '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

# No header before the assistant, as Llama 2's and Mistral's.
INST = """\
{{- '<s>' }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content | trim + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ G }}{{ ' ' + message.content | trim + ' </s>' }}{{ /G }}
{%- else %}{{ raise_exception('only user and assistant') }}{% endif %}
{%- endfor %}"""

_SOURCES = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "strips_thinking": STRIPS_THINKING,
    "empty_thought": EMPTY_THOUGHT,
    "merges_tools": MERGES_TOOLS,
    "inst": INST,
}


def chat_template(name: str, marks: bool = False) -> str:
    """One of the templates above, with or without `{% generation %}` marks."""
    begin, end = ("{% generation %}", "{% endgeneration %}") if marks else ("", "")
    return _SOURCES[name].replace("{{ G }}", begin).replace("{{ /G }}", end)


def chat_tokenizer(template: str | None = None, vocab_size: int = 384):
    """A byte-level BPE tokenizer with the templates' special tokens; eos is <|endoftext|>, pad <|pad|>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    # As Llama 3's and Qwen's: line breaks stay together, with the blanks before them, whatever follows.
    split = Regex(r"\s*[\r\n]+|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(split, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Line breaks are merged, so that tokens may straddle the end of a header.
    tokenizer.train_from_iterator([*SENTENCES, "user\n\nassistant\n\nsystem\n\n\n" * 3], trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|pad|>")
    wrapped.chat_template = template
    return wrapped
