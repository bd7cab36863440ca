"""Answers of finished models with paths: drawn, scored and shown."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.data_flags import data_flags, with_flags
from threestep.plugins.evaluation.answer_figures import answer_figures, answer_samples
from threestep.plugins.evaluation.answers import Scores, answers_to, scores_of
from threestep.plugins.evaluation.model import ChatModel, engine_maker, load_chat_model
from threestep.plugins.evaluation.scorer import Scorer, load_answer_scorer
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.evaluation.tests.conftest import CPU, save_model  # noqa: F401, F811
from threestep.plugins.evaluation.tests.test_answers import ALONE, SCORING, WORDS
from threestep.plugins.evaluation.web import _columns
from threestep.plugins.parallel_thinking.form import ParallelPaths
from threestep.plugins.parallel_thinking.layout import ParallelTags, PathSampling, drawn_document
from threestep.plugins.parallel_thinking.tests.parallel_texts import WRITTEN_TAGS, fond_of_tags
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.seeds import derived_seed
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.rollout_engine import RolloutRequest, Sampling
from training.utils.data.arguments import AnswerDataArguments
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.rows.documents import collate_prompts
from training.utils.flags.flags import note_mistakes, settings_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.table import RolloutEngineFlags
from training.utils.layout.rows import packed_rows
from training.utils.models.document_attention import use_document_attention
from training.utils.models.token_model import ScalarModel
from training.utils.rewards.weighted import Reward

pytestmark = pytest.mark.unit

DRAWN = SamplingArguments(max_new_tokens=20)
PATHS = with_flags(
    AnswerDataArguments(), max_prompt_seq_len=64, parallel_thinking=True, parallel_paths=3, max_path_tokens=6
)


@pytest.fixture
def thinking(save_model, tiny_tokenizer, tmp_path) -> tuple[ChatModel, Scorer]:  # noqa: F811
    """A model that opens blocks, and a reward model that reads them."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(WRITTEN_TAGS)
    data = PATHS
    path = fond_of_tags(save_model("plain", tokenizer=tokenizer), tmp_path / "thinking")
    start = engine_maker(DRAWN, RolloutEngineFlags(), 64, data.form)
    reward = save_model("reward", scalar=True, tokenizer=tokenizer)
    return load_chat_model(str(path), None, data, CPU, start_engine=start), load_answer_scorer(
        reward, None, data, ALONE
    )


def test_paths_are_drawn_and_scored_as_in_step_3(thinking):
    """The rollout of its sampling, and the reward model's score of the layout in which it trains."""
    asked, scorer = thinking
    rows = [PromptMaker(asked.data, asked.tokenizer).make(f"Human: {word}? Assistant:", word, 0) for word in WORDS]
    answers = answers_to(asked, rows, DRAWN, seed=1, rows_per_batch=4, samples=2)
    tags = ParallelTags(*asked.tokenizer.convert_tokens_to_ids(WRITTEN_TAGS))
    sampling = settings_of(
        Sampling,
        DRAWN,
        end_token_id=asked.end_token_id,
        pad_token_id=asked.tokenizer.pad_token_id,
        form=ParallelPaths(PathSampling(tags, 3, 6)),
        defaults=("bad_words", "ends"),
    )
    batch = collate_prompts(rows, asked.tokenizer.pad_token_id)
    seeds = [derived_seed(1, "evaluation", *index) for row in range(len(rows)) for index in ((row,), (row, 1))]
    request = RolloutRequest(batch.prompt_ids_BP, batch.prompt_mask_BP, sampling, seeds, 2)
    drawn = asked.engine.roll_out(asked.model, request)
    assert [list(answer.token_ids) for answer in answers] == [drawn.response_of(row).tolist() for row in range(8)]
    assert [answer.positions for answer in answers] == drawn.formed.positions_B.tolist()
    assert max(drawn.formed.positions_B) <= 20 < max(len(answer.token_ids) for answer in answers)
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
    in_one_piece = dataclasses.replace(scorer, form=None)
    apart = scores_of(asked, rows, answers, (Reward("model", 1.0, None),), scorer=in_one_piece, flags=SCORING).total
    assert max(abs(one - other) for one, other in zip(scores, apart, strict=True)) > 1e-3
    samples = answer_samples(rows, answers, Scores(scores, {"model": scores}))
    figures = answer_figures([samples], seed=1)
    assert figures["with_paths"] == len(whole) / 8 and figures["answer_positions"] < figures["answer_tokens"]


def test_a_chat_draws_and_names_them(thinking):
    asked, scorer = thinking
    talk = Talk([asked], DRAWN, 3, scorer)
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
    mistakes = Mistakes()
    note_mistakes(with_flags(AnswerDataArguments(), parallel_paths=3), mistakes)
    [sentence] = mistakes.sentences
    assert sentence.startswith("--parallel_paths 3 is for the paths of --parallel_thinking, which is not")
    with pytest.raises(ThreestepError, match="--rollout_engine vllm does not support --parallel_thinking"):
        engine_maker(dataclasses.replace(DRAWN, rollout_engine="vllm"), RolloutEngineFlags(), 64, PATHS.form)


def test_a_model_that_cannot_draw_them_is_refused(save_model):  # noqa: F811
    start = engine_maker(DRAWN, RolloutEngineFlags(), 64, PATHS.form)
    with pytest.raises(ThreestepError, match="--parallel_tags expects every tag to be one token, got '<Parallel>'"):
        load_chat_model(save_model("plain"), None, data_flags(parallel_thinking=True), CPU, start_engine=start)
