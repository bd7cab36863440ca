"""Which checkpoint and which part an export takes, and its sentences; its weights:
threestep/plugins/programs/tests/end_to_end/test_export_end_to_end.py."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.families.builds import build
from tests.support.tiny_models import tiny_causal_lm
from threestep.plugins.programs import export
from threestep.plugins.programs import exporting as exporting
from threestep.plugins.programs.export import engine_of, find_checkpoint, main
from training.utils.base.errors import ThreestepError
from training.utils.checkpoints.folder import CheckpointFolder
from training.utils.loading.saving import write_description


@pytest.fixture
def run(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.begin(step)
        (folder.partial(step) / "a.bin").write_bytes(b"weights")
        folder.publish(step, {})
    return tmp_path


def test_a_checkpoint_by_its_path_and_the_latest_of_a_run(run):
    checkpoints = run / "checkpoints"
    assert find_checkpoint(checkpoints / "step_000001") == checkpoints / "step_000001"
    assert find_checkpoint(run) == find_checkpoint(checkpoints) == checkpoints / "step_000002"


def test_a_damaged_one_is_never_exported(run, capsys):
    newest = run / "checkpoints" / "step_000002"
    (newest / "a.bin").write_bytes(b"Weights")
    assert find_checkpoint(run).name == "step_000001"
    assert "skipped step_000002" in capsys.readouterr().err
    with pytest.raises(ThreestepError, match="step_000002: a.bin does not have the content .*; pass another"):
        main([str(newest), str(run / "out")])
    (run / "checkpoints" / "step_000001" / "a.bin").unlink()
    with pytest.raises(ThreestepError, match=r"only damaged checkpoints \(step_000002: a.bin does not have"):
        find_checkpoint(run)


def test_no_checkpoint_there(tmp_path):
    with pytest.raises(ThreestepError, match="step_000009: the folder does not exist; pass another"):
        find_checkpoint(tmp_path / "step_000009")
    with pytest.raises(ThreestepError, match="has no checkpoints in .*; save some with --save_every"):
        find_checkpoint(tmp_path)


def test_a_finished_run_without_checkpoints_gives_its_model(tmp_path, capsys):
    run = tmp_path / "run"
    (run / "model").mkdir(parents=True)
    (run / "model/config.json").write_text("{}")
    with pytest.raises(ThreestepError, match="has no checkpoints in"):
        export.main([str(run), str(tmp_path / "out")])  # it was killed before its end
    (run / "summary.json").write_text("{}")
    export.main([str(run), str(tmp_path / "out")])
    assert (tmp_path / "out/config.json").read_text() == "{}"
    with pytest.raises(ThreestepError, match="^OUT '.*' cannot be written: .*config.json: a file is in the way"):
        export.main([str(run), str(tmp_path / "out/config.json/model")])
    assert "has no checkpoints (--save_every, --save_at_end); copied its finished model " in capsys.readouterr().out
    with pytest.raises(ThreestepError, match="has no checkpoints in"):
        export.main([str(run), str(tmp_path / "other"), "--part", "critic"])


@pytest.mark.parametrize("given", ["hf", "tfr"])
def test_an_engine_that_is_written_no_head(tmp_path, given):
    with pytest.raises(ThreestepError, match=f"^--mtp expects .*, got '{given}'$"):
        export.main([str(tmp_path), str(tmp_path / "out"), "--mtp", given])


@pytest.fixture
def exported(tmp_path, tiny_tokenizer, monkeypatch):
    """Export a checkpoint of `model` whose weights are `weights`; return the folder."""

    def export_of(model, weights, **more):
        write_description(tmp_path / "models" / "model", model, tiny_tokenizer)
        state = {f"model.{name}": weight for name, weight in weights.items()}
        monkeypatch.setattr(exporting, "engine_state", lambda path: state)
        exporting.export_model(tmp_path, "model", tmp_path / "out", **more)
        return tmp_path / "out"

    return export_of


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_weights_are_exported_tied_ones_once(exported, tiny_tokenizer, family):
    model = tiny_causal_lm(family, vocab_size=len(tiny_tokenizer))
    weights = dict(model.state_dict())
    if family == "gpt2":
        weights.pop("lm_head.weight")
    folder = exported(model, weights)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        assert torch.equal(type(model).from_pretrained(folder)(ids).logits, model(ids).logits)


def test_a_buffer_that_is_saved_keeps_its_precision(exported, tiny_tokenizer, tmp_path):
    """The bias of a router, float32 in a bfloat16 model; ZeRO-3's checkpoints hold all in float32."""
    build("glm4_moe", tmp_path / "start", vocab_size=len(tiny_tokenizer))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.bfloat16)
    folder = exported(model, {name: tensor.float() for name, tensor in model.state_dict().items()})
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    stored = load_file(folder / "model.safetensors")
    kept = {str(tensor.dtype) for name, tensor in stored.items() if "correction_bias" in name}
    assert kept == {"torch.float32"} and stored["model.norm.weight"].dtype is torch.bfloat16


def test_what_was_trained_beside_a_model_is_written_beside_it(exported, tiny_tokenizer, tmp_path):
    model, written = tiny_causal_lm("llama", vocab_size=len(tiny_tokenizer)), list[str]()

    def write(checkpoint, name, state, dtype, *, out):
        assert checkpoint == tmp_path and name == "model" and dtype is torch.float32 and "model.lm_head.weight" in state
        assert (out / "model.safetensors").is_file()
        written.append("written")

    exported(model, dict(model.state_dict()), write_beside=[write, write])
    assert written == ["written", "written"]


def test_no_checkpoint_there_or_one_of_an_earlier_version(run, tmp_path):
    with pytest.raises(
        ThreestepError, match="has no models/ folder with the configuration and tokenizer, because an older version"
    ):
        main([str(run), str(run / "out")])
    with pytest.raises(ThreestepError, match="step_000009: the folder does not exist; pass another"):
        find_checkpoint(tmp_path / "step_000009")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ThreestepError, match="has no checkpoints in .*; save some with --save_every"):
        find_checkpoint(tmp_path / "empty")


def test_parts_are_engines(tmp_path):
    assert engine_of("model", ["model"], tmp_path) == engine_of("average", ["model"], tmp_path) == "model"
    assert [engine_of(part, ["actor", "critic"], tmp_path) for part in ("model", "critic")] == ["actor", "critic"]


@pytest.mark.parametrize(
    ("family", "name", "words"),
    [
        ("llama", "model.norm.weight", "lacks 1 of its model's weights, such as {}: .* the versions that the run used"),
        ("llama", "lm_head.weight", "lacks 1 of its model's weights, such as {}: "),  # not tied, though it can be
        ("gpt2", "transformer.h.1.ln_1.bias", "lacks 1 of its model's weights, such as {}: "),
        ("llama", "model.layers.0.mlp.up_proj.bias", "has 1 weights that its model does not have, such as .*{}: the"),
    ],
)
def test_a_weight_that_is_lacking_or_that_nobody_knows(exported, tiny_tokenizer, family, name, words):
    model = tiny_causal_lm(family, vocab_size=len(tiny_tokenizer))
    weights = dict(model.state_dict())
    if weights.pop(name, None) is None:
        weights[name] = torch.zeros(48)
    with pytest.raises(ThreestepError, match=words.format(name)):
        exported(model, weights)
