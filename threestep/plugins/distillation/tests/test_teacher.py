"""A teacher on rows of any layout, in a file or behind an address, is the teacher of each sequence alone."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.scoring_server import scoring_server
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.distillation.divergence import divergence, with_rest
from threestep.plugins.distillation.file import keys_of_row, read_table, write_table
from threestep.plugins.distillation.server import ServerTeacher
from threestep.plugins.distillation.settings import DivergenceSettings
from threestep.plugins.distillation.stored import FileTeacher
from threestep.plugins.distillation.teacher import Teacher
from threestep.plugins.distillation.top_tokens import (
    LEAST_REST,
    TopTable,
    compare_top,
    keys_of,
    keys_of_rows,
    rest_of,
    sequences_of_rows,
)
from threestep.plugins.serving.asking.settings import AskSettings
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence
from training.utils.contracts.rows import SentenceRow
from training.utils.data.rows.documents import sentence_document
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.training_engine import FrozenModel
from training.utils.layout.planner import PlanSettings
from training.utils.layout.rows import packed_rows
from training.utils.layout.trie import SequenceLayout, rank_share
from training.utils.models.token_model import PolicyModel, Readout

TEMPERATURE = 0.8
SEQUENCES = [([5, 6, 7], [9, 10, 11, 2]), ([5, 6, 7], [9, 10, 4]), ([5, 6, 7], [9, 10, 11, 2]), ([8], [3, 12])]


def sequences() -> list[TokenSequence]:
    found = []
    for prompt, response in SEQUENCES:
        is_target = torch.tensor([False] * len(prompt) + [True] * len(response))
        found.append(TokenSequence(torch.tensor([*prompt, *response]), is_target))
    return found


def teacher_of(model: Any, settings: DivergenceSettings) -> Teacher:
    """A teacher of `model`, by 64 tokens."""
    policy = PolicyModel(model)
    ranks: Any = SimpleNamespace(rank=0)
    return Teacher(FrozenModel(policy, EngineSettings(), ranks), policy.target_head, settings, 64)


def plainly(
    student: torch.nn.Module, teacher: torch.nn.Module, settings: DivergenceSettings, temperature: float = TEMPERATURE
) -> torch.Tensor:
    """The sum over response tokens, one sequence at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for prompt, response in SEQUENCES:
        ids = torch.tensor([[*prompt, *response]])
        here = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
        with torch.no_grad():
            theirs = torch.log_softmax(teacher(input_ids=ids).logits[0, here] / temperature, dim=-1)
        own = torch.log_softmax(student(input_ids=ids).logits[0, here] / temperature, dim=-1)
        if settings.top_k:
            top = theirs.topk(settings.top_k, dim=-1).indices
            own, theirs = with_rest(own, top), with_rest(theirs, top)
        total = total + divergence(own, theirs, settings).sum()
    return total


def test_vocabularies_of_other_widths_compare_what_both_have():
    """The teacher's is wider, and the student's pad token is one that it lacks, as if filled up."""
    student, teacher = tiny_causal_lm("llama", torch.float64, 0), tiny_causal_lm("llama", torch.float64, 1)
    wider = tiny_causal_lm("llama", torch.float64, 1, vocab_size=72)
    with torch.no_grad():
        wide, plain_weights = dict(wider.named_parameters()), dict(teacher.named_parameters())
        for name, weight in plain_weights.items():
            wide[name][: len(weight)] = weight
    settings = DivergenceSettings()
    policy, reader = PolicyModel(student), teacher_of(wider, settings)
    [(_, rows)] = rank_share(sequences(), SequenceLayout(PlanSettings(1, None, 4, False, 0), 63), torch.device("cpu"))
    rows.input_ids_NT[rows.segment_ids_NT < 0] = 63
    got = policy(rows, Readout(TEMPERATURE), compare=reader.compare).compared.total
    assert got.item() == pytest.approx(plainly(student, teacher, settings).item(), rel=1e-9)


