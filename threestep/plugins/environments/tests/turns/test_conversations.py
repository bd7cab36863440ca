"""Conversations: what was drawn is what is trained, whoever else is in the batch; limits; environments side by side."""

from __future__ import annotations

import json
import threading
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_hf import PAD, PLAIN, prompts, responses
from threestep.plugins.environments.turns.conversations import ActingRollout, ConversationLimits, Speech, _Awaited
from threestep.plugins.environments.turns.turn_tokens import TurnTokens
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import derived_seed
from training.utils.contracts.drawing import Turns
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import RolloutRequest, rolled_out
from training.utils.data.chat.chat import ChatTokenizer
from training.utils.data.rows.arguments import ChatArguments
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import padded_rows
from training.utils.models.token_model import PolicyModel

END, CALL, HEARD = 2, 5, 7  # ends a turn; a call; begins what an environment says
LIMITS = ConversationLimits(turns=5, calls=None, seconds=None, prompt_tokens=50, answer_interval=32)
SAMPLING = replace(PLAIN, max_new_tokens=40, end_token_id=END)


class Scripted:
    """Answers a turn with its last tokens, 1 to 4 of them, and pays its length; done after a turn of even length."""

    def __init__(self, row, seed: int, opened: list) -> None:
        self.row, self.seed, self.figures, self.closed = row, seed, {}, 0
        self.said: list[list[int]] = []
        opened.append(self)

    def reset(self) -> Future:
        return given((self.row.get("messages", self.row["ids"]), None))

    def step(self, message) -> Future:
        self.said.append(message.ids)
        self.figures["words"] = self.figures.get("words", 0.0) + len(message.ids)
        done = len(message.ids) % 2 == 0
        return given(SimpleNamespace(messages=message.ids[-4:], reward=len(message.ids), done=done))

    def close(self) -> None:
        self.closed += 1


def given(value) -> Future:
    answer: Future = Future()
    answer.set_result(value)
    return answer


def message(ids) -> SimpleNamespace:
    return SimpleNamespace(ids=list(ids), calls=[token for token in ids if token == CALL])


def heard(messages, tools, last) -> SimpleNamespace:
    return SimpleNamespace(ids=[HEARD, *messages[:-1]], cut_messages=0)


def kept(said, opened, tools, ids) -> SimpleNamespace:
    return SimpleNamespace(ids=None, is_refused=False)


SPEECH = Speech(lambda messages, tools: list(messages), message, heard, kept)


def model_that_turns():
    """Likes to end a turn, now and then to call."""
    model = tiny_causal_lm("llama")
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(0.3 * head.weight.detach())
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    head.bias.data[END], head.bias.data[CALL] = 2.5, 1.0
    return model


@pytest.fixture(scope="module")
def model():
    return model_that_turns()


def converse(
    model, lengths=(3, 11, 1, 7), samples=4, limits=LIMITS, sampling=SAMPLING, kind=Scripted, draws=None, **of
):
    """The rollout and its partners. draws: an engine. of: more columns of the rows, each a function of the row's
    number."""
    ids_BP, mask_BP = prompts(lengths)
    rows = [{"ids": ids[mask].tolist()} for ids, mask in zip(ids_BP, mask_BP, strict=True)]
    rows = [{**row, **{name: make(number) for name, make in of.items()}} for number, row in enumerate(rows)]
    opened: list = []

    def partner_of(row, seed):
        return None if row.get("alone") else kind(row, seed, opened)

    engine = ActingRollout(draws or TransformersRollout(), partner_of, SPEECH, limits)
    request = RolloutRequest(ids_BP, mask_BP, sampling, range(len(rows) * samples), samples, rows)
    return rolled_out(engine, model, request), opened


@pytest.fixture(scope="module")
def many(model):
    """100 conversations."""
    return converse(model, lengths=(3, 11, 1, 7, 5) * 2, samples=10)


def test_what_is_trained_is_what_was_said(many):
    rollout, partners = many
    assert isinstance(rollout, Rollout) and len(partners) == 100
    turns = [[ids.tolist() for ids in rollout.turns_of(row)] for row in range(100)]
    sequences = rollout.sequences()
    for row, (partner, own) in enumerate(zip(partners, turns, strict=True)):
        assert own[: len(partner.said)] == partner.said and len(own) - len(partner.said) in (0, 1)
        assert rollout.records[row].turns == len(own)
        assert not bool(rollout.inserted_BR[row, rollout.response_lengths_B[row] - 1])
        sequence = sequences[row]
        assert sequence.input_ids[sequence.is_target].tolist() == [token for turn in own for token in turn]
    assert sum(len(own) > 2 for own in turns) > 10 and max(map(len, turns)) > 3


