"""Conversations: what was drawn is trained, whoever else is there; limits; and turns that keep their cache."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.tiny_models import tiny_causal_lm
from tests.unit.utils.generation.decoding.test_decode_check import known
from tests.unit.utils.generation.decoding.test_hf import PAD, PLAIN, prompts, responses, spelt
from threestep.plugins.environments.turns.conversations import ActingRollout, ConversationLimits, Speech, _Awaited
from threestep.plugins.environments.turns.kept_turns import KeptTurns, TurnsKept
from threestep.plugins.environments.turns.turn_tokens import TurnTokens
from threestep.plugins.ragged.ragged_rows import RaggedRows
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import derived_seed
from training.utils.contracts.decode_loops import DecodeLoop
from training.utils.contracts.drawing import NextTurn, Turns
from training.utils.contracts.rollout import Rollout
from training.utils.contracts.rollout_engine import Drawing, Ends, RolloutRequest, rolled_out
from training.utils.data.chat.chat import ChatTokenizer
from training.utils.data.rows.arguments import ChatArguments
from training.utils.generation.decoding.decoding import FIXED, MASKED
from training.utils.generation.decoding.hf import TransformersRollout
from training.utils.layout.rows import padded_rows
from training.utils.models.token_model import PolicyModel

END, CALL, HEARD = 2, 5, 7  # ends a turn; a call; begins what an environment says
LIMITS = ConversationLimits(turns=5, calls=None, seconds=None, prompt_tokens=50, answer_interval=32)
SAMPLING = replace(PLAIN, max_new_tokens=40, end_token_id=END)


class Scripted:
    """Answers a turn with its last tokens, 1 to 4 of them, and pays its length; done after a turn of even length."""

    most = 99  # turns

    def __init__(self, row, seed: int, opened: list) -> None:
        self.row, self.seed, self.figures, self.closed = row, seed, {}, 0
        self.said: list[list[int]] = []
        opened.append(self)

    def reset(self) -> Future:
        return given((self.row.get("messages", self.row["ids"]), None))

    def step(self, message) -> Future:
        self.said.append(message.ids)
        self.figures["words"] = self.figures.get("words", 0.0) + len(message.ids)
        done = len(message.ids) % 2 == 0 or len(self.said) >= self.most
        return given(SimpleNamespace(messages=message.ids[-4:], reward=len(message.ids), done=done))

    def close(self) -> None:
        self.closed += 1


class Later(Scripted):
    """Answers after times that no seed decides, in any order."""

    def wait(self) -> None:
        time.sleep(random.uniform(0, 0.01))

    def step(self, message) -> Future:
        answer, late = super().step(message), Future()

        def give() -> None:
            self.wait()
            late.set_result(answer.result())

        threading.Thread(target=give, daemon=True).start()
        return late


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


def model_with_bias(**shape):
    model = tiny_causal_lm("llama", **shape)
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(0.3 * head.weight.detach())
    head.bias = torch.nn.Parameter(torch.zeros(len(head.weight)))
    return model


@pytest.fixture(scope="module")
def model():
    """Likes to end a turn, now and then to call."""
    model = model_with_bias()
    bias = model.get_output_embeddings().bias.data
    bias[END], bias[CALL] = 2.5, 1.0
    return model


def converse(model, lengths=(3, 11, 1, 7), samples=4, limits=LIMITS, sampling=SAMPLING, *, kind=Scripted, draws=None,
             speech=SPEECH, opened=None, **of):  # fmt: skip
    """The rollout and its partners. draws: an engine. opened: takes the partners. of: more columns of the rows, each a
    function of the row's number."""
    ids_BP, mask_BP = prompts(lengths)
    rows = [{"ids": ids[mask].tolist()} for ids, mask in zip(ids_BP, mask_BP, strict=True)]
    rows = [{**row, **{name: make(number) for name, make in of.items()}} for number, row in enumerate(rows)]
    opened = [] if opened is None else opened

    def partner_of(row, seed):
        return None if row.get("alone") else kind(row, seed, opened)

    engine = ActingRollout(draws or TransformersRollout(), partner_of, speech, limits)
    request = RolloutRequest(ids_BP, mask_BP, sampling, range(len(rows) * samples), samples, rows)
    return rolled_out(engine, model, request), opened