PLANS = {
    "padded": PlanSettings(1, None, 4, False, 0),
    "shared prompt": PlanSettings(1, None, 2, True, 20),
    "shared beginnings": PlanSettings(1, None, 2, True, 20, least_shared_tokens=1),
}


def laid_out(plan: str) -> list:
    layout = SequenceLayout(PLANS[plan], 0)
    return [rows for _, rows in rank_share(sequences(), layout, torch.device("cpu"), with_before=True)]


def read_by(student: Any, plan: str, settings: DivergenceSettings, top_of: Any) -> float:
    """The sum of divergences from a teacher's likeliest tokens, top_of(rows)."""
    policy, total = PolicyModel(student), torch.zeros((), dtype=torch.float64)
    for rows in laid_out(plan):
        top = top_of(rows)
        read = policy(rows, compare=lambda rows, heat, top=top: compare_top(top, settings, rows, heat))
        total = total + read.compared.total
    return total.item()


@pytest.mark.parametrize("plan", PLANS)
def test_a_key_is_of_the_tokens_before_a_target(plan: str):
    by_key = {}
    for prompt, response in SEQUENCES:
        ids = [*prompt, *response]
        by_key |= {key: ids[: place + 1] for place, key in enumerate(keys_of(ids))}
    assert len(by_key) == 11  # beginnings that differ
    seen = set()
    for rows in laid_out(plan):
        for key, target in zip(keys_of_rows(rows), rows.reads()[0].tolist(), strict=True):
            seen.add((*by_key[key], target))
        for ids in sequences_of_rows(rows):
            assert any(ids == [*prompt, *response] for prompt, response in SEQUENCES)
    wanted = {
        tuple([*prompt, *response][: len(prompt) + count + 1])
        for prompt, response in SEQUENCES
        for count in range(len(response))
    }
    assert seen == wanted


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["reverse", "forward", "js"])
def test_a_table_of_a_teacher_is_the_teacher(plan: str, kind: str):
    settings = DivergenceSettings(kind, 0.3, 4)
    student, teacher = (tiny_causal_lm("llama", torch.float64, seed) for seed in (0, 1))
    reader, keys, parts = teacher_of(teacher, settings), [], []
    for rows in laid_out("padded"):
        keys += keys_of_rows(rows)
        parts.append([part.numpy() for part in reader.top_tokens(rows, chunk_bytes=1)])
    table = TopTable(keys, *(np.concatenate(column) for column in zip(*parts, strict=True)))
    found = read_by(student, plan, settings, lambda rows: table.of(keys_of_rows(rows)))
    assert found == pytest.approx(plainly(student, teacher, settings, temperature=1.0).item(), rel=1e-6)


def test_what_is_lacking_and_what_is_left():
    table = TopTable(
        [7, 3], np.array([[1], [2]], np.int32), np.array([[-0.5], [-0.1]], np.float32), np.zeros(2, np.float32)
    )
    assert table.lacks([3, 4, 7]) == [1] and len(table) == 2
    assert table.of([7, 3]).ids_Uk.tolist() == [[1], [2]]
    whole = np.log(np.array([[0.5, 0.25], [0.75, 0.25]], np.float32))
    assert rest_of(whole).tolist() == pytest.approx([math.log(0.25), math.log(LEAST_REST)])


ROWS = [
    SentenceRow(0, np.array([5, 6, 7, 0], np.int32), np.array([False, False, True, True])),
    SentenceRow(1, np.array([5, 8], np.int32), np.array([False, True])),
]


def table() -> TopTable:
    keys = [key for row in ROWS for key in keys_of_row(row)]
    top = np.array([[1, 2], [3, 4], [5, 6]], np.int32)
    logprobs = np.log(np.array([[0.5, 0.2], [0.6, 0.3], [0.7, 0.1]], np.float32))
    return TopTable(keys, top, logprobs, np.log(np.array([0.3, 0.1, 0.2], np.float32)))


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_what_is_written_is_read(tmp_path, name: str):
    write_table(tmp_path / "new" / name, ROWS, table())
    found = read_table(tmp_path / "new" / name)
    for row in ROWS:
        assert not found.lacks(keys_of_row(row))
        for own, theirs in zip(found.of(keys_of_row(row)), table().of(keys_of_row(row)), strict=True):
            torch.testing.assert_close(own, theirs)
    assert [each.name for each in (tmp_path / "new").iterdir()] == [name]
    assert keys_of_row(ROWS[0]) == keys_of([5, 6, 7])[1:]


