"""Calls with loaded models, and calls that were stopped and are made again, in one process: `python given_program.py
PLACE [long]`, as test_given_models.py runs it. What was seen goes to PLACE/told.json."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

import threestep
from tests.end_to_end.calls_program import PAIRS, ROWS, lengths

PROMPTS = [{"prompt": row["prompt"]} for row in ROWS]
SHARED: dict[str, Any] = {"max_train_steps": 2, "report": False, "report_mfu": False, "dtype": "fp32"}
TRAINED = {**SHARED, "per_device_train_batch_size": 4, "max_seq_len": 48, "learning_rate": 1e-2}
DRAWN = {
    **SHARED, "per_device_generation_batch_size": 4, "per_device_training_batch_size": 8, "max_answer_seq_len": 6,
    "max_prompt_seq_len": 30, "actor_learning_rate": 1e-3, "reward": lengths, "advantage": "grpo",
    "num_samples_per_prompt": 2,
}  # fmt: skip


class Halved(LlamaForCausalLM):
    """Computes what a plain model with half the output layer does, to the bit."""

    def forward(self, input_ids: Any = None, labels: Any = None, **others: Any) -> Any:
        output = super().forward(input_ids=input_ids, **others)
        output.logits = output.logits / 2
        return output


def halve(module: Any, inputs: Any, output: Any) -> Any:
    return output / 2


def language_model(place: Path, kind: Any = LlamaForCausalLM, hooked: bool = False, half_head: bool = False) -> Any:
    model = kind.from_pretrained(place / "start")
    if hooked:
        model.lm_head.register_forward_hook(halve)
    if half_head:
        model.lm_head.weight.data.div_(2)
    return model


def scalar_model(place: Path, hooked: bool = False, half_head: bool = False) -> Any:
    torch.manual_seed(0)
    model = LlamaForSequenceClassification.from_pretrained(place / "start", num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    if hooked:
        model.score.register_forward_hook(halve)
    if half_head:
        model.score.weight.data.div_(2)
    return model


def digest(model: torch.nn.Module) -> str:
    whole = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole.update(name.encode() + tensor.float().numpy().tobytes())
    state = ([part.training for part in model.modules()], [part.requires_grad for part in model.parameters()])
    configs = (model.config.to_dict(), getattr(model, "generation_config", None))
    return whole.hexdigest() + str(state) + str(configs)


def given(place: Path) -> dict[str, Any]:
    """Each step with an object and with the plain model that computes the same."""
    shared = {"tokenizer": AutoTokenizer.from_pretrained(place / "start")}
    cache = {"data_output_path": str(place / "cache")}
    told: dict[str, Any] = {}

    def called(name: str, call: Callable[..., Any], model: Any, rows: Any, **settings: Any) -> None:
        for part in ("model.layers.0.mlp.up_proj", "model.norm"):
            model.get_submodule(part).requires_grad_(False)
        before = digest(model)
        result = call(model, rows, **shared, **cache, **settings, output_dir=place / name)
        own = dict(model.named_parameters())
        trained = {part: weight for part, weight in result.model.named_parameters() if part in own}
        told[name] = {
            "kind": type(result.model).__name__,
            "as it was": digest(model) == before,
            "moved": sorted(part for part, weight in trained.items() if not weight.equal(own[part])),
            "frozen": sorted(part for part, weight in own.items() if not weight.requires_grad),
            "figures": {**result.figures, "first": next(line for line in result.metrics if line["step"] == 1)},
        }

    lm, scalar = functools.partial(language_model, place), functools.partial(scalar_model, place)
    called("sft plain", threestep.sft, lm(half_head=True), ROWS, **TRAINED)
    called("sft class", threestep.sft, lm(Halved), ROWS, **TRAINED)
    hooked = lm(hooked=True).train()
    hooked.generation_config.temperature, hooked.generation_config.top_p = 0.9, 0.6  # as Vicuna's, without do_sample
    called("sft hook", threestep.sft, hooked, ROWS, **TRAINED)
    halves = {**TRAINED, "per_device_train_batch_size": 2, "zero_stage": 3, "num_ranks": 2}
    called("sft ranks", threestep.sft, lm(), ROWS, **halves)
    called("dpo other", threestep.dpo, lm(), PAIRS, **TRAINED)  # whose reference the next must not take from the cache
    called("dpo class", threestep.dpo, lm(Halved), PAIRS, **TRAINED)
    called("dpo plain", threestep.dpo, lm(half_head=True), PAIRS, **TRAINED)
    called("reward plain", threestep.reward, scalar(half_head=True), PAIRS, **TRAINED)
    called("reward hook", threestep.reward, scalar(hooked=True), PAIRS, **TRAINED)
    called("ppo plain", threestep.ppo, lm(half_head=True), PROMPTS, **DRAWN)
    called("ppo class", threestep.ppo, lm(Halved), PROMPTS, **DRAWN)
    scored = {name: value for name, value in DRAWN.items() if name != "reward"} | {"advantage": "gae"}
    for name, judge in (("scored plain", scalar(half_head=True)), ("scored hook", scalar(hooked=True))):
        judge.requires_grad_(False)  # as one that was loaded to score
        called(name, functools.partial(threestep.ppo, reward_model=judge), lm(), PROMPTS, **scored)
    return told


CALLS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "sft": (ROWS, "training.step1_sft.main", TRAINED),
    "reward": (PAIRS, "training.step2_reward.main", TRAINED),
    "dpo": (PAIRS, "training.step2_dpo.main", TRAINED),
    "ppo": (PROMPTS, "training.step3_ppo.main", {**DRAWN, "reward": "length", "reward_length_characters": 5}),
}


# How a stopped call is made again. Step 1 in every form, the others in some, but for the long form.
FORMS = ("python", "bare", "true", "yaml", "path")
ORDINARY = {"sft": FORMS, "reward": ("path",), "dpo": ("true",), "ppo": ("python", "yaml")}


def stopped(place: Path, is_long: bool) -> dict[str, Any]:
    """Each step unbroken, and stopped after its first update and resumed in its forms: what each ended with."""
    told: dict[str, Any] = {}
    for kind, (rows, module, settings) in CALLS.items():
        call = functools.partial(
            getattr(threestep, kind), str(place / "start"), rows, **settings, data_output_path=str(place / "cache")
        )
        call(output_dir=place / f"{kind} unbroken")
        for form in FORMS if is_long else ORDINARY[kind]:
            folder = place / f"{kind} {form}"
            try:
                call(output_dir=folder, stop_before="1s")  # time is always short
            except threestep.ThreestepError as stop:
                said = str(stop)
            if form == "python":  # what the message says, as it is typed
                again = eval(f"dict({said.partition('the same call with ')[2].partition(' goes on')[0]})")
                call(**again)
            else:
                config = folder / "again.yaml"
                resume = {"yaml": "true", "path": str(folder / "checkpoints" / "step_000001")}.get(form)
                text = (folder / "config.yaml").read_text()
                config.write_text(text.replace("resume: null", f"resume: {resume}") if resume else text)
                words = {"bare": ["--resume"], "true": ["--resume", "true"]}.get(form, [])
                importlib.import_module(module).main(["--config", str(config), *words])
            steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
            told[f"{kind} {form}"] = {"said": said, "steps": steps}
    return told


def main() -> None:
    place = Path(sys.argv[1])
    os.chdir(place)
    (place / "told.json").write_text(
        json.dumps({"given": given(place), "stopped": stopped(place, sys.argv[2:] == ["long"])})
    )


if __name__ == "__main__":
    main()
