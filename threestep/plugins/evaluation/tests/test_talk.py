"""Turns, commands, scores."""

from __future__ import annotations

import json

import pytest

from threestep.plugins.evaluation.model import Answer, load_chat_model
from threestep.plugins.evaluation.scorer import load_answer_scorer
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.evaluation.tests.conftest import CPU
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.data.formats.messages import read_messages
from training.utils.engine.ranks.startup import Ranks
from training.utils.generation.arguments import SamplingArguments


@pytest.fixture
def talk(save_model) -> Talk:
    data = DataArguments()
    models = [load_chat_model(save_model(name, seed=seed), None, data, CPU) for seed, name in enumerate("AB")]
    scorer = load_answer_scorer(save_model("reward", scalar=True), None, data, Ranks(0, 0, 1, CPU))
    return Talk(models, SamplingArguments(max_new_tokens=6), 7, scorer)


def answered(talk: Talk, said: str) -> list[str]:
    talk.ask(said)
    return [list(talk.answer(place))[-1].text for place in range(len(talk.models))]


def test_each_model_sees_its_own_answers(talk):
    first = answered(talk, "Hi")
    assert first[0] != first[1]
    talk.ask("And now?")
    for place in (0, 1):
        assert talk.messages(place) == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": first[place].strip()},
            {"role": "user", "content": "And now?"},
        ]


def test_the_seed_decides_and_retry_draws_anew(talk):
    first = answered(talk, "Hi")
    assert talk.command("/reset").text == "new conversation"
    assert answered(talk, "Hi") == first
    assert talk.command("/retry").answer
    assert [list(talk.answer(place))[-1].text for place in (0, 1)] != first
    talk.command("/reset")
    assert talk.command("/seed 8").text == "seed is 8"
    assert answered(talk, "Hi") != first


def test_scores_of_ids_and_of_texts_agree(talk, save_model):
    talk.ask("Hi")
    list(talk.answer(0))
    ids = [*talk.models[0].tokenizer(" fig").input_ids, talk.models[0].end_token_id]
    talk.turns[-1].answers[0] = Answer(" fig", tuple(ids), ended=True)
    score = talk.score(0)
    prompt, response = talk.scorer.ids_of_text([{"role": "user", "content": "Hi"}], "fig")
    assert talk.scorer.score_ids([prompt], [response]) == [pytest.approx(score)]
    assert talk.turns[-1].scores == {0: score}
    assert talk.score(1) is None  # it has not answered


def test_sampling_is_set_and_told(talk):
    assert talk.command("/temperature 0").text == "temperature is 0.0"
    assert talk.command("/max_new_tokens").text == "max_new_tokens is 6"
    assert talk.command("/top_k 3").text == "top_k is 3" and talk.sampling.top_k == 3
    for line, sentence in [
        ("/top_p 2", "--top_p expects more than 0 and at most 1, got 2.0"),
        ("/temperature warm", "/temperature expects a number, got 'warm'"),
        ("/seed x", "/seed expects a number from 0 up, got 'x'"),
        ("/seed ²", "/seed expects a number from 0 up, got '²'"),
        ("/temprature 1", "unknown command /temprature; /help lists the commands; did you mean 'temperature'"),
        ("/retry", "/retry expects an earlier question, got none; ask one first"),
        ("/save", "/save expects a file name, got none; type /save FILE"),
    ]:
        with pytest.raises(ThreestepError, match=sentence):
            talk.command(line)
    assert talk.sampling.top_p == 1.0


def test_a_system_prompt_begins_anew(talk):
    answered(talk, "Hi")
    assert talk.command("/system Be brief.").text == "new conversation, with this system prompt"
    talk.ask("Hi")
    assert talk.messages(0)[0] == {"role": "system", "content": "Be brief."} and len(talk.messages(0)) == 2
    assert talk.command("/system").text == "new conversation, without a system prompt"
    assert talk.messages(0) == []


def test_what_is_saved_is_a_dataset(talk, tmp_path):
    answered(talk, "Hi")
    path = tmp_path / "talk.jsonl"
    assert talk.command(f"/save {path}").text == f"written to {path}, one line per model"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["model"] for line in lines] == [asked.name for asked in talk.models]
    assert read_messages(lines[0]["messages"], "a line") == talk.messages(0)
    with pytest.raises(ThreestepError, match="File exists; name another file"):
        talk.command(f"/save {path}")


def test_a_question_that_nobody_answered_is_forgotten(talk):
    talk.ask("Hi " * 200)
    with pytest.raises(ThreestepError, match="leaves no room for an answer"):
        list(talk.answer(0))
    talk.drop_turn()
    assert talk.turns == []
