"""The records of one step of two runs beside each other: the row, the rank, the token and the layer that differ first.

S sequences of a rank, T their tokens one after the other.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from threestep.plugins.audit.recording.schema import TRACED, layers_file
from training.utils.base.reading import checked_json, read_text

if TYPE_CHECKING:
    from threestep.plugins.audit.recording.files import StepRecord

_INTEGERS = ("token_ids", "is_real", "data_mask", "loss_mask")
_INPUTS = ("corrections", "ref_logprobs", "old_logprobs", "old_values", "advantages", "returns")
_READ = ("logits", "logprobs", "new_values", "token_losses")
_OF_ROLLOUT = (
    "sampling_logprobs", "scores", "old_logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns",
)  # fmt: skip
_OF_THE_LOSS = ("denominator", "beta", "reference_point")  # figures that it is computed from
_PARTS = ("forward", "backward", "optimizer")
_OWN_GRADIENT = TRACED[3]
_PARTS_BEFORE, _PARTS_AFTER = TRACED[:1], (TRACED[1:2], TRACED[2:4], TRACED[4:])
# A traced part in words.
_CALLED = {
    "forward": "output",
    "backward": "gradient of the output",
    _OWN_GRADIENT: "gradient of the weight",
    "gradient": "gradient, in Adam's first moment",
}
_UNITS = dict.fromkeys(TRACED[1:3], "modules")  # what the sums of a traced part are of; others: weights
_MOST_WORDS = 60
WEIGHTS = "weights"  # the part of a step before all others


@dataclass(frozen=True)
class Located:
    """A quantity that differs. part: of the step. where: its first place. a, b: the numbers there, in words. differing:
    how many, of so many. unit: what is counted."""

    part: str
    name: str
    where: str
    a: str
    b: str
    differing: int = 1
    of: int = 1
    unit: str = ""


@dataclass(frozen=True)
class TracedRecord:
    """A record with the sums of its layers: by model, one table a rank."""

    record: StepRecord
    layers: Mapping[str, Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class _Sequence:
    """A sequence of a record. key: what it is found by in the other one. row: of the dataset, if known."""

    key: tuple[Any, ...]
    rank: int
    place: int
    tokens: slice
    row: int | None


def read_layers(folder: Path, ranks: int) -> dict[str, list[Mapping[str, Any]]]:
    """The sums of the layers beside a record, by model."""
    end = layers_file("", 0).removeprefix("layers_")
    models = [path.name.removeprefix("layers_").removesuffix(end) for path in sorted(folder.glob(f"layers_*{end}"))]
    return {model: [_read_layers(folder / layers_file(model, rank)) for rank in range(ranks)] for model in models}


def _read_layers(path: Path) -> Mapping[str, Any]:
    """The bits, the sum and the sum of squares of each module or weight, by the traced part."""
    found: Mapping[str, Any] = checked_json(dict[str, dict[str, tuple[str, float, float]]], read_text(path), path)
    return found


def locate(a: TracedRecord, b: TracedRecord, bound: float) -> list[Located]:
    """Everything that differs, as the data flow. bound: relative, of floats; 0: every bit counts."""
    found = [*_layers(a, b, _PARTS_BEFORE, bound)]
    sequences = [_sequences(side.record) for side in (a, b)]
    found += _missing(*sequences)
    pairs = [(own, sequences[1][key]) for key, own in sequences[0].items() if key in sequences[1]]
    found += _tokens(a.record, b.record, pairs, _INTEGERS, part="data", bound=0.0)
    found += _rollout(a.record, b.record, bound)
    found += _tokens(a.record, b.record, pairs, _INPUTS, part="data", bound=bound)
    read = [*_tokens(a.record, b.record, pairs, _READ, part="forward", bound=bound)]
    read += _of_sequences(a.record, b.record, pairs, bound)
    forward, backward, optimizer = ([*_layers(a, b, parts, bound)] for parts in _PARTS_AFTER)
    backward.sort(key=lambda each: _backward_place(a, f"model.{each.where.partition(' (')[0]}"))
    figures = {part: [each for each in _figures(a, b, bound) if each.part == part] for part in _PARTS}
    read += [*figures["forward"], *backward, *figures["backward"]]
    moments = [each for each in optimizer if each.part == "backward"]
    weights = [each for each in optimizer if each.part == "optimizer"]
    return [*found, *forward, *read, *moments, *figures["optimizer"], *weights]


def _sequences(record: StepRecord) -> dict[tuple[Any, ...], _Sequence]:
    found: dict[tuple[Any, ...], _Sequence] = {}
    times = Counter[Any]()
    for rank, tensors in enumerate(record.ranks):
        ends = np.cumsum(tensors.get("lengths", np.zeros(0, dtype=np.int64)))
        for place, end in enumerate(ends):
            tokens = slice(int(end - tensors["lengths"][place]), int(end))
            row = int(tensors["rows"][place]) if "rows" in tensors else None
            name: Any = row
            if "numbers" in tensors:
                name = ("number", int(tensors["numbers"][place]))
            elif row is None:
                name = tensors["token_ids"][tokens].tobytes()
            times[name] += 1
            key = (name, times[name])
            found[key] = _Sequence(key, rank, place, tokens, row)
    return found


def _missing(a: Mapping[Any, _Sequence], b: Mapping[Any, _Sequence]) -> Iterator[Located]:
    only = [[each for key, each in x.items() if key not in y] for x, y in ((a, b), (b, a))]
    if any(only):
        words = [_named(side[0]) if side else "none" for side in only]
        places = [_named(each) for each in (only[0] or only[1])[:1]]
        yield Located(
            "data", "rows", places[0], words[0], words[1], max(map(len, only)), max(len(a), len(b)), "sequences"
        )


def _named(each: _Sequence) -> str:
    if each.row is not None:
        return f"row {each.row:,} (rank {each.rank})"
    name = each.key[0]
    return f"response {name[1]:,} (rank {name and each.rank})" if isinstance(name, tuple) else f"rank {each.rank}"


def _tokens(
    a: StepRecord,
    b: StepRecord,
    pairs: Sequence[tuple[_Sequence, _Sequence]],
    names: Sequence[str],
    *,
    part: str,
    bound: float,
) -> Iterator[Located]:
    """Numbers of tokens."""
    for name in names:
        first: Any = None
        differing, total = 0, 0
        for x, y in pairs:
            if name not in a.ranks[x.rank] or name not in b.ranks[y.rank]:
                continue
            own, other = a.ranks[x.rank][name][x.tokens], b.ranks[y.rank][name][y.tokens]
            if len(own) != len(other):
                first = first or (x, y, min(len(own), len(other)), f"{len(own):,} tokens", f"{len(other):,} tokens")
                differing, total = differing + 1, total + 1
                continue
            wrong: Any = _wrong(own, other, bound)
            wrong = wrong.any(axis=1) if wrong.ndim > 1 else wrong
            total += len(wrong)
            differing += int(wrong.sum())
            if first is None and wrong.any():
                at = int(np.argmax(wrong))
                values = [values[at] if values.ndim == 1 else values[at].max() for values in (own, other)]
                first = (x, y, at, *map(_number, values))
        if first is not None:
            x, y, at, *words = first
            yield Located(part, name, f"{_both(x, y)}, token {at:,}", words[0], words[1], differing, total, "tokens")


def _both(x: _Sequence, y: _Sequence) -> str:
    own = _named(x)
    return own if x.rank == y.rank else own.replace(f"rank {x.rank}", f"rank {x.rank} and {y.rank}")


def _of_sequences(
    a: StepRecord, b: StepRecord, pairs: Sequence[tuple[_Sequence, _Sequence]], bound: float
) -> Iterator[Located]:
    for name in ("ref_logprob_sums", "logprob_sums", "scores"):
        known = [
            (x, y, a.ranks[x.rank][name][x.place], b.ranks[y.rank][name][y.place])
            for x, y in pairs
            if name in a.ranks[x.rank] and name in b.ranks[y.rank]
        ]
        wrong = [each for each in known if _wrong(np.asarray(each[2]), np.asarray(each[3]), bound)]
        if wrong:
            x, y, *values = wrong[0]
            counts = len(wrong), len(known), "sequences"
            yield Located("forward", name, _both(x, y), _number(values[0]), _number(values[1]), *counts)


def _rollout(a: StepRecord, b: StepRecord, bound: float) -> Iterator[Located]:
    """Numbers of a rollout's responses and their tokens."""
    sides = [_responses(side) for side in (a, b)]
    for name in (*_OF_ROLLOUT, "counts", "ended"):
        first: Any = None
        differing, total = 0, 0
        for number, (rank, own) in sides[0].items():
            rank_b, other = sides[1].get(number, (0, {}))
            if name not in own or name not in other:
                continue
            total += 1
            short = own[name].shape != other[name].shape
            wrong = np.ones(1, dtype=bool) if short else _wrong(own[name], other[name], bound)
            if wrong.any():
                differing += 1
                at = int(np.argmax(wrong))
                first = first or (number, rank, at, own[name], other[name], short)
        if first is not None:
            number, rank, at, x, y, short = first
            words = [f"{len(side)} tokens" for side in (x, y)] if short else [_number(side[at]) for side in (x, y)]
            where = f"response {number:,} (rank {rank})" + (f", token {at:,}" if len(x) > 1 and not short else "")
            yield Located("rollout", name, where, words[0], words[1], differing, total, "responses")


