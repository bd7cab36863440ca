"""vLLM's own server as a child, asked in the style in which the model was trained.

vLLM renders chats by a template alone. It is given one that writes what training wrote: the model's, with the variables
saved with it, or "Human: ... Assistant:" as a template. Both are compared before vLLM starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError
from training.utils.serving.door import ADDRESS

if TYPE_CHECKING:
    from training.inference.endpoint.model import OpenedModel
    from training.utils.generation.arguments import SamplingArguments

_KEY_VARIABLE = "VLLM_API_KEY"  # vLLM's: on its command line every user of the machine could read the key
_PROGRAM = "vllm.entrypoints.cli.main"
_ENDING_SECONDS = 30.0
# The conversations by which a template is compared.
_PROBES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "user", "assistant", "user"),
)
_HUMAN_ASSISTANT = (
    "{% for message in messages %}"
    "{{ {'system': 'System', 'user': 'Human', 'assistant': 'Assistant', 'tool': 'Tool'}[message['role']] }}: "
    "{{ message['content'] }} "
    "{% endfor %}Assistant:"
)


@dataclass(frozen=True)
class VllmServer:
    """What vLLM's server is started with. name: by which requests ask for the model."""

    model: OpenedModel
    name: str
    port: int
    sampling: SamplingArguments
    most_rows: int | None

    def words(self, template: str) -> list[str]:
        """The command. template: a file."""
        values = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        changed = {name: own for name, value in values.items() if (own := getattr(self.sampling, name)) != value}
        words = [sys.executable, "-m", _PROGRAM, "serve", self.model.name, "--host", ADDRESS, "--port", str(self.port)]
        words += ["--served-model-name", self.name, "--dtype", self.model.dtype, "--chat-template", template]
        words += ["--chat-template-content-format", "string", "--generation-config", "vllm"]
        words += ["--override-generation-config", json.dumps(changed)] if changed else []
        return words + (["--max-num-seqs", str(self.most_rows)] if self.most_rows is not None else [])

    def run(self, key: str, announce: Callable[[], None]) -> int:
        """Serve until vLLM ends, or this program is asked to; return the child's code, 0 if it was asked. announce:
        called once vLLM was started."""
        template = template_of(self.model)
        assert template is not None, "`why_not` has looked"
        with tempfile.TemporaryDirectory(prefix="threestep_serve_") as folder:
            file = Path(folder) / "chat_template.jinja"
            file.write_text(template, encoding="utf-8")
            child = subprocess.Popen(self.words(str(file)), env=_environment(os.environ, key))
            announce()
            return _until_the_end(child)


def _environment(ours: Mapping[str, str], key: str) -> dict[str, str]:
    """The child's environment."""
    return {**ours, _KEY_VARIABLE: key}


def _until_the_end(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child; hand SIGTERM and Ctrl-C on to it, once."""
    asked = []

    def ask(number: int, frame: Any) -> None:
        asked.append(number)
        child.terminate()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            try:
                code = child.wait(_ENDING_SECONDS)
                return 0 if asked else code
            except subprocess.TimeoutExpired:
                if asked:
                    child.kill()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def why_not_vllm(model: OpenedModel) -> str | None:
    """Why vLLM's server would ask this model otherwise than it was trained, or not at all; None if it would not."""
    if model.is_adapter:
        return "it is an adapter, which is merged into its base here"
    if not model.end_is_saved:
        return f"vLLM does not know that its answers end with {model.end_token}"
    template = template_of(model)
    if template is None:
        return f"vLLM cannot write prompts of the style {model.prompt_style}"
    for roles in _PROBES:
        messages = [{"role": role, "content": f"{place}. A word, \u00e9\u4f60?"} for place, role in enumerate(roles)]
        try:
            as_trained = model.ids_of(messages)
        except ThreestepError:
            continue  # the model's template refuses such conversations, and so does vLLM
        rendered = model.rendered(template, messages)
        if rendered != as_trained:
            return f"vLLM would write a conversation of {', '.join(roles)} with other tokens than training"
    return None


def template_of(model: OpenedModel) -> str | None:
    """The chat template that writes what training wrote; None where there is none."""
    if model.template is None:
        return f"{{{{ {json.dumps(model.prefix)} }}}}{_HUMAN_ASSISTANT}" if model.is_human_assistant else None
    return "".join(_assignment(name, value) for name, value in model.template_kwargs.items()) + model.template


def _assignment(name: str, value: Any) -> str:
    return f"{{%- set {name} = {_literal(value)} -%}}"


def _literal(value: Any) -> str:
    """A JSON value as Jinja has it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_literal(held)}" for key, held in value.items()) + "}"
    return "[" + ", ".join(map(_literal, value)) + "]" if isinstance(value, Sequence) and not isinstance(
        value, str) else json.dumps(value)  # fmt: skip
