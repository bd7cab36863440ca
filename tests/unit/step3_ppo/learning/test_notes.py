"""Notes on the optimizer steps of a rollout."""

from __future__ import annotations

from training.step3_ppo.learning import notes


def test_tokens_of_ranks_have_a_spread(monkeypatch):
    """Ranks that computed 30 and 10 tokens."""
    monkeypatch.setattr(notes, "gathered", lambda own: [own, own._replace(total=10.0, squares=100.0, least=10.0)])
    assert notes.rank_token_figures(30) == {
        "train/rank_tokens_mean": 20.0,
        "train/rank_tokens_std": 10.0,
        "train/rank_tokens_min": 10.0,
        "train/rank_tokens_max": 30.0,
    }
