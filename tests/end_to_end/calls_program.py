"""Training calls in one process: `python calls_program.py PLACE [long]`, as test_calls.py runs it. What was seen goes
to PLACE/told.json.

Calls in a row, behind each of which is counted what the process holds: threads, open files, signal handlers, process
groups, tensors. Calls with loaded models. Calls that were stopped and are made again.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, LlamaForSequenceClassification

import threestep


def lengths(prompts: list[str], responses: list[str], **columns: Any) -> list[float]:
    return [float(len(response)) for response in responses]


ROWS = [
    {"prompt": f"{a} + {b} =", "completion": f" {a + b}", "rejected": f" {a + b + 1}"}
    for a in range(6)
    for b in range(4)
]
PAIRS = [{"prompt": row["prompt"], "chosen": row["completion"], "rejected": row["rejected"]} for row in ROWS]
PROMPTS = [{"prompt": row["prompt"]} for row in ROWS]
SETTINGS: dict[str, Any] = {
    "max_train_steps": 1, "report": False, "report_mfu": False, "per_device_train_batch_size": 4, "max_seq_len": 48,
    "learning_rate": 1e-2,
}  # fmt: skip
SHARED: dict[str, Any] = {"max_train_steps": 2, "report": False, "report_mfu": False, "dtype": "fp32"}
TRAINED = {**SHARED, "per_device_train_batch_size": 4, "max_seq_len": 48, "learning_rate": 1e-2}
DRAWN = {
    **SHARED, "per_device_generation_batch_size": 4, "per_device_training_batch_size": 8, "max_answer_seq_len": 6,
    "max_prompt_seq_len": 30, "actor_learning_rate": 1e-3, "reward": lengths, "advantage": "grpo",
    "num_samples_per_prompt": 2,
}  # fmt: skip
CALLS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "sft": (ROWS, "training.step1_sft.main", TRAINED),
    "reward": (PAIRS, "training.step2_reward.main", TRAINED),
    "dpo": (PAIRS, "training.step2_dpo.main", TRAINED),
    "ppo": (PROMPTS, "training.step3_ppo.main", {**DRAWN, "reward": "length", "reward_length_characters": 5}),
}
# A class in a file, for a folder with its code.
CODE = """
from transformers import LlamaForCausalLM


class Halved(LlamaForCausalLM):
    def forward(self, *arguments, **others):
        output = super().forward(*arguments, **others)
        output.logits = output.logits / 2
        return output
