"""Compiled blocks compute what the plain ones do, whatever the rows' widths."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.random_rows import random_rows
from tests.support.tiny_models import VOCABULARY, tiny_causal_lm, tiny_scalar_model
from threestep.plugins.lora.adding import add_lora
from threestep.plugins.lora.preparers import Lora
from threestep.plugins.speed import compiled
from threestep.plugins.speed.compiled import check_compiler, compile_blocks
from threestep.plugins.speed.tests.test_speed import fast
from training.utils.base.errors import ThreestepError
from training.utils.contracts.documents import TokenSequence, plain, shared_prompt
from training.utils.contracts.token_rows import TokenRows
from training.utils.layout.rows import packed_rows
from training.utils.loading.models import load_causal_lm
from training.utils.models.document_attention import share_keys_of_few_tokens
from training.utils.models.layout_check import check_padded
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel, ScalarModel


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._logging.set_logs()


def run(length: int, first_target: int, seed: int) -> TokenSequence:
    ids = torch.randint(1, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
    return TokenSequence(ids, torch.arange(length) >= first_target)


def micro_batches() -> list[TokenRows]:
    """Rows of several numbers and widths, with a mask of segments and without."""
    plain_rows = [[plain(run(length, 2, length))] for length in (9, 5, 7)]
    shared = shared_prompt(run(4, 99, 1), [run(3, 0, 2), run(5, 0, 3)])
    return [
        packed_rows([[shared, plain(run(6, 1, 4))], [plain(run(11, 3, 5))]], 0),
        packed_rows([[plain(run(13, 3, 6)), plain(run(4, 1, 7))]], 0),
        packed_rows(plain_rows, 0),
    ]


def gradients(module: torch.nn.Module, batches: list[TokenRows]) -> dict[str, torch.Tensor]:
    module.zero_grad()
    for rows in batches:
        read = module(rows)
        (read if isinstance(read, torch.Tensor) else read.logprobs_M).square().sum().backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_compiling_changes_nothing(module: torch.nn.Module, backend: str, batches: list[TokenRows]) -> None:
    model = module.model.train()
    names = [name for name, _ in model.named_parameters()]
    want = gradients(module, batches)
    compile_blocks(model, backend)
    assert [name for name, _ in model.named_parameters()] == names
    got = gradients(module, batches)
    assert got.keys() == want.keys() and len(want) > 5
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-5 * float(gradient.abs().max()))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_traced_blocks_give_the_same_gradients(family):
    """Traced by torch, without a compiler; with gradient checkpointing and adapters."""
    model = tiny_causal_lm(family)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    add_lora(model, Lora(lora_dim=2, only_optimize_lora=False))
    assert_compiling_changes_nothing(PolicyModel(model), "eager", micro_batches())


def compilations() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_twenty_mixed_layouts_are_four_compilations():
    """Of both blocks; one row or several, with a mask or without, also behind a rollout. A failure prints what was
    compiled again, and why."""
    share_keys_of_few_tokens()
    torch._logging.set_logs(recompiles=True, graph_breaks=True)
    model, generator = tiny_causal_lm("llama"), torch.Generator().manual_seed(0)
    policy = PolicyModel(model)
    assert compile_blocks(model, "eager") == 2
    torch._dynamo.utils.counters.clear()
    for index in range(20):
        rows = random_rows(generator, 1 + index % 3, 6 + index)
        if index % 5 == 4:
            rows = packed_rows([[plain(run(4 + index, 1, index))] for _ in range(1 + index % 2)], 0)
        policy(rows)
    assert 2 <= compilations() <= 4


def test_rollouts_before_training_use_up_nothing(capsys):
    """Before, each layer of the cache and each of its states was a compilation: 4 layers used up torch's limit of 8,
    and training compiled nothing."""
    model = tiny_causal_lm("llama")
    policy = PolicyModel(model)
    compile_blocks(model, "eager")
    torch._dynamo.utils.counters.clear()
    rows, learned = micro_batches()[0], 0
    for length in (5, 3):
        model.generate(torch.full((2, length), 7), max_new_tokens=4, do_sample=False)
        assert compilations() == learned
        with torch.no_grad():
            policy(rows)
        gradients(policy.train(), [rows])
        policy.eval()
        learned = compilations()
    assert learned == 2  # with gradients and without
    assert capsys.readouterr().out == ""


def test_where_the_limit_is_reached_a_line_says_so_and_nothing_changes(capsys):
    model, batches = tiny_causal_lm("llama"), micro_batches()
    want = gradients(PolicyModel(model), batches)
    compile_blocks(model, "eager", limit=1)
    got = gradients(PolicyModel(model), batches)
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)
    assert capsys.readouterr().out == (
        "warning: LlamaForCausalLM runs uncompiled from here on, because it would need "
        "more than 1 compiled variants for its rows or blocks; consider removing --torch_compile\n"
    )


def test_blocks_that_are_compiled_wrong_end_the_run_at_its_start():
    model = tiny_causal_lm("llama")

    def wrong(graph: torch.fx.GraphModule, inputs: object) -> object:
        return lambda *given: [part * 1.01 if part.is_floating_point() else part for part in graph(*given)]

    compile_blocks(model, wrong)
    read = PolicyModel(model)
    with pytest.raises(
        ThreestepError, match="padded rows and for single sequences differ by .*; try --torch_compile false"
    ):
        check_padded(model, lambda rows: read(rows).logprobs_M, torch.device("cpu"))


@pytest.mark.long
def test_compiled_blocks_give_the_same_scores_and_gradients():
    """By the compiler itself; the smallest model that has a block."""
    try:
        check_compiler()
    except ThreestepError as problem:
        pytest.skip(str(problem))
    model = tiny_scalar_model("llama", num_hidden_layers=1)
    assert_compiling_changes_nothing(ScalarModel(model), "inductor", micro_batches()[:2])


def broken(*args, **kwargs):
    raise RuntimeError("no g++ in sight\nand a long story")


def test_no_compiler_is_said_in_a_sentence(monkeypatch):
    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ThreestepError, match="^--torch_compile needs a C.. compiler.*: no g.. in sight; install it, or"
    ):
        check_compiler()


def test_the_compiler_is_tried_before_the_model_loads(save_folder, monkeypatch):
    folder = save_folder()
    settings = fast(folder, torch_compile=True)
    monkeypatch.setattr(compiled, "check_compiler", lambda: None)
    model = load_causal_lm(settings, torch.float32, 1)
    assert all(layer._compiled_call_impl is not None for layer in model.model.layers)
    assert load_causal_lm(ModelSettings(folder), torch.float32, 1).model.layers[0]._compiled_call_impl is None
    monkeypatch.setattr(compiled, "check_compiler", broken)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", lambda *a, **k: pytest.fail("loaded"))
    with pytest.raises(RuntimeError, match="no g"):
        load_causal_lm(settings, torch.float32, 1)