def _responses(record: StepRecord) -> dict[int, tuple[int, dict[str, np.ndarray]]]:
    found = {}
    for rank, tensors in enumerate(record.ranks):
        if "rollout_numbers" not in tensors:
            continue
        begin = 0
        for place, (number, length) in enumerate(
            zip(tensors["rollout_numbers"], tensors["rollout_lengths"], strict=True)
        ):
            own = {}
            for name in (*_OF_ROLLOUT, "counts", "ended"):
                values = tensors.get(f"rollout_{name}")
                if values is not None:
                    is_token = len(values) != len(tensors["rollout_numbers"]) or name not in (
                        "scores",
                        "counts",
                        "ended",
                    )
                    own[name] = values[begin : begin + int(length)] if is_token else values[place : place + 1]
            found[int(number)] = (rank, own)
            begin += int(length)
    return found


def _figures(a: TracedRecord, b: TracedRecord, bound: float) -> Iterator[Located]:
    ours, theirs = a.record.head.figures, b.record.head.figures
    for name in sorted(dict.fromkeys((*ours, *theirs)), key=lambda name: name not in _OF_THE_LOSS):
        x, y = ours.get(name), theirs.get(name)
        if x is None or y is None or _wrong(np.asarray(x), np.asarray(y), bound):
            part = "backward" if name == "grad_norm" else "optimizer" if name == "learning_rate" else "forward"
            yield Located(part, name, "the whole step", _number(x), _number(y))


