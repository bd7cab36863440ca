"""Environments with one fault each, what loads them, and what a model said."""

from __future__ import annotations

import pytest

from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.calling.calls import Caller
from threestep.plugins.environments.interface import AssistantMessage, Call
from threestep.plugins.environments.loading import load_environments
from training.utils.base.errors import Mistakes

FILE = '''
import itertools
import random

class Sound:
    """Asks once more, then pays for the answer."""
    def reset(self, row):
        self.turns, self.truth = 0, row["ground_truth"]
        return [{"role": "user", "content": "Say it."}], None
    def step(self, message):
        self.turns += 1
        if message.content == self.truth:
            return [], 1.0, True
        return [{"role": "user", "content": f"no, {3 - self.turns} left"}], -0.1, self.turns == 3
    def close(self): ...

class Greets(Sound):
    def reset(self, row, seed):
        opening = super().reset(row)
        opening[0][0]["content"] += str(seed)
        return opening

class Moody(Sound):
    def step(self, message):
        messages, reward, done = super().step(message)
        return messages, reward + random.SystemRandom().random(), done

class Shared(Sound):
    count = itertools.count()
    def reset(self, row):
        Shared.seen = 0
        return super().reset(row)
    def step(self, message):
        Shared.seen += 1
        messages, reward, done = super().step(message)
        return messages, reward + Shared.seen, done

class Fragile(Sound):
    def step(self, message):
        if len(message.text) > 1000:
            raise OverflowError("too long")
        return super().step(message)

class Generous(Sound):
    def step(self, message):
        return [], 1.0, True

class Leaky(Sound):
    def step(self, message):
        messages, reward, done = super().step(message)
        return [{**each, "content": f"not the {self.truth}"} for each in messages], reward, done

class Told(Sound):
    def reset(self, row):
        return super().reset(row)[0] + [{"role": "user", "content": row["ground_truth"]}], None

class Tooled(Sound):
    def reset(self, row):
        function = {"name": "look", "parameters": {"type": "object", "properties": {"key": {"type": "string"}}}}
        return super().reset(row)[0], [{"type": "function", "function": function}]
    def step(self, message):
        if message.calls or message.problems:
            count = len(message.calls) + len(message.problems)
            return [{"role": "tool", "content": f"{count} calls"}], 0.0, False
        return super().step(message)

class Unready(Sound):
    def reset(self, row):
        return row["nothing"]
'''


def said(text: str, *calls: Call, problems: tuple[str, ...] = ()) -> AssistantMessage:
    return AssistantMessage(text, text, calls=calls, problems=problems)


@pytest.fixture
def caller():
    made = Caller()
    yield made
    made.close()


@pytest.fixture
def environment_file(tmp_path):
    path = tmp_path / "envs.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def load(environment_file):
    """Environments of the file, by a class's name."""

    def loaded(name):
        mistakes = Mistakes()
        environments = load_environments(EnvironmentArguments(environment=f"{environment_file}:{name}"), mistakes)
        mistakes.raise_if_any()
        return environments

    return loaded
