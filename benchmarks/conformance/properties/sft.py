"""Properties of supervised fine-tuning. Each takes the trainer's `run` (a case to what was seen) and its further
settings, and returns what two methods saw of it."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.conformance.material import (
    END,
    OTHER_WORDS,
    TRAINED_WORDS,
    chats,
    make_model,
    make_tokenizer,
    texts,
    tool_chat,
)
from benchmarks.conformance.seen import Document, Seen, SftCase, documents, off, plain_gradient
from benchmarks.conformance.verdicts import Sight, View, size

Run = Callable[[SftCase], Seen]
# Rounding of float32 is below 1e-6 of a gradient and below 1e-4 of the weights' change.
MOST = 1e-3
RATE = 1e-2


def _rows(seen: Seen, step: int = 0) -> list[Document]:
    try:
        return documents(seen.batches[step])
    except AssertionError:
        return documents(seen.batches[step], "trained")


def _plain(
    seen: Seen, step: int = 0, rows: list[Document] | None = None, smoothing: float = 0.0
) -> tuple[float, torch.Tensor]:
    model = make_model(make_tokenizer())
    return plain_gradient(model, seen.weights[step], _rows(seen, step) if rows is None else rows, smoothing)


def _moved(seen: Seen, step: int = 0) -> torch.Tensor:
    """The gradient as plain SGD applied it."""
    return (seen.weights[step] - seen.weights[step + 1]) / RATE


def _same(run: Run, cases: Mapping[str, SftCase], same_rows: bool = True) -> Sight:
    """The gradients of all cases are alike, and each is that of the token mean over its rows."""
    seen = {name: run(case) for name, case in cases.items()}
    base, first = next(iter(seen.items()))
    distances = {name: off(_given(each), _given(first)) for name, each in seen.items() if each is not first}
    beside = {name: off(_moved(each), _plain(each)[1]) for name, each in seen.items()}
    note = ""
    losses = {}
    if not first.gradients:
        losses = {name: abs(each.losses[0] / _plain(each)[0] - 1) for name, each in seen.items()}
    if same_rows:
        rows = {name: sorted(_rows(each), key=str) for name, each in seen.items()}
        differing = [name for name in rows if rows[name] != rows[base]]
        note = f"the rows themselves differ from {base}'s: {', '.join(differing)}" if differing else ""
    views = [
        worst(f"gradient beside {base}", distances),
        worst("update beside the token mean of the same rows", beside),
    ]
    if not first.gradients:  # both are from the weights: the loss is another sight
        views.append(worst("logged loss beside the token mean of the same rows", losses))
    return Sight(views, note)


def _given(seen: Seen, step: int = 0) -> torch.Tensor:
    """The gradient as the optimizer was given it; as it was applied where a trainer does not show it."""
    return seen.gradients[step] if seen.gradients else _moved(seen, step)


def worst(method: str, distances: Mapping[str, float]) -> View:
    name = max(distances, key=lambda each: math.inf if math.isnan(distances[each]) else distances[each])
    return View(method, distances[name] < MOST, f"{size(distances[name])} ({name})")


def accumulation(run: Run, extra: Mapping[str, Any]) -> Sight:
    layouts = {"8x1": (8, 1), "4x2": (4, 2), "2x4": (2, 4), "1x8": (1, 8)}
    rows = chats(8)
    return _same(run, {name: SftCase(rows, micro, many, extra=extra) for name, (micro, many) in layouts.items()})


def label_smoothing(run: Run, extra: Mapping[str, Any]) -> Sight:
    rows, extra = chats(8), {**extra, "label_smoothing_factor": 0.1}
    seen = {name: run(SftCase(rows, *layout, extra=extra)) for name, layout in {"8x1": (8, 1), "2x4": (2, 4)}.items()}
    plain = {name: _plain(each, smoothing=0.1) for name, each in seen.items()}
    losses = {name: abs(each.losses[0] / plain[name][0] - 1) for name, each in seen.items()}
    moved = {name: off(_moved(each), plain[name][1]) for name, each in seen.items()}
    return Sight(
        [worst("logged loss beside the smoothed token mean", losses), worst("update beside that of the same", moved)]
    )


def padding_width(run: Run, extra: Mapping[str, Any]) -> Sight:
    rows = chats(8)
    return _same(
        run,
        {
            f"{width} tokens" if width else "the longest row": SftCase(rows, pad_to=width, extra=extra)
            for width in (None, 128, 200)
        },
    )


def padding_side(run: Run, extra: Mapping[str, Any]) -> Sight:
    """Not run where rows that should be padded on the left begin with a token all the same."""
    rows, seen = chats(8), []

    def kept(case: SftCase) -> Seen:
        seen.append(run(case))
        return seen[-1]

    sight = _same(kept, {side: SftCase(rows, padding_side=side, extra=extra) for side in ("right", "left")})
    masks = [micro.mask for micro in seen[1].batches[0] if micro.mask is not None]
    if masks and all(bool(mask[:, 0].all()) for mask in masks):
        raise NotImplementedError("pads on the right, whatever the tokenizer says")
    return Sight(sight.views, sight.note if masks else "no mask was seen, so the side is the tokenizer's word alone")


def packing(run: Run, extra: Mapping[str, Any]) -> Sight:
    """Packed rows, all of one optimizer step, beside the token mean of the conversations that they hold, and beside
    the same trainer's gradient of them unpacked."""
    rows = chats(8)
    packed = run(SftCase(rows, 8, 1, packing=True, extra=extra))
    plain = run(SftCase(rows, 8, 1, extra={name: value for name, value in extra.items() if name != "packing_strategy"}))
    inside = sum(len(micro.ids) for micro in packed.batches[0])  # Threestep's records have a row for each conversation
    missing = len(set(_rows(plain)) - set(_rows(packed)))
    note = (f"8 conversations in {inside} rows" if inside < len(rows) else "") + (
        f"; {missing} of them not found whole in the packed rows" if missing else ""
    )
    return Sight(
        [
            worst("gradient beside unpacked rows", {"packed": off(_given(packed), _given(plain))}),
            worst(
                "update beside the token mean of the conversations",
                {"packed": off(_moved(packed), _plain(packed, rows=_rows(plain))[1])},
            ),
        ],
        note,
    )


