"""A model is the same function at every ZeRO stage in half precision, and in every copy that is made of it: buffers
such as rotary frequencies keep the precision that plain transformers gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.families.builds import NoTokenizer, build, quiet
from tests.families.configs import VOCABULARY
from tests.families.subjects import drawn_ids
from tests.invariants.launched import each_case
from training.utils.contracts.documents import TokenSequence
from training.utils.engine.config.arguments import EngineSettings
from training.utils.engine.config.config import engine_config
from training.utils.engine.ranks.collectives import barrier
from training.utils.engine.training_engine import FrozenModel, TrainingEngine
from training.utils.engine.whole_model import WholeModel
from training.utils.engine.zero3 import born_sharded
from training.utils.layout.rows import padded_rows
from training.utils.loading.models import load_causal_lm
from training.utils.loading.saving import save_model
from training.utils.models import document_attention
from training.utils.models.settings import ModelSettings
from training.utils.models.token_model import PolicyModel
from training.utils.setup.setup import load_under

# Rotary buffers; those of two kinds of layers; router biases that files hold in float32: by a list of the family's, by
# how they are made.
FAMILIES = ("llama", "gemma3_text", "glm4_moe", "lfm2_moe")
STAGES = {1: (0, 3), 2: (1, 2, 3)}  # by the number of ranks
ORDINARY = {1: ("llama", "lfm2_moe"), 2: ("gemma3_text", "glm4_moe")}
TOKENS = (64, 2048)


def on_ranks(ranks: Any, models: Path, out: Path, is_long: bool) -> dict[str, dict[str, Any]]:
    """Load models in bfloat16 at ZeRO stages, train one step, save. Return {family: {stage: see `of_stage`}, "fp16":
    names of buffers that differ at stage 3}}. Attention is computed in bfloat16, as plain transformers does it, so that
    equal buffers give equal bits."""
    quiet()
    document_attention.attention_dtype = lambda queries, part: part.dtype
    results: dict[str, dict[str, Any]] = {}
    for family in FAMILIES if is_long else ORDINARY[ranks.world_size]:
        if ranks.is_main:
            build(family, out / family, max_position_embeddings=max(TOKENS))
        barrier()
        results[family] = {str(stage): of_stage(out / family, stage, ranks) for stage in STAGES[ranks.world_size]}
        results[family]["fp16"] = {"loaded": in_float16(out / family, ranks)}
    return results


def of_stage(folder: Path, stage: int, ranks: Any) -> dict[str, Any]:
    """Return, of the loaded, engine's, frozen, lent and saved model, names of buffers that are not plain transformers';
    "carried": names of saved tensors that are not; "read" and "trained": {tokens: {model: log-probabilities}} before
    and after a step, "plain" among the first."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model = loaded(folder, stage, ranks)
    told: dict[str, Any] = {"loaded": differing(model, plain)}
    engine = engine_of(model, stage, ranks)
    whole = WholeModel(engine, model)
    still = loaded(folder, stage, ranks)
    frozen = FrozenModel(PolicyModel(still), settings(stage), ranks)
    again = saved(engine, model, folder, f"{folder.name}_{stage}")
    told |= {"engine": differing(model, plain), "frozen": differing(still, plain), "saved": differing(again, plain)}
    told["carried"] = tensors_that_differ(again, plain)
    with whole.lent() as copy:
        told["lent"] = differing(copy, plain)
        told["read"] = readings(engine=engine, frozen=frozen, lent=copy, saved=again, plain=plain)
    take_step(engine)
    again = saved(engine, model, folder, f"{folder.name}_{stage}_trained")
    with whole.lent() as copy:
        told["trained"] = readings(engine=engine, lent=copy, saved=again)
    return told


def settings(stage: int) -> Any:
    return EngineSettings(dtype="bf16", zero_stage=stage, learning_rate=1e-3)


def loaded(folder: Path, stage: int, ranks: Any) -> Any:
    asked = ModelSettings(str(folder), dropout=0.0)
    return load_under(settings(stage), ranks, lambda dtype: load_causal_lm(asked, dtype, VOCABULARY))


def engine_of(model: Any, stage: int, ranks: Any) -> Any:
    return TrainingEngine(PolicyModel(model), settings(stage), ranks, total_steps=1)


