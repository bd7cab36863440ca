"""What people give for a model folder and is none: one sentence that says what it is and what to do."""

from __future__ import annotations

import importlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.forked_programs import run_python
from tests.support.tiny_models import tiny_causal_lm
from training.utils.base.errors import ThreestepError
from training.utils.flags.step import known_steps
from training.utils.loading.folder_kinds import check_model_folder
from training.utils.loading.models import load_causal_lm
from training.utils.loading.tokenizers import load_tokenizer
from training.utils.models.settings import ModelSettings

CONFIG = json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})


DEEP = '{"a": ' * 100_000 + "1" + "}" * 100_000
NESTED = '{"model_type": "llama", "a": ' + "[" * 200 + "]" * 200 + "}"


def folder_of(place: Path, *names: str, **contents: str | bytes) -> Path:
    """A folder with files `names`, empty but for config.json and those given by `contents` (`__` is a point)."""
    place.mkdir(parents=True, exist_ok=True)
    texts: dict[str, str | bytes] = {name: CONFIG if name.endswith("config.json") else "" for name in names}
    texts |= {name.replace("__", "."): text for name, text in contents.items()}
    for name, text in texts.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return place


@pytest.mark.parametrize(
    "load", [load_tokenizer, lambda path: load_causal_lm(ModelSettings(path), torch.float32, 1)], ids=["tok", "model"]
)
def test_folders_that_are_none(load, tmp_path):
    with pytest.raises(ThreestepError, match="the model folder '.*nowhere' does not exist"):
        load(str(tmp_path / "nowhere"))
    with pytest.raises(ThreestepError, match=r"the model folder '\./nowhere' does not exist"):
        load("./nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ThreestepError, match="empty' is empty; expected config.json and safetensors"):
        load(str(tmp_path / "empty"))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["README.md"], "so it is not a model folder: it holds README.md; expected config.json and"),
        (["step1/config.json"], "so it is not a model folder; did you mean '.*/given/step1'"),
        (["tokenizer.json"], "it holds only a tokenizer; add the model's config.json and safetensors"),
        (["model.safetensors"], "model.safetensors alone does not give the architecture"),
        (["pytorch_model.bin"], "pytorch_model.bin alone does not give the architecture"),
        (["model/config.json"], "is the folder of a run; use its model, .*given/model$"),
        (["model/config.json", "critic/config.json"], "use its model, .*given/model or .*given/critic$"),
        (["params.json", "consolidated.00.pth"], "in its original format .* use its transformers version"),
        (["config.json", "consolidated.safetensors"], "needs model.safetensors, .* but holds consolidated.safetensors"),
        (["config.json", "pytorch_model.bin"], "pickled weights .pytorch_model.bin., which may run code .*; expected"),
        (["config.json", "weights.pt", "optimizer.pt"], "pickled weights .weights.pt."),
        (["config.json", "model.pth"], "pickled weights .model.pth."),
        (["config.json", "zero_to_fp32.py", "latest"], "a DeepSpeed checkpoint .*zero_to_fp32.py .*given .*given"),
        (["checkpoints/step_000100/manifest.json"], "is a checkpoint or .* threestep export .*given OUT"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_other_things(tmp_path, files, words):
    with pytest.raises(ThreestepError, match=words) as mistake:
        check_model_folder(str(folder_of(tmp_path / "given", *files)))
    assert "\n" not in str(mistake.value)


PARTS = [f"models/{part}/{file}.json" for part in ("actor", "critic") for file in ("config", "weights")]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("given/model.safetensors", "expected a model folder, got the file .*; use its folder, '.*'"),
        # A checkpoint of ours names the export.
        ("run/checkpoints", "threestep export .*/run "),
        ("run/checkpoints/step_000100", "threestep export .*/run/checkpoints/step_000100 "),
        ("run/checkpoints/step_000100/models/actor", "threestep export .*/run/checkpoints/step_000100 "),
        ("run/checkpoints/step_000100/models/critic", "threestep export .*/step_000100 OUT --part critic"),
    ],
)
def test_a_file_or_a_checkpoint_for_a_folder(tmp_path, given, words):
    folder_of(tmp_path / "given", "model.safetensors")
    folder_of(tmp_path / "run/checkpoints/step_000100", "manifest.json", *PARTS)
    with pytest.raises(ThreestepError, match=words):
        check_model_folder(str(tmp_path / given))


NO_CONFIG = r"config.json' (is not JSON .*again|has no model_type, such as \"llama\")"
NO_SETTINGS = "generation_config.json' is not a JSON object; download or copy it again"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *(("config.json", each, NO_CONFIG) for each in ("", "{", "[]", '{"architectures": ["Llama"]}', "\N{SNOWMAN}")),
        *(("generation_config.json", each, NO_SETTINGS)  # which transformers leaves out in silence
          for each in (b"", b"[1]", b'{"eos_token_id": 3', b"\xff", b"9" * 6000)),
        *((each, text, f"{each}'.* are nested too deeply") for text in (DEEP, NESTED)
          for each in ("config.json", "generation_config.json", "tokenizer_config.json", "adapter_config.json")),
    ],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_files_that_are_not_what_their_name_says(tmp_path, name, content, words):
    folder = folder_of(tmp_path / "given", "config.json", **{name.replace(".", "__"): content})
    with pytest.raises(ThreestepError, match=words):
        check_model_folder(str(folder))


