"""Many prompts at once get the answers that each gets alone; --reward scores them."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.data_flags import data_flags
from tests.support.parallel_texts import WRITTEN_TAGS, fond_of_tags
from threestep.plugins.evaluation.answer_figures import answer_figures, answer_samples
from threestep.plugins.evaluation.answers import Scores, answers_to, combined_values, scores_of
from threestep.plugins.evaluation.model import ChatModel, engine_maker, load_chat_model
from threestep.plugins.evaluation.scorer import Scorer, load_answer_scorer
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.evaluation.tests.conftest import CPU
from threestep.plugins.evaluation.web import _columns
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import derived_seed
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.paths import ParallelTags
from training.utils.contracts.rollout_engine import PathSampling, RolloutRequest, Sampling
from training.utils.data.build.arguments import DataArguments
from training.utils.data.build.prompts import PromptMaker
from training.utils.data.rows.collate import collate_prompts
from training.utils.engine.ranks.startup import Ranks
from training.utils.flags.flags import settings_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.table import RolloutEngineFlags
from training.utils.layout.parallel import drawn_document
from training.utils.layout.rows import packed_rows
from training.utils.models.attention.document_attention import use_document_attention
from training.utils.models.token_model import ScalarModel
from training.utils.rewards.arguments import ScoringArguments
from training.utils.rewards.combination import Combination
from training.utils.rewards.weighted import Reward

ALONE = Ranks(0, 0, 1, CPU)
PATHS = SamplingArguments(max_new_tokens=20, parallel_paths=3, max_path_tokens=6)
WORDS = ("fig", "pear", "2", "apple")

SCORING = ScoringArguments()


def test_answers_and_scores(asked, save_model, monkeypatch):
    asked = dataclasses.replace(asked, data=data_flags(max_prompt_seq_len=64))
    maker = PromptMaker(asked.data, asked.tokenizer)
    rows = [maker.make(f"Human: {word}? Assistant:", word, place) for place, word in enumerate(("fig", "pear", "2"))]
    flags = SamplingArguments(max_new_tokens=5)
    together = answers_to(asked, rows, flags, seed=1, rows_per_batch=2)
    assert [answer.token_ids for answer in answers_to(asked, rows, flags, 1, rows_per_batch=3)] == [
        a.token_ids for a in together
    ]

    def length(prompts, responses, ground_truth, **columns):
        assert ground_truth == ["fig", "pear", "2"]
        return [float(len(response)) for response in responses]

    scorer = load_answer_scorer(save_model("reward", scalar=True), None, DataArguments(), ALONE)
    rewards = (Reward("length", 2.0, length), Reward("model", 0.5, None))
    found = scores_of(asked, rows, together, rewards, scorer=scorer, flags=SCORING)
    for row, answer, score in zip(rows, together, found.total, strict=True):
        [own] = scorer.score_ids([row.flipped_prompt_ids[::-1].tolist()], [list(answer.token_ids)])
        assert score == pytest.approx(2.0 * len(answer.text) + 0.5 * own, abs=1e-4)
    assert list(found.parts) == ["length", "model"] and found.parts["length"] == [len(a.text) for a in together]
    # Two answers to each prompt: the first as alone, and each scored with its own prompt.
    twice = answers_to(asked, rows, flags, seed=1, rows_per_batch=2, samples=2)
    assert [answer.token_ids for answer in twice[::2]] == [answer.token_ids for answer in together]
    assert scores_of(asked, rows, twice, rewards[1:], scorer=scorer, flags=SCORING).total[::2] == pytest.approx(
        [0.5 * value for value in found.parts["model"]], abs=1e-4
    )
    # A reward that does not apply to an answer is left out of its sum, and of its sample.
    some = Reward("some", 1.0, lambda prompts, responses, **columns: [None, 1.0, None])
    found = scores_of(asked, rows, together, (rewards[0], some), scorer=None, flags=SCORING)
    assert found.total == [2.0 * len(answer.text) + extra for answer, extra in zip(together, (0, 1, 0), strict=True)]
    assert ["reward/some" in sample for sample in answer_samples(rows, together, found)] == [False, True, False]
    assert scores_of(asked, rows, together, (some,), scorer=None, flags=SCORING).total == [0, 1, 0]
    # A reward model with another tokenizer reads the texts.
    monkeypatch.setattr("threestep.plugins.evaluation.answers.same_tokenizer", lambda one, other: False)
    assert scores_of(asked, rows, together, rewards[1:], scorer=scorer, flags=SCORING).total != [0.0, 0.0, 0.0]


@pytest.fixture
def thinking(save_model, tiny_tokenizer, tmp_path) -> tuple[ChatModel, Scorer]:
    """A model that opens blocks, and a reward model that reads them."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(WRITTEN_TAGS)
    data = data_flags(max_prompt_seq_len=64, parallel_thinking=True)
    path = fond_of_tags(save_model("plain", tokenizer=tokenizer), tmp_path / "thinking")
    start = engine_maker(PATHS, RolloutEngineFlags(), 64, thinks=True)
    reward = save_model("reward", scalar=True, tokenizer=tokenizer)
    return load_chat_model(str(path), None, data, CPU, start_engine=start), load_answer_scorer(
        reward, None, data, ALONE
    )