def test_log_probabilities_are_those_of_the_training_forward(model, many):
    rollout, _ = many
    rows = padded_rows(rollout.sequences(), PAD)
    with torch.no_grad():
        trained_M = PolicyModel(model)(rows).logprobs_M
    drawn = rollout.drawn
    assert torch.allclose(trained_M, drawn.logprobs_BR[drawn.mask_BR], atol=1e-4)
    assert not rollout.sampled_logprobs_BR[rollout.inserted_BR].any()


def test_each_turn_is_drawn_from_its_own_seed(model, many):
    """As the engine draws it by itself, behind the same tokens."""
    rollout, _ = many
    row = next(row for row in range(100) if rollout.records[row].turns >= 3)
    ids, inserted = rollout.response_of(row), rollout.inserted_BR[row]
    begins = [n for n in range(len(ids)) if not inserted[n] and (n == 0 or inserted[n - 1])]
    for turn, begin in enumerate(begins):
        prompt = torch.cat([rollout.prompt_of(row), ids[:begin]])
        seed = derived_seed(row, "turn", turn) if turn else row
        alone = TransformersRollout().roll_out(model, RolloutRequest.of_prompt(prompt, SAMPLING, seed))
        end = min(begin + len(alone.response_of(0)), 40)
        assert torch.equal(alone.response_of(0)[: end - begin], ids[begin:end])


def test_no_result_depends_on_the_batch(model, many):
    whole, _ = many
    ids_BP, mask_BP = prompts((3, 11, 1, 7, 5) * 2)
    for row in (3, 28, 92):
        prompt = row // 10
        rows = [{"ids": ids_BP[prompt][mask_BP[prompt]].tolist()}]
        engine = ActingRollout(TransformersRollout(), lambda row, seed: Scripted(row, seed, []), SPEECH, LIMITS)
        only = slice(prompt, prompt + 1)
        alone = engine.roll_out(model, RolloutRequest(ids_BP[only], mask_BP[only], SAMPLING, [row], 1, rows))
        assert torch.equal(alone.response_of(0), whole.response_of(row))
        assert alone.records[0] == whole.records[row]


def test_rewards_stand_at_the_last_token_of_their_turn(many):
    rollout, partners = many
    for row, partner in enumerate(partners):
        paid = rollout.conversations.turn_rewards_BR[row].nonzero().flatten()
        assert rollout.conversations.turn_rewards_BR[row, paid].tolist() == [len(said) for said in partner.said]
        assert all(int(rollout.response_ids_BR[row, place]) == END for place in paid)
    compressed_BR = rollout.drawn.turn_rewards_BR
    assert torch.equal(compressed_BR.sum(1), rollout.conversations.turn_rewards_BR.sum(1))
    assert rollout.records[7].figures == {"words": float(sum(map(len, partners[7].said)))}


def test_a_row_without_an_environment_has_one_turn_as_ever(model):
    rollout, partners = converse(model, alone=lambda number: number % 2)
    ids_BP, mask_BP = prompts((3, 11, 1, 7))
    plain = TransformersRollout().roll_out(model, RolloutRequest(ids_BP, mask_BP, SAMPLING, range(16), 4))
    assert len(partners) == 8
    for row in [*range(4, 8), *range(12, 16)]:
        assert torch.equal(rollout.response_of(row), plain.response_of(row))
        assert rollout.records[row].turns == 1 and rollout.ended_B[row] == plain.ended_B[row]


def test_limits_cut_and_are_counted(model):
    short = replace(SAMPLING, max_new_tokens=15)
    unlimited, _ = converse(model, samples=8, limits=replace(LIMITS, turns=100), sampling=short)
    assert not unlimited.ended_B.all() and {each.cut for each in unlimited.records} == {None, "tokens"}
    two, partners = converse(model, samples=8, limits=replace(LIMITS, turns=2))
    cut = [each.cut for each in two.records]
    assert max(each.turns for each in two.records) == 2 and cut.count("turns") > 1
    assert [name is None for name in cut] == two.ended_B.tolist()
    no_calls, partners = converse(model, samples=8, limits=replace(LIMITS, calls=0))
    for each, partner, record in zip(range(32), partners, no_calls.records, strict=True):
        calls = CALL in no_calls.turns_of(each)[-1]
        assert (record.cut == "calls") == (calls and record.cut != "tokens") and all(
            CALL not in own for own in partner.said
        )
    slow, _ = converse(model, samples=8, limits=replace(LIMITS, seconds=0.0))
    assert {(each.turns, each.cut) for each in slow.records} <= {(1, None), (1, "seconds"), (1, "tokens")}
    for rollout in (unlimited, two, no_calls, slow):
        assert int(rollout.response_lengths_B.max()) <= 40
        last = rollout.inserted_BR.gather(1, rollout.response_lengths_B[:, None] - 1)
        assert not last.any()


