"""`--reward judge:FILE.yaml`: a language model behind a chat endpoint, asked by a rubric.

Pointwise, it rates each response. Pairwise, it compares two, in both orders: the mean of the two verdicts does not
depend on which is called A, and a judge that always prefers the first answer says nothing. A response's number is then
its share of wins.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from threestep.plugins.judges.chat_endpoint import OPENAI_URL, JudgeSettings, chat_sender
from threestep.plugins.judges.http_reward import http_reward
from threestep.plugins.judges.names import JUDGE
from threestep.plugins.judges.rubric import PAIRWISE, REFERENCE, RubricSettings
from threestep.plugins.judges.rule import AskedRule, shown_sample
from threestep.plugins.judges.settings import read_settings, settings_from
from threestep.plugins.judges.verdicts import AskedQuestion
from threestep.plugins.serving.asking.settings import AskSettings, check_url
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.rewards.calling import MESSAGES
from training.utils.rewards.table import GROUPS

if TYPE_CHECKING:
    from threestep.plugins.judges.service import Send

_FILE = re.compile(r"(?:judge|http):[^:]+\.ya?ml(?::|$)")  # a file of settings
_KEY_VARIABLE = "OPENAI_API_KEY"  # read by default for OpenAI's own address, and no other


class JudgeReward(AskedRule):
    """A reward computed from a judge's verdicts."""

    def __init__(
        self, name: str, where: str, judge: JudgeSettings, rubric: RubricSettings, *, asking: AskSettings
    ) -> None:
        super().__init__(name, where, asking, _KEY_VARIABLE if judge.base_url == OPENAI_URL else "")
        self._judge, self.rubric = judge, rubric

    @property
    def compares(self) -> bool:
        """True if the judge compares the responses to a prompt with each other."""
        return self.rubric.form == PAIRWISE and self.rubric.against != REFERENCE

    @property
    def reads_reference(self) -> bool:
        return self.rubric.reads_reference or self.rubric.against == REFERENCE

    def sender(self) -> Send:
        asking, counts = self._settings, self._settings.most_tokens is not None
        return chat_sender(self._judge, self.key(), asking.seconds, self.rubric.reads, counts=counts)

    def __call__(self, prompts: list[str], responses: list[str], **columns: Any) -> list[float | None]:
        """Return a number for each response; pairwise, None for one that has no other to be compared with."""
        shown = [_as_text(*each) for each in zip(prompts, columns.get(MESSAGES) or prompts, strict=True)]
        references = columns.get("ground_truth") or [None] * len(responses)
        if self.reads_reference:
            self._check_references(references, prompts)
        if self.rubric.form != PAIRWISE:
            samples = zip(shown, responses, references, strict=True)
            return [*self._values([self._rated(*sample) for sample in samples])]
        if self.rubric.against == REFERENCE:
            pairs = [(prompt, own, str(other)) for prompt, own, other in zip(shown, responses, references, strict=True)]
            return [*self.shares(pairs, references)]
        groups = columns.get(GROUPS) or list(zip(shown, map(str, references), strict=True))
        return self._shares_of_groups(shown, responses, references, groups)

    def compare(self, prompts: list[str], responses: list[str], *, others: list[str], **columns: Any) -> list[float]:
        """Return the share of wins of each response over that of another model to the same prompt; as a rule."""
        shown = [_as_text(*each) for each in zip(prompts, columns.get(MESSAGES) or prompts, strict=True)]
        references = columns.get("ground_truth") or [None] * len(responses)
        if self.rubric.reads_reference:
            self._check_references(references, prompts)
        return self.shares(list(zip(shown, responses, others, strict=True)), references)

    def shares(self, pairs: Sequence[tuple[str, str, str]], references: Sequence[Any]) -> list[float]:
        """Return the share of wins of the first response of each (prompt, response, other): 1, 0.5 or 0 in either
        order, their mean. Equal responses draw, and are not asked about."""
        asked = [place for place, (_, own, other) in enumerate(pairs) if own != other]
        questions: list[AskedQuestion] = []
        for place in asked:
            prompt, own, other = pairs[place]
            questions += [
                self._compared(prompt, own, other, references[place]),
                self._compared(prompt, other, own, references[place]),
            ]
        values = self._values(questions)
        shares = [0.5] * len(pairs)
        for number, place in enumerate(asked):
            shares[place] = (values[2 * number] + (1.0 - values[2 * number + 1])) / 2
        return shares

    def _shares_of_groups(
        self, prompts: Sequence[str], responses: Sequence[str], references: Sequence[Any], groups: Sequence[Any]
    ) -> list[float | None]:
        """Return each response's mean share of wins over those that it is compared with: adjacent ones whose entries in
        `groups` are equal."""
        pairs: list[tuple[int, int]] = []
        for _, group in groupby(range(len(prompts)), key=lambda place: groups[place]):
            pairs += pairs_of(list(group), self.rubric.opponents)
        shares = self.shares(
            [(prompts[one], responses[one], responses[other]) for one, other in pairs],
            [references[one] for one, _ in pairs],
        )
        of_place: list[list[float]] = [[] for _ in prompts]
        for (one, other), share in zip(pairs, shares, strict=True):
            of_place[one].append(share)
            of_place[other].append(1.0 - share)
        return [sum(own) / len(own) if own else None for own in of_place]

    def _values(self, questions: Sequence[AskedQuestion]) -> list[float]:
        return self._service.values(questions, self.send)

    def _rated(self, prompt: str, response: str, reference: Any) -> AskedQuestion:
        return self._question(prompt, reference, shown_sample(prompt, response), response=response)

    def _compared(self, prompt: str, first: str, second: str, reference: Any) -> AskedQuestion:
        shown = f"{shown_sample(prompt, first)} against {second[:60]!r}"
        return self._question(prompt, reference, shown, first=first, second=second)

    def _question(self, prompt: str, reference: Any, shown: str, **answers: str) -> AskedQuestion:
        text = self.rubric.text(prompt=prompt, ground_truth=str(reference), **answers)
        asked = {"messages": self._judge.messages(text), "request": self._judge.request}
        ends = {} if self.rubric.form == PAIRWISE else {"scale": list(self.rubric.ends)}
        return AskedQuestion({**asked, **ends}, text, shown)

    def _check_references(self, references: Sequence[Any], prompts: Sequence[str]) -> None:
        for reference, prompt in zip(references, prompts, strict=True):
            if reference is None:
                raise ThreestepError(
                    f"{self._where} shows the judge each row's ground_truth, but the row with the prompt "
                    f"{prompt[-60:]!r} has none; name its column with --reference_column"
                )