def test_paths_are_drawn_and_scored_as_in_step_3(thinking):
    """The rollout of its sampling, and the reward model's score of the layout in which it trains."""
    asked, scorer = thinking
    rows = [PromptMaker(asked.data, asked.tokenizer).make(f"Human: {word}? Assistant:", word, 0) for word in WORDS]
    answers = answers_to(asked, rows, PATHS, seed=1, rows_per_batch=4, samples=2)
    tags = ParallelTags(*asked.tokenizer.convert_tokens_to_ids(WRITTEN_TAGS))
    sampling = settings_of(
        Sampling,
        PATHS,
        end_token_id=asked.end_token_id,
        pad_token_id=asked.tokenizer.pad_token_id,
        paths=PathSampling(tags, 3, 6),
        defaults=("bad_words", "ends"),
    )
    batch = collate_prompts(rows, asked.tokenizer.pad_token_id)
    seeds = [derived_seed(1, "evaluation", *index) for row in range(len(rows)) for index in ((row,), (row, 1))]
    request = RolloutRequest(batch.prompt_ids_BP, batch.prompt_mask_BP, sampling, seeds, 2)
    drawn = asked.engine.roll_out(asked.model, request)
    assert [list(answer.token_ids) for answer in answers] == [drawn.response_of(row).tolist() for row in range(8)]
    assert [answer.positions for answer in answers] == drawn.paths.positions_B.tolist()
    assert max(drawn.paths.positions_B) <= 20 < max(len(answer.token_ids) for answer in answers)
    whole = [answer for answer in answers if answer.paths]
    assert len(whole) > 2 and all(set(answer.paths) == {3} for answer in whole)
    scores = scores_of(asked, rows, answers, (Reward("model", 1.0, None),), scorer=scorer, flags=SCORING).total
    model = AutoModelForSequenceClassification.from_pretrained(scorer.name).eval()
    use_document_attention(model)
    for sequence, score in zip(drawn.sequences(), scores, strict=True):
        cut = int(sequence.is_target.long().argmax())
        parts = [
            TokenSequence(sequence.input_ids[part], sequence.is_target[part]) for part in (slice(cut), slice(cut, None))
        ]
        with torch.no_grad():
            laid_out = ScalarModel(model)(packed_rows([[drawn_document(parts[0], parts[1:], tags)]], 0))
        assert score == pytest.approx(float(laid_out), abs=1e-5)
    in_one_piece = dataclasses.replace(scorer, tags=None)
    apart = scores_of(asked, rows, answers, (Reward("model", 1.0, None),), scorer=in_one_piece, flags=SCORING).total
    assert max(abs(one - other) for one, other in zip(scores, apart, strict=True)) > 1e-3
    samples = answer_samples(rows, answers, Scores(scores, {"model": scores}))
    figures = answer_figures([samples], seed=1)
    assert figures["with_paths"] == len(whole) / 8 and figures["answer_positions"] < figures["answer_tokens"]


def test_a_chat_draws_and_names_them(thinking):
    asked, scorer = thinking
    talk = Talk([asked], PATHS, 3, scorer)
    for _ in range(4):
        talk.ask("Sort these words: pear fig.")
        [answer] = talk.answer(0)  # once it is complete
        if answer.paths:
            break
    assert answer.text.count("<Path>") >= 3 and answer.note == talk.note(0)
    assert talk.note(0) == (
        f"paths side by side: {', '.join('3' * len(answer.paths))}; {len(answer.token_ids)} tokens in "
        f"{answer.positions} positions"
    )
    assert isinstance(talk.score(0), float)
    [shown] = _columns(talk, "")
    assert "&lt;Path>" in shown[-1]["content"] and f"*{talk.note(0)}*" in shown[-1]["content"]


def test_paths_without_parallel_thinking_are_refused():
    with pytest.raises(ThreestepError, match="--parallel_paths 3 is of the paths of --parallel_thinking, which is not"):
        engine_maker(PATHS, RolloutEngineFlags(), 64)
    with pytest.raises(ThreestepError, match="--rollout_engine vllm does not support --parallel_thinking"):
        engine_maker(dataclasses.replace(PATHS, rollout_engine="vllm"), RolloutEngineFlags(), 64, thinks=True)


def test_a_model_that_cannot_draw_them_is_refused(save_model, tiny_tokenizer):
    start = engine_maker(PATHS, RolloutEngineFlags(), 64, thinks=True)
    with pytest.raises(ThreestepError, match="--parallel_tags expects every tag to be one token, got '<Parallel>'"):
        load_chat_model(save_model("plain"), None, data_flags(parallel_thinking=True), CPU, start_engine=start)


def test_weights_scale_members_and_of_weight_0_is_none():
    assert combined_values([[1.0], [2.0], [50.0]], [3.0, 0.5, 0.0], Combination("mean")) == [2.0]
    assert combined_values([[1.0], [2.0], [-50.0]], [3.0, 0.5, 0.0], Combination("minimum")) == [1.0]
