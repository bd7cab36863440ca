"""A teacher behind an address: its likeliest tokens, asked once; failures change nothing but time, or end the run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.support.scoring_server import scoring_server
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.distillation.server import ServerTeacher
from threestep.plugins.distillation.settings import DivergenceSettings
from threestep.plugins.distillation.tests.test_teacher import plainly
from threestep.plugins.distillation.tests.test_top_tokens import PLANS, laid_out
from threestep.plugins.distillation.top_tokens import compare_top
from threestep.plugins.serving.asking.settings import AskSettings
from training.utils.base.errors import ThreestepError
from training.utils.models.token_model import PolicyModel

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


@pytest.mark.parametrize("plan", PLANS, ids=["padded", "shared prompt", "shared beginnings"])
@pytest.mark.parametrize("fails", [lambda number: 0, lambda number: (503, -1, 0)[number % 3]], ids=["sound", "failing"])
def test_its_numbers_are_the_teachers(plan: Any, fails: Any):
    student, model = (tiny_causal_lm("llama", torch.float64, seed) for seed in (0, 1))
    settings, policy = DivergenceSettings("js", 0.3, TOP), PolicyModel(student)
    with scoring_server(vllm_like(model), fails=fails) as server:
        teacher, total = teacher_at(server.url), torch.zeros((), dtype=torch.float64)
        for rows in laid_out(plan):
            top = teacher.top_tokens(rows)
            read = policy(rows, compare=lambda rows, heat, top=top: compare_top(top, settings, rows, heat))
            total = total + read.compared.total
        asked = len(server.asked)
        for rows in laid_out(plan):  # a further epoch
            teacher.top_tokens(rows)
        assert len(server.asked) == asked
    # What is left is 1 minus a sum of float32: a few 1e-7 of the mass.
    assert total.item() == pytest.approx(plainly(student, model, settings, temperature=1.0).item(), rel=1e-4)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"choices": [{"text": "x"}]}, "expected prompt_logprobs of . tokens, got none"),
        ({"choices": [{"prompt_logprobs": [None]}]}, "expected prompt_logprobs of . tokens, got 1"),
        ({"choices": []}, "the answer has another form: IndexError"),
        (None, "the server read other tokens than it was sent"),
    ],
)
def test_another_answer_is_never_a_distribution(answer: Any, why: str):
    [rows] = laid_out(PLANS[0])

    def other_tokens(body: Any) -> Any:
        return {"choices": [{"prompt_logprobs": [None] + [{"1": {"logprob": -1.0}}] * (len(body["prompt"]) - 1)}]}

    few = AskSettings(concurrency=1, retries=1, seconds=20, pause=0.01)
    with (
        scoring_server(lambda body: answer or other_tokens(body)) as server,
        pytest.raises(ThreestepError, match=f"--teacher_url .*: no answer of the teacher after . requests: {why}"),
    ):
        teacher_at(server.url, few).top_tokens(rows)


def test_another_tokenizer_is_refused(monkeypatch):
    teacher = ServerTeacher("http://127.0.0.1:9/v1", TOP, QUICK)
    answers = {"models": {"data": [{"id": "tiny"}]}, "../tokenize": {"tokens": [1, 2]}}
    monkeypatch.setattr(teacher, "_answer", lambda path, body: answers[path])
    teacher.check(lambda text: [1, 2])
    with pytest.raises(ThreestepError, match="the tokenizer of 'tiny' makes .1, 2. of .*, and that of the model in"):
        teacher.check(lambda text: [1, 3])
    answers["models"] = {"data": []}
    del teacher.__dict__["model"]
    with pytest.raises(ThreestepError, match="expected a list of models at /models"):
        teacher.check(lambda text: [1, 2])
