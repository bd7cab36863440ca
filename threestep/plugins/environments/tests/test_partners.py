"""Conversations in step 3: the environments of the flags answer the model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.chat_templates import chat_tokenizer
from tests.support.ppo_flags import ppo_flags
from threestep.plugins.environments.acting import history_habit
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.partners import EnvironmentPartners
from threestep.plugins.environments.tests.turns.test_turn_tokens import parts
from threestep.plugins.replay.files import DumpingRollout, ReplayRollout
from training.step3_ppo.parts.evaluation import conversation_columns
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import RolloutEngine, RolloutRequest, Sampling, rolled_out
from training.utils.contracts.rows import PromptRow
from training.utils.data.rows.dataset import ROWS_PER_BATCH, CachedSplit, write_rows

EXAMPLES = Path(__file__).parents[4] / "examples" / "environments"


class Draws(RolloutEngine):
    """Draws given texts, turn by turn; the second sample of a prompt answers at once, with a wrong code."""

    def __init__(self, tokenizer, texts: dict[int, list[str]]) -> None:
        super().__init__()
        self.tokenizer, self.texts, self.turns = tokenizer, texts, 0

    def roll_out(self, model, request) -> Rollout:
        ids_BP, mask_BP = request.repeated()
        end, own = self.tokenizer.eos_token_id, [self.texts[seed][self.turns] for seed in request.seeds if seed < 2]
        own = own or [self.texts[0][self.turns]]
        self.turns += 1
        ids = [[*self.tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in own]
        width = max(map(len, ids))
        ids_BR = torch.tensor([each + [0] * (width - len(each)) for each in ids])
        lengths_B = torch.tensor([len(each) for each in ids])
        ended_B = torch.ones(len(ids)).bool()
        return Rollout(ids_BP, mask_BP, ids_BR, lengths_B, torch.full(ids_BR.shape, -1.0), ended_B)


def looked_up(**given):
    tokenizer = chat_tokenizer((EXAMPLES / "template.jinja").read_text())
    flags = ppo_flags(
        environment=f"{EXAMPLES / 'lookup.py'}:Lookup", tool_parser="pythonic", reward="environment",
        prompt_style="chat_template", **given,
    )  # fmt: skip
    texts = {0: [' [look_up(key="owl elk")]', " 37"], 1: [" 38", ""]}
    return tokenizer, flags, lambda: engine_of_rows(Draws(tokenizer, texts), flags, tokenizer)


def loaded(flags) -> EnvironmentPartners:
    partners = EnvironmentPartners(flags.added)
    partners.load(Mistakes())
    return partners


def engine_of_rows(engine: RolloutEngine, flags, tokenizer) -> RolloutEngine:
    ends, longest = (tokenizer.eos_token_id,), flags.data.rows.max_prompt_seq_len
    return loaded(flags).acting(engine, flags.data.chat, tokenizer, end_token_ids=ends, prompt_tokens=longest)


def asked(engine: RolloutEngine, tokenizer, **columns) -> Rollout:
    raw = {"raw_prompt": [{"role": "user", "content": "Code of owl elk?"}], "key": "owl elk", "environment": "Lookup"}
    row = PromptRow(0, np.array([7], np.int32), "Code of owl elk?", "37", {**raw, **columns})
    sampling = Sampling(40, 1.0, 0, 1.0, end_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    ids_BP = torch.tensor([[7]])
    return rolled_out(engine, None, RolloutRequest(ids_BP, ids_BP.bool(), sampling, [0, 1], 2, [row]))


def test_the_look_up_is_played_and_shown():
    tokenizer, _, make = looked_up()
    rollout = asked(make(), tokenizer)
    assert rollout.conversations.turn_rewards_BR.sum(1).tolist() == [1.0, 0.0] and rollout.ended_B.all()
    shown = conversation_columns(rollout, tokenizer.decode, {tokenizer.eos_token_id})
    assert shown["prompt"][0] == "Tools: look_up(key)\nHuman: Code of owl elk?\nAssistant:"
    assert shown["response"] == [' [look_up(key="owl elk")]<|endoftext|>Tool: 37\nAssistant: 37', " 38"]
    call, heard, answer = shown["parts"][0]
    assert call == ("model", ' [look_up(key="owl elk")]') and answer == ("model", " 37")
    assert heard == ("environment", "Tool: 37\nAssistant:") and shown["parts"][1] == [("model", " 38")]
    assert shown["last_turn"] == [" 37", " 38"] and shown["turns"] == [2, 1] and shown["cut_by"] == [None, None]
    assert [each["right"] for each in shown["environment_figures"]] == [1.0, 0.0]
    # A row that names no environment is a prompt as ever.
    plain = asked(make(), tokenizer, environment=None)
    assert plain.conversations.turn_rewards_BR.sum() == 0 and [each.turns for each in plain.records] == [1, 1]


def test_the_start_says_what_a_template_makes_of_a_history():
    _, _, make = looked_up()
    (told,) = make().check(None, None)
    assert told == (
        "conversations: the chat template keeps earlier turns as they were drawn when messages of role 'tool' and "
        "'user' follow"
    )
    for name, acts, wanted in (
        ("strips_thinking", True, "changes the thought of earlier turns when a message of role 'user' follows, so a "
         "conversation forks there and continues in a new sequence; it keeps earlier turns as they were drawn when "
         "messages of role 'tool' follow"),
        ("strips_thinking", False, "keeps earlier turns as they were drawn when messages of role 'tool' follow"),
        ("inst", True, "keeps earlier turns as they were drawn when messages of role 'user' follow; it accepts no "
         "message of role 'tool'"),
    ):  # fmt: skip
        *_, turns = parts(name)
        assert history_habit(turns, acts) == f"conversations: the chat template {wanted}"
    with pytest.raises(ThreestepError, match="accepts no message of role 'tool'.*only user and"):
        history_habit(turns, acts=False)


def test_a_row_of_no_environment_is_refused_before_any_is_drawn(tmp_path):
    def checked(*names: str | None, tools: str | None = None) -> None:
        rows = [
            PromptRow(n, np.array([7], np.int32), f"Question {n}", "37", {"raw_prompt": [], **named})
            for n, named in enumerate({"environment": name} if name != "no column" else {} for name in names)
        ]
        path = str(tmp_path / "rows.arrow")
        written = write_rows(path, PromptRow, rows)
        addresses = ",".join(f"{EXAMPLES / file}" for file in ("lookup.py:Lookup", "guessing.py:Guessing"))
        flags = ppo_flags(environment=None if tools else addresses, tools=tools)
        loaded(flags).check_rows(CachedSplit(path, written.rows, {}))

    checked("Lookup", "Guessing", None, "")
    many = ["Lookup"] * ROWS_PER_BATCH
    with pytest.raises(ThreestepError, match=f"got 'Lokup'; did you mean 'Lookup'.*the prompt 'Question {len(many)}'"):
        checked(*many, "Lokup")
    with pytest.raises(ThreestepError, match="expects one of Lookup, Guessing, .*got a row without it.*'Question 1'"):
        checked("Lookup", "no column")
    checked("Lokup", tools=f"{EXAMPLES / 'calculator.py'}:calculate")


def test_a_replay_asks_no_environment(tmp_path):
    tokenizer, flags, make = looked_up()
    more = EnvironmentPartners(flags.added).decides
    drawn = asked(DumpingRollout(make(), tmp_path, 0, more), tokenizer)
    again = asked(ReplayRollout(tmp_path, 0, more), tokenizer)
    assert again.records == drawn.records
    for field in dataclasses.fields(Rollout):
        left, right = getattr(drawn, field.name), getattr(again, field.name)
        assert not isinstance(left, torch.Tensor) or torch.equal(left, right), field.name
    _, other, _ = looked_up(max_turns=3)
    with pytest.raises(ThreestepError, match="was generated with max_turns = 8, but this run uses 3; replay with"):
        more = EnvironmentPartners(other.added).decides
        asked(ReplayRollout(tmp_path, 0, more), tokenizer)


def test_what_conversations_need():
    tokenizer, flags, _ = looked_up()
    plain = dataclasses.replace(flags.data.chat, prompt_style="human_assistant")
    without = flags._replace(data=dataclasses.replace(flags.data, chat=plain))
    with pytest.raises(ThreestepError, match="need a chat template to write a conversation's messages"):
        engine_of_rows(Draws(tokenizer, {}), without, tokenizer)
    # A template that shows no calls matters once there are tools.
    flags.added.of(EnvironmentArguments).tool_parser = "auto"
    engine = engine_of_rows(Draws(tokenizer, {}), flags, tokenizer)
    with pytest.raises(
        ThreestepError, match="--tool_parser auto expects a chat template that renders calls in the format of"
    ):
        asked(engine, tokenizer)
