"""Chat and evaluation by vLLM: in float32 the likeliest answers are those of transformers."""

from __future__ import annotations

import dataclasses
import io
import json
import sys

import pytest
import torch

from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.evaluation import chat, evaluate
from threestep.plugins.evaluation.model import engine_maker, load_chat_model
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.evaluation.tests.test_talk_images import answered, own_answer, seen
from threestep.plugins.vllm.arguments import VllmArguments
from threestep.plugins.vllm.tests.vllm.conftest import SHAPES
from training.utils.base.errors import ThreestepError
from training.utils.data.arguments import DataArguments
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.table import RolloutEngineFlags

VLLM = ["--rollout_engine", "vllm", "--vllm_cache_gib", "0.05"]
LONGEST_TOKENS = 120
GREEDY = SamplingArguments(max_new_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, tiny_tokenizer):
    """Two models, of random weights."""
    place = tmp_path_factory.mktemp("asked")
    own = {"vocab_size": len(tiny_tokenizer), "eos_token_id": tiny_tokenizer.eos_token_id}
    for seed, (name, family) in enumerate((("one", "llama"), ("two", "qwen3"))):
        model = tiny_causal_lm(family, seed=seed, pad_token_id=tiny_tokenizer.pad_token_id, **own, **SHAPES[family])
        model.save_pretrained(place / name)
        tiny_tokenizer.save_pretrained(place / name)
    return place


@pytest.fixture(scope="module")
def pair(folders):
    """The same model, asked by transformers and by vLLM."""
    small_cache = RolloutEngineFlags(vllm=VllmArguments(vllm_cache_gib=0.05))

    def loaded(engine: str):
        flags = small_cache if engine == "vllm" else RolloutEngineFlags()
        start = engine_maker(SamplingArguments(rollout_engine=engine), flags, LONGEST_TOKENS)
        return load_chat_model(str(folders / "one"), None, DataArguments(), torch.device("cpu"), start_engine=start)

    return loaded("hf"), loaded("vllm")


def conversation(asked, sampling: SamplingArguments, questions=("Sort these words: pear fig.", "Again", "Why?")):
    """All that was shown of three turns."""
    talk = Talk([asked], sampling, seed=7)
    shown = []
    for question in questions:
        talk.ask(question)
        shown.append(list(talk.answer(0)))
    return shown


def test_a_conversation_is_that_of_hf(pair):
    hf, vllm = pair
    expected = conversation(hf, GREEDY)
    assert conversation(vllm, GREEDY) == expected, "word by word"
    assert all(len(turn) == len(turn[-1].token_ids) > 1 for turn in expected)


def test_drawn_answers_follow_the_seed(pair):
    vllm = pair[1]
    drawn = SamplingArguments(max_new_tokens=8, temperature=0.7)
    first = conversation(vllm, drawn)
    assert conversation(vllm, drawn) == first != conversation(vllm, GREEDY)


def test_each_of_the_models_ends_ends_an_answer(pair):
    hf, vllm = pair
    ids = conversation(hf, GREEDY)[0][-1].token_ids
    [turn] = conversation(
        dataclasses.replace(vllm, more_end_tokens=frozenset({ids[2]})), GREEDY, ["Sort these words: pear fig."]
    )
    assert turn[-1].ended and turn[-1].token_ids == ids[: ids.index(ids[2]) + 1]


@pytest.mark.parametrize("interrupted", ["left", "stopped"])
def test_who_goes_away_leaves_nothing_behind(pair, interrupted, monkeypatch):
    """An answer that nobody hears to its end, or one that Ctrl-C stops while vLLM computes."""
    hf, vllm = pair
    talk = Talk([vllm], GREEDY, seed=7)
    talk.ask("Sort these words: pear fig.")
    answer = talk.answer(0)
    next(answer)
    if interrupted == "left":
        answer.close()
    else:
        engine = vllm.engine._vllm.llm.llm_engine
        executor = engine.engine_core.engine_core.model_executor

        def stopped(*_, **__):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(executor, "execute_model", stopped)
            with pytest.raises(KeyboardInterrupt):
                next(answer)
    assert len(talk.turns[-1].answers[0].token_ids) == 1
    assert conversation(vllm, GREEDY) == conversation(hf, GREEDY)


def test_a_conversation_that_has_no_room_is_told(pair):
    with pytest.raises(ThreestepError, match=f"leaves no room for an answer in the {LONGEST_TOKENS} positions"):
        conversation(pair[1], GREEDY, ["Hi " * 200])


def test_chat_with_two_models(folders, monkeypatch, capsys):
    said = []
    for flags in ([], VLLM):
        monkeypatch.setattr(sys, "stdin", io.StringIO("Sort these words: pear fig."))
        own = "--temperature 0 --max_new_tokens 6".split()
        chat.main([str(folders / "one"), str(folders / "two"), *own, *flags])
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] and "== B " in said[0]


def test_an_evaluation(folders, tmp_path):
    words = ("fig", "pear", "apple", "plum", "quince")
    rows = [{"prompt": f"Human: {word}? Assistant:", "chosen": f" {word}", "rejected": " no"} for word in words]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rule.py").write_text(
        "def long(prompts, responses, **columns):\n    return [len(r) for r in responses]\n"
    )
    flags = (
        f"win_rate --model_name_or_path {folders}/one --baseline {folders}/two --data_path jsonl:{tmp_path}/rows.jsonl"
    )
    flags += f" --data_output_path {tmp_path}/cache --data_split 0,0,1 --split train --reward {tmp_path}/rule.py:long"
    flags += " --temperature 0 --max_new_tokens 6 --per_device_eval_batch_size 2 --max_prompt_seq_len 64"
    read = []
    for name, own in (("hf", []), ("vllm", VLLM)):
        evaluate.main([*flags.split(), *own, "--output_dir", f"{tmp_path}/{name}"])
        found = json.loads((tmp_path / name / "win_rate.json").read_text())
        assert found.pop("rollout_engine") == name
        read.append((found, (tmp_path / name / "win_rate.jsonl").read_text()))
    assert read[0] == read[1]


def test_answers_to_pictures_are_transformers_own(tmp_path):
    """In a chat also a turn later, with another picture than before, and of an evaluation's rows."""
    place = seen(tmp_path, width=64)
    engines = RolloutEngineFlags(vllm=VllmArguments(vllm_cache_gib=0.05))
    start = engine_maker(SamplingArguments(rollout_engine="vllm"), engines, LONGEST_TOKENS)
    asked = load_chat_model(str(place / "model"), None, DataArguments(), torch.device("cpu"), start_engine=start)
    talk = Talk([asked], SamplingArguments(temperature=0.0, max_new_tokens=5), 1)
    for name in ("red", "blue"):
        talk.attach(str(place / f"{name}.png"))
        first = answered(talk, "What?")
        assert first == own_answer(place, [name], ["What?"])
        assert answered(talk, "And?") == own_answer(place, [name], ["What?", first, "And?"])
        talk.command("/reset")
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>What?"}],
            "answer": own_answer(place, [name], ["What?"]),
            "images": [f"{name}.png"],
        }
        for name in ("red", "blue")
    ]
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = f"reward --model_name_or_path {place}/model --data_path jsonl:{place}/rows.jsonl --output_dir {place}/out"
    flags += f" --data_output_path {place}/cache --split train --eval_fraction 0 --data_split 0,0,1 --temperature 0"
    flags += " --max_new_tokens 5 --reference_column answer --reward exact_match"
    evaluate.main([*flags.split(), *VLLM])
    found = json.loads((place / "out" / "reward.json").read_text())
    assert found["reward"]["value"] == 1.0, found
