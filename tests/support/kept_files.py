"""Files that programs keep or find as state, made by these programs, and the commands that read them: rollouts of
conversations, what best of n resumes from, models that are asked, and the clients of serve-training."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open

from tests.end_to_end.conftest import run_step, save_start
from tests.support.chat_templates import chat_template, chat_tokenizer
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.replay.files import ReplayRollout, file_of
from threestep.plugins.tinker.adapters import AdaptedModel
from threestep.plugins.tinker.client_state import ClientState
from threestep.plugins.tinker.opening import Computing, ServerSettings, service_of
from threestep.plugins.tinker.records import LoraSpec
from threestep.plugins.tinker.service import TrainingService
from threestep.plugins.tinker.store import Store, StoredMessage
from threestep.plugins.tinker.wire import STEP, RequestBounds
from training.step3_ppo.parts.evaluation import conversation_columns
from training.utils.base.errors import ThreestepError
from training.utils.contracts.rollout_engine import Ends, RolloutRequest, Sampling


@dataclass(frozen=True)
class ReadingCommand:
    """A command that reads files. files: that are damaged, one at a time. call: runs it with the files as they are.
    skips: it counts or skips what it cannot read, by its documentation. compares: code 1 says that something
    differs."""

    name: str
    files: Sequence[Path]
    call: Callable[[], object]
    skips: bool = False
    compares: bool = False


def make_kept(folder: Path, with_rollouts: bool) -> None:
    """Write the files, beside those of `make_runs`. with_rollouts: rollouts of conversations too."""
    with contextlib.redirect_stdout(io.StringIO()):
        _best_of(folder, folder / "best_of")
    answers = (folder / "best_of" / "answers.jsonl").read_text("utf-8").splitlines(keepends=True)
    (folder / "best_of_cut" / "batches").mkdir(parents=True)
    shutil.copy(folder / "best_of" / "settings.json", folder / "best_of_cut")
    for place, begin in enumerate(range(0, len(answers), 2)):
        (folder / "best_of_cut" / "batches" / f"{place:06d}.jsonl").write_text("".join(answers[begin : begin + 2]))
    _make_clients(folder / "clients")
    if with_rollouts:
        _make_talks(folder / "talks")


def kept_commands(folder: Path, with_rollouts: bool) -> list[ReadingCommand]:
    start = folder / "start"
    model = [start / name for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")]
    done, cut = folder / "best_of", folder / "best_of_cut"
    batches = sorted((cut / "batches").glob("*.jsonl"))
    return [
        ReadingCommand(
            "best-of, done", [done / "answers.jsonl", done / "settings.json"], lambda: _resumed(folder, done)
        ),
        ReadingCommand("best-of, cut", [*batches, cut / "settings.json"], lambda: _resumed(folder, cut)),
        ReadingCommand("best-of, new", [folder / "rows.jsonl", *model], lambda: _drawn(folder)),
        ReadingCommand("chat", [*model, start / "generation_config.json"], lambda: _chatted(start)),
        ReadingCommand("serve", [*model, start / "generation_config.json"], lambda: _served(start)),
        *_of_clients(folder / "clients"),
        *(_of_talks(folder / "talks") if with_rollouts else []),
    ]


# --- best of n


def _best_of(folder: Path, out: Path) -> None:
    flags = (
        "--reward length --reward_length_characters 5 --data_split 0,0,1 --num_samples_per_prompt 2 "
        "--max_new_tokens 3 --max_prompt_seq_len 40 --per_device_eval_batch_size 2 --keep_cut true"
    )
    data = ["--data_path", f"jsonl:{folder / 'rows.jsonl'}", "--data_output_path", folder / "cache"]
    words = ["--model_name_or_path", folder / "start", *data, "--output_dir", out, *flags.split()]
    import_module("threestep.plugins.evaluation.best_of.__main__").main([*map(str, words)])


def _resumed(folder: Path, kept: Path) -> None:
    """Go on in a copy: what is read is removed behind it."""
    copy = folder / "out" / kept.name
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(kept, copy)
    _best_of(folder, copy)


def _drawn(folder: Path) -> None:
    shutil.rmtree(folder / "out" / "best_of_new", ignore_errors=True)
    _best_of(folder, folder / "out" / "best_of_new")


# --- models that are asked


def _chatted(start: Path) -> None:
    with mock.patch.object(sys, "stdin", io.StringIO("fig?\n")):
        import_module("threestep.plugins.evaluation.chat").main([str(start), "--max_new_tokens", "3"])


def _served(start: Path) -> None:
    """Open a model for an engine's own server, load it for ours, and order an answer."""
    from threestep.plugins.serve.endpoint.fields import read_request
    from threestep.plugins.serve.endpoint.model import load_served, open_model
    from training.utils.data.rows.arguments import ChatArguments
    from training.utils.generation.arguments import SamplingArguments

    flags, chat = SamplingArguments(max_new_tokens=3), ChatArguments()
    open_model(str(start), flags, chat)
    served = load_served(str(start), "m", flags, chat)
    request = read_request({"model": "m", "messages": [{"role": "user", "content": "fig?"}]}, True, "m")
    served.orders(request, served.prompts(request), flags, [1])


