"""A chat in which tools or an environment answer: conversations of step 3, shown as they grow, stopped at any time."""

from __future__ import annotations

import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.added_groups import added_groups
from tests.support.chat_templates import chat_tokenizer
from threestep.plugins.environments.arguments import EnvironmentArguments
from threestep.plugins.environments.conversation_arguments import ConversationArguments
from threestep.plugins.evaluation.acting import _acting_engine, check_acting, load_partners, stream_trajectory
from threestep.plugins.evaluation.model import ChatModel, Trajectory, load_chat_model
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.evaluation.tests.conftest import CPU
from threestep.plugins.evaluation.web import _columns
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import RolloutEngine, RolloutRequest, rolled_out
from training.utils.data.arguments import DataArguments
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.generation.partners import Partners, partners_of

EXAMPLES = Path(__file__).parents[4] / "examples" / "environments"
LOOKUP, GUESSING = (f"{EXAMPLES / file}" for file in ("lookup.py:Lookup", "guessing.py:Guessing"))
TOOLS = '''
import time

def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "rested <|endoftext|>"
'''


class Says(RolloutEngine):
    """Draws given texts, one a turn."""

    def __init__(self, tokenizer, texts: list[str]) -> None:
        super().__init__()
        self.tokenizer, self.texts, self.prompts = tokenizer, texts, []

    def roll_out(self, model, request):
        raise AssertionError("it streams")

    def stream(self, model, request, more_ends):
        self.prompts.append(self.tokenizer.decode(request.prompt_ids_BP[0]))
        yield from self.tokenizer(self.texts.pop(0), add_special_tokens=False)["input_ids"]
        yield self.tokenizer.eos_token_id


@pytest.fixture
def acting_model(save_model) -> ChatModel:
    tokenizer = chat_tokenizer((EXAMPLES / "template.jinja").read_text())
    return load_chat_model(
        save_model("acting", tokenizer=tokenizer, max_position_embeddings=1024), None, DataArguments(), CPU
    )


def loaded(*groups) -> Partners | None:
    return load_partners(partners_of(added_groups("chat", *groups)))


def talk_of(asked: ChatModel, texts: list[str], most: int = 60, limits=None, **flags) -> Talk:
    flags = {"tool_parser": "pythonic", **flags}
    acting = loaded(EnvironmentArguments(**flags), limits or ConversationArguments())
    asked = replace(asked, engine=Says(asked.tokenizer, texts))
    return Talk([asked], SamplingArguments(max_new_tokens=most), 7, acting=acting)


def test_calls_and_their_results_are_shown_and_remembered(acting_model):
    texts = [' [look_up(key="owl elk")]', " 37", ' [look_up(key="bee")]', " 38"]
    talk = talk_of(acting_model, texts, environment=LOOKUP)
    assert talk.command('/row {"key": "owl elk", "ground_truth": "37"}').text.endswith('"ground_truth": "37"}')
    talk.ask("Code of owl elk?")
    grown = [answer.text for answer in talk.answer(0)]
    assert all(later.startswith(before) for before, later in zip(grown, grown[1:], strict=False))
    assert grown[-1] == ' [look_up(key="owl elk")]\n  tool> 37\nmodel>  37'
    assert talk.note(0) == "2 turns, reward 1, right 1"
    said = [
        {"role": "user", "content": "Code of owl elk?"},
        {"role": "assistant", "content": '[look_up(key="owl elk")]'},
        {"role": "tool", "content": "37", "by_environment": True},
        {"role": "assistant", "content": "37"},
    ]
    assert talk.messages(0) == said
    assert "*2 turns, reward 1, right 1*" in _columns(talk, "")[0][-1]["content"]
    # A further question opens the environment anew, behind what was said.
    talk.ask("And of bee?")
    assert talk.messages(0) == [*said, {"role": "user", "content": "And of bee?"}]
    assert [*talk.answer(0)][-1].text.startswith(' [look_up(key="bee")]\n  tool> unknown')
    assert talk.note(0) == "2 turns, reward 0"
    prompt = talk.models[0].engine.prompts[2]
    assert prompt.startswith('Tools: look_up(key)\nHuman: Code of owl elk?\nAssistant: [look_up(key="owl elk")]<|end')
    assert prompt.endswith("Tool: 37\nAssistant: 37<|endoftext|>Human: And of bee?\nAssistant:")


