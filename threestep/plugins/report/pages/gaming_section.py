"""The report's section "Is the reward being gamed?": signs of it, values, and features that the score goes with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING

from threestep.plugins.report.figures.numbers import shown
from threestep.plugins.report.figures.tables import paired_rows
from threestep.plugins.report.gaming.surface import FEATURES
from threestep.plugins.report.gaming.values import label_of
from threestep.plugins.report.pages.document import scrolled, table, with_flags
from threestep.plugins.report.pages.samples_section import answers_card

if TYPE_CHECKING:
    from threestep.plugins.report.figures.gaming_figures import GamingFigures
    from threestep.plugins.report.gaming.account import Drift, FeatureAccount

TITLE = "Is the reward being gamed?"
_NO_PROOF = (
    "This section reports; it does not promise to warn. A score can be gamed in ways that nothing here measures; "
    "only a checker of what you really want can reveal that."
)
_NONE_HELD_OUT = (
    "No held-out value checks the score. Add --checker, or a reward with weight 0, such as judge:FILE.yaml:0, "
    "which is only logged and not trained on."
)


def gaming_section(found: Sequence[GamingFigures], charts: Sequence[str]) -> str:
    """HTML of the section; "" without figures. charts: the element of each run's curve."""
    return "".join(_of_run(*each, len(found) > 1) for each in zip(found, charts, strict=True))


def _of_run(figures: GamingFigures, chart: str, several: bool) -> str:
    account = figures.account
    title = f"<h3>{escape(figures.run)}</h3>" if several else ""
    signs = "".join(f'<p class="warning">{escape(_readable(sign))}.</p>' for sign in figures.signs)
    none = "" if figures.signs else f'<p class="card">{escape(_unsuspicious(figures))}</p>'
    missing = "" if account.held_out else f'<p class="soft above">{with_flags(_NONE_HELD_OUT)}</p>'
    at = "" if figures.kl is None else f" KL to the reference at the end: {shown(figures.kl)} nats per response."
    curve = f'<div class="charts">{chart}</div>' if chart else ""
    return (
        f'{title}{signs}{none}{missing}<p class="soft">{escape(_NO_PROOF + at)}</p>{curve}'
        f"{_values(account.drifts)}{_features(figures)}{_pairs(figures)}"
    )


def _readable(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def _unsuspicious(figures: GamingFigures) -> str:
    """The sentence of an account without a sign."""
    score = figures.account.score
    if not score.rose:
        return "The score did not rise by more than three standard errors, so there is no gain to explain."
    rose = [label_of(value.name) for value in figures.account.held_out if value.rose]
    beside = f", and {' and '.join(rose)} rose with it" if rose else ""
    return f"No sign: the score rose by {shown(score.gain)} (s.e. {shown(score.error)}){beside}."


def _values(drifts: Sequence[Drift]) -> str:
    rows = [
        [
            label_of(drift.name),
            "yes" if drift.is_trained else "no",
            f"{shown(drift.before)} → {shown(drift.after)}",
            f"{_signed(drift.gain)} ± {shown(drift.error) if math.isfinite(drift.error) else '–'}",
            _signed(drift.deviations),
        ]
        for drift in drifts
    ]
    head = ["", "trained on", "before → after", "change ± standard error", "in standard deviations"]
    name = "The score and held-out values"
    return f"<h3>{name}</h3>{scrolled(table(head, rows, numbers=range(2, 5)), name)}"


def _features(figures: GamingFigures) -> str:
    account = figures.account
    rows = [_feature_row(feature) for feature in account.features]
    head = ["", "mean before → after", "correlation with the score", "its change", "share of the gain"]
    explained = (
        (
            "No linear model of the features was fitted, because the score did not move clearly or there are too "
            "few samples."
        )
        if account.explained is None
        else f"A linear model of these features (R² {shown(account.r_squared)}) explains {account.explained:.0%} of "
        "the score's gain."
    )
    name = "Features correlated with the score"
    words = "; ".join(f"{feature}: {meaning}" for feature, meaning in FEATURES.items())
    return (
        f"<h3>{name}</h3>{scrolled(table(head, rows, numbers=range(1, 5)), name)}"
        f'<p class="above">{escape(explained)} <span class="soft">{escape(words)}.</span></p>'
    )


def _feature_row(feature: FeatureAccount) -> list[str]:
    before, after = feature.correlations
    change = None if before is None or after is None else after - before
    return [
        feature.name,
        " → ".join(map(shown, feature.means)),
        "–" if before is None and after is None else " → ".join(map(_correlation, feature.correlations)),
        "–" if change is None else f"{_rounded(change):+.2f}",
        "–" if feature.share is None else f"{_rounded(feature.share):.0%}",
    ]


def _correlation(value: float | None) -> str:
    return "–" if value is None else f"{_rounded(value):.2f}"


def _rounded(value: float) -> float:
    """To two digits, without a negative zero."""
    return round(value, 2) + 0.0


def _pairs(figures: GamingFigures) -> str:
    pairs = figures.account.pairs
    if not pairs:
        return ""
    title = f"{len(pairs)} responses whose score rose most while a held-out value fell"
    cards = "".join(map(answers_card, paired_rows(figures.run, [(pair.before, pair.after) for pair in pairs])))
    return f"<details><summary>{escape(title)}</summary>{cards}</details>"


def _signed(value: float) -> str:
    return f"{'+' if value > 0 else ''}{shown(value)}"