GOOD = {"input_ids": [5, 6, 7], "places": [1, 2], "top_ids": [[1, 2], [3, 4]], "top_logprobs": [[-1, -2], [-1, -3]]}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"places": [0, 2]}, "expected ascending places within input_ids, from 1; write the file again"),
        ({"places": [1, 3]}, "expected ascending places within input_ids"),
        ({"top_ids": [[1], [3]]}, "expected lists of 2 tokens at each place"),
        ({"top_ids": [[1, 2], [3]]}, "expected the same number of values at each place"),
        ({"top_ids": [[1, 1], [3, 4]]}, "expected no repeated token at a place"),
        ({"top_logprobs": [[-1, -2], [-1, 0.3]]}, "expected log-probabilities of at most 0, without NaN"),
        ({"rest_logprobs": [-1]}, "expected one number in rest_logprobs for each place"),
        ({"top_ids": 3}, "expected lists input_ids, places, top_ids, top_logprobs; threestep/plugins/dist"),
    ],
)
def test_another_form_is_refused_with_its_line(tmp_path, changed: dict, why: str):
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(GOOD) + "\n" + json.dumps({**GOOD, **changed}) + "\n")
    with pytest.raises(ThreestepError, match=f"--distill: .*t.jsonl, line 2: {why}"):
        read_table(path)


def test_no_file_and_no_rows(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.parquet").write_text("{}")
    with pytest.raises(ThreestepError, match="empty.jsonl has no rows"):
        read_table(tmp_path / "empty.jsonl")
    for name in ("bad.parquet", "none.jsonl"):
        with pytest.raises(ThreestepError, match="--distill expects JSON lines or Parquet .*cannot be read"):
            read_table(tmp_path / name)


RANKS: Any = SimpleNamespace(is_main=True)


def lay_out(rows: Any) -> Any:
    return [packed_rows([[sentence_document(row)] for row in rows], 0, with_before=True)]


def test_a_file_is_written_once_and_found_again(tmp_path):
    asked = []

    class StandIn:
        def top_tokens(self, rows: Any) -> Any:
            asked.append(rows)
            return table().of([key for row in ROWS for key in keys_of_row(row)])

    path = tmp_path / "t.jsonl"
    first, second = FileTeacher(path, StandIn(), RANKS), FileTeacher(path, StandIn(), RANKS)
    [rows] = lay_out(ROWS)
    assert first.top_tokens(rows) is None  # while it is laid out for the teacher
    first.open([ROWS, []], lambda split: lay_out(split) if split else [])
    second.open([ROWS], lay_out)
    assert len(asked) == 1
    for own, theirs in zip(first.top_tokens(rows), second.top_tokens(rows), strict=True):
        torch.testing.assert_close(own, theirs)
    write_table(tmp_path / "short.jsonl", ROWS[:1], table())
    told = "--distill: .*short.jsonl lacks row 1 of the data, .*[(]--teacher_model_name_or_path[)]"
    with pytest.raises(ThreestepError, match=told):
        FileTeacher(tmp_path / "short.jsonl", None, RANKS).open([ROWS], lay_out)


TOP = 4
QUICK = AskSettings(concurrency=2, retries=6, seconds=20, pause=0.01)


def vllm_like(model: Any) -> Any:
    """Answers as vLLM 0.32 does: null for the first token, then the likeliest, and the token itself."""

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        ids, top = body["prompt"], body["prompt_logprobs"]
        assert body["temperature"] == 1.0 and body["model"] == "tiny"
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
        found: list[Any] = [None]
        for place in range(1, len(ids)):
            own = logprobs[place - 1]
            chosen = dict.fromkeys([*own.topk(top).indices.tolist(), ids[place]])
            found.append({str(each): {"logprob": float(own[each]), "rank": 1} for each in chosen})
        return {"choices": [{"text": "x", "prompt_logprobs": found}]}

    return answer


def teacher_at(url: str, asking: AskSettings = QUICK) -> ServerTeacher:
    teacher = ServerTeacher(f"{url}/v1", TOP, asking)
    teacher.__dict__["model"] = "tiny"
    return teacher


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("fails", [lambda number: 0, lambda number: (503, -1, 0)[number % 3]], ids=["sound", "failing"])
def test_its_numbers_are_the_teachers(plan: str, fails: Any):
    student, model = (tiny_causal_lm("llama", torch.float64, seed) for seed in (0, 1))
    settings = DivergenceSettings("js", 0.3, TOP)
    with scoring_server(vllm_like(model), fails=fails) as server:
        teacher = teacher_at(server.url)
        found = read_by(student, plan, settings, teacher.top_tokens)
        asked = len(server.asked)
        for rows in laid_out(plan):  # a further epoch
            teacher.top_tokens(rows)
        assert len(server.asked) == asked
    # What is left is 1 minus a sum of float32: a few 1e-7 of the mass.
    assert found == pytest.approx(plainly(student, model, settings, temperature=1.0).item(), rel=1e-4)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"choices": [{"text": "x"}]}, "expected prompt_logprobs for . tokens, got none"),
        ({"choices": [{"prompt_logprobs": [None]}]}, "expected prompt_logprobs for . tokens, got 1"),
        ({"choices": []}, "the answer has an unexpected format: IndexError"),
        (None, "the server did not read the tokens it was sent"),
    ],
)
def test_another_answer_is_never_a_distribution(answer: Any, why: str):
    [rows] = laid_out("padded")

    def other_tokens(body: Any) -> Any:
        return {"choices": [{"prompt_logprobs": [None] + [{"1": {"logprob": -1.0}}] * (len(body["prompt"]) - 1)}]}

    few = AskSettings(concurrency=1, retries=1, seconds=20, pause=0.01)
    with (
        scoring_server(lambda body: answer or other_tokens(body)) as server,
        pytest.raises(ThreestepError, match=f"--teacher_url .*: no answer from the teacher after . requests: {why}"),
    ):
        teacher_at(server.url, few).top_tokens(rows)


