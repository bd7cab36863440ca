"""An explained step: shares, held-out responses, lessons, rules and turns, against plain float64 PyTorch."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.support import plain_losses
from threestep.plugins.audit.quantities.models import sequences_of
from threestep.plugins.audit.quantities.step import AuditedStep
from threestep.plugins.explain.explanation import Questions, explain
from threestep.plugins.explain.forward.model import Reads, RecordedModel, of_logits, of_tangents
from threestep.plugins.explain.forward.moving import CannotMoveError
from threestep.plugins.explain.held_out import HeldOutResponses, change_of, read_held_out
from threestep.plugins.explain.page import page
from threestep.plugins.explain.rules import OtherRule, counterfactual, rule_of
from threestep.plugins.explain.shares import derivative, model_of, shares_of, slopes_of
from threestep.plugins.explain.table import COLUMNS, SEQUENCE_COLUMNS
from threestep.plugins.explain.taught import taught
from threestep.plugins.explain.tests.explained_steps import (
    KINDS,
    MOST_APART,
    MOST_IN_FLOAT32,
    PlainStep,
    advantages_apart,
    apart,
    conversations,
    drawn_step,
)
from threestep.plugins.explain.text import as_lines
from threestep.plugins.explain.turns import parts_of, turns_of
from threestep.plugins.explain.updates import Update, dot, update_of
from training.utils.base.errors import ThreestepError


@cache
def _drawn(kind: str, seed: int = 3):
    return PlainStep(seed, kind).made()


def _step(kind: str) -> AuditedStep:
    return AuditedStep(_drawn(kind).record)


def _held(step: AuditedStep) -> HeldOutResponses:
    return HeldOutResponses(["a", "b"], [np.array([3, 5, 2, 9]), sequences_of(step)[1]], [1, 2])


@pytest.mark.parametrize("number", range(10))
def test_shares_equal_a_gradient_for_each_token(number: int):
    token, total = apart(drawn_step(number, 11))
    assert token < MOST_APART
    assert total < MOST_APART


@pytest.mark.parametrize("number", range(5))
def test_passes_in_float32_leave_a_hundred_thousandth(number: int):
    assert max(apart(drawn_step(number, 11), torch.float32)) < MOST_IN_FLOAT32


def test_every_loss_and_estimator_is_drawn():
    """But the estimator of a teacher alone."""
    from training.step2_dpo.loss import LOSSES
    from training.step3_ppo.advantages import ESTIMATORS
    from training.step3_ppo.losses import POLICY_LOSSES

    assert {*plain_losses.PAIR_LOSSES, plain_losses.RANKING_LOSS, *plain_losses.MARKED_LOSSES} >= LOSSES.keys()
    assert {*plain_losses.POLICY_LOSSES} == POLICY_LOSSES.keys()
    assert {*plain_losses.ESTIMATORS} == ESTIMATORS.keys() - {"none"}


def test_another_estimators_advantages_are_those_of_its_paper():
    drawn = [drawn_step(KINDS.index("policy") + len(KINDS) * turn, 11) for turn in range(4)]
    assert sum(each.other is not None for each in drawn) > 1
    assert max(map(advantages_apart, drawn)) < MOST_APART


def test_plain_descent_is_a_pass_that_must_be_asked_for():
    step = _step("policy")
    update = update_of(step)
    asked, without = shares_of(step, update, plain=True), shares_of(step, update)
    assert set(asked.parts) - set(without.parts) == {"plain"}
    plain = sum(float((step.state("gradients.")[name] * value).sum()) for name, value in update.plain.items())
    assert asked.parts["plain"].sum() == pytest.approx(plain, rel=1e-9)


def test_the_share_of_the_gradient_is_along_its_part():
    step = _step("sft")
    update = update_of(step)
    along = model_of(step).along(sequences_of(step), update.gradient)
    own = derivative(slopes_of(step), along)
    np.testing.assert_allclose(shares_of(step, update).parts["gradient"], own, atol=1e-9 * np.abs(own).sum())


@pytest.mark.parametrize("kind", ["sft", "reward"])
def test_directions_together_are_directions_alone(kind: str, monkeypatch):
    step = _step(kind)
    update, model, sequences = update_of(step), model_of(step), sequences_of(step)
    read, both = model.along_all(sequences, [update.whole, update.earlier])

    def refuse(*_: object, **__: object) -> None:
        raise CannotMoveError

    assert _same(read, model.read(sequences))
    for own, direction in zip(both, (update.whole, update.earlier), strict=True):
        assert _same(own, model.along(sequences, direction))
    monkeypatch.setattr("threestep.plugins.explain.forward.moving._Call.result", refuse)
    again, alone = model.along_all(sequences, [update.whole, update.earlier])
    assert _same(again, read)
    assert all(_same(own, other) for own, other in zip(alone, both, strict=True))


def _same(one: Reads, other: Reads) -> bool:
    return all(
        np.allclose(values, getattr(other, name), rtol=1e-9, atol=1e-12)
        for name in ("logprobs_T", "normalizers_T", "entropies_T", "scores_S")
        if (values := getattr(one, name)) is not None
    )


def test_tangents_of_logits_are_their_derivatives():
    torch.manual_seed(2)
    logits, tangent = torch.randn(2, 2, 3, 7, dtype=torch.float64).unbind(0)
    targets = torch.randint(7, (2, 3))
    want = torch.func.jvp(lambda own: of_logits(own, targets), (logits,), (tangent,))[1]
    for name, values in of_tangents(logits, targets, tangent).items():
        torch.testing.assert_close(values, want[name], rtol=1e-12, atol=1e-12)


def test_the_parts_of_an_update_sum_to_it():
    update = update_of(_step("sft"))
    for name, whole in update.whole.items():
        parts = update.gradient[name] + update.earlier[name] + update.decay[name]
        np.testing.assert_allclose(parts, whole, rtol=0, atol=1e-15)


def _scaled(update: Update, by: float) -> Update:
    return replace(update, whole={name: by * value for name, value in update.whole.items()})


def test_the_error_to_first_order_falls_with_the_square_of_the_update():
    step = _step("sft")
    update, before, held = update_of(step), model_of(step), _held(step)
    errors = []
    for by in (0.3, 0.03, 0.003):
        own = _scaled(update, by)
        weights = {name: value + own.whole.get(name, 0.0) for name, value in step.state("weights_before.").items()}
        after = RecordedModel(weights, step.head.model, temperature=before.temperature)
        change = change_of(held, before, after, own)
        errors.append(float(np.abs(change.real - change.first_order).sum()))
    assert 50 < errors[0] / errors[1] < 200  # the third order is still seen
    assert errors[1] / errors[2] == pytest.approx(100, rel=0.1)


def test_shares_of_lessons_sum_to_what_the_gradient_did_to_a_response():
    step = _step("sft")
    held, update = _held(step), update_of(step)
    found = taught([step], held)
    gradient = change_of(held, model_of(step), model_of(step), replace(update, whole=update.gradient))
    assert found.told == pytest.approx(float(gradient.first_order.sum()), rel=1e-6)
    whole = change_of(held, model_of(step), model_of(step), update)
    assert found.first_order == pytest.approx(float(whole.first_order.sum()), rel=1e-6)


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "policy"])
def test_the_same_rule_is_the_same_step(kind: str):
    step = _step(kind)
    same = counterfactual(step, update_of(step), OtherRule("as it is", {}))
    assert same.cosine == pytest.approx(1.0, abs=1e-9)
    assert same.size == pytest.approx(1.0, abs=1e-6)
    assert not same.turned_T.any()


def test_a_rule_is_the_step_that_it_says():
    """The record of the same samples under another loss has the gradient that the rule finds."""
    step = _step("policy")
    kl_coef = float(step.settings["kl_coef"]) + 0.5
    found = counterfactual(step, update_of(step), rule_of(f"loss=cispo kl_in=loss kl_coef={kl_coef}", "policy"))
    other = {"kl_coef": kl_coef, "kl_in": "loss", "policy_loss": "cispo"}
    other |= {"reduction": "token mean", "clip_low": 1.0, "clip_high": 4.0}
    remade = AuditedStep(_drawn("policy").record, {**step.settings, **other})
    want = counterfactual(remade, update_of(step), OtherRule("as it is", {}))
    for name, value in want.update.whole.items():
        np.testing.assert_allclose(found.update.whole[name], value, rtol=1e-12, atol=1e-15)
    assert found.cosine < 1.0 - 1e-6


def test_an_advantage_brings_its_defaults_which_are_those_of_a_run():
    assert rule_of("advantage=rloo", "policy").settings == {"advantage": "rloo", "norm_by": "none", "whiten": False}
    assert rule_of("advantage=grpo, norm_by=batch", "policy").settings["norm_by"] == "batch"
    assert rule_of("reduction=sequence_mean", "sft").settings == {"reduction": "sequence mean"}
    from threestep.plugins.audit.quantities.step import _BY_GROUP, _WHITENED
    from threestep.plugins.explain.rules import _OF_LOSSES, _OF_OTHER_LOSSES
    from training.step3_ppo.advantages import ESTIMATORS
    from training.step3_ppo.losses import POLICY_LOSSES

    assert {name for name, each in ESTIMATORS.items() if each.whitens} == set(_WHITENED)
    words = {"token-mean": "token mean", "seq-mean-token-mean": "sequence mean"}
    for name, each in POLICY_LOSSES.items():
        own = (words[each.aggregation], each.clip_low, each.clip_high)
        assert _OF_LOSSES.get(name, _OF_OTHER_LOSSES) == own, name
    assert set(_BY_GROUP) <= {name for name, each in ESTIMATORS.items() if each.norms}


@pytest.mark.parametrize(
    "said, words", [("temperature=2", "loss settings"), ("loss", "NAME=VALUE"), ("kl_cof=1", "kl_coef")]
)
def test_a_rule_of_the_samples_is_refused(said: str, words: str):
    with pytest.raises(ThreestepError, match=words):
        rule_of(said, "policy")


def test_a_mask_of_the_user_decides_what_carries_loss():
    step = _step("sft")
    masks = {
        "same": lambda columns: columns["role"] == "trained",
        "less": lambda columns: (columns["role"] == "trained") & (columns["place"] > 3),
    }
    same, less = (explain([step], Questions(masks={name: mask})).rules[0] for name, mask in masks.items())
    assert same.cosine == pytest.approx(1.0, abs=1e-9) and less.cosine < 0.9999
    with pytest.raises(ThreestepError, match="a boolean for each of"):
        explain([step], Questions(masks={"wrong": lambda columns: columns["share"]}))


@pytest.mark.parametrize("kind", ["sft", "dpo", "reward", "policy"])
def test_the_table_has_known_columns_and_the_page_opens(kind: str):
    step = _step(kind)
    found = explain([step], Questions(_held(step) if kind != "reward" else None, is_taught=kind != "reward"))
    assert set(found.table.tokens) <= set(COLUMNS)
    assert set(found.table.sequences) <= set(SEQUENCE_COLUMNS)
    frame = found.to_pandas()
    assert len(frame) == len(step.tensor("token_ids"))
    assert frame["share"].sum() == pytest.approx(found.table.figures["change"])
    assert found.table.sequences["share"].sum() == pytest.approx(found.table.figures["change"])
    text = page(found)
    assert "Every token" in text
    assert ("Held-out responses" in text) == (kind != "reward")


def test_terms_of_a_policys_loss_sum_to_the_share():
    tokens = explain([_step("policy")], Questions()).table.tokens
    terms = sum(np.nan_to_num(tokens[name]) for name in ("share_policy", "share_kl", "share_entropy") if name in tokens)
    np.testing.assert_allclose(terms, tokens["share"], atol=1e-12)


def test_another_models_numbers_are_refused():
    record = _drawn("sft").record
    other = {name: value * (1.3 if "lm_head" in name else 1.0) for name, value in record.state.items()}
    step = AuditedStep(replace(record, state=other))
    with pytest.raises(ThreestepError, match="requires the recorded log-probabilities"):
        explain([step], Questions())
    record.ranks[0]["logprobs"] = np.where(record.ranks[0]["loss_mask"], -np.inf, 0.0)
    with pytest.raises(ThreestepError, match="requires the recorded log-probabilities"):
        explain([AuditedStep(record)], Questions())


def test_held_out_lines(tmp_path):
    path = tmp_path / "held.jsonl"
    path.write_text('{"prompt": "ab", "response": "c"}\n\n{"ids": [1, 2, 3], "begin": 2, "name": "mine"}\n')
    held = read_held_out(path, lambda text: [ord(letter) for letter in text], 0)
    assert [list(map(int, ids)) for ids in held.sequences] == [[97, 98, 99, 0], [1, 2, 3]]
    assert list(held.begins) == [2, 2]
    assert held.names[1] == "mine"
    path.write_text('{"prompt": "ab"}\n')
    with pytest.raises(ThreestepError, match="line 1: expected `prompt` and `response`"):
        read_held_out(path, lambda text: [1], None)


def test_the_command_writes_a_page_and_a_table(tmp_path, capsys):
    import pandas

    from threestep.plugins.audit.recording.files import write_record
    from threestep.plugins.explain.__main__ import main

    write_record(tmp_path / "record", _drawn("policy").record)
    held = tmp_path / "held.jsonl"
    held.write_text('{"ids": [3, 5, 2], "begin": 1}\n')
    own = [str(tmp_path / "record"), "--out", str(tmp_path / "out")]
    main([*own, "--held_out", str(held), "--with", "loss=cispo"])
    said = capsys.readouterr().out
    assert "along its update the loss" in said
    assert "what taught it" in said
    assert "<title>Explained: grpo, step 4" in (tmp_path / "out" / "explained.html").read_text()
    assert len(pandas.read_parquet(tmp_path / "out" / "tokens.parquet")) == len(_step("policy").tensor("token_ids"))
    with pytest.raises(ThreestepError, match="of one step; remove them"):
        main([*own, "--step", "3"])
    with pytest.raises(ThreestepError, match="is not a folder"):
        main([str(tmp_path / "nothing"), "--step", "3"])


def test_a_page_is_in_the_run_that_it_explains_and_no_page_is_lost(tmp_path, capsys):
    from threestep.plugins.audit.recording.files import write_record
    from threestep.plugins.explain.__main__ import main

    def written(*words: str) -> str:
        main([*words])
        return capsys.readouterr().out.splitlines()[-1].replace(f"{tmp_path}/", "")

    for place in ("run/records/step_000004", "alone"):
        write_record(tmp_path / place, PlainStep(3, "sft").made().record)
    place = "run/explained/step_000004"
    assert written(f"{tmp_path}/run", "--step", "4").startswith(f"written: {place}/explained.html, {place}/tokens.parq")
    assert f": {place}_2/explained.html" in written(f"{tmp_path}/run/records/step_000004")
    assert f": {place}_3/explained.html" in written(f"{tmp_path}/run", "--step", "4")
    assert ": explained/alone/explained.html" in written(f"{tmp_path}/alone")
    out = ("--out", str(tmp_path / "out"))
    assert "replace" not in written(f"{tmp_path}/alone", *out)
    assert written(f"{tmp_path}/alone", *out).endswith("out/tokens.parquet; they replace the earlier ones")


def test_a_record_without_weights_is_refused(tmp_path):
    from threestep.plugins.audit.recording.files import write_record
    from threestep.plugins.explain.records import whole_record

    write_record(tmp_path / "record", replace(_drawn("sft").record, state={}))
    with pytest.raises(ThreestepError, match="does not have the weights before and after the step"):
        whole_record(tmp_path / "record")


@pytest.mark.parametrize("kind", ["sft", "dpo", "policy"])
@pytest.mark.parametrize("seed", [3, 4])
def test_an_effect_is_what_leaving_a_sequence_out_takes_away(kind: str, seed: int):
    """Beside the update by the gradient of the others, and the share beside the same with Adam's root held."""
    step = AuditedStep(PlainStep(seed, kind).made().record)
    update, model, slopes, sequences = update_of(step), model_of(step), slopes_of(step), sequences_of(step)
    held = HeldOutResponses(["a"], [np.array([3, 5, 2, 9])], [1])
    mask_T = np.repeat(np.arange(len(sequences)), [len(ids) for ids in sequences]) == 2
    own = {
        name: values * ~mask_T if (values := getattr(slopes, name)) is not None else None
        for name in ("logprobs_T", "normalizers_T", "entropies_T")
    }
    others = model.gradient(sequences, Reads(**own))
    without = update_of(step, {name: others[name] for name in update.whole})
    by_weight = model.gradient(held.sequences, Reads(logprobs_T=held.mask.astype(float)))
    lesson = next(each for each in taught([step], held).lessons if each.sequence == 2)
    assert lesson.effect == pytest.approx(dot(by_weight, update.whole) - dot(by_weight, without.whole), rel=1e-6)
    part = {name: value - others[name] for name, value in step.state("gradients.").items()}
    share = sum((by_weight[name] * scale * part[name]).sum() for name, scale in update.scale.items())
    assert lesson.share == pytest.approx((1 - update.beta1) * update.clip * share, rel=1e-6)


