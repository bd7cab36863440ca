"""All that is said of one step: its table, and what was asked beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.explain.forward.model import shown_media
from threestep.plugins.explain.held_out import change_of
from threestep.plugins.explain.rules import OtherRule, counterfactual
from threestep.plugins.explain.shares import model_of, shares_of
from threestep.plugins.explain.table import explained
from threestep.plugins.explain.taught import taught
from threestep.plugins.explain.updates import update_of
from training.utils.base.errors import ThreestepError

if TYPE_CHECKING:
    from collections.abc import Callable

    from threestep.plugins.audit.quantities.step import AuditedStep
    from threestep.plugins.explain.held_out import HeldOutChange, HeldOutResponses
    from threestep.plugins.explain.rules import Counterfactual
    from threestep.plugins.explain.shares import Shares
    from threestep.plugins.explain.table import Explained
    from threestep.plugins.explain.taught import Taught


@dataclass(frozen=True)
class HeldOutFindings:
    """rows: the responses. change: of their log-probabilities by the step. by_rule: by each rule, to first order."""

    rows: HeldOutResponses
    change: HeldOutChange
    by_rule: Sequence[np.ndarray] = ()


@dataclass(frozen=True)
class NamedLesson:
    """A lesson with its text. place: of its row in the data; empty where that is not known."""

    step: int
    sequence: int
    name: str
    effect: float
    share: float
    text: str
    place: str = ""


@dataclass(frozen=True)
class Explanation:
    """table: of tokens and sequences. rules: the step under other rules. held_out, taught: None where not asked for.
    media: of each sequence, as addresses; empty where none has any."""

    table: Explained
    held_out: HeldOutFindings | None = None
    taught: Taught | None = None
    named_lessons: Sequence[NamedLesson] = ()
    rules: Sequence[Counterfactual] = ()
    media: Sequence[Sequence[str]] = ()

    def to_pandas(self) -> Any:
        """Return the tokens as a frame, a row each."""
        return self.table.to_pandas()


@dataclass(frozen=True)
class Questions:
    """Questions to a step beside its shares. held_out: responses. is_taught: who of the steps taught these. rules:
    under which the step is made again. masks: names and functions of the table's columns to tokens that carry loss.
    is_plain: shares along plain gradient descent too."""

    held_out: HeldOutResponses | None = None
    is_taught: bool = False
    rules: Sequence[OtherRule] = ()
    masks: Mapping[str, Callable[[Mapping[str, np.ndarray]], Any]] = field(default_factory=dict)
    is_plain: bool = False


@dataclass(frozen=True)
class KnownOfRun:
    """A run beside its records. decode: token ids to text; None: no tokenizer is known. places: in the data, of rows.
    note: why there are none. scale: of what its model was given of media; None where that is not known."""

    decode: Callable[[list[int]], str] | None = None
    places: Mapping[int, str] = field(default_factory=dict)
    note: str = ""
    scale: Any = None


def explain(steps: Sequence[AuditedStep], questions: Questions, known: KnownOfRun | None = None) -> Explanation:
    """Explain the last of steps that follow each other."""
    step, known = steps[-1], known or KnownOfRun()
    decode = known.decode
    update = update_of(step)
    shares = shares_of(step, update, plain=questions.is_plain)
    _check_finite(shares)
    ids = np.unique(np.concatenate([each.tensor("token_ids") for each in steps]))
    texts = {} if decode is None else {int(each): decode([int(each)]) for each in ids}
    table = _with_places(explained(step, shares, update, texts), step, known)
    rules = [counterfactual(step, update, rule) for rule in _with_masks(step, questions, table)]
    held, lessons, named = None, None, []
    if questions.held_out is not None:
        before = model_of(step)
        change = change_of(questions.held_out, before, model_of(step, "weights_after."), update)
        by_rule = [
            questions.held_out.sums(before.along(questions.held_out.sequences, each.update.whole)) for each in rules
        ]
        held = HeldOutFindings(questions.held_out, change, by_rule)
        if questions.is_taught:
            lessons = taught(steps, questions.held_out)
            named = _named(steps, lessons, known)
    return Explanation(table, held, lessons, named, rules, shown_media(step, known.scale))


def _check_finite(shares: Shares) -> None:
    """ThreestepError for a step whose numbers are lost."""
    reads = (getattr(read, name) for read in (shares.before, shares.after) for name in ("logprobs_T", "scores_S"))
    for numbers in (shares.whole, *shares.parts.values(), *reads):
        if numbers is not None and not np.isfinite(numbers).all():
            raise ThreestepError(
                "an explanation needs finite numbers, but the step's weights, moments or losses are not finite: the "
                "run diverged in or before this step, or the record is damaged"
            )


def _named(steps: Sequence[AuditedStep], lessons: Taught, known: KnownOfRun) -> list[NamedLesson]:
    places = {step.head.step: _places(step, known) for step in steps if step.has("rows")}
    begins = {step.head.step: _begins(step) for step in steps}
    return [
        NamedLesson(
            each.step, each.sequence, each.name, each.effect, each.share,
            _text(each.ids, known.decode, begins[each.step][each.sequence]),
            places[each.step][each.sequence] if each.step in places else "",
        )
        for each in lessons.lessons
    ]  # fmt: skip


def _places(step: AuditedStep, known: KnownOfRun) -> list[str]:
    """Each sequence's place in the data; empty where that is not known."""
    rows = step.tensor("rows") if step.has("rows") else [-1] * len(step.rank_S)
    return [known.places.get(int(row), "") for row in rows]


_NO_CRITIC = "the critic's step is not explained: shares, rules and held-out responses cover the actor alone"


def _with_places(table: Explained, step: AuditedStep, known: KnownOfRun) -> Explained:
    notes = (known.note, _NO_CRITIC if step.head.critic else "")
    table = replace(table, notes=(*table.notes, *filter(None, notes)))
    if not known.places:
        return table
    return replace(table, sequences={**table.sequences, "from": np.array(_places(step, known), dtype=object)})


def _begins(step: AuditedStep) -> list[int]:
    """Return [S], the place of each response's first token among the real ones; 0 where that is not known."""
    if not step.has("data_mask"):
        return [0] * len(step.rank_S)
    wanted_T, sequence_T = step.tensor("data_mask")[step.real_T], step.sequence_T[step.real_T]
    return [int(np.argmax(wanted_T[sequence_T == sequence])) for sequence in range(len(step.rank_S))]


def _text(ids: np.ndarray, decode: Callable[[list[int]], str] | None, begin: int) -> str:
    """A prompt and its response, a line each."""
    parts = [[int(each) for each in part] for part in (ids[:begin], ids[begin:]) if len(part)]
    return "\n".join(" ".join(map(str, part)) if decode is None else decode(part) for part in parts)


def _with_masks(step: AuditedStep, questions: Questions, table: Explained) -> list[OtherRule]:
    """The rules, and one for each mask."""
    found = list(questions.rules)
    for name, mask in questions.masks.items():
        given = np.asarray(mask(dict(table.tokens)))
        if given.shape != (len(table.tokens["sequence"]),) or given.dtype != np.bool_:
            raise ThreestepError(
                f"--with_mask {name}: the function must return a boolean for each of "
                f"{len(table.tokens['sequence']):,} tokens, got {given.dtype} {list(given.shape)}"
            )
        whole_T = np.zeros(len(step.place_T), dtype=bool)
        whole_T[step.real_T] = given
        found.append(OtherRule(f"the mask {name}", {}, mask_T=whole_T))
    return found