def test_another_tokenizer_is_refused(monkeypatch):
    teacher = ServerTeacher("http://127.0.0.1:9/v1", TOP, QUICK)
    answers = {"models": {"data": [{"id": "tiny"}]}, "../tokenize": {"tokens": [1, 2]}}
    monkeypatch.setattr(teacher, "_answer", lambda path, body: answers[path])
    teacher.check(lambda text: [1, 2])
    with pytest.raises(ThreestepError, match="the tokenizer of 'tiny' turns .* into .1, 2., but the tokenizer of"):
        teacher.check(lambda text: [1, 3])
    answers["models"] = {"data": []}
    del teacher.__dict__["model"]
    with pytest.raises(ThreestepError, match="expected a list of models at /models"):
        teacher.check(lambda text: [1, 2])


@pytest.mark.parametrize(
    "settings",
    [DivergenceSettings("reverse"), DivergenceSettings("forward", top_k=3), DivergenceSettings("js", 0.3, 5)],
    ids=str,
)
@pytest.mark.parametrize("plan", PLANS)
def test_any_layout_equals_single_sequences(settings: DivergenceSettings, plan: str):
    student, teacher = (tiny_causal_lm("llama", torch.float64, seed) for seed in (0, 1))
    policy, reader = PolicyModel(student), teacher_of(teacher, settings)
    total = torch.zeros((), dtype=torch.float64)
    for rows in laid_out(plan):
        total = total + policy(rows, Readout(TEMPERATURE), compare=reader.compare).compared.total
    expected = plainly(student, teacher, settings)
    assert total.item() == pytest.approx(expected.item(), rel=1e-9)
    weights = list(student.parameters())
    for got, wanted in zip(torch.autograd.grad(total, weights), torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)  # norms round to float32
