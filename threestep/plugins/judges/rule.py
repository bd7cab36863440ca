"""A reward that asks a service, as a rule. It is made from its settings alone, and opened once the run is known."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from threestep.plugins.judges.service import AskedService, Send
from threestep.plugins.judges.verdicts import folder_of_replay
from threestep.plugins.serving.keys import given_key
from training.utils.base.errors import ThreestepError
from training.utils.rewards.table import OpenedRule, RunPlace

if TYPE_CHECKING:
    from threestep.plugins.serving.asking.settings import AskSettings

_SHOWN_CHARACTERS = 60  # of a prompt or a response, in an error


class AskedRule(OpenedRule):
    """A rule whose numbers a service gives.

    name: in the log. own_variable: of the key, where the settings name none. where: the settings, for errors.
    """

    reads_messages = True

    def __init__(
        self, name: str, where: str, settings: AskSettings, own_variable: str, *, per_request: int = 1
    ) -> None:
        self.name, self._where, self._settings = name, where, settings
        self._own_variable = own_variable
        self._service = AskedService(name, settings, per_request)
        self._send: Send | None = None
        self._tokenizer = ""

    def check(self, replay: str | None) -> None:
        """ThreestepError for what is missing to ask: a key that the settings name, or in a replay a run that asked."""
        if replay is None:
            self.key()
        else:
            folder_of_replay(replay)

    def key(self) -> str | None:
        """The key of the service; None for one that needs none. ThreestepError where the settings name another."""
        settings, variable = self._settings, self._settings.key_variable
        key = given_key(settings.key_file, variable or self._own_variable, f"{self._where}: key_file")
        if key is None and variable is not None:
            raise ThreestepError(
                f"{self._where}: key_variable reads the key from {variable}, which is not set; export {variable}=..."
            )
        return key

    def open(self, place: RunPlace) -> None:
        """Read what the run has asked before; log there from now on. Without this, nothing is logged."""
        self._service.open(place if place.replay is None else place._replace(replay=folder_of_replay(place.replay)))
        self._tokenizer = place.tokenizer
        self._send = None

    @abstractmethod
    def sender(self) -> Send:
        """Return what sends questions. Called where one is to be sent, not in a replay."""

    def send(self, questions: Sequence[Any]) -> Sequence[Any]:
        if self._send is None:
            self._send = self.sender()
        return self._send(questions)


def shown_sample(prompt: str, response: str) -> str:
    """A prompt and a response, as errors name them."""
    return f"prompt {prompt[-_SHOWN_CHARACTERS:]!r}, response {response[:_SHOWN_CHARACTERS]!r}"