def test_a_configuration_alone_passes_for_a_dry_run_and_is_refused_for_its_weights(tmp_path, tiny_tokenizer):
    tiny_causal_lm("llama").config.save_pretrained(tmp_path)
    check_model_folder(str(tmp_path))
    with pytest.raises(ThreestepError, match="has a config.json but no weights; add model.safetensors, or "):
        load_causal_lm(ModelSettings(str(tmp_path)), torch.float32, 1)


def test_hub_names_pass(tmp_path, monkeypatch):
    """Also below a folder of the owner's name, where the hub's cache has the model."""
    monkeypatch.chdir(tmp_path)
    check_model_folder("an-owner/a-model")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "an-owner").mkdir()
    (tmp_path / "hub/models--an-owner--a-model").mkdir(parents=True)
    check_model_folder("an-owner/a-model")
    check_model_folder("gpt2")


def test_a_path_of_two_words_is_no_hub_name_where_the_first_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder_of(tmp_path / "runs", "such/config.json")
    with pytest.raises(ThreestepError) as told:
        check_model_folder("runs/nosuch")
    assert str(told.value) == (
        "the model folder 'runs/nosuch' does not exist, though 'runs' does; did you mean 'runs/such'; to use the hub's "
        "model of that name, run from another folder"
    )


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("runs/mine/stf/model", "did you mean 'runs/mine/sft/model'"),
        ("runs/mine/stf", "did you mean 'runs/mine/sft/model'"),  # a run's folder, whose model is meant
        ("run/mien/sft/model", "did you mean 'runs/mine/sft/model'"),
        ("./tinny", "did you mean 'tiny' or 'tunny'$"),  # that with a model first
        ("run/tinny", "there is no folder 'run/tinny'; did you mean 'runs/tiny'? If you mean the hub's model: the"),
        ("tinyy", "there is no folder 'tinyy'; did you mean 'tiny' or 'tunny'? If you mean the hub's model: the model"),
        ("gpt2", "^the model 'gpt2' is not on this machine, and the hub could not be reached"),
        ("/nowhere/near/by", "^the model folder '/nowhere/near/by' does not exist$"),
    ],
)
def test_the_nearest_folder_is_named_first(given, nearest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    for name in ("runs/mine/sft/model", "runs/tiny", "tiny"):
        folder_of(tmp_path / name, "config.json")
    (tmp_path / "tunny").mkdir()
    with pytest.raises(ThreestepError, match=nearest.replace("?", r"\?")):
        check_model_folder(given)


@pytest.mark.needs_plugin("embedded")
@pytest.mark.parametrize("step", known_steps().values(), ids=known_steps())
def test_programs_say_so_before_anything_is_loaded(step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)  # and so for the configuration:
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    models = [word for name in step.inputs for word in (f"--{name}", "gpt2")]
    models[-1] = "runs/nosuch"
    with pytest.raises(ThreestepError, match="^the model folder 'runs/nosuch' does not exist, though 'runs' does"):
        importlib.import_module(step.program).main(["--data_path", "embedded", *models])


def run_command_of(sentence: str, out: Path) -> None:
    """Run the command `python -c "..."` of a sentence, which writes OUT."""
    words = shlex.split(sentence[sentence.index("python -c ") :])
    ran = run_python(["-c", words[2].replace("'OUT'", f"'{out}'")])
    assert ran.returncode == 0, ran.stderr


def test_the_command_for_pickled_weights_makes_the_same_model(save_folder: Callable[..., str], tmp_path):
    folder = Path(save_folder())
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    check_model_folder(str(folder))  # the safetensors are there
    (folder / "model.safetensors").unlink()
    with pytest.raises(ThreestepError, match="if you trust them, convert them: python -c") as mistake:
        check_model_folder(str(folder))
    run_command_of(str(mistake.value), tmp_path / "out")
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert made.keys() == weights.keys() and all(torch.equal(made[name], weights[name]) for name in made)
    check_model_folder(str(tmp_path / "out"))
    assert load_tokenizer(str(tmp_path / "out")).get_vocab() == load_tokenizer(save_folder("other")).get_vocab()


def test_a_file_that_is_no_json_or_large_is_its_readers_matter(tmp_path):
    folder = folder_of(tmp_path / "given", "config.json", tokenizer_config__json="{")
    (folder / "special.json").write_bytes(b"\xff")
    (folder / "vocab.json").write_text(json.dumps({str(n): n for n in range(400_000)}))
    check_model_folder(str(folder))
