"""Which figures are signs that a run has diverged, and which are those of a run that learns; they are said once, noted
for the report, and not said again by a run that is resumed."""

from __future__ import annotations

import json
import math

import pytest

from training.utils.run.divergence import (
    EQUAL_PAIRS,
    GROWN,
    WINDOW,
    ZERO_STEPS,
    DivergenceWatch,
    History,
    Uniform,
    signs,
)
from training.utils.run.metrics import MetricsWriter
from training.utils.run.run_folder import DIVERGENCE, LOGS

TOKENS = Uniform(math.log(384), "all 384 tokens")
LOSS, HELD_OUT, NORM = "train/loss", "eval/loss", "train/grad_norm"


def history(losses=(), norms=(), held_out=()):
    """One line a step, then one for each evaluation, after the last step."""
    kept = History()
    count = max(len(losses), len(norms))
    for step in range(count):
        figures = {name: part[step] for name, part in ((LOSS, losses), (NORM, norms)) if step < len(part)}
        kept.add(step + 1, figures, LOSS, HELD_OUT)
    for loss in held_out:
        kept.add(count or 1, {HELD_OUT: loss}, LOSS, HELD_OUT)
    return kept


def test_a_loss_that_rises_to_the_uniform_one():
    learned = [3.0] * WINDOW
    assert signs(history(learned + [5.9] * WINDOW), TOKENS) == {}  # still below it
    found = signs(history(learned + [TOKENS.nats] * WINDOW), TOKENS)
    assert found["loss"].startswith(
        "the loss has risen to 5.951 nats (a model that finds all 384 tokens equally likely has 5.951) from 3: the run "
        "has diverged"
    )
    skipped = [TOKENS.nats] * 4 + [float("nan")] + [TOKENS.nats] * 6  # a skipped step hides no divergence
    assert signs(history(learned + skipped), TOKENS)["loss"].startswith("the loss has risen to 5.951 nats")
    # One step of a bad batch is none.
    assert signs(history(learned + [20.0]), TOKENS) == {}
    assert signs(history(learned + [TOKENS.nats] * WINDOW), None) == {}


def test_a_model_that_never_learned_is_one_at_the_end_alone():
    untrained = history([6.1] * 5, held_out=[6.0])
    assert signs(untrained, TOKENS) == {}
    assert "the model has diverged, or learned nothing" in signs(untrained, TOKENS, at_end=True)["loss"]
    assert "5.95 nats" in signs(history([5.95] * 3), TOKENS, at_end=True)["loss"]  # without held-out rows
    assert signs(history(), TOKENS, at_end=True) == {}
    # In bfloat16 a loss read of equal logits may be a little below the logarithm.
    assert "loss" in signs(history(held_out=[TOKENS.nats * 0.9995]), TOKENS, at_end=True)
    assert signs(history([0.1] * WINDOW, held_out=[9.0]), TOKENS, at_end=True) == {}  # it overfits
    kept = History()
    kept.add(0, {HELD_OUT: 6.2}, LOSS, HELD_OUT)  # before training
    assert signs(kept, TOKENS, at_end=True) == {}


@pytest.mark.parametrize("uniform", [TOKENS, EQUAL_PAIRS, None])
@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_held_out_loss_that_is_no_number(loss, uniform):
    """Also of a loss without a uniform one. An evaluation after it that is finite takes the sign back."""
    for at_end in (False, True):
        found = signs(history([0.5] * 3, held_out=[0.5, loss]), uniform, at_end)
        assert found["loss"].startswith(f"the held-out loss is {loss}: the run has diverged; lower the learning rate")
        assert signs(history([0.5] * 3, held_out=[loss, 0.5]), uniform, at_end) == {}


def test_a_loss_of_pairs_begins_at_the_uniform_one():
    assert signs(history([0.69] * WINDOW, held_out=[0.693]), EQUAL_PAIRS, at_end=True) == {}
    assert "learned nothing" in signs(history([0.75] * WINDOW, held_out=[0.75]), EQUAL_PAIRS, at_end=True)["loss"]
    risen = signs(history([0.3] * WINDOW + [0.7] * WINDOW), EQUAL_PAIRS)
    assert "both responses of a pair equally likely has 0.6931) from 0.3: the run has diverged" in risen["loss"]