def ranks(run: Run, extra: Mapping[str, Any]) -> Sight:
    rows = chats(8)
    cases = {"1 rank": SftCase(rows, 8, 1, extra=extra)}
    cases |= {f"2 ranks, {m}x{a}": SftCase(rows, m, a, ranks=2, extra=extra) for m, a in ((4, 1), (2, 2))}
    return _same(run, cases)


def objective(run: Run, extra: Mapping[str, Any]) -> Sight:
    """The loss as logged and the update are those of the mean over all tokens that carry loss."""
    seen = run(SftCase(chats(8), 4, 2, extra=extra))
    return _beside_plain(seen)


def whole_texts(run: Run, extra: Mapping[str, Any]) -> Sight:
    """The same of texts, every token of which is learned but the first, which nothing predicts."""
    return _beside_plain(run(SftCase(texts(8), 4, 2, extra=extra)))


def _beside_plain(seen: Seen) -> Sight:
    loss, gradient = _plain(seen)
    return Sight(
        [
            worst(
                "logged loss beside the token mean",
                {f"{seen.losses[0]:.4f} for {loss:.4f}": abs(seen.losses[0] / loss - 1)},
            ),
            worst("update beside the token mean", {"4x2": off(_moved(seen), gradient)}),
        ]
    )


def chat_tokens(run: Run, extra: Mapping[str, Any]) -> Sight:
    """Of a conversation with a system prompt, a tool and two turns: each word of the assistant and its closing token
    carry loss, nobody else's words do."""
    seen = run(SftCase([tool_chat(extra.get("arguments_as_text", False))] * 2, 2, 1, max_length=2048, extra=extra))
    return Sight([_spoken(seen, "labels"), _spoken(seen, "trained")])


