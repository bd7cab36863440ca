"""Environments of Gymnasium's interface: begun by the row, played by text, closed."""

from __future__ import annotations

import pytest

from threestep.plugins.environments.gymnasium import GymnasiumEnvironment
from threestep.plugins.environments.interface import AssistantMessage

pytestmark = pytest.mark.unit

ROW = {"messages": [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go."}], "prompt": "Go."}


class Walk:
    """Five places in a row; the last pays."""

    def __init__(self):
        self.closed = False

    def reset(self, *, seed=None, options=None):
        self.seed, self.place = seed, (options or {}).get("place", 0)
        return self.place, {}

    def step(self, action):
        self.place += action
        return self.place, float(self.place == 4), self.place == 4, self.place < 0, {}

    def close(self):
        self.closed = True


class Walking(GymnasiumEnvironment):
    expected = "Say on or back."

    def make(self):
        self.walk = Walk()
        return self.walk

    def options(self, row):
        return {"place": 2}

    def action(self, message):
        return {"on": 1, "back": -1}.get(message.content)

    def text(self, observation):
        return f"at {observation}"


def said(text):
    return AssistantMessage(text, text)


def test_a_game_to_its_end():
    game = Walking()
    opening = game.reset(ROW)
    assert opening.messages == [ROW["messages"][0], {"role": "user", "content": "Go.\n\nat 2"}]
    assert game.step(said("jump")) == ([{"role": "user", "content": "Say on or back."}], 0.0, False, {"no_actions": 1})
    assert game.step(said("on"))[:3] == ([{"role": "user", "content": "at 3"}], 0.0, False)
    assert game.step(said("on"))[:3] == ([], 1.0, True)
    game.close()
    assert game.walk.closed


def test_a_message_without_an_action_costs_its_penalty():
    class Strict(Walking):
        penalty = 0.5

    game = Strict()
    game.reset(ROW)
    assert [game.step(said(text)).reward for text in ("jump", "on", "on")] == [-0.5, 0.0, 1.0]


def test_the_row_decides_the_seed():
    seeds = []
    for prompt in ("a", "a", "b"):
        game = Walking()
        game.reset({**ROW, "prompt": prompt})
        seeds.append(game.walk.seed)
    assert seeds[0] == seeds[1] != seeds[2]


def test_a_truncated_game_is_over():
    game = Walking()
    game.options = lambda row: {"place": 0}
    game.reset(ROW)
    assert game.step(said("back"))[:3] == ([], 0.0, True)


def test_the_interface_of_old_gym_is_named():
    game = Walking()
    game.reset(ROW)
    game.walk.step = lambda action: (1, 0.0, False, {})
    with pytest.raises(TypeError, match="expected step to return .observation, reward, terminated, truncated, info."):
        game.step(said("on"))
    with pytest.raises(NotImplementedError, match="expects a method make"):
        GymnasiumEnvironment().reset(ROW)
    GymnasiumEnvironment().close()