def test_the_turns_are_those_of_a_rollout(acting_model):
    """The same seed gives the tokens that step 3 draws, and ends where it does."""
    head = acting_model.model.get_output_embeddings()
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[acting_model.end_token_id] = 4.0
    flags, limits = EnvironmentArguments(environment=GUESSING), ConversationArguments(max_turns=4)
    acting, sampling, cuts = loaded(flags, limits), SamplingArguments(max_new_tokens=300), set()
    for seed in range(4):
        row = {"messages": [{"role": "user", "content": "Guess."}], "ground_truth": "7"}
        *_, last = stream_trajectory(acting_model, acting, row, sampling, seed=seed)
        engine = _acting_engine(acting, acting_model, TransformersRollout(), acting.partner)
        request = RolloutRequest.of_prompt(torch.tensor([5]), acting_model.sampling(sampling), seed)
        wanted = rolled_out(engine, acting_model.model, replace(request, rows=[row]))
        assert list(last.token_ids) == wanted.response_of(0).tolist()
        (record,) = wanted.records
        assert (last.trajectory.turns, last.trajectory.cut) == (record.turns, record.cut) and last.trajectory.turns > 1
        assert last.text.count("\n  user> Say a number from 1 to 32.") == record.figures["guesses"]
        cuts.add(record.cut)
    assert "turns" in cuts and "cut off by the limit on turns" in Trajectory((), 4, -0.5, "turns").sentence


def test_a_tool_that_hangs_holds_up_nobody(acting_model, tmp_path):
    (tmp_path / "own.py").write_text(TOOLS)
    naps = [" [nap(seconds=60.0)]", " well"]
    talk = talk_of(acting_model, list(naps), 90, tools=f"{tmp_path}/own.py:nap", tool_seconds=0.2)
    talk.ask("Sleep")
    assert [*talk.answer(0)][-1].text.endswith("\n  tool nap> Error: no answer within 0.2 seconds\nmodel>  well")
    assert talk.note(0).startswith("2 turns, slow_calls 1, calls 1, tool_seconds 0.2")

    # Ctrl-C in the middle of a call that may take long: the chat goes on at once, with what was said so far.
    talk = talk_of(acting_model, naps, tools=f"{tmp_path}/own.py:nap", tool_seconds=50.0)
    talk.ask("Sleep")
    main = threading.main_thread().ident
    # A shell has its background jobs ignore Ctrl-C, the tests too if they are one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, lambda: signal.pthread_kill(main, signal.SIGINT)).start()
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            for _ in talk.answer(0):
                pass
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 10
    assert talk.messages(0)[1:] == [{"role": "assistant", "content": "[nap(seconds=60.0)]"}]
    talk.models[0].engine.texts[:] = [" awake"]
    talk.ask("Up!")
    assert [*talk.answer(0)][-1].text == " awake" and talk.note(0) == "1 turn"


def test_what_a_chat_cannot_open(acting_model, asked):
    talk = talk_of(acting_model, [" 1"], environment=LOOKUP)
    talk.ask("Code?")
    with pytest.raises(ThreestepError, match="environment 'Lookup': reset raised KeyError: 'key'"):
        [*talk.answer(0)]
    with pytest.raises(ThreestepError, match="/row expects a JSON object such as"):
        talk.command("/row [1]")
    with pytest.raises(ThreestepError, match="/row works only in a chat with --environment"):
        Talk([asked], SamplingArguments(), 1).command("/row")
    with pytest.raises(ThreestepError, match="need a chat template to write a conversation's messages"):
        check_acting(talk.acting, [asked])
    short = talk_of(acting_model, [" 1", " 2"], environment=GUESSING)
    short.models[0] = replace(short.models[0], model=acting_model.model)
    acting_model.model.config.max_position_embeddings = 12
    short.columns = {"ground_truth": "7"}
    short.ask("Guess my number from 1 to 32.")
    with pytest.raises(ThreestepError, match="which leaves no room for an answer in .*; type /reset"):
        [*short.answer(0)]
    with pytest.raises(ThreestepError, match="has no 'Lokup'; did you mean 'Lookup'"):
        loaded(EnvironmentArguments(environment=LOOKUP.replace("Lookup", "Lokup")))
    assert loaded() is None