def test_gradients_that_are_exactly_zero():
    assert signs(history(norms=[1.0] + [0.0] * (ZERO_STEPS - 1)), None) == {}
    found = signs(history(norms=[1.0] + [0.0] * ZERO_STEPS), None)
    assert list(found) == [f"{NORM} zero"]
    assert found[f"{NORM} zero"].startswith(
        f"{NORM} has been exactly 0 for the last {ZERO_STEPS} steps: nothing trains"
    )
    assert signs(history(norms=[0.0] * 5 + [1e-30]), None) == {}
    assert signs(history(norms=[1.0, 0.0]), None, at_end=True)  # nothing follows


@pytest.mark.parametrize("skipped", [float("inf"), float("nan")])
def test_gradients_that_grow_without_end(skipped):
    first = [2.0] * WINDOW
    assert signs(history(norms=first + [1.5 * GROWN] * WINDOW), None) == {}
    found = signs(history(norms=first + [3 * GROWN, skipped] * WINDOW), None)
    assert found[f"{NORM} grown"].startswith(
        f"{NORM} has a median of 300 over {WINDOW} steps, up from 2 at the beginning: it keeps growing"
    )
    assert signs(history(norms=first + [1e6] + [2.0] * 4), None) == {}  # a spike
    assert signs(history(norms=[0.0] * WINDOW + [1.0] * WINDOW), None) == {}  # it began with nothing to learn


@pytest.mark.parametrize("skipped", [float("inf"), float("nan")])
def test_a_run_that_ends_in_skipped_steps(skipped):
    kept = history(norms=[2.0] + [skipped] * ZERO_STEPS)
    assert signs(kept, None) == {}  # each is said as it happens
    assert signs(kept, None, at_end=True)[f"{NORM} infinite"].startswith(
        f"{NORM} has not been finite for the last {ZERO_STEPS} steps, which were skipped: the run has diverged"
    )
    assert signs(history(norms=[2.0] + [skipped] * (ZERO_STEPS - 1)), None, at_end=True) == {}
    assert signs(history(norms=[skipped] * ZERO_STEPS + [2.0]), None, at_end=True) == {}


NAMES = (Uniform(math.log(100), "all 100 tokens"), "train/loss", "eval/loss")
LOSSES = [2.0] * WINDOW + [4.61] * (WINDOW + 3)


def run(folder, steps, first=0):
    with MetricsWriter(folder, True, first) as metrics:
        watch = DivergenceWatch(folder, True, *NAMES[:2], eval_loss=NAMES[2])
        for step in range(first, steps):
            figures = {"train/loss": LOSSES[step], "train/grad_norm": 1.0}
            metrics.write(step + 1, figures)
            watch.see(step + 1, figures)
        return watch.closing()


def test_a_sign_is_said_once_and_stands_in_the_last_line(tmp_path, capsys):
    closing = run(tmp_path, len(LOSSES))
    (said,) = [line for line in capsys.readouterr().out.splitlines() if "warning" in line]
    assert said.startswith(f"warning: step {2 * WINDOW}: the loss has risen to 4.61 nats")
    assert closing.startswith("; warning: the loss has risen to 4.61 nats")
    (noted,) = [json.loads(line) for line in (tmp_path / DIVERGENCE).read_text().splitlines()]
    assert noted["step"] == 2 * WINDOW and noted["sentence"] in said
    assert DIVERGENCE in LOGS  # it is cut with the others when a run is resumed


def test_a_resumed_run_knows_what_was_before(tmp_path, capsys):
    assert run(tmp_path, WINDOW + 5) == "" and not (tmp_path / DIVERGENCE).exists()
    other = DivergenceWatch(tmp_path, False)  # another rank's
    for step in range(5):
        other.see(step, {"train/grad_norm": 0.0})
    assert "warning" not in capsys.readouterr().out and not (tmp_path / DIVERGENCE).exists()
    run(tmp_path, 2 * WINDOW + 1, first=WINDOW + 5)
    assert capsys.readouterr().out.count("warning") == 1
    assert "has risen" in run(tmp_path, len(LOSSES), first=2 * WINDOW + 1)
    assert "warning" not in capsys.readouterr().out  # said before it was resumed
    assert len((tmp_path / DIVERGENCE).read_text().splitlines()) == 1


def test_a_resumed_run_counts_the_steps_that_were_skipped_before(tmp_path):
    """metrics.jsonl writes their norm as null."""
    for first, steps in ((0, 2), (2, 4)):
        with MetricsWriter(tmp_path, True, first) as metrics:
            watch = DivergenceWatch(tmp_path, True)
            for step in range(first, steps):
                figures = {"critic/grad_norm": math.inf, "train/loss": 1.0}
                metrics.write(step + 1, figures)
                watch.see(step + 1, figures)
            closing = watch.closing()
    assert closing.startswith("; warning: critic/grad_norm has not been finite for the last 4 steps")