def assert_trained_as_drawn(model, rollout: Rollout) -> None:
    """Log-probabilities of drawn tokens are those of the training forward, of the sequence in which each was drawn."""
    rows = padded_rows([part for sequence in rollout.sequences() for part in sequence.parts], PAD)
    with torch.no_grad():
        trained_M = PolicyModel(model)(rows).logprobs_M
    drawn = rollout.drawn
    assert torch.allclose(trained_M, drawn.logprobs_BR[drawn.mask_BR], atol=1e-4)
    assert not rollout.sampled_logprobs_BR[rollout.inserted_BR].any()


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
    assert_trained_as_drawn(model, many[0])


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
        assert (record.cut == "calls") == (calls and record.cut != "tokens")
        assert all(CALL not in own for own in partner.said)
    slow, _ = converse(model, samples=8, limits=replace(LIMITS, seconds=0.0))
    assert {(each.turns, each.cut) for each in slow.records} <= {(1, None), (1, "seconds"), (1, "tokens")}
    for rollout in (unlimited, two, no_calls, slow):
        assert int(rollout.response_lengths_B.max()) <= 40
        last = rollout.inserted_BR.gather(1, rollout.response_lengths_B[:, None] - 1)
        assert not last.any()


def test_what_leaves_no_room_is_left_out(model):
    """The conversation ends with the turn before; a room of one token is enough for another turn."""
    small = replace(SAMPLING, max_new_tokens=9)
    full, _ = converse(model, samples=8, sampling=small, limits=replace(LIMITS, turns=100))
    lengths = [int(length) for length, each in zip(full.response_lengths_B, full.records, strict=True) if each.cut]
    assert max(lengths) == 9 and min(lengths) < 9
    assert sum(record.turns > 1 for record in full.records) > 5


class Slow(Later):
    """Every step waits for seven others."""

    barrier, most = threading.Barrier(8), 1

    def wait(self) -> None:
        self.barrier.wait(20)


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
    with pytest.raises(ThreestepError, match="mended by nobody"):
        converse(model, (3, 4), 1, kind=Broken, opened=opened)
    assert [partner.closed for partner in opened] == [1, 1]


def test_samples_of_a_prompt_begin_alike(model):
    class Moody(Scripted):
        def reset(self) -> Future:
            return given(([4, 5 + self.seed % 2], None))

    with pytest.raises(ThreestepError, match="needs a reset that returns the same messages for all samples"):
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
    return model_with_bias(vocab_size=385, max_position_embeddings=512)


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
def test_log_probabilities_of_forks_are_those_of_the_training_forward(name, wordy):
    assert_trained_as_drawn(wordy, talks(name, 8, wordy)[0])


def test_what_counts_of_a_fork(model):
    """The limit counts what was drawn and said, not what a fork repeats; and each sequence keeps within the longest."""
    sampling = replace(SAMPLING, max_new_tokens=12)

    def heavier(factor: int, is_refused: bool = False) -> tuple[Rollout, list]:
        def history(said, opened, tools, ids) -> SimpleNamespace:
            return SimpleNamespace(ids=None if is_refused else [4] * factor + list(ids), is_refused=is_refused)

        return converse(model, samples=8, limits=replace(LIMITS, turns=100), sampling=sampling,
                        speech=replace(SPEECH, history=history))  # fmt: skip

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


LENGTHS = (3, 11, 1, 7, 5) * 2
CUT_SAMPLING = replace(
    SAMPLING, top_p=0.9, temperature=0.7, bad_words=((9,), (5, 2), (7, 11)), ends=Ends((spelt([8]), spelt([6, 2])))
)