@pytest.mark.parametrize("kind, other", [("sft", "others"), ("policy", "environment")])
def test_speakers_and_turns_of_each_sequence(kind: str, other: str):
    step = conversations(kind)
    turns = turns_of(step)
    assert turns is not None
    for sequence in range(len(step.rank_S)):
        own = step.sequence_T == sequence
        length = int(own.sum())
        assert list(turns.speaker_T[own]) == ["prompt", "model", other, *["model"] * (length - 3)]
        assert list(turns.turn_T[own]) == [0, 1, 1, *[2] * (length - 3)]


def test_a_step_without_conversations_has_no_turns():
    step = AuditedStep(PlainStep(3, "policy").made().record)
    assert turns_of(step) is None
    tokens = explain([step], Questions()).table.tokens
    assert not {"speaker", "turn"} & set(tokens)


@pytest.mark.parametrize("kind", ["sft", "policy"])
def test_the_table_the_page_and_the_terminal_have_the_turns(kind: str):
    step = conversations(kind)
    found = explain([step], Questions())
    tokens, sequences = found.table.tokens, found.table.sequences
    assert set(sequences["turns"]) == {2}
    between = tokens["place"] == 2
    assert set(tokens["role"][between]) == {"environment" if kind == "policy" else "others"}
    assert not tokens["share"][between].any()
    data = re.search(r'<script type="application/json" id="explained">(.*?)</script>', page(found))
    assert data is not None
    for sequence, own in enumerate(json.loads(data[1])["sequences"]):
        assert [part[0] for part in own["parts"]] == ["prompt", "model", *{*tokens["speaker"][between]}, "model"]
        assert sum(part[1] for part in own["parts"]) == (tokens["sequence"] == sequence).sum()
        assert sum(part[2] for part in own["parts"]) == pytest.approx(own["share"])
    line = next(line for line in as_lines(found) if "by turns of the model" in line)
    whole = found.table.figures["change"]
    first, second = (float(tokens["share"][tokens["turn"] == turn].sum()) / whole for turn in (1, 2))
    assert line == f"  by turns of the model: 1: {100 * first:.3g}%, 2: {100 * second:.3g}%"


def test_parts_follow_each_other():
    speakers = np.array(["prompt", "prompt", "model", "environment", "model", "model"], dtype=object)
    shares = np.array([0.0, 0.0, -2.0, 0.0, 1.0, 3.0])
    want = [("prompt", 2, 0.0), ("model", 1, -2.0), ("environment", 1, 0.0), ("model", 2, 4.0)]
    assert parts_of(speakers, shares) == want
