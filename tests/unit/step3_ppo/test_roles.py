"""The records of step 3's models."""

from __future__ import annotations

from typing import Any

from training.step3_ppo.roles.roles import Tokenizers


def test_a_critic_on_the_actors_trunk_is_saved_with_the_actors_tokenizer():
    actor: Any = object()
    critic: Any = object()
    both = Tokenizers(actor, critic)
    assert both.saved_with(shares_trunk=True) == {"actor": actor, "critic": actor}
    assert both.saved_with(shares_trunk=False) == {"actor": actor, "critic": critic}