class Keeping(TransformersRollout):
    """As `check` leaves it for a family that fits."""

    _turns, _way = TurnsKept(fixed=False), MASKED


class Captured(Keeping):
    _turns, _way = TurnsKept(fixed=True), FIXED


TURNS = Drawing(turns=TurnsKept())


def same(left, right) -> None:
    assert responses(left[0]) == responses(right[0]) and left[0].records == right[0].records
    for name in ("prompt_ids_BP", "prompt_mask_BP", "ended_B", "inserted_BR"):
        assert torch.equal(getattr(left[0], name), getattr(right[0], name)), name
    assert torch.equal(left[0].conversations.turn_rewards_BR, right[0].conversations.turn_rewards_BR)
    logprobs = (each[0].sampled_logprobs_BR for each in (left, right))
    torch.testing.assert_close(*logprobs, rtol=0, atol=1e-5)
    assert [partner.said for partner in left[1]] == [partner.said for partner in right[1]]


@pytest.mark.needs_plugin("captured")
@pytest.mark.parametrize("sampling", [SAMPLING, CUT_SAMPLING], ids=["whole", "cut"])
def test_conversations_are_those_of_rounds(model, sampling):
    """60 of them; between two looks for ends one token or, as on a GPU, several."""
    rounds = converse(model, LENGTHS, 6, sampling=sampling, draws=TransformersRollout(spelt))
    assert max(record.turns for record in rounds[0].records) >= 4
    for draws, every in ((Keeping, 1), (Keeping, 3), (Captured, 3)):
        seldom = replace(sampling, ends=replace(sampling.ends, check_tokens=every))
        same(converse(model, LENGTHS, 6, sampling=seldom, draws=draws(spelt)), rounds)


def test_no_token_is_computed_twice(model, monkeypatch):
    given, steps = [], []
    give, step = RaggedRows.give, RaggedRows.step
    monkeypatch.setattr(RaggedRows, "give", lambda rows, first, ids: (given.append(ids), give(rows, first, ids))[1])
    monkeypatch.setattr(RaggedRows, "step", lambda rows, *of: (steps.append(len(of[0])), step(rows, *of))[1])
    rollout, partners = converse(model, LENGTHS, 10, draws=Keeping())
    assert len(given[0]) == 10 and sum(map(len, given[0])) == sum(LENGTHS)  # samples share their prompt
    computed = sum(len(ids) for ids_J in given for ids in ids_J) + sum(steps)
    # The last token of a conversation need not be.
    assert computed == sum(LENGTHS) + int(rollout.response_lengths_B.sum()) - len(partners)


class Late(Later):
    """The first turn of all is answered once another conversation has drawn its third."""

    third = threading.Event()
    asked: list[int] = []
    in_time: list[bool] = []

    def step(self, message) -> Future:
        self.is_first = not self.asked
        self.asked.append(self.seed)
        if len(self.said) == 2:
            self.third.set()
        return super().step(message)

    def wait(self) -> None:
        if self.is_first:
            self.in_time.append(self.third.wait(10))
        else:
            super().wait()


def test_others_go_on_while_one_waits(model):
    """Without an interval. And all draw what they do where each answer is there at once."""
    late = converse(model, LENGTHS, 4, replace(LIMITS, answer_interval=0), draws=Keeping(), kind=Late)
    assert Late.in_time == [True]
    same(late, converse(model, LENGTHS, 4, draws=Keeping()))


@pytest.mark.parametrize("interval", [1, 8, 32])
@pytest.mark.parametrize("draws", [Keeping, pytest.param(Captured, marks=pytest.mark.needs_plugin("captured"))])
def test_delays_change_no_bit(model, draws, interval):
    limits = replace(LIMITS, answer_interval=interval)
    at_once, _ = converse(model, LENGTHS, 4, limits, draws=draws())
    for _ in range(2):
        delayed, _ = converse(model, LENGTHS, 4, limits, draws=draws(), kind=Later)
        assert torch.equal(delayed.sampled_logprobs_BR, at_once.sampled_logprobs_BR)
        assert responses(delayed) == responses(at_once)


