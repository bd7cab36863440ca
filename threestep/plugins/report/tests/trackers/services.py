"""Packages of services, stood in for by modules that record the calls.

The services were tried with their own packages by hand; what is held here is the shape of the calls.
"""

from __future__ import annotations

import types

from training.utils.run.metrics import MetricsWriter
from training.utils.run.trackers import open_trackers

SETTINGS = {"learning_rate": 0.1, "data_path": ["a"], "limit": None, "padded": False}
SAMPLE = {"prompt": "p", "response": "# r", "reward": 1.0, "response_tokens": 3, "ended": True}


class Recorder(types.ModuleType):
    """A module whose every function notes its call; what `results` names gives its value back."""

    def __init__(self, name: str, **results) -> None:
        super().__init__(name)
        self.calls: list[tuple] = []
        self.results = results

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*words, **named):
            self.calls.append((name, words, named))
            return self.results.get(name)

        return call

    def named(self, name: str) -> list[tuple]:
        return [(words, named) for called, words, named in self.calls if called == name]


def written(folder, report_to, done_steps=0, **more) -> None:
    trackers = open_trackers(report_to, folder, SETTINGS, done_steps)
    with MetricsWriter(folder, True, done_steps, trackers=trackers) as metrics:
        metrics.write(done_steps, {"eval/loss": 3.0, "eval/perplexity": 20.0})
        metrics.write(done_steps + 1, {"train/loss": 2.0, **more})
        metrics.write_samples(done_steps + 1, [SAMPLE] * 20)
        metrics.flush()