"""


def held() -> dict[str, Any]:
    gc.collect()
    process = psutil.Process()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]
    return {
        "threads": process.num_threads(),
        "files": process.num_fds(),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "group": torch.distributed.is_initialized(),
        "variables": sorted(name for name in ("RANK", "WORLD_SIZE", "MASTER_PORT") if name in os.environ),
        "elements": sum(tensor.numel() for tensor in tensors),
    }


def in_a_row(place: Path, calls: int) -> dict[str, Any]:
    shared = {**SETTINGS, "data_output_path": str(place / "cache")}
    start = str(place / "start")
    own: list[Any] = [
        lambda: threestep.sft(start, ROWS, **shared, zero_stage=3),
        lambda: threestep.dpo(start, PAIRS, **shared, zero_stage=1, dtype="bf16"),
        lambda: threestep.sft(start, ROWS, **shared, output_dir=str(place / "again")),
    ]
    counts, results = [], []
    for call in range(calls):
        results.append(own[call % len(own)]())
        counts.append(held())
    told = {"counts": counts, "folders": [str(result.folder) for result in results]}
    told["figures"] = [result.figures for result in results]
    return told


def digest(model: torch.nn.Module) -> str:
    whole = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        whole.update(name.encode() + tensor.float().numpy().tobytes())
    state = ([part.training for part in model.modules()], [part.requires_grad for part in model.parameters()])
    configs = (model.config.to_dict(), getattr(model, "generation_config", None))
    return whole.hexdigest() + str(state) + str(configs)


def given(place: Path) -> dict[str, Any]:
    """Each step with an object of which weights are frozen."""
    shared = {"tokenizer": AutoTokenizer.from_pretrained(place / "start"), "data_output_path": str(place / "cache")}
    told: dict[str, Any] = {}

    def called(name: str, call: Callable[..., Any], model: Any, rows: Any, **settings: Any) -> None:
        for part in ("model.layers.0.mlp.up_proj", "model.norm"):
            model.get_submodule(part).requires_grad_(False)
        before = digest(model)
        call = functools.partial(call, model, rows, **shared, **settings, output_dir=place / name)
        if "stopped" in name:
            try:
                call(stop_before="1s")  # time is always short
            except threestep.ThreestepError:
                result = call(resume=True)
        else:
            result = call()
        own = dict(model.named_parameters())
        trained = {part: weight for part, weight in result.model.named_parameters() if part in own}
        told[name] = {
            "as it was": digest(model) == before,
            "moved": sorted(part for part, weight in trained.items() if not weight.equal(own[part])),
            "frozen": sorted(part for part, weight in own.items() if not weight.requires_grad),
            "steps": [line["step"] for line in result.metrics],
        }

    def scalar() -> Any:
        torch.manual_seed(0)
        model = LlamaForSequenceClassification.from_pretrained(place / "start", num_labels=1)
        torch.nn.init.normal_(model.score.weight)
        return model

    language = functools.partial(LlamaForCausalLM.from_pretrained, place / "start")
    called("sft at ZeRO 3", threestep.sft, language(), ROWS, **TRAINED, zero_stage=3)
    shards = {**TRAINED, "per_device_train_batch_size": 2, "zero_stage": 3, "num_ranks": 2}
    called("sft on ranks", threestep.sft, language().train(), ROWS, **shards)
    called("sft stopped", threestep.sft, language(), ROWS, **TRAINED)
    called("dpo", threestep.dpo, language(), PAIRS, **TRAINED)
    called("reward", threestep.reward, scalar(), PAIRS, **TRAINED)
    scored = {name: value for name, value in DRAWN.items() if name != "reward"} | {"advantage": "gae"}
    judge = scalar().requires_grad_(False)  # as one that was loaded to score
    called("ppo", functools.partial(threestep.ppo, reward_model=judge), language(), PROMPTS, **scored)
    return told


def same(place: Path) -> dict[str, bool]:
    """Whether each step makes the model of an object that it makes of the object's folder (`stopped` has run)."""
    told = {}
    tokenizer = AutoTokenizer.from_pretrained(place / "start")
    for kind, (rows, _, settings) in CALLS.items():
        model = LlamaForCausalLM.from_pretrained(place / "start")
        places = {"data_output_path": str(place / "cache"), "output_dir": place / f"{kind} of an object"}
        result = getattr(threestep, kind)(model, rows, tokenizer=tokenizer, **settings, **places)
        mine, folders = (one / "model" / "model.safetensors" for one in (result.folder, place / f"{kind} unbroken"))
        told[kind] = mine.read_bytes() == folders.read_bytes()
    return told


def with_code(place: Path) -> dict[str, Any]:
    """A class of one's own: the object, and its folder with its code."""
    (place / "halved.py").write_text(CODE)
    sys.path.insert(0, str(place))
    kind = importlib.import_module("halved").Halved
    kind.register_for_auto_class("AutoModelForCausalLM")
    model, tokenizer = kind.from_pretrained(place / "start"), AutoTokenizer.from_pretrained(place / "start")
    settings = {**TRAINED, "data_output_path": str(place / "cache"), "output_dir": place / "halved"}
    said = ""
    try:
        threestep.sft(model, ROWS, tokenizer=tokenizer, **settings)
    except threestep.ThreestepError as mistake:
        said = str(mistake)
    model.save_pretrained(place / "code")
    tokenizer.save_pretrained(place / "code")
    result = threestep.sft(place / "code", ROWS, trust_remote_code=True, **settings)
    logits = [one.eval()(input_ids=torch.arange(5, 9)[None]).logits for one in (result.model, _plain(result))]
    return {"said": said, "kind": type(result.model).__name__, "half": logits[0].equal(logits[1] / 2)}


def _plain(result: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(result.model_folder)


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
                again = eval(f"dict({said.partition('repeat the call with ')[2]})")
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
    import pyarrow

    # Arrow's pools take another worker, up to their size, where tasks meet: by the moment, in any call.
    pyarrow.set_cpu_count(1)
    pyarrow.set_io_thread_count(1)
    place, is_long = Path(sys.argv[1]), sys.argv[2:] == ["long"]
    os.chdir(place)
    told = in_a_row(place, 30 if is_long else 3)
    told |= {"stopped": stopped(place, is_long), "given": given(place), "same": same(place)}
    (place / "told.json").write_text(json.dumps({**told, "with code": with_code(place)}))


if __name__ == "__main__":
    main()