def test_a_conversation_that_goes_on_otherwise_computes_what_is_new(model, monkeypatch):
    """Its second turn comes behind half of the first and other tokens, its third behind nothing that it had."""
    given, give = [], RaggedRows.give
    monkeypatch.setattr(RaggedRows, "give", lambda rows, first, ids: (given.extend(ids), give(rows, first, ids))[1])
    ids_BP, mask_BP = prompts((9, 4))
    turns = KeptTurns(model, SAMPLING, None, 1, fixed=False)
    first, beside = (ids[mask].tolist() for ids, mask in zip(ids_BP, mask_BP, strict=True))
    drawn = drawn_turns(turns, NextTurn("a", first, 3, 12), NextTurn("b", beside, 4, 20))
    texts = [first, first[:5] + [9, 8], [7, 6, 5], [7, 6, 5], first + drawn["a"].ids]
    wanted = [texts[0], beside, [9, 8], [7, 6, 5], [5], texts[4]]
    for seed, ids in enumerate(texts):
        if seed:
            drawn = drawn_turns(turns, NextTurn("a", ids, 3 + seed, 12))
        request = RolloutRequest.of_prompt(torch.tensor(ids), replace(SAMPLING, max_new_tokens=12), 3 + seed)
        assert drawn["a"].ids == TransformersRollout().roll_out(model, request).response_of(0).tolist()
    assert given == wanted


def drawn_turns(turns: KeptTurns, *added: NextTurn) -> dict:
    for turn in added:
        turns.add(turn)
    drawn = {}
    while turns.is_drawing:
        drawn |= {each.key: each for each in turns.advance()}
    return drawn


def test_where_nobody_answers_the_engine_draws_by_itself(model, monkeypatch):
    monkeypatch.delattr(KeptTurns, "add")
    rollout, _ = converse(model, draws=Keeping(), alone=lambda number: True)
    same((rollout, []), converse(model, alone=lambda number: True))


def test_rows_that_have_left_take_no_memory(model):
    turns = KeptTurns(model, replace(PLAIN, max_new_tokens=400), None, 1, fixed=False)
    drawn_turns(turns, *(NextTurn(key, [key + 3, 4], key, 2) for key in range(8)))
    for key in range(1, 8):
        turns.drop(key)
    assert turns._rows.room[0] == 8
    drawn_turns(turns, NextTurn(0, [3, 4, 5], 0, 400 - 272))
    assert turns._rows.room[0] == 1


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "cohere", "granite"])
def test_families_that_take_several_tokens_keep_what_they_computed(family):
    model, own = known(family)
    engine = TransformersRollout()
    assert engine.check(nullcontext(model), own, TURNS) == []
    assert isinstance(engine.turns_of(model, PLAIN), KeptTurns)


def test_others_draw_in_rounds_and_say_why():
    class Own(TransformersRollout):
        def roll_out(self, model, request):
            return super().roll_out(model, request)

    class Whole(DecodeLoop):
        name = "--whole"

    other = TransformersRollout()
    other.draw_by(Whole())
    for family, engine, reason in (
        ("gemma2", TransformersRollout(), "its layers see only the most recent tokens"),
        ("mamba", TransformersRollout(), "the model family makes its own masks"),
        ("bloom", TransformersRollout(), "the model family makes its own masks"),
        ("llama", Own(), "Own has its own roll_out"),
        ("llama", other, "--whole draws whole responses"),
    ):
        model, own = known(family)
        (*_, note) = engine.check(nullcontext(model), own, TURNS)
        assert engine.turns_of(model, PLAIN) is None and f"warning: {type(model).__name__} rereads" in note
        assert "and all conversations wait for the slowest answer: " in note and reason in note