def saved(engine: Any, model: Any, folder: Path, name: str) -> Any:
    """Return the model that plain transformers loads from what is saved."""
    tokenizer: Any = NoTokenizer()
    state = engine.full_state(model)
    if engine.ranks.is_main:
        save_model(folder.with_name(name), model, state, tokenizer)
    barrier()
    return AutoModelForCausalLM.from_pretrained(folder.with_name(name), dtype=torch.bfloat16).eval()


def take_step(engine: Any) -> None:
    engine.train()
    engine.backward(-engine(rows(64)).logprobs_M.mean() / engine.ranks.world_size)
    engine.step()


def in_float16(folder: Path, ranks: Any) -> list[str]:
    """Of a model that is born sharded in float16, which DeepSpeed can load, but not train, on a CPU."""
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    config = engine_config(settings(3), ranks.world_size, 1, on_gpu=False)
    config["bf16"], config["fp16"] = {"enabled": False}, {"enabled": True}
    with born_sharded(config, 3):
        return differing(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16), plain)


def readings(**readers: Any) -> dict[str, dict[str, list[float]]]:
    """Return {tokens: {reader: log-probabilities of the last tokens}}, of engines and of transformers models."""
    found: dict[str, dict[str, list[float]]] = {}
    for name, reader in readers.items():
        reader = PolicyModel(reader) if isinstance(reader, PreTrainedModel) else reader
        if hasattr(reader, "eval"):
            reader.eval()
        for tokens in TOKENS:
            with torch.no_grad():
                found.setdefault(str(tokens), {})[name] = reader(rows(tokens)).logprobs_M.tolist()
    return found


def rows(tokens: int) -> Any:
    """One sequence, whose last 16 tokens are the targets."""
    return padded_rows([TokenSequence(drawn_ids(tokens, 5), torch.arange(tokens) >= tokens - 16)], 0)


def differing(model: Any, plain: Any) -> list[str]:
    """Return names of buffers whose dtype or values are not those of `plain`."""
    ours = dict(model.named_buffers())
    return [
        name
        for name, buffer in plain.named_buffers()
        if ours[name].dtype is not buffer.dtype or not torch.equal(ours[name].cpu(), buffer)
    ]


def tensors_that_differ(one: Any, other: Any) -> list[str]:
    """Return names of tensors that a checkpoint of the two holds, and that are not the same in both."""
    ours, theirs = one.state_dict(), other.state_dict()
    return [
        name
        for name in sorted({*ours, *theirs})
        if name not in ours or ours[name].dtype is not theirs[name].dtype or not torch.equal(ours[name], theirs[name])
    ]


pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]  # on a busy machine

EVERY = each_case({1: FAMILIES, 2: FAMILIES}, ORDINARY)
COPIES = ("loaded", "engine", "frozen", "lent", "saved", "carried")


@pytest.mark.parametrize("world_size, family", EVERY)
def test_buffers_keep_their_precision(launched, world_size, family):
    found = launched("test_buffers", world_size)[1][0][family]
    differing = {(stage, copy): names for stage in found for copy in COPIES if (names := found[stage].get(copy))}
    stages = {str(stage) for stage in STAGES[world_size]}
    assert set(found) == {*stages, "fp16"} and not differing


@pytest.mark.parametrize("world_size, family", EVERY)
def test_every_stage_and_copy_is_the_same_function(launched, world_size, family):
    """From 2 to 3 and back, too: a folder that one stage saves is the same at each."""
    found = launched("test_buffers", world_size)[1][0][family]
    for stage in map(str, STAGES[world_size]):
        for tokens, by_reader in found[stage]["read"].items():
            for reader, logprobs in by_reader.items():
                assert logprobs == by_reader["plain"], (stage, tokens, reader)


@pytest.mark.parametrize("world_size, family", EVERY)
def test_what_is_saved_is_what_was_trained(launched, world_size, family):
    found = launched("test_buffers", world_size)[1][0][family]
    for stage in map(str, STAGES[world_size]):
        for tokens, by_reader in found[stage]["trained"].items():
            assert by_reader["engine"] != found[stage]["read"][tokens]["engine"]  # something was trained
            assert by_reader["saved"] == by_reader["engine"] == by_reader["lent"], (stage, tokens)