# --- clients of serve-training

_SESSION, _CHECKPOINT, _SAMPLER = "0" * 32, "weights/whole", "sampler_weights/drawn"


def _service(folder: Path) -> tuple[TrainingService, Computing]:
    model = tiny_causal_lm("llama").requires_grad_(False)
    return service_of(
        model, Store(folder, {"name": "tiny"}), ServerSettings(1000, 8, 64), tokenizer="tiny", name="tiny",
        bounds=RequestBounds(100, 32), decode=str, ends=frozenset([2]),
    )  # fmt: skip


def _make_clients(folder: Path) -> None:
    adapted = AdaptedModel(tiny_causal_lm("llama").requires_grad_(False))
    store, spec = Store(folder, {"name": "tiny"}), LoraSpec(2, 3)
    store.open_session(_SESSION, {"created": 1.0, "tags": None})
    files, layout = store.client(_SESSION, 0), adapted.layout(spec)
    weights_P = adapted.new(spec)
    state = ClientState(weights_P, weights_P * 0.1, weights_P.square(), weights_P * 0.5, 3)
    files.create(spec, state, {"type": "create_model", "model_id": files.model_id}, {"name": "a"})
    files.write_state(state, 2, {"metrics": {"grad_norm": 1.0}})
    files.write_result(2, StoredMessage(b'{"metrics": {"grad_norm": 1.0}}', is_proto=False))
    step = {"model_id": files.model_id, "seq_id": 3, "adam_params": {"learning_rate": 0.1}}
    files.write_request(3, StoredMessage(json.dumps(step).encode(), False, STEP))
    files.save_checkpoint("whole", state, 2, overwrite=False)
    path = files.save_weights("drawn", weights_P, layout, seq=2, base="tiny")
    store.write_sampler(_SESSION, 1, {"path": path})


def _of_clients(folder: Path) -> list[ReadingCommand]:
    client, model_id = folder / "sessions" / _SESSION / "train_0", f"{_SESSION}:train:0"
    whole, drawn = client / _CHECKPOINT, client / _SAMPLER

    def resumed() -> None:
        """In a copy: what is done is removed."""
        copy = folder.parent / "out" / "clients"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy)
        service, computing = _service(copy)
        for seq in (0, 2):
            _raise_if_failed(service.retrieve({"request_id": f"{model_id}:{seq}"}))
        service.post("get_info", {"model_id": model_id}, b"")
        computing._trainer.turn()
        _raise_if_failed(service.retrieve({"request_id": f"{model_id}:3"}))

    def listed() -> None:
        service, _ = _service(folder)
        service.get(f"training_runs/{model_id}")
        service.get(f"samplers/{_SESSION}:sample:1")
        service.post("weights_info", {"tinker_path": f"tinker://{model_id}/{_CHECKPOINT}"}, b"")

    def created() -> None:
        """A client from a checkpoint's state, which is removed again."""
        service, _ = _service(folder)
        asked = {"session_id": _SESSION, "path": f"tinker://{model_id}/{_CHECKPOINT}", "optimizer": True}
        try:
            answer = service.post("load_weights", {**asked, "model_seq_id": 9}, b"")
            _raise_if_failed(service.retrieve(answer))
        finally:
            shutil.rmtree(client.with_name("train_9"), ignore_errors=True)

    def sampled() -> None:
        service, _ = _service(folder)
        chunk = {"type": "encoded_text", "tokens": [5, 6]}
        asked = {"prompt": {"chunks": [chunk]}, "sampling_params": {"max_tokens": 2}, "num_samples": 1}
        service.post("asample", {"sampling_session_id": f"{_SESSION}:sample:1", "seq_id": 0, **asked}, b"")

    return [
        ReadingCommand(
            "serve-training, a client",
            [client / name for name in ("client.json", "state.safetensors", "requests/00000003.step.json",
                                        "results/00000002.json", "state.safetensors")],
            resumed,
        ),
        ReadingCommand(
            "serve-training, lists",
            [client / "client.json", client.with_name("sampler_1.json"), whole / "checkpoint.json"],
            listed,
        ),
        ReadingCommand(
            "serve-training, a client from a state", [whole / "checkpoint.json", whole / "state.safetensors"], created
        ),
        ReadingCommand(
            "serve-training, a sampler",
            [client.with_name("sampler_1.json"), drawn / "checkpoint.json", drawn / "adapter_model.safetensors"],
            sampled,
        ),
    ]  # fmt: skip