def _layers(a: TracedRecord, b: TracedRecord, parts: Sequence[str], bound: float) -> Iterator[Located]:
    """Sums of modules and weights; on as many ranks, rank by rank."""
    for part in parts:
        for model in (name for name in a.layers if name in b.layers):
            ours, theirs = a.layers[model], b.layers[model]
            if len(ours) != len(theirs) or part in ("weights before", "gradient", "weights after"):
                ours, theirs = [_summed(ours, part)], [_summed(theirs, part)]
            else:
                ours, theirs = ([table.get(part, {}) for table in side] for side in (ours, theirs))
            names = [name for name in ours[0] if name in theirs[0]]
            alone = _of_one_run(ours, theirs) if part in TRACED[2:4] else []
            names += alone
            if part == _OWN_GRADIENT or alone:
                names.sort(key=partial(_backward_place, a))
            whole = math.sqrt(sum(table[name][2] for table in ours for name in table)) or 1.0
            wrong = []
            for name in names:
                for rank, (x, y) in enumerate(zip(ours, theirs, strict=True)):
                    own, other = x.get(name), y.get(name)
                    if name in alone and own is not other:  # not None in both
                        wrong.append((name, rank, own, other))
                        break
                    scale = whole if "gradient" in part else None
                    if own is not None and other is not None and _sums_differ(own, other, bound, scale):
                        wrong.append((name, rank, own, other))
                        break
            if wrong:
                name, rank, own, other = wrong[0]
                where = name.removeprefix("model.") + (f" (rank {rank})" if len(ours) > 1 else "")
                words = [
                    "none" if side is None else f"norm {math.sqrt(side[2]):.9g}, sum {side[1]:.9g}"
                    for side in (own, other)
                ]
                whose = _CALLED.get(part, part)
                whose = whose if len(a.layers) == 1 else f"{whose} ({model})"
                counts = len(wrong), len(names), _UNITS.get(part, "weights")
                yield Located(_part(part), whose, where, words[0], words[1], *counts)


