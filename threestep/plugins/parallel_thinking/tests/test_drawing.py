"""Paths that are drawn side by side: the training layout's log-probabilities, limits, seeds, and where they go."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from tests.support.data_flags import data_flags, with_flags
from tests.support.ppo_flags import ppo_flags
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm
from tests.unit.step3_ppo.experience.test_experience import how, made_from, roles  # noqa: F401  # a fixture
from tests.unit.step3_ppo.flags.test_checks import names_of, why
from tests.unit.utils.generation.decoding.test_hf import PAD, prompts, responses, shapes_of_inputs
from threestep.plugins.evaluation.answer_figures import answer_figures, answer_samples
from threestep.plugins.evaluation.answers import Scores, answers_to, scores_of
from threestep.plugins.evaluation.model import ChatModel, engine_maker, load_chat_model
from threestep.plugins.evaluation.scorer import Scorer, load_answer_scorer
from threestep.plugins.evaluation.talk import Talk
from threestep.plugins.evaluation.tests.conftest import CPU, save_model  # noqa: F401  # a fixture
from threestep.plugins.evaluation.tests.test_answers import ALONE, SCORING, WORDS
from threestep.plugins.evaluation.web import _columns
from threestep.plugins.parallel_thinking.arguments import ParallelRolloutArguments
from threestep.plugins.parallel_thinking.form import ParallelPaths, ParallelThinking
from threestep.plugins.parallel_thinking.layout import ParallelTags, PathSampling, drawn_blocks, drawn_document
from threestep.plugins.parallel_thinking.tests.parallel_texts import WRITTEN_TAGS, fond_of_tags
from threestep.plugins.ragged.ragged_rows import arranged
from threestep.plugins.replay.files import DumpingRollout, ReplayRollout
from threestep.plugins.replay.tests.test_files import PLAIN, asked, assert_same
from training.step3_ppo.advantages import ESTIMATORS
from training.step3_ppo.advantages.inputs import AdvantageInputs
from training.step3_ppo.contracts.settings import ExperienceSettings, LengthSettings
from training.step3_ppo.experience.scoring import outcome_scores
from training.step3_ppo.experience.sequences import training_sequences
from training.step3_ppo.flags.checks import FORWARDS, VALUES
from training.utils.base.errors import Mistakes, ThreestepError
from training.utils.base.seeds import derived_seed
from training.utils.contracts.documents import Document, TokenSequence
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Drawing, RolloutEngine, RolloutRequest, Sampling
from training.utils.data.arguments import AnswerDataArguments
from training.utils.data.build.row_maker import PromptMaker
from training.utils.data.rows.documents import collate_prompts
from training.utils.flags.flags import note_mistakes, settings_of
from training.utils.generation.arguments import SamplingArguments
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.generation.table import RolloutEngineFlags
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import SequenceLayout, rank_share
from training.utils.models.document_attention import use_document_attention
from training.utils.models.own_forward import own_forward_of, read_own_forward
from training.utils.models.token_model import PolicyModel, Readout, ScalarModel
from training.utils.rewards.weighted import Reward

TAGS = ParallelTags(open_block=3, open_path=4, close_path=5, close_block=6)
OPEN, PATH, END_PATH, CLOSE, END = 3, 4, 5, 6, 2
PATHS = Drawing(form=ParallelThinking(ParallelRolloutArguments(parallel_thinking=True)))
SAMPLING = Sampling(
    24, 1.0, top_k=0, top_p=1.0, end_token_id=END, pad_token_id=PAD, form=ParallelPaths(PathSampling(TAGS, 3))
)


def model_that_thinks(family: str = "llama", dtype: torch.dtype = torch.float32, **pulls: float):
    """A tiny model that likes tags; `pulls` are added to the logits of `_3`, `_4` and so on."""
    model = tiny_causal_lm(family, dtype)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(0.5 * head.weight.detach())  # rounding as of models, not of wide ones
    head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY, dtype=dtype))
    for token, pull in ({"_3": 3.5, "_4": 3.5, "_5": 3.5} | pulls).items():
        head.bias.data[int(token[1:])] = pull
    return model


def roll(model, sampling=SAMPLING, lengths=(3, 11, 1, 7), samples: int = 4, seeds=None) -> Rollout:
    ids_BP, mask_BP = prompts(lengths)
    seeds = list(range(len(ids_BP) * samples)) if seeds is None else seeds
    return TransformersRollout().roll_out(model, RolloutRequest(ids_BP, mask_BP, sampling, seeds, samples))


def split(sequence: TokenSequence) -> tuple[TokenSequence, TokenSequence]:
    """Prompt and response: the first token of a response is always drawn."""
    cut = int(sequence.is_target.long().argmax())
    parts = (slice(cut), slice(cut, None))
    prompt, response = (TokenSequence(sequence.input_ids[part], sequence.is_target[part]) for part in parts)
    return prompt, response


def document(sequence: TokenSequence) -> Document:
    prompt, response = split(sequence)
    return drawn_document(prompt, [response], TAGS)


def largest_difference(model, rollout: Rollout) -> float:
    """Between what was recorded and what the training forward computes of the drawn tokens."""
    rows = packed_rows([[document(sequence)] for sequence in rollout.sequences()], PAD)
    with torch.no_grad():
        trained_M = PolicyModel(model)(rows).logprobs_M
    return float((trained_M - rollout.drawn.logprobs_BR[rollout.drawn.mask_BR]).abs().max())


@pytest.fixture(scope="module")
def model():
    return model_that_thinks()


@pytest.fixture(scope="module")
def rollout(model):
    """500 responses."""
    return roll(model, lengths=(3, 11, 1, 7, 5) * 10, samples=10)


def test_log_probabilities_of_500_responses_and_at_another_temperature_are_the_training_layouts(model, rollout):
    assert len(rollout.ended_B) == 500 and rollout.inserted_BR.any(dim=1).sum() > 250
    assert largest_difference(model, rollout) < 1e-5
    drawn = roll(model, replace(SAMPLING, temperature=0.7, top_k=40))
    rows = packed_rows([[document(sequence)] for sequence in drawn.sequences()], PAD)
    with torch.no_grad():
        trained_M = PolicyModel(model)(rows, Readout(0.7)).logprobs_M
    assert (trained_M - drawn.drawn.logprobs_BR[drawn.drawn.mask_BR]).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "qwen3", "opt"])
def test_in_float64_to_the_precision_of_the_record(family):
    """float32 of numbers up to 16: 1e-6."""
    model = model_that_thinks(family, torch.float64)
    drawn = roll(model)
    assert drawn.inserted_BR.any() and largest_difference(model, drawn) < 1e-6


def test_blocks_are_whole_and_what_is_inserted_is_no_target(model, rollout):
    """By the text alone: of each block that ends three paths; the first path's tag is drawn, the others' are not."""
    ends = 0
    for row, ids in enumerate(responses(rollout)):
        inserted = rollout.inserted_BR[row].tolist()
        for block in drawn_blocks(torch.tensor(ids), TAGS):
            assert [inserted[path] for path in block.paths] == [False, True, True][: len(block.paths)]
            if block.end is not None:
                assert len(block.paths) == 3 and ids[block.end] == CLOSE and inserted[block.end]
                inserted[block.end] = False
                ends += 1
            for path in block.paths:
                inserted[path] = False
        # What is left are ends of paths that came to their limit or drew the end of a response.
        assert all(ids[column] == END_PATH for column, is_inserted in enumerate(inserted) if is_inserted)
        assert bool(rollout.ended_B[row]) == (ids[-1] == END)
    assert ends > 200
    targets = torch.cat([sequence.input_ids[sequence.is_target] for sequence in rollout.sequences()])
    assert torch.equal(targets, rollout.response_ids_BR[rollout.response_mask_BR & ~rollout.inserted_BR])


def test_limits_of_a_response_and_of_a_path(model, rollout):
    positions = []
    for sequence in rollout.sequences():
        prompt = len(split(sequence)[0])
        ends = [part.first_position + len(part.tokens) for part in document(sequence).segments]
        positions.append(max(ends) - prompt)
    assert rollout.formed.positions_B.tolist() == positions and max(positions) == SAMPLING.max_new_tokens
    assert torch.equal(rollout.spans_B, rollout.formed.positions_B)
    assert rollout.response_lengths_B.max() > SAMPLING.max_new_tokens  # more tokens than positions
    limited = roll(model, replace(SAMPLING, form=ParallelPaths(PathSampling(TAGS, 2, most_tokens=4))), samples=20)
    lengths = set()
    for ids in responses(limited):
        for block in drawn_blocks(torch.tensor(ids), TAGS):
            if block.end is not None:
                bounds = [*block.paths, block.end]
                lengths |= {after - before for before, after in zip(bounds[:-1], bounds[1:], strict=True)}
    assert lengths == {2, 3, 4} and largest_difference(model, limited) < 1e-5


def test_a_path_that_draws_the_end_ends_itself_and_tags_out_of_place_are_text():
    """And the trunk goes on."""
    model = model_that_thinks(_2=3.0)
    drawn = roll(model, samples=25)
    found = 0
    for row, ids in enumerate(responses(drawn)):
        for column in [column for column, token in enumerate(ids[:-1]) if token == END]:
            assert ids[column + 1] == END_PATH and drawn.inserted_BR[row, column + 1]
            found += 1
    assert found > 5 and largest_difference(model, drawn) < 1e-5
    model = model_that_thinks(_3=3.0, _4=3.0, _5=3.0, _6=3.0)
    drawn = roll(model, samples=25)
    counts = [len(drawn_blocks(torch.tensor(ids), TAGS)) for ids in responses(drawn)]
    tags = [sum(token == CLOSE for token in ids) for ids in responses(drawn)]
    assert sum(tags) > 2 * sum(counts) and max(counts) > 1 and largest_difference(model, drawn) < 1e-5


def test_without_a_block_it_is_the_response_in_one_piece():
    model = model_that_thinks(_3=-100.0)
    one, other = roll(model), roll(model, replace(SAMPLING, form=None))
    assert responses(one) == responses(other) and not one.inserted_BR.any()
    assert torch.allclose(one.sampled_logprobs_BR, other.sampled_logprobs_BR, atol=1e-5)
    assert torch.equal(one.formed.positions_B, other.response_lengths_B) and torch.equal(one.ended_B, other.ended_B)


def test_a_response_depends_on_its_prompt_and_its_seed_alone():
    """In float64, where no draw is tipped by rounding: each prompt alone, all together, and in another order."""
    model, lengths = model_that_thinks(dtype=torch.float64), (3, 11, 1, 7)
    ids_BP, mask_BP = prompts(lengths)
    engine, together = TransformersRollout(), roll(model, lengths=lengths)
    rows = [responses(together)[4 * prompt : 4 * prompt + 4] for prompt in range(4)]
    for prompt in range(4):
        own = ids_BP[prompt][mask_BP[prompt]].unsqueeze(0)
        seeds = range(4 * prompt, 4 * prompt + 4)
        alone = engine.roll_out(model, RolloutRequest(own, torch.ones_like(own).bool(), SAMPLING, seeds, 4))
        assert responses(alone) == rows[prompt]
    order = [2, 0, 3, 1]
    seeds = [4 * prompt + sample for prompt in order for sample in range(4)]
    turned = engine.roll_out(model, RolloutRequest(ids_BP[order], mask_BP[order], SAMPLING, seeds, 4))
    assert responses(turned) == [response for prompt in order for response in rows[prompt]]
    paths = [
        tuple(ids[start:stop])
        for ids in responses(together)
        for block in drawn_blocks(torch.tensor(ids), TAGS)
        for start, stop in zip(block.paths, (*block.paths[1:], block.end), strict=True)
    ]
    assert len(set(paths)) > len(paths) // 2  # each path has numbers of its own


def test_paths_cost_the_steps_of_the_longest(model):
    """One forward of one token a row for each position; in one piece it would be one for each token."""
    for seed in range(40):
        drawn, shapes = shapes_of_inputs(model, lambda seed=seed: roll(model, lengths=(5,), samples=1, seeds=[seed]))
        steps = [shape for shape in shapes[1:] if shape[1] == 1]
        assert len(steps) == len(shapes) - 1 and len(steps) <= int(drawn.formed.positions_B[0])
        if int(drawn.response_lengths_B[0]) > 1.5 * len(steps) > 15:
            break
    else:
        raise AssertionError("no response had long paths")


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma2", "generates paths side by side, .* does not support this: .*see only the most recent tokens"),
        ("mamba", "generates paths side by side, .* does not support this: .*a custom layer type"),
        ("bloom", "BloomForCausalLM does not support this: the model family builds its own attention masks"),
        ("llama", None),
    ],
)
def test_a_family_whose_cache_does_not_hold_all_tokens_or_that_takes_no_masks_is_refused(family, said):
    engine, model = TransformersRollout(), tiny_causal_lm(family)
    read_own_forward(model)
    with pytest.raises(ThreestepError, match=said) if said else contextlib.nullcontext():
        engine.check(contextlib.nullcontext(model), own_forward_of(model), PATHS)
    assert TransformersRollout.draws_forms and not RolloutEngine.draws_forms


def test_rows_keep_their_places_where_they_can():
    rows = [(0, "a"), (2, "b"), (2, "b2"), (4, "c"), (1, "d")]
    assert arranged(rows) == [(0, "a"), (1, "d"), (2, "b"), (2, "b2"), (4, "c")]
    assert arranged([(3, "x"), (1, "y")]) == [(3, "x"), (1, "y")] and arranged([]) == []


def test_paths_come_back_with_what_was_inserted_and_to_the_same_settings_alone(tmp_path, model):
    how = replace(PLAIN, form=ParallelPaths(PathSampling(ParallelTags(3, 4, 5, 6), 2)))
    asked(DumpingRollout(TransformersRollout(), tmp_path, 0), model, how, samples=20)
    expected = asked(TransformersRollout(), model, how, samples=20)
    assert expected.inserted_BR is not None and expected.formed.positions_B is not None
    assert_same(asked(ReplayRollout(tmp_path, 0), None, how, samples=20), expected)
    for other in (replace(how, form=None), replace(how, form=ParallelPaths(PathSampling(ParallelTags(3, 4, 5, 6), 3)))):
        with pytest.raises(
            ThreestepError, match="was generated with paths = .*; replay with the settings of the run that"
        ):
            asked(ReplayRollout(tmp_path, 0), None, other, samples=20)


@pytest.fixture(scope="module")
def with_paths(roles) -> tuple[Rollout, SimpleNamespace]:  # noqa: F811
    """Four samples of each of two prompts, drawn path by path by an actor that likes tags."""
    model = model_that_thinks()
    drawn = roll(model, lengths=(3, 5), samples=4)
    assert drawn.inserted_BR.any(dim=1).sum() >= 4
    return drawn, SimpleNamespace(**{**vars(roles), "actor": PolicyModel(model)})


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", sorted(set(ESTIMATORS) - {"remax", "none"}))
def test_every_estimator_takes_drawn_tokens_alone(with_paths, name, packed):
    """As a response of the drawn tokens, one behind the other. Actor and rollout have the same log-probabilities."""
    rollout, roles = with_paths  # noqa: F811
    drawn, settings = rollout.drawn, how(
        temperature=1.0, samples_per_prompt=4, estimator=ESTIMATORS[name], length=LengthSettings(24),
        plan=PlanSettings(1, 300, 8, packed, 300, form=TAGS),
    )  # fmt: skip
    made = made_from(rollout, roles, settings)
    assert torch.allclose(made.old_logprobs_BR, drawn.logprobs_BR, atol=1e-5)
    kl_BR = 0.1 * (made.old_logprobs_BR - made.read.ref_logprobs_BR)
    assert torch.allclose((made.rewards_BR + kl_BR).sum(dim=1), made.scored.scores_B, atol=1e-5)
    for field in (made.rewards_BR, made.advantages_BR, made.read.values_BR):
        assert field.shape == drawn.mask_BR.shape and not field[~drawn.mask_BR].any()
    inputs = AdvantageInputs(
        made.rewards_BR, drawn.lengths_B, torch.tensor([0] * 4 + [1] * 4), made.read.values_BR,
        logprobs_BR=made.old_logprobs_BR, collisions_BR=_collisions(rollout, roles.actor, settings),
    )  # fmt: skip
    wanted_BR, _ = ESTIMATORS[name].estimate(inputs, settings.advantage)
    assert torch.allclose(made.advantages_BR, wanted_BR, atol=1e-5) and wanted_BR.any()
    for each in training_sequences([made], 4, 0, 1):
        targets = int(each.tokens.is_target.sum())
        assert targets == len(each.advantages_r) == len(each.old_logprobs_r) < len(each.tokens)


def _collisions(rollout: Rollout, actor: PolicyModel, settings: ExperienceSettings) -> torch.Tensor:
    mask_BR = rollout.drawn.mask_BR
    found = [
        actor(rows, Readout(collisions=True)).collisions_M
        for sequence in rollout.sequences()
        for _, rows in rank_share([sequence], SequenceLayout(settings.layout.plan, PAD, 0), torch.device("cpu"))
    ]
    return torch.zeros(mask_BR.shape).masked_scatter(mask_BR, torch.cat(found).detach().float())


def test_a_response_of_paths_is_as_long_as_its_longest(with_paths):
    """What --max_answer_seq_len bounds, and the punishment of long responses reads."""
    rollout, _ = with_paths
    settings = LengthSettings(24, overlong_buffer_tokens=24, overlong_penalty=1.0)
    punished_B = outcome_scores(rollout, torch.zeros(8), settings)
    assert torch.allclose(punished_B, -rollout.formed.positions_B.float() / 24)
    assert (rollout.response_lengths_B > rollout.formed.positions_B).any()


DRAWN = SamplingArguments(max_new_tokens=20)
WITH_PATHS = with_flags(
    AnswerDataArguments(), max_prompt_seq_len=64, parallel_thinking=True, parallel_paths=3, max_path_tokens=6
)


@pytest.fixture
def thinking(save_model, tiny_tokenizer, tmp_path) -> tuple[ChatModel, Scorer]:  # noqa: F811
    """A model that opens blocks, and a reward model that reads them."""
    tokenizer = copy.deepcopy(tiny_tokenizer)
    tokenizer.add_tokens(WRITTEN_TAGS)
    path = fond_of_tags(save_model("plain", tokenizer=tokenizer), tmp_path / "thinking")
    start = engine_maker(DRAWN, RolloutEngineFlags(), 64, WITH_PATHS.form)
    reward = save_model("reward", scalar=True, tokenizer=tokenizer)
    scorer = load_answer_scorer(reward, None, WITH_PATHS, ALONE)
    return load_chat_model(str(path), None, WITH_PATHS, CPU, start_engine=start), scorer


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
        f"parallel paths per block: {', '.join('3' * len(answer.paths))}; {len(answer.token_ids)} tokens in "
        f"{answer.positions} positions"
    )
    assert isinstance(talk.score(0), float)
    [shown] = _columns(talk, "")
    assert "&lt;Path>" in shown[-1]["content"] and f"*{talk.note(0)}*" in shown[-1]["content"]


def test_a_model_and_an_engine_that_cannot_draw_them_are_refused(save_model):  # noqa: F811
    start = engine_maker(DRAWN, RolloutEngineFlags(), 64, WITH_PATHS.form)
    with pytest.raises(
        ThreestepError, match="--parallel_tags expects every tag to be a single token, but '<Parallel>' is not"
    ):
        load_chat_model(save_model("plain"), None, data_flags(parallel_thinking=True), CPU, start_engine=start)
    with pytest.raises(ThreestepError, match="--rollout_engine vllm does not support --parallel_thinking"):
        engine_maker(dataclasses.replace(DRAWN, rollout_engine="vllm"), RolloutEngineFlags(), 64, WITH_PATHS.form)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"rollout_engine": "hybrid"}, "--rollout_engine hybrid does not support --parallel_thinking; remove"),
        ({"stop": ["x"]}, r"--stop \['x'\] checks a response token by token, but --parallel_thinking generates paths"),
        (
            {"speculate": "2", "speculate_by": "ngram"},
            "generates several tokens at once, but --parallel_thinking generates its",
        ),
        (
            {"bad_words": ["x"]},
            r"--bad_words \['x'\] checks a response token by token, but --parallel_thinking generates",
        ),
    ],
)
def test_what_does_not_go_with_paths_side_by_side(given, said):
    with pytest.raises(ThreestepError, match=said):
        names_of(parallel_thinking=True, **given)
    if "rollout_engine" not in given:
        names_of(**given)
        names_of(parallel_thinking=True, parallel_paths=3, max_path_tokens=8)


@pytest.mark.parametrize("name", ["parallel_paths", "max_path_tokens"])
def test_settings_of_paths_without_them(name):
    mistakes = Mistakes()
    note_mistakes(ppo_flags(**{name: 3}).data, mistakes)
    sentence = (
        f"--{name} 3 applies to the paths of --parallel_thinking, which is off; add --parallel_thinking, or remove "
        f"--{name}"
    )
    assert sentence in mistakes.sentences


@pytest.mark.parametrize("name", [FORWARDS, VALUES])
def test_a_forward_of_its_own(name):
    assert (why(name, parallel_thinking=True) or "").startswith("responses have parallel paths")