def test_what_leaves_no_room_is_left_out(model):
    """The conversation ends with the turn before; a room of one token is enough for another turn."""
    full, _ = converse(
        model, samples=8, sampling=replace(SAMPLING, max_new_tokens=9), limits=replace(LIMITS, turns=100)
    )
    lengths = [int(length) for length, each in zip(full.response_lengths_B, full.records, strict=True) if each.cut]
    assert max(lengths) == 9 and min(lengths) < 9
    assert sum(record.turns > 1 for record in full.records) > 5


class Slow(Scripted):
    """Every step waits for seven others."""

    barrier = threading.Barrier(8)

    def step(self, message) -> Future:
        answer: Future = Future()

        def work() -> None:
            self.barrier.wait(20)
            answer.set_result(SimpleNamespace(messages=[], reward=1.0, done=True))

        threading.Thread(target=work, daemon=True).start()
        return answer


def test_environments_answer_side_by_side(model):
    rollout, partners = converse(model, samples=2, sampling=replace(SAMPLING, max_new_tokens=200), kind=Slow)
    assert rollout.ended_B.all() and all(partner.closed == 1 for partner in partners)


class _Clock(Turns):
    """Turns of which nothing is drawn."""

    is_drawing = True

    def add(self, turn) -> None: ...
    def advance(self) -> list: ...


def test_answers_are_taken_at_marks_that_drawn_tokens_decide():
    turns, steps = _Clock(), {name: Future() for name in "abcd"}
    awaited = _Awaited(turns, 8)

    def taken_at(tokens: int) -> str:
        turns.steps = tokens
        return "".join(name for name, _ in awaited.answered())

    for name, tokens in (("a", 1), ("b", 4), ("c", 6)):
        turns.steps = tokens
        awaited.add(steps[name], name)
    steps["b"].set_result(None)
    assert taken_at(7) == ""  # although one is there
    threading.Timer(0.05, lambda: steps["a"].set_result(None)).start()
    assert taken_at(9) == "ab"  # in the order of their turns; late ones are waited for
    steps["c"].set_result(None)
    assert taken_at(15) == "" and taken_at(16) == "c" and awaited.count == 0
    awaited.add(steps["d"], "d")
    steps["d"].set_result(None)
    turns.is_drawing = False
    assert taken_at(17) == "d"  # nothing is drawn that it would wait for


def test_without_marks_an_answer_is_taken_as_it_comes():
    turns, late, there = _Clock(), Future(), given(1)
    awaited = _Awaited(turns, 0)
    awaited.add(late, "late")
    awaited.add(there, "there")
    assert awaited.answered() == [("there", 1)] and awaited.answered() == []
    turns.is_drawing = False
    threading.Timer(0.05, lambda: late.set_result(2)).start()
    assert awaited.answered() == [("late", 2)]


class Broken(Scripted):
    def step(self, message) -> Future:
        raise ThreestepError("mended by nobody")


def test_all_are_closed_whatever_happens(model, many):
    assert all(partner.closed == 1 for partner in many[1])
    opened: list = []
    ids_BP, mask_BP = prompts((3, 4))
    rows = [{"ids": [4, 5]}, {"ids": [4]}]
    engine = ActingRollout(TransformersRollout(), lambda row, seed: Broken(row, seed, opened), SPEECH, LIMITS)
    with pytest.raises(ThreestepError, match="mended by nobody"):
        engine.roll_out(model, RolloutRequest(ids_BP, mask_BP, SAMPLING, range(2), 1, rows))
    assert [partner.closed for partner in opened] == [1, 1]


def test_samples_of_a_prompt_begin_alike(model):
    class Moody(Scripted):
        def reset(self) -> Future:
            return given(([4, 5 + self.seed % 2], None))

    with pytest.raises(ThreestepError, match="expects reset to begin all samples of a prompt alike"):
        converse(model, kind=Moody)
    rollout, _ = converse(model, kind=Moody, samples=1)  # samples of different prompts may
    assert [rollout.prompt_of(row).tolist() for row in range(2)] == [[4, 5], [4, 6]]
    with pytest.raises(ThreestepError, match="begins with 51 tokens.*--max_prompt_seq_len is 50"):
        converse(model, messages=lambda number: [4] * 51)