def _of_one_run(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names that have a gradient in one of two runs: a weight is frozen in the other, or no gradient reaches it."""
    known: list[dict[str, None]] = [dict.fromkeys(name for table in side for name in table) for side in (ours, theirs)]
    if not all(known):
        return []
    return [name for name in known[0] | known[1] if (name in known[0]) != (name in known[1])]


def _backward_place(a: TracedRecord, name: str) -> float:
    """The place of a module or a weight in the backward: that of a weight is after its module's output."""
    for tables in a.layers.values():
        order = [*tables[0].get("backward", {})]
        if name in order:
            return float(order.index(name))
        if name.rpartition(".")[0] in order:
            return order.index(name.rpartition(".")[0]) + 0.5
    return math.inf


def _part(part: str) -> str:
    return {"weights before": WEIGHTS, "weights after": "optimizer", "forward": "forward"}.get(part, "backward")


def _summed(tables: Sequence[Mapping[str, Any]], part: str) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for table in tables:
        for name, (bits, total, squares) in table.get(part, {}).items():
            own = found.setdefault(name, [0, 0.0, 0.0])
            own[:] = [(own[0] + int(bits, 16)) % 2**64, own[1] + total, own[2] + squares]
    return {name: [f"{bits:016x}", *rest] for name, (bits, *rest) in found.items()}


def _sums_differ(a: Sequence[Any], b: Sequence[Any], bound: float, scale: float | None) -> bool:
    if not bound:
        return bool(a[0] != b[0])
    if not all(map(math.isfinite, (*a[1:], *b[1:]))):
        return str(a[1:]) != str(b[1:])  # NaN is as NaN
    size = math.sqrt(max(a[2], b[2])) if scale is None else scale
    return abs(a[1] - b[1]) > bound * size or abs(math.sqrt(a[2]) - math.sqrt(b[2])) > bound * size


def _wrong(a: np.ndarray, b: np.ndarray, bound: float) -> np.ndarray:
    """True where numbers differ by more than `bound`; what is not finite, where it is not the same."""
    wrong = np.asarray((a != b) & ~((a != a) & (b != b)))
    if not bound or a.dtype.kind != "f":
        return wrong
    with np.errstate(invalid="ignore", over="ignore"):
        is_near = np.abs(a - b) <= bound * np.maximum(1.0, np.abs(a))
    return wrong & ~(np.isfinite(a) & np.isfinite(b) & is_near)


def _number(value: Any) -> str:
    if value is None:
        return "nothing"
    plain = value.item() if isinstance(value, np.generic) else value
    return f"{plain:.9g}" if isinstance(plain, float) else json.dumps(plain)[:_MOST_WORDS]
