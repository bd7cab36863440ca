"""Features of several plugins are asked together, in the order of their places."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import MixtralForCausalLM

from tests.invariants import tiny
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.guests import Guest, GuestFeature
from training.utils.setup import guests as module
from training.utils.setup.guests import GuestFeatures, guest_features, left_out


class Named(GuestFeature):
    """Answers every question with its name."""

    lends_guesser = records_experts = trains_alone = True

    def __init__(self, name: str, place: int, of_models: int = 1) -> None:
        self.name, self.place, self._of_models = name, place, of_models
        self.needs_segments = name
        self.words: list[Any] = []

    def exact_weights(self):
        return {self.name: "why"}

    def reuse_obstacle(self):
        return self.name, "leave it out"

    def check_words(self, tokenizer):
        self.words.append(tokenizer)

    def check_media(self, mistakes: Mistakes):
        mistakes.add(self.name)

    def inside(self, path, model, zero_stage, seed, *, ranks):
        return {self.name: (path, model, zero_stage, seed, ranks)}

    def open(self, models, path, total_steps, seed):
        return [None if model == "without" else NamedGuest(self.name) for _, model in models[: self._of_models]]

    def recorded_experts(self, model, read, ranks):
        return self.name

    def planned(self, model, settings, ranks, device):
        return [self.name], [f"{self.name} held"], [f"{self.name} moment"]


class NamedGuest(Guest):
    def __init__(self, name: str) -> None:
        self.name = name


def test_every_feature_is_asked_in_the_order_of_their_places(monkeypatch):
    made = [lambda flags: Named(f"b{flags}", 300), lambda flags: Named(f"a{flags}", 100)]
    monkeypatch.setattr(module, "hooks", {"guests": made}.get)
    flags: Any = ""
    a, b = guest_features(flags)
    both, model = GuestFeatures([a, b]), object()
    assert both.needs_segments == "a"
    assert both.lends_guesser and both.records_experts and both.trains_alone
    assert both.exact_weights() == {"a": "why", "b": "why"}
    assert both.reuse_obstacles() == [("a", "leave it out"), ("b", "leave it out")]
    both.check_words("tokenizer")
    assert a.words == b.words == ["tokenizer"]
    mistakes = Mistakes()
    both.check_media(mistakes)
    with pytest.raises(ThreestepError, match="(?s)2 mistakes .* a\n .* b"):
        mistakes.raise_if_any()
    inside = both.inside("path", model, 2, 5, ranks="ranks")
    assert inside == dict.fromkeys("ab", ("path", model, 2, 5, "ranks"))
    assert both.recorded_experts(model, print, "ranks") == "a"
    assert both.planned(model, None, 1, None) == (["a", "b"], ["a held", "b held"], ["a moment", "b moment"])


def test_guests_of_each_model(monkeypatch):
    monkeypatch.setattr(module, "left_out", lambda model: [])
    both = GuestFeatures([Named("a", 1, of_models=2), Named("b", 2)])
    opened = both.open([(None, "first"), (None, "second")], "path", 3, 5)
    assert [[guest.name for guest in guests] for guests in opened] == [["a", "b"], ["a"]]
    opened = both.open([(None, "without"), (None, "second")], "path", 3, 5)
    assert [[guest.name for guest in guests] for guests in opened] == [[], ["a"]]
    assert GuestFeatures().open([(None, "first")], "path", 3, 5) == [()]


def test_without_features_nothing_changes():
    none, one, mistakes = GuestFeatures(), GuestFeatures([GuestFeature()]), Mistakes()
    for features in (none, one):
        assert features.needs_segments is None and features.reuse_obstacles() == []
        assert not (features.trains_alone or features.lends_guesser or features.records_experts)
        assert features.exact_weights() == {}
        features.check_media(mistakes)
        assert features.inside("", None, 0, 0, ranks=None) == {} and mistakes.sentences == []
        assert features.recorded_experts(None, None, None) is None
        assert features.planned(None, None, 1, None) == ([], [], [])
        features.check_words("tokenizer")


def mixture(coefficient: float) -> MixtralForCausalLM:
    return MixtralForCausalLM(tiny.mixture(router_aux_loss_coef=coefficient))


def test_a_loss_of_the_models_own_that_is_left_out_is_named(monkeypatch, capsys):
    model = mixture(0.02)
    monkeypatch.setattr(module, "missing", lambda kind: {})
    assert left_out(model) == []
    monkeypatch.setattr(module, "missing", lambda kind: {"router_aux_loss_coef": "routers"} if kind else {})
    why = (
        "warning: MixtralForCausalLM: its configuration adds a loss with router_aux_loss_coef 0.02, which "
        "is left out because the plugin 'routers' is not installed"
    )
    assert left_out(model) == [why] and left_out(tiny_causal_lm("llama")) == []
    assert left_out(mixture(0.0)) == []
    engine: Any = SimpleNamespace(ranks=SimpleNamespace(is_main=True))
    assert GuestFeatures().open([(engine, model)], "", 1, 0) == [()]
    assert capsys.readouterr().out == f"{why}\n"