# Under the chat templates of the public families.

# By template: who answers, and the thinking that it is asked for. The last two rewrite what was said before.
TEMPLATES = {"chatml": ("user", None), "llama3": ("tool", None), "merges_tools": ("tool", None), "inst": ("user", None),
             "strips_thinking": ("user", None), "empty_thought": ("user", False)}  # fmt: skip
REWRITES = ("strips_thinking", "empty_thought")
THOUGHT_ENDS = "</think>"


@pytest.fixture(scope="module")
def wordy():
    """A model of the templates' tokenizer, and of a token that ends a thought."""
    model = tiny_causal_lm("llama", vocab_size=385, max_position_embeddings=512)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(0.3 * head.weight.detach())
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    return model


class Noting(TransformersRollout):
    """Keeps what it drew, by seed."""

    def __init__(self, drawn: dict[int, list[int]]) -> None:
        super().__init__()
        self.drawn = drawn

    def roll_out(self, model, request) -> Rollout:
        found = super().roll_out(model, request)
        self.drawn |= dict(zip(request.seeds, responses(found), strict=True))
        return found


def talks(name: str, count: int, wordy):
    """`count` conversations under a template, with one that ends in the middle of a turn now and then: the rollout, its
    partners, what was drawn by seed, the tokenizer and the tokens around turns."""
    role, thinks = TEMPLATES[name]
    tokenizer = chat_tokenizer(chat_template(name))
    tokenizer.add_tokens([THOUGHT_ENDS])
    variables = json.dumps({} if thinks is None else {"enable_thinking": thinks})
    chat = ChatTokenizer(ChatArguments(prompt_style="chat_template", chat_template_kwargs=variables), tokenizer)
    turns, end, drawn = TurnTokens(chat, None), tokenizer.convert_tokens_to_ids(chat.end_token), {}
    bias = wordy.get_output_embeddings().bias.data.zero_()
    bias[end], bias[tokenizer.convert_tokens_to_ids(THOUGHT_ENDS)] = 7.0, 6.0

    class Teller(Scripted):
        def reset(self) -> Future:
            self.messages = [{"role": "user", "content": f"fig {self.row['number']}"}]
            return given((list(self.messages), None))

        def step(self, message) -> Future:
            self.said.append(message.ids)
            told = f"{tokenizer.decode(message.ids[:-1])} <|im_end|><|im_start|>assistant"
            messages = [{"role": role, "content": told}]
            self.messages += [{"role": "assistant", "content": message.text}, *messages]
            return given(SimpleNamespace(messages=messages, reward=0.0, done=len(self.said) == 4))

    def said(ids) -> SimpleNamespace:
        return SimpleNamespace(ids=list(ids), calls=[], text=tokenizer.decode(ids[:-1]))

    ids_BP = torch.ones(count, 1, dtype=torch.int64)
    rows, opened = [{"number": number} for number in range(count)], []
    speech = Speech(turns.opening, said, turns.reply, turns.history)
    limits = ConversationLimits(4, None, None, 200, 32)
    engine = ActingRollout(Noting(drawn), lambda row, seed: Teller(row, seed, opened), speech, limits)
    sampling = replace(SAMPLING, max_new_tokens=250, end_token_id=end)
    rollout = engine.roll_out(wordy, RolloutRequest(ids_BP, ids_BP.bool(), sampling, range(count), 1, rows))
    return rollout, opened, drawn, tokenizer, turns, end


