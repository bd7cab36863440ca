"""Signs that a reward is gamed, as sentences. They report what was seen: without them a reward may be gamed all the
same, in what nothing held out measures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from threestep.plugins.report.gaming.account import CLEAR, Drift, GamingAccount
from threestep.plugins.report.gaming.values import label_of

_MOSTLY = 0.5  # of the gain


def signs_of_gaming(
    account: GamingAccount, courses: Mapping[str, Sequence[tuple[int, float]]] | None = None
) -> list[str]:
    """Return a sentence for each sign; nothing where the score did not rise.

    courses: of held-out values, (step, mean) of each evaluation
    """
    score = account.score
    if not score.rose:
        return []
    sentences = [_fell(score, value) for value in account.held_out if value.fell]
    for value in account.held_out:
        course = (courses or {}).get(value.name, ())
        if not value.fell and (sentence := _past_its_best(value, course)):
            sentences.append(sentence)
    explained = account.explained or 0.0
    if explained >= _MOSTLY and not any(value.rose or value.fell for value in account.held_out):
        unmoved = [label_of(value.name) for value in account.held_out]
        beside = f"but {' and '.join(unmoved)} did not rise with it" if unmoved else "and no held-out value checks it"
        sentences.append(f"{explained:.0%} of the score's gain is explained by {_named(account)}, {beside}")
    return sentences


def _fell(score: Drift, value: Drift) -> str:
    rose = f"the score rose by {score.gain:.3g} (s.e. {score.error:.2g})"
    fell = f"which is not trained on, fell by {-value.gain:.3g} ({value.error:.2g})"
    return f"{rose} while {label_of(value.name)}, {fell}"


def _past_its_best(value: Drift, course: Sequence[tuple[int, float]]) -> str:
    """The sentence of a held-out value that rose and has fallen since; "" for others. The error of the gain since the
    start stands for that of the fall."""
    if len(course) < 3:
        return ""
    best, last = max(course, key=lambda point: point[1]), course[-1]
    fall = best[1] - last[1]
    if best[0] in (course[0][0], last[0]) or fall <= CLEAR * value.error:
        return ""
    return f"{label_of(value.name)}, which is not trained on, has fallen by {fall:.3g} since step {best[0]:,}"


def _named(account: GamingAccount) -> str:
    """The features that have most of the explained share."""
    shares = sorted(((each.share or 0.0, each.name) for each in account.features), reverse=True)
    largest = [name for share, name in shares if share >= 0.2 * (account.explained or 0.0)] or [shares[0][1]]
    return " and ".join(largest)