def _raise_if_failed(answer: StoredMessage) -> None:
    error = json.loads(answer.body).get("error")
    if error is not None:
        raise ThreestepError(error)


# --- rollouts of conversations

_ENVIRONMENT = """
class Uneven:
    def reset(self, row):
        self.left = int(row["ground_truth"]) % 3
        return row["messages"], None

    def step(self, message):
        self.left -= 1
        done = self.left < 0
        return [] if done else [{"role": "user", "content": "more"}], 0.5, done, {"heard": 1}

    def close(self):
        pass
"""


def _make_talks(folder: Path) -> None:
    folder.mkdir()
    start = save_start(folder / "start", tokenizer=chat_tokenizer(chat_template("chatml")))
    rows = [{"prompt": f"Say {n}.", "ground_truth": str(n)} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "uneven.py").write_text(_ENVIRONMENT)
    flags = (
        "--data_split 0,0,1 --eval_fraction 0.2 --max_prompt_seq_len 40 --max_answer_seq_len 60 --dtype fp32 "
        "--reward environment --advantage grpo --num_samples_per_prompt 2 --max_train_steps 1 --max_turns 4 "
        "--per_device_generation_batch_size 2 --per_device_training_batch_size 2 --eval_interval 0 --stop a e i o t s n"
    )
    ran = run_step(3, [
        "--actor_model_name_or_path", start, "--data_path", f"jsonl:{folder / 'rows.jsonl'}",
        "--data_output_path", folder / "cache", "--environment", f"{folder / 'uneven.py'}:Uneven",
        "--output_dir", folder / "run", "--rollout_dump", folder / "dump", *flags.split(),
    ])  # fmt: skip
    assert ran.code == 0, ran.words
    first = file_of(folder / "dump", 0, 0)
    (folder / "whole.json").write_text(json.dumps(_request_of(first)))


def _request_of(path: Path) -> dict[str, Any]:
    """What a run asks for that gets this rollout."""
    with safe_open(path, "pt") as file:
        found = {name: file.get_tensor(name).tolist() for name in ("asked_ids_BP", "asked_mask_BP", "seeds")}
        settings = {name: json.loads(value) for name, value in file.metadata().items() if name != "conversations"}
    return {**found, "settings": settings}


def _of_talks(folder: Path) -> list[ReadingCommand]:
    known = json.loads((folder / "whole.json").read_text())
    settings = known["settings"]
    own = {name: settings.pop(name) for name in [*settings] if name in _SAMPLING}
    ends = Ends(tuple(settings.pop("stop")), tuple(settings.pop("more_end_token_ids")))
    each = settings.pop("samples_per_prompt")
    settings.pop("format")
    own["bad_words"] = tuple(map(tuple, own["bad_words"]))
    request = RolloutRequest(
        torch.tensor(known["asked_ids_BP"])[::each], torch.tensor(known["asked_mask_BP"])[::each],
        Sampling(**own, ends=ends), known["seeds"], each,
    )  # fmt: skip
    vocabulary = SimpleNamespace(vocab_size=384)
    model: Any = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: vocabulary))

    def replayed() -> None:
        rollout = ReplayRollout(folder / "dump", 0, settings).roll_out(model, request)
        conversation_columns(rollout, str, request.sampling.end_token_ids)
        assert len(rollout.sequences()) == len(rollout.turn_texts(str, ())) == len(rollout.records)
        assert rollout.drawn.turn_rewards_BR is not None

    return [ReadingCommand("--rollout_replay of conversations", 2 * [file_of(folder / "dump", 0, 0)], replayed)]


_SAMPLING = {name for name in asdict(Sampling(1, 1.0, 0, 1.0, 0, 0)) if name not in ("ends", "paths")}
