"""Launched on one or two ranks: loads models in bfloat16 at ZeRO stages, trains one step, saves, and reports what
became of their buffers and of their log-probabilities, beside those of plain transformers in bfloat16. Attention is
computed in bfloat16 here as there, so that equal buffers give equal bits.

Arguments: the folder of the invariants' models, which is not read, a folder of this launch, and "long" for all
FAMILIES, not ORDINARY alone. Report, on the first rank: {family: {stage: see `of_stage`}, "fp16": names of buffers that
differ at stage 3}}.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

# Rotary buffers; those of two kinds of layers; router biases that files hold in float32: by a list of the family's, by
# how they are made.
FAMILIES = ("llama", "gemma3_text", "glm4_moe", "lfm2_moe")
STAGES = {1: (0, 3), 2: (1, 2, 3)}  # by the number of ranks
ORDINARY = {1: ("llama", "lfm2_moe"), 2: ("gemma3_text", "glm4_moe")}
TOKENS = (64, 2048)


def main(place: Path, is_long: bool) -> None:
    from tests.distributed.launch import report
    from tests.families.builds import build, quiet
    from training.utils.engine.ranks.collectives import barrier
    from training.utils.engine.ranks.startup import started_process_group
    from training.utils.models import document_attention

    quiet()
    document_attention.attention_dtype = lambda queries, part: part.dtype
    results: dict[str, dict[str, Any]] = {}
    with started_process_group() as ranks:
        for family in FAMILIES if is_long else ORDINARY[ranks.world_size]:
            if ranks.is_main:
                build(family, place / family, max_position_embeddings=max(TOKENS))
            barrier()
            results[family] = {str(stage): of_stage(place / family, stage, ranks) for stage in STAGES[ranks.world_size]}
            results[family]["fp16"] = {"loaded": in_float16(place / family, ranks)}
        report(results if ranks.is_main else {})


def of_stage(folder: Path, stage: int, ranks: Any) -> dict[str, Any]:
    """Return, of the loaded, engine's, frozen, lent and saved model, names of buffers that are not plain transformers';
    "carried": names of saved tensors that are not; "read" and "trained": {tokens: {model: log-probabilities}} before
    and after a step, "plain" among the first."""
    from transformers import AutoModelForCausalLM

    from training.utils.engine.training_engine import FrozenModel
    from training.utils.engine.whole_model import WholeModel
    from training.utils.models.token_model import PolicyModel

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
    from training.utils.engine.config.arguments import EngineSettings

    return EngineSettings(dtype="bf16", zero_stage=stage, learning_rate=1e-3)


def loaded(folder: Path, stage: int, ranks: Any) -> Any:
    from tests.families.configs import VOCABULARY
    from training.utils.loading.models import load_causal_lm
    from training.utils.models.settings import ModelSettings
    from training.utils.setup.setup import load_under

    asked = ModelSettings(str(folder), dropout=0.0)
    return load_under(settings(stage), ranks, lambda dtype: load_causal_lm(asked, dtype, VOCABULARY))


def engine_of(model: Any, stage: int, ranks: Any) -> Any:
    from training.utils.engine.training_engine import TrainingEngine
    from training.utils.models.token_model import PolicyModel

    return TrainingEngine(PolicyModel(model), settings(stage), ranks, total_steps=1)


def saved(engine: Any, model: Any, folder: Path, name: str) -> Any:
    """Return the model that plain transformers loads from what is saved."""
    from transformers import AutoModelForCausalLM

    from tests.families.builds import NoTokenizer
    from training.utils.engine.ranks.collectives import barrier
    from training.utils.loading.saving import save_model

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
    from transformers import AutoModelForCausalLM

    from training.utils.engine.config.config import engine_config
    from training.utils.engine.zero3 import born_sharded

    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16)
    config = engine_config(settings(3), ranks.world_size, 1, on_gpu=False)
    config["bf16"], config["fp16"] = {"enabled": False}, {"enabled": True}
    with born_sharded(config, 3):
        return differing(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float16), plain)


def readings(**readers: Any) -> dict[str, dict[str, list[float]]]:
    """Return {tokens: {reader: log-probabilities of the last tokens}}, of engines and of transformers models."""
    from transformers import PreTrainedModel

    from training.utils.models.token_model import PolicyModel

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
    from tests.families.subjects import drawn_ids
    from training.utils.contracts.documents import TokenSequence
    from training.utils.layout.rows import padded_rows

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


if __name__ == "__main__":
    main(Path(sys.argv[2]), sys.argv[3:] == ["long"])
