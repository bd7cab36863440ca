"""Answers to many prompts are those to each alone; rewards score them, and figures of them are worked by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification

from tests.support.data_flags import data_flags
from tests.support.tiny_tokenizers import train_tokenizer
from threestep.plugins.evaluation import pairs_page, sharing
from threestep.plugins.evaluation.answer_figures import answer_figures, answer_samples, share
from threestep.plugins.evaluation.answers import Scores, answers_to, combined_values, scores_of
from threestep.plugins.evaluation.model import Answer
from threestep.plugins.evaluation.pairs_page import page
from threestep.plugins.evaluation.perplexity import row_losses
from threestep.plugins.evaluation.scorer import load_answer_scorer
from threestep.plugins.evaluation.sharing import Sharers
from threestep.plugins.evaluation.tests.conftest import CPU
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rows import PromptRow, SentenceRow
from training.utils.data.arguments import DataArguments
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.rows.documents import sentence_document
from training.utils.engine.ranks.startup import Ranks
from training.utils.generation.arguments import SamplingArguments
from training.utils.rewards.arguments import Combination, ScoringArguments
from training.utils.rewards.weighted import Reward

ALONE = Ranks(0, 0, 1, CPU)
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


def test_weights_scale_members_and_of_weight_0_is_none():
    assert combined_values([[1.0], [2.0], [50.0]], [3.0, 0.5, 0.0], Combination("mean")) == [2.0]
    assert combined_values([[1.0], [2.0], [-50.0]], [3.0, 0.5, 0.0], Combination("minimum")) == [1.0]


def prompt_rows(*sources: str) -> list[PromptRow]:
    return [PromptRow(n, np.array([3]), f"p{n}", "r", {"data_source": source}) for n, source in enumerate(sources)]


def said(*texts: str) -> list[Answer]:
    return [Answer(text, tuple(range(len(text))), True) for text in texts]


def test_one_answer_to_each_prompt():
    """Gains 1, 0, -0.5, 0.5: two wins, a tie and a loss are 2.5 of 4."""
    answers = [Answer("", (1, 2), True), Answer("", (1,), False), Answer("", (1,), True), Answer("", (1,), True)]
    sides = [
        answer_samples(prompt_rows(*"aaaa"), answers, Scores(total, {"rule": total}))
        for total in ([2.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.5, 0.5])
    ]
    figures = answer_figures(sides, seed=0)
    assert (figures["prompts"], figures["wins"], figures["ties"], figures["losses"]) == (4, 2, 1, 1)
    assert figures["win_rate"].value == 0.625 and figures["reward_gain"].value == 0.25
    assert figures["answer_tokens"] == 1.25 and figures["baseline_ended_share"] == 0.75
    assert not any("/" in name or "@" in name for name in figures)  # one source, one reward, one answer


def test_several_answers_by_source_and_by_key():
    """Four answers to each of two prompts; right 1, 0, 0, 0 and 1, 1, 1, 0: pass@2 is 1 - 3/6 and 1 - 0."""
    texts = ("x", "y", "y", "z", "x", "x", "x", "y")
    right = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]
    digits = [1.0, 2.0, 2.0, 3.0, 7.0, 7.0, 7.0, 8.0]
    scores = Scores(right, {"rule": right, "rule/answer": digits})
    samples = answer_samples(prompt_rows("a/math", "b/code"), said(*texts), scores)
    assert [(own["prompt_index"], own["sample"]) for own in samples][3:5] == [(0, 3), (1, 0)]
    figures = answer_figures([samples], seed=0)
    assert figures["prompts"] == 2 and figures["reward"].value == 0.5
    assert figures["reward_best@2"].value == pytest.approx((0.5 + 1.0) / 2)
    assert figures["reward_best@4"].value == 1.0 and figures["reward_worst@4"].value == 0.0
    # Votes are by the rule's answer: 2 of 1, 2, 2, 3 is wrong, 7 of 7, 7, 7, 8 right.
    assert figures["reward_majority@4"].value == 0.5 == figures["reward/rule_majority@4"].value
    assert figures["math/reward_best@2"].value == 0.5 and figures["code/reward/rule/answer"].value == 7.25
    assert figures["math/reward/rule/answer_best@4"].value == 3.0
    low, high = figures["reward_best@2"].low, figures["reward_best@2"].high
    assert 0.5 <= low <= 0.75 <= high <= 1.0


def test_several_answers_of_two_models_meet_one_by_one():
    """Gains 1, 0 and -1, 1: a win and a tie are 0.75 of the first prompt, a loss and a win half of the second."""
    sides = [
        answer_samples(prompt_rows("a", "a"), said(*"abcd"), Scores(total, {"rule": total}))
        for total in ([1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 0.0])
    ]
    figures = answer_figures(sides, seed=0)
    assert (figures["wins"], figures["ties"], figures["losses"]) == (2, 1, 1)
    assert figures["win_rate"].value == 0.625 and figures["reward_gain"].value == 0.25
    assert figures["baseline_reward"].value == 0.25


def test_wilson_by_hand():
    """8 of 10, z = 1.96: centre (0.8 + 3.8415/20) / (1 + 3.8415/10) = 0.9921/1.3841 = 0.7167, half width
    1.96/1.3841 * sqrt(0.16/10 + 3.8415/400) = 1.4160 * 0.1600 = 0.2266. 0 of n: the upper end is z^2 / (n + z^2)."""
    figure = share(8, 10)
    assert figure.value == 0.8
    assert (figure.low, figure.high) == pytest.approx((0.4902, 0.9433), abs=5e-5)
    assert str(figure) == "0.800 (95 % from 0.490 to 0.943)"
    none, every = share(0, 20), share(20, 20)
    assert (none.low, none.high) == pytest.approx((0.0, 3.8415 / 23.8415), abs=1e-5)
    assert (every.low, every.high) == pytest.approx((1 - none.high, 1.0), abs=1e-9)


MESSAGES = [{"role": "user", "content": "Sort these words: pear fig."}]
TEXT = "Human: Sort these words: pear fig. Assistant: fig pear"


def test_ids_and_texts_score_as_in_plain_transformers(save_model, tiny_tokenizer):
    path = save_model("reward", scalar=True)
    scorer = load_answer_scorer(path, None, DataArguments(), ALONE)
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    ids = [*tiny_tokenizer(TEXT)["input_ids"], tiny_tokenizer.eos_token_id]
    with torch.no_grad():
        expected = float(plain(torch.tensor([ids])).logits[0, 0])
    prompt, response = scorer.ids_of_text(MESSAGES, "fig pear")
    assert prompt + response == ids
    assert scorer.ids_of_text("Human: Sort these words: pear fig. Assistant:", " fig pear") == (prompt, response)
    assert scorer.score_ids([prompt, prompt], [response, response[:1]])[0] == pytest.approx(expected, abs=1e-5)


def test_an_answer_that_was_cut_keeps_its_last_token_where_pad_is_the_end(save_model, tiny_tokenizer_pad_is_eos):
    tokenizer = tiny_tokenizer_pad_is_eos
    path = save_model("reward", scalar=True, tokenizer=tokenizer)
    scorer = load_answer_scorer(path, None, DataArguments(), ALONE)
    plain = AutoModelForSequenceClassification.from_pretrained(path).eval()
    prompt, ended = scorer.ids_of_text(MESSAGES, "fig pear")
    assert ended[-1] == tokenizer.pad_token_id
    for cut in (ended, ended[:-1], ended[:-2]):
        with torch.no_grad():
            expected = float(plain(torch.tensor([[*prompt, *cut]])).logits[0, 0])
        assert scorer.score_ids([prompt], [cut]) == [pytest.approx(expected, abs=1e-5)]


def test_a_reward_model_with_a_chat_template_reads_messages_alone(save_model, tmp_path):
    tokenizer = train_tokenizer(["<|user|>Hi"])
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|pad|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer.chat_template = template
    path = save_model("reward", scalar=True, tokenizer=tokenizer)
    scorer = load_answer_scorer(path, None, data_flags(prompt_style="chat_template"), ALONE)
    prompt, response = scorer.ids_of_text([{"role": "user", "content": "Hi"}], "fig")
    assert tokenizer.decode(prompt) == "<|user|>Hi<|pad|><|assistant|>"
    assert tokenizer.decode(response) == "fig<|pad|>"
    with pytest.raises(ThreestepError, match="formats conversations with its chat template, but its tokenizer differs"):
        scorer.ids_of_text("Human: Hi Assistant:", "fig")
    one_way = "{% for m in messages %}{{ loop.length }}<|{{ m.role }}|>{{ m.content }}<|pad|>{% endfor %}"
    tokenizer.chat_template = one_way + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    path = save_model("reward2", scalar=True, tokenizer=tokenizer)
    scorer = load_answer_scorer(path, None, data_flags(prompt_style="chat_template"), ALONE)
    with pytest.raises(ThreestepError, match="does not render the answer after its prompt"):
        scorer.ids_of_text([{"role": "user", "content": "Hi"}], "fig")


def test_a_reward_model_whose_rows_are_as_stored_reads_text_as_it_is(save_model):
    scorer = load_answer_scorer(save_model("reward", scalar=True), None, data_flags(prompt_style="as_stored"), ALONE)
    talk = [{"role": "user", "content": "1 ="}, {"role": "assistant", "content": " 1"}]
    prompt, response = scorer.ids_of_text([*talk, {"role": "user", "content": "2 ="}], " 2")
    assert scorer.tokenizer.decode(prompt) == "2 ="
    assert scorer.tokenizer.decode(response).removesuffix(scorer.tokenizer.eos_token) == " 2"


def test_row_losses_beside_plain_cross_entropy(asked):
    draws = np.random.default_rng(0)
    rows = []
    for place, length in enumerate((5, 9, 30, 7)):
        mask = np.arange(length) >= 2
        rows.append(SentenceRow(place, draws.integers(0, 60, length).astype(np.int32), mask))
    losses, targets, right = row_losses(asked, [sentence_document(row) for row in rows], 32, 2, flag="--max_seq_len")
    assert targets == [3, 7, 28, 5]
    hits = 0
    for row, loss in zip(rows, losses, strict=True):
        ids = torch.tensor(row.input_ids, dtype=torch.int64)
        with torch.no_grad():
            logits = asked.model(ids[None]).logits[0, :-1].double()
        expected = torch.nn.functional.cross_entropy(logits[1:], ids[2:], reduction="sum")
        assert loss == pytest.approx(float(expected), rel=1e-5)
        hits += int((logits[1:].argmax(-1) == ids[2:]).sum())
    assert right == hits / 43
    with pytest.raises(ThreestepError, match="--max_seq_len allow 129 tokens"):
        row_losses(asked, [], 129, 2, flag="--max_seq_len")


@pytest.fixture
def three():
    store = dist.HashStore()
    return [Sharers(rank, 3, store) for rank in range(3)]


def test_the_first_rank_gets_every_result_in_order_and_each_piece_is_worked_once(three):
    worked: list[int] = []

    def work(piece: int) -> list[int]:
        worked.append(piece)
        return [piece, piece**2]

    assert sharing.ALONE.results("squares", 4, lambda piece: piece**2) == [0, 1, 4, 9]
    assert [one.results("a", 7, work) for one in three[1:]] == [[], []]
    assert three[0].results("a", 7, work) == [[piece, piece**2] for piece in range(7)]
    assert sorted(worked) == list(range(7)) and list(three[1].pieces(7)) == [1, 4]


def test_the_first_rank_does_not_wait_for_one_that_failed(three):
    three[2].store.set("failed", "2")
    three[1].results("a", 3, lambda piece: piece)
    with pytest.raises(ThreestepError, match="rank 2 failed; see its messages above"):
        three[0].results("a", 3, lambda piece: piece)


def test_the_page(tmp_path):
    samples = [
        {"prompt": "a < b?", "answers": ["<script>x</script>", "no"], "scores": [1.0, 0.5], "ground_truth": "no"},
        {"prompt": "c", "answers": ["1", "2"], "scores": [0.5, 0.5], "ground_truth": None},
    ]
    figures = {"win_rate": "0.5 (95 % from 0.4 to 0.6)", "reward": "1", "baseline_reward": "2"}
    text = page("win_rate", figures, ["A", "B"], samples, folder=tmp_path, settings={})
    assert all(f">{words}<" in text for words in ("Win rate", "reward (A)", "reward (B)", "95%: 0.4 to 0.6"))
    assert "<script>" not in text and "&lt;script&gt;x&lt;/script&gt;" in text and "a &lt; b?" in text
    assert text.count('class="answer best"') == 1  # a tie marks none
    assert text.count("expected: no") == 1
    assert "http:" not in text and "https:" not in text and "script-src" not in text


def test_pictures_stand_below_the_prompt_until_the_page_has_enough(tmp_path, monkeypatch):
    (tmp_path / "sample_pictures").mkdir()
    (tmp_path / "sample_pictures" / f"{'c' * 64}.png").write_bytes(b"a picture")
    sample = {"prompt": "p", "images": ["c" * 64], "answers": ["1"], "scores": [1.0], "ground_truth": None}
    text = page("reward", {}, ["A"], [sample, sample], folder=tmp_path, settings={})
    assert text.count('<img src="data:image/png;base64,YSBwaWN0dXJl" alt="image 1 of 1">') == 2
    monkeypatch.setattr(pairs_page, "_MOST_BYTES", 10)
    text = page("reward", {}, ["A"], [sample, sample], folder=tmp_path, settings={})
    assert text.count("<img") == 1 and text.count("1 image not shown") == 1