@pytest.mark.parametrize("count", [7, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_trained_ids_are_sampled_ids_under_a_template(name, count, wordy):
    """And what is in between is what the template gives the environment's part; a history that it rewrites begins
    another sequence, in which nothing is trained again."""
    rollout, opened, by_seed, tokenizer, turns, end = talks(name, count, wordy)
    role, thinks = TEMPLATES[name]
    sequences, specials, trained = rollout.sequences(), set(tokenizer.all_special_ids), 0
    for row, partner in enumerate(opened):
        seeds = [row, *(derived_seed(row, "turn", turn) for turn in range(1, rollout.records[row].turns))]
        own = [ids.tolist() for ids in rollout.turns_of(row)]
        assert own == [by_seed[seed][: len(ids)] for seed, ids in zip(seeds, own, strict=True)]
        assert own[: len(partner.said)] == partner.said
        parts = sequences[row].parts
        targets = [part.input_ids[part.is_target].tolist() for part in parts]
        assert sum(targets, []) == sum(own, []) and all(targets)
        trained += len(own)
        assert len(parts) == 1 + rollout.records[row].forks
        if name in REWRITES:
            written = [(part, begin) for part in parts for begin in begins_of(part)]
            for turn, (part, begin) in enumerate(written):
                messages = partner.messages[: 1 + 2 * turn]
                kwargs = {} if thinks is None else {"enable_thinking": thinks}
                text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **kwargs)
                assert tokenizer.decode(part.input_ids[:begin]) == text
            assert len(written) == len(own)
            continue
        assert len(parts) == 1
        # Between two turns there are as many control tokens as after a plain word.
        inserted = rollout.response_of(row)[rollout.inserted_BR[row, : rollout.response_lengths_B[row]]].tolist()
        word = turns.reply([{"role": role, "content": "fig"}], None, end).ids
        assert sum(token in specials for token in inserted) == (len(own) - 1) * sum(token in specials for token in word)
    assert sum(record.turns > 2 for record in rollout.records) > count // 2
    assert trained == len(by_seed) == sum(record.turns for record in rollout.records)  # each turn once
    forks = sum(record.forks for record in rollout.records)
    assert forks > count // 2 if name in REWRITES else not forks


def begins_of(part) -> list[int]:
    """Where the drawn turns of a sequence begin."""
    is_target = part.is_target.tolist()
    return [place for place in range(1, len(is_target)) if is_target[place] and not is_target[place - 1]]


@pytest.mark.parametrize("name", REWRITES)
def test_log_probabilities_are_those_of_the_sequence_in_which_a_turn_was_drawn(name, wordy):
    rollout, *_ = talks(name, 8, wordy)
    rows = padded_rows([part for sequence in rollout.sequences() for part in sequence.parts], PAD)
    with torch.no_grad():
        trained_M = PolicyModel(wordy)(rows).logprobs_M
    drawn = rollout.drawn
    assert torch.allclose(trained_M, drawn.logprobs_BR[drawn.mask_BR], atol=1e-4)
    assert not rollout.sampled_logprobs_BR[rollout.inserted_BR].any()


def test_what_counts_of_a_fork(model):
    """The limit counts what was drawn and said, not what a fork repeats; and each sequence keeps within the longest."""
    sampling = replace(SAMPLING, max_new_tokens=12)

    def heavier(factor: int, is_refused: bool = False) -> tuple[Rollout, list]:
        def history(said, opened, tools, ids) -> SimpleNamespace:
            return SimpleNamespace(ids=None if is_refused else [4] * factor + list(ids), is_refused=is_refused)

        speech = replace(SPEECH, history=history)
        ids_BP, mask_BP = prompts((3, 11, 1, 7))
        rows, opened = [{"ids": ids[mask].tolist()} for ids, mask in zip(ids_BP, mask_BP, strict=True)], []
        limits = replace(LIMITS, turns=100)
        engine = ActingRollout(TransformersRollout(), lambda row, seed: Scripted(row, seed, opened), speech, limits)
        request = RolloutRequest(ids_BP, mask_BP, sampling, range(32), 8, rows)
        return rolled_out(engine, model, request), opened

    light, _ = heavier(1)
    assert sum(record.cut == "tokens" for record in light.records) > 2
    heavy, _ = heavier(45)
    assert max(record.turns for record in heavy.records) == 2  # the third would begin behind 90 tokens of 62
    for rollout in (light, heavier(20)[0], heavy):
        for row, sequence in enumerate(rollout.sequences()):
            record, parts = rollout.records[row], sequence.parts
            assert record.forks == record.turns - 1 == len(parts) - 1
            assert max(map(len, parts)) <= LIMITS.prompt_tokens + sampling.max_new_tokens
            heard = [len(later) - len(former) for former, later in pairwise(parts)]
            assert int(sequence.is_target.sum()) <= sampling.max_new_tokens and all(heard)
    spent = [
        int(sequence.is_target.sum()) + sum(begins_of(later)[0] - len(former) - 1 for former, later in pairwise(parts))
        for sequence in light.sequences()
        for parts in [sequence.parts]
    ]
    assert max(spent) == sampling.max_new_tokens
    refused, _ = heavier(1, is_refused=True)
    for record in refused.records:
        assert not record.forks and record.figures.get("refused_histories", 0) >= record.turns - 1
    assert any(record.figures.get("refused_histories") for record in refused.records)
