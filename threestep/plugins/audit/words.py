"""The words by which a user says what a step should be: `--as "grpo, token mean, k3"`."""

from __future__ import annotations

from typing import Any

from threestep.plugins.audit.recording.files import check_setting
from threestep.plugins.audit.recording.schema import SETTINGS
from training.utils.base.errors import ThreestepError, nearest_names

# The words that a setting's value is known by without its name.
_WORDS: dict[str, tuple[str, Any]] = {
    word: (name, word)
    for name in ("reduction", "preference_loss", "advantage", "kl_estimator")
    for kinds in [SETTINGS[name][0]]
    if isinstance(kinds, tuple)
    for word in kinds
} | {
    "kl in reward": ("kl_in", "reward"),
    "kl in loss": ("kl_in", "loss"),
    "no kl": ("kl_in", "none"),
    "group std": ("norm_by", "group"),
    "batch std": ("norm_by", "batch"),
    "no std": ("norm_by", "none"),
    "ddof 0": ("std_ddof", 0.0),
    "ddof 1": ("std_ddof", 1.0),
    "whitened": ("whiten", True),
    "not whitened": ("whiten", False),
}


def settings_of_words(said: str) -> dict[str, Any]:
    """Return the settings that `said` names: words, or NAME=VALUE, with commas between. ThreestepError for others."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, said.split(","))):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and part.lower() in _WORDS:
            setting, own = _WORDS[part.lower()]
            found[setting] = own
        elif equals and name in SETTINGS:
            found[name] = _value(name, value)
            check_setting(name, found[name], "--as")
        else:
            known = [*_WORDS, *(f"{name}=" for name in SETTINGS)]
            raise ThreestepError(
                "--as expects words such as 'grpo, token mean, k3' or NAME=VALUE, got "
                f"'{part}'{nearest_names(part if not equals else f'{name}=', known)}; "
                "threestep/plugins/audit/README.md lists them"
            )
    return found


def _value(name: str, text: str) -> Any:
    kind = SETTINGS[name][0]
    if isinstance(kind, tuple):
        return text
    if kind is str:
        return text
    if kind is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return float(text)
    except ValueError:
        return text