def pairs_of(places: Sequence[int], opponents: int | None) -> list[tuple[int, int]]:
    """Return the pairs of a group: each once, all of them, or of each with the next `opponents`, round and round."""
    count = len(places)
    most = count - 1 if opponents is None else min(opponents, count - 1)
    found = {
        tuple(sorted((place, (place + step) % count))): None for step in range(1, most + 1) for place in range(count)
    }
    return [(places[one], places[other]) for one, other in found]


def judge_reward(given: str, name: str, flag: str = "--reward") -> JudgeReward:
    """Return the judge defined in a YAML file that `flag` names as judge:FILE.yaml."""
    where = f"{flag} {given}"
    settings = read_settings(given.removeprefix(JUDGE), where)
    judge, rubric, asking = settings_from(settings, where, JudgeSettings, RubricSettings, AskSettings)
    check_url(judge.base_url, where)
    mistakes = Mistakes()
    asking.check(where, mistakes)
    rubric.check(where, mistakes)
    mistakes.require(judge.max_tokens is None or judge.max_tokens >= 1, f"{where}: max_tokens expects 1 or more")
    taken = [field for field in ("messages", "model", "stream", "n") if field in judge.fields]
    mistakes.require(not taken, f"{where}: fields must not contain {', '.join(taken)}, which the judge sets itself")
    mistakes.raise_if_any()
    return JudgeReward(name, where, judge, rubric, asking=asking)


def check_entry(entry: str) -> None:
    """ThreestepError for mistakes in a file of --reward, of a judge or a server. Cheap to call."""
    given = _FILE.match(entry)
    if given is not None:
        make = judge_reward if entry.startswith(JUDGE) else http_reward
        make(given[0].rstrip(":"), "")


def _as_text(prompt: str, given: Any) -> str:
    """A prompt as the judge reads it: of messages their contents, with roles if there are several; else the text."""
    if not isinstance(given, list):
        return prompt
    if len(given) == 1 and isinstance(given[0].get("content"), str):
        return str(given[0]["content"])
    return "\n\n".join(f"{message.get('role')}: {message.get('content')}" for message in given)
