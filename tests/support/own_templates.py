"""Chat templates of our own in the structures that published ones have, with the tokens of their families.

What is particular to each: the end of a call is another token than that of an answer, or the next speaker's token, or
follows quotes; arguments are wanted as text and content as null; thoughts of earlier turns vanish; texts are joined
without a token between.
"""

from __future__ import annotations

# As gpt-oss: one block a channel, one call a message, which ends with a token of its own, and only the last answer has
# the real stop.
CHANNELS = """\
{%- if tools %}{{ '<|start|>developer<|message|>' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content %}
{{- '<|start|>assistant<|channel|>commentary<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one call at a time') }}{% endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start|>assistant to=' + call.name + '<|channel|>call<|message|>' + (call.arguments | tojson) + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{%- if message.reasoning_content and loop.last %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}{% endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + ('<|return|>' if loop.last else '<|end|>') }}
{%- else %}{{ '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

# As GLM 4.5: nothing ends a turn but the token of the next speaker.
NEXT_SPEAKER = """\
[gMASK]<sop>
{%- if tools %}<|system|>{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|assistant|>
{%- if message.reasoning_content %}{{ '\\n<think>' + message.reasoning_content + '</think>' }}{% endif %}
{%- if message.content %}{{ '\\n' + message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>' + call.function.name }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key><arg_value>' + (value if value is string else value | tojson) + '</arg_value>' }}
{%- endfor %}</tool_call>{% endfor %}
{%- elif message.role == 'tool' %}{{ '<|observation|>\\n' + message.content }}
{%- elif message.role == 'user' %}{{ '<|user|>\\n' + message.content }}
{%- else %}{{ '<|system|>\\n' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{% endif %}"""

# As DeepSeek V3: arguments are joined as text, and calls are written only where there is no content.
JOINED = """\
{{- bos_token }}
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for message in messages %}
{%- if message.role in ('user', 'developer') %}{{ '<\uff5cUser\uff5c>' + message.content + '<\uff5cAssistant\uff5c>' }}
{%- elif message.role == 'tool' %}{{ '<\uff5ctool\u2581output\uff5c>' + message.content + '<\uff5cAssistant\uff5c>' }}
{%- elif message.role == 'system' %}{{ message.content }}
{%- elif message.content is none %}
{%- for call in message.tool_calls %}
{{- '<\uff5ctool\u2581call\uff5c>' + call.function.name + '\\n' + call.function.arguments + '\\n' }}{% endfor %}
{{- '<\uff5cend\u2581of\u2581sentence\uff5c>' }}
{%- else %}{{ message.content + '<\uff5cend\u2581of\u2581sentence\uff5c>' }}{% endif %}
{%- endfor %}"""

# As Gemma 4: texts in a call stand between quote tokens, and a tool's answer opens with the token that stops a call.
QUOTED = """\
{{- bos_token }}
{%- if tools %}{{ '<|turn>system\\n' + (tools | tojson) + '<turn|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ 'result{' + message.content + '}<tool_response|><turn|>\\n' }}
{%- else %}{{ '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{%- if message.content %}{{ message.content | trim }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<|tool_call>call:' + call.function.name + '{' }}
{%- for key, value in call.function.arguments.items() %}
{{- key + ':' + ('<|"|>' + value + '<|"|>' if value is string else value | tojson) + ',' }}{% endfor %}
{{- '}<tool_call|>' }}{% endfor %}
{{- '<|tool_response>' if message.tool_calls else '<turn|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|turn>model\\n' }}{% endif %}"""

# As Qwen 3: thoughts before the last question vanish, and the prompt may hold an empty one.
THOUGHTS = """\
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{ '<|im_start|>system\\n<tools>' + (tools | tojson) + '</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""

# As Llama 2 and Mistral: a space between the header's last token and the answer, and no word for other roles.
BRACKETS = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- else %}{{ raise_exception('only user and assistant take part') }}{% endif %}
{%- endfor %}"""

# As Cohere's Command: a token closes the answer, and another the turn.
CLOSED_TWICE = """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|START_OF_TURN_TOKEN|>' + message.role }}
{%- if message.role == 'assistant' %}{{ '<|START_RESPONSE|>' + message.content + '<|END_RESPONSE|>' }}
{%- else %}{{ '<|START_TEXT|>' + message.content }}{% endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor %}
{%- if add_generation_prompt %}<|START_OF_TURN_TOKEN|>assistant{% endif %}"""

# Marks that begin before the prompt ends, as in some of TRL's; calls are not written.
MARKED = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant' }}
{%- generation %}{{ '\\n' + message.content + '<|im_end|>\\n' }}{% endgeneration %}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

TEMPLATES = {
    "channels": CHANNELS,
    "next speaker": NEXT_SPEAKER,
    "joined": JOINED,
    "quoted": QUOTED,
    "thoughts": THOUGHTS,
    "brackets": BRACKETS,
    "closed twice": CLOSED_TWICE,
    "marked": MARKED,
}
