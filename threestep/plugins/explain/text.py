"""An explanation on the terminal, and as JSON."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.explain.table import TRAINED

if TYPE_CHECKING:
    from threestep.plugins.explain.explanation import Explanation

_SHOWN = 8
_TERMS = {"policy": "policy loss", "kl": "KL", "entropy": "entropy bonus"}
_PARTS = (("gradient", "this step's gradient"), ("earlier", "earlier gradients"), ("decay", "weight decay"))


def as_lines(found: Explanation) -> list[str]:
    """The lines of the terminal, the headline first."""
    return [
        headline(found),
        *(f"  {line}" for line in summary(found)),
        *_largest(found),
        *_held_out(found),
        *_lessons(found),
        *_rules(found),
        *(f"note: {note}" for note in found.table.notes),
    ]


def headline(found: Explanation) -> str:
    return f"{found.table.title}: along its update the loss {change(found)}"


def change(found: Explanation) -> str:
    """The change of the loss, in words that follow it."""
    value = found.table.figures["change"]
    way = "falls" if value < 0 else "rises"
    return f"{way} by {number(abs(value))}, to first order"


def summary(found: Explanation) -> list[str]:
    """Sentences on the whole step."""
    figures, tokens = found.table.figures, found.table.tokens
    whole = figures["change"] or 1e-300
    parts = ", ".join(f"{words} {share(figures[name] / whole)}" for name, words in _PARTS)
    lines = [f"by parts of the update: {parts}"]
    terms = [name for name in ("policy", "kl", "entropy") if f"share_{name}" in tokens]
    if terms:
        said = ", ".join(
            f"{_TERMS.get(name, name)} {share(float(np.nansum(tokens[f'share_{name}'])) / whole)}" for name in terms
        )
        lines.append(f"by terms of the loss: {said}")
    clip = figures["clip"]
    norm = f"gradient norm {number(figures['grad_norm'])}" if "grad_norm" in figures else "the gradient"
    clipped = f"clipped to {share(clip)} of it" if clip < 1.0 else "not clipped"
    lines.append(f"{norm}, {clipped}; learning rate {number(figures.get('learning_rate', float('nan')))}")
    trained = int((tokens["role"] == TRAINED).sum())
    if trained:
        lines.append(f"{trained:,} of {len(tokens['role']):,} tokens carry loss; {_half(tokens['share'])}")
    if "clipped" in tokens and trained:
        clipped_tokens = int(tokens["clipped"].sum())
        told = f"{clipped_tokens:,} of them are clipped: their policy loss has no slope" if clipped_tokens else ""
        lines.append(told or "none of them is clipped")
    if "turn" in tokens:
        turn_T = tokens["turn"]
        by_turn = [float(tokens["share"][turn_T == turn].sum()) for turn in range(1, int(turn_T.max()) + 1)]
        said = ", ".join(f"{turn}: {share(part / whole)}" for turn, part in enumerate(by_turn[:_SHOWN], start=1))
        lines.append(f"by turns of the model: {said}{', ...' if len(by_turn) > _SHOWN else ''}")
    return lines


def _half(shares_T: np.ndarray) -> str:
    """Say how many tokens carry half of all that moved."""
    sizes = np.sort(np.abs(shares_T))[::-1]
    if not sizes.sum():
        return "none of them moved the loss"
    count = int(np.searchsorted(np.cumsum(sizes), 0.5 * sizes.sum())) + 1
    return (
        f"the {count:,} with the largest shares make up half of all" if count > 1 else "one makes up half of all shares"
    )


def _largest(found: Explanation) -> list[str]:
    tokens = found.table.tokens
    order = np.argsort(-np.abs(tokens["share"]))[:_SHOWN]
    lines = [
        f"  {number(float(tokens['share'][place])):>10}  {_quoted(str(tokens['text'][place])):<14} "
        f"{found.table.sequences['name'][tokens['sequence'][place]]}, token {tokens['place'][place]}"
        for place in order
        if tokens["share"][place]
    ]
    return ["the largest shares:", *lines] if lines else []


def _held_out(found: Explanation) -> list[str]:
    held = found.held_out
    if held is None:
        return []
    first, real = held.change.first_order, held.change.real
    lines = [
        f"  {name}: {number(first[place])} to first order, {number(real[place])} actually"
        for place, name in enumerate(held.rows.names[:_SHOWN])
    ]
    whole = f"{number(first.sum())} to first order, {number(real.sum())} actually"
    return [f"log-probabilities of {len(first):,} held-out responses, nats: {whole}", *lines]


def _lessons(found: Explanation) -> list[str]:
    taught = found.taught
    if taught is None:
        return []
    lines = [
        f"  {number(each.effect):>10}  step {each.step:,}, {each.name}{_in_brackets(each.place)}: "
        f"{_quoted(each.text, 60)}"
        for each in found.named_lessons[:_SHOWN]
    ]
    return [
        f"what taught it: {number(taught.told)} nats from these sequences, {number(taught.first_order)} from "
        f"everything that moved the weights, {number(taught.real)} actually",
        *lines,
    ]


def _rules(found: Explanation) -> list[str]:
    return [
        f"{each.rule.name}: cosine {number(each.cosine)} to the real update, {number(each.size)} times its length, "
        f"{int(each.turned_T.sum()):,} of {len(each.turned_T):,} pushed the other way"
        for each in found.rules
    ]


def as_json(found: Explanation) -> dict[str, Any]:
    """One object: the step, its sequences, and what was asked of it. Tokens are in the table's file."""
    table = found.table
    sequences = [
        {name: _plain(values[place]) for name, values in table.sequences.items()}
        for place in range(len(table.sequences["sequence"]))
    ]
    content: dict[str, Any] = {
        "title": table.title,
        "figures": {name: float(value) for name, value in table.figures.items()},
        "summary": summary(found),
        "sequences": sequences,
        "notes": list(table.notes),
    }
    if found.held_out is not None:
        held = found.held_out
        content["held_out"] = [
            {"name": name, "before": float(b), "first_order": float(f), "real": float(r)}
            for name, b, f, r in zip(
                held.rows.names, held.change.before, held.change.first_order, held.change.real, strict=True
            )
        ]
    if found.taught is not None:
        whole = {name: float(getattr(found.taught, name)) for name in ("told", "first_order", "real")}
        lessons = [
            {
                "step": each.step,
                "sequence": each.sequence,
                "name": each.name,
                "from": each.place,
                "effect": each.effect,
                "share": each.share,
                "text": each.text,
            }
            for each in found.named_lessons
        ]
        content["taught"] = {**whole, "lessons": lessons}
    if found.rules:
        content["rules"] = [
            {
                "rule": each.rule.name,
                "cosine": each.cosine,
                "size": each.size,
                "gradient_cosine": each.gradient_cosine,
                "turned": int(each.turned_T.sum()),
                "of": len(each.turned_T),
            }
            for each in found.rules
        ]
    return content


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value


def _in_brackets(place: str) -> str:
    return f" ({place})" if place else ""


def _quoted(text: str, most: int = 12) -> str:
    shown = text if len(text) <= most else f"{text[: most - 1]}…"
    return repr(shown)


def number(value: float) -> str:
    return f"{value:.4g}"


def share(value: float) -> str:
    return f"{100.0 * value:.3g}%" if abs(value) >= 5e-6 else "0%"
