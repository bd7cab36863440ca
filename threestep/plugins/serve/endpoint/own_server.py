"""An engine's own server as a child, which asks the model in the style in which it was trained.

Such a server renders chats by a template alone. It is given one that writes what training wrote: the model's, with the
variables saved with it, or "Human: ... Assistant:" as a template. Both are compared before the server starts.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from threestep.plugins.serve.endpoint.model import StyledModel
    from training.utils.generation.table import ServerCommand

_ENDING_SECONDS = 30.0
# The conversations by which a template is compared.
_PROBES = (
    ("user",),
    ("system", "user"),
    ("user", "assistant", "user"),
    ("user", "assistant", "user", "assistant", "user"),
)
_TURN = (
    "{{ {'system': 'System', 'user': 'Human', 'assistant': 'Assistant', 'tool': 'Tool'}[message['role']] }}: "
    "{{ message['content'] }}"
)


def run_server(command: Callable[[str], ServerCommand], template: str, announce: Callable[[], None]) -> int:
    """Serve until the child ends, or this program is asked to; return the child's code, 0 if it was asked. command:
    takes the file of the template. announce: called once the child was started."""
    with tempfile.TemporaryDirectory(prefix="threestep_serve_") as folder:
        file = Path(folder) / "chat_template.jinja"
        file.write_text(template, encoding="utf-8")
        made = command(str(file))
        child = subprocess.Popen(made.words, env={**os.environ, **made.variables})
        announce()
        return _until_the_end(child)


def _until_the_end(child: subprocess.Popen[bytes]) -> int:
    """Wait for the child; hand SIGTERM and Ctrl-C on to it, once."""
    signals: list[int] = []

    def ask(number: int, frame: Any) -> None:
        signals.append(number)
        child.terminate()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        while True:
            try:
                code = child.wait(_ENDING_SECONDS)
                return 0 if signals else code
            except subprocess.TimeoutExpired:
                if signals:
                    child.kill()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def why_not_alike(model: StyledModel) -> str | None:
    """Why a server that reads the model's folder would ask it otherwise than it was trained; None if it would not."""
    if model.is_adapter:
        return "it is an adapter, which Threestep must merge into its base model"
    if not model.end_is_saved:
        return f"its folder does not name {model.end_token} as the end token"
    template = template_of(model)
    if template is None:
        return f"there is no chat template for prompts in the style {model.prompt_style}"
    for roles in _PROBES:
        messages = [{"role": role, "content": f"{place}. A word, \u00e9\u4f60?"} for place, role in enumerate(roles)]
        try:
            as_trained = model.ids_of(messages)
        except ThreestepError:
            continue  # the model's template refuses such conversations, there too
        if model.rendered(template, messages) != as_trained:
            return f"a chat template would tokenize a conversation of {', '.join(roles)} differently from training"
    return None


def template_of(model: StyledModel) -> str | None:
    """The chat template that writes what training wrote; None where there is none."""
    if model.template is None:
        return _human_assistant(model.prefix, *model.frame) if model.is_human_assistant else None
    return "".join(_assignment(name, value) for name, value in model.template_kwargs.items()) + model.template


def _human_assistant(prefix: str, begin: str, end: str) -> str:
    between, first = end.partition("Assistant:")[0], json.dumps(prefix + begin)
    turns = f"{{% for message in messages %}}{_TURN}{{{{ {json.dumps(between)} }}}}{{% endfor %}}"
    return f"{{{{ {first} }}}}{turns}{{{{ {json.dumps(end.lstrip())} }}}}"


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