def _spoken(seen: Seen, by: str) -> View:
    method = {"labels": "labels of the batch", "trained": "tokens whose prediction gets a gradient"}[by]
    tokenizer = make_tokenizer()
    row = documents(seen.batches[0], by)[0]
    text = tokenizer.decode([token for token, counts in zip(row.ids, row.counts, strict=True) if counts])
    lacking = [word for word in TRAINED_WORDS if word not in text]
    beyond = [word for word in OTHER_WORDS if word in text]
    ends = text.count(END)
    parts = [f"without {' '.join(lacking)}"] * bool(lacking) + [f"with {' '.join(beyond)}"] * bool(beyond)
    parts += [f"{ends} closing tokens of 3"] * (ends != 3)
    return View(method, not parts, "; ".join(parts) or "the three answers and their closing tokens")


def truncated_rows(run: Run, extra: Mapping[str, Any]) -> Sight:
    """Rows that are cut to 28 tokens: what is left carries loss as it did uncut, rows with nothing left count nothing,
    and the gradient is that of the token mean over the rest."""
    rows, most = chats(8), 28
    whole, cut = _rows(run(SftCase(rows, extra=extra))), run(SftCase(rows, 4, 2, max_length=most, extra=extra))
    left = _rows(cut)
    beginnings = {(row.ids[:end], row.counts[:end]) for row in whole for end in range(1, len(row.ids) + 1)}
    changed = [row for row in left if (row.ids, row.counts) not in beginnings]
    long = [row for row in left if len(row.ids) > most]
    learned = sum(sum(row.counts) for row in left)
    view = View(
        "rows beside the uncut ones",
        not changed and not long,
        f"{len(left)} rows, {learned} tokens learned"
        + f"; {len(changed)} are no beginning of an uncut row" * bool(changed)
        + f"; {len(long)} are longer" * bool(long),
    )
    dropped = len(whole) - len(left)
    note = f"{dropped} of 8 rows are dropped" if dropped else ""
    finite = bool(_given(cut).isfinite().all())
    other = View("gradient is finite", finite, "finite" if finite else "not finite")
    return Sight(
        [view, worst("update beside the token mean of what is left", {"4x2": off(_moved(cut), _plain(cut)[1])}), other],
        note,
    )


def last_partial_batch(run: Run, extra: Mapping[str, Any]) -> Sight:
    """An epoch of 11 rows as 2x4: every row once; the second step, 3 rows in 2 micro-batches, is their token mean."""
    rows = chats(11)
    seen = run(SftCase(rows, 2, 4, steps=-1, extra={**extra, "num_train_epochs": 1}))
    met = sum(len(_rows(seen, step)) for step in range(len(seen.batches)))
    last = len(seen.batches) - 1
    _, gradient = _plain(seen, last)
    return Sight(
        [
            View("rows of the epoch", met == len(rows), f"{met} of {len(rows)}"),
            View("steps of the epoch", last == 1, f"{last + 1} of 2"),
            worst(
                "last gradient beside the token mean",
                {f"{len(_rows(seen, last))} rows": off(_given(seen, last), gradient)},
            ),
            worst(
                "last update beside the token mean",
                {f"{len(_rows(seen, last))} rows": off(_moved(seen, last), gradient)},
            ),
        ]
    )


def resume(run: Run, extra: Mapping[str, Any]) -> Sight:
    """Four steps of AdamW under a linear schedule, and the last two of them again from the checkpoint after two."""
    folder = tempfile.mkdtemp()
    schedule = {"optim": "adamw_torch", "lr_scheduler_type": "linear", "learning_rate": 1e-3}
    common = {**extra, **schedule, "output_dir": folder, "save_strategy": "steps", "save_steps": 2}
    case = SftCase(chats(24), 2, 2, steps=4, extra=common)
    whole = run(case)
    resumed = run(replace(case, extra={**common, "resume_from": Path(folder) / "checkpoint-2"}))
    weights = off(resumed.weights[-1], whole.weights[-1])
    later = whole.losses[2:4]
    losses = max(abs(one - other) for one, other in zip(resumed.losses[-2:], later, strict=True))
    return Sight(
        [
            View("final weights beside unbroken", weights == 0.0, "bit for bit" if weights == 0 else size(weights)),
            View("losses of the later steps", losses == 0.0, "equal" if losses == 0 else f"by up to {losses:.2g}"),
        ]
    )
