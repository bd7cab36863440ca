"""A mistake in a Python call: it names arguments, and its traceback is the call's."""

from __future__ import annotations

import sys
import traceback
from types import SimpleNamespace

import pytest

import threestep
from threestep.mistakes import VARIABLE, in_python
from training.utils.base.errors import ThreestepError

ROWS = [{"prompt": "a", "completion": "b"}]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.needs_plugin("lora")
@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (
            "--output_dir /a/done holds a finished run: give another --output_dir, or --overwrite to replace that run",
            "output_dir='/a/done' holds a finished run: give another output_dir, or overwrite=True to replace that run",
        ),
        ("up to step 1: give --resume to continue it", "up to step 1: give resume=True to continue it"),
        ("--resume: no checkpoint there", "resume: no checkpoint there"),
        ("--learning_rate expects more than 0, got -1.0", "learning_rate expects more than 0, got -1.0"),
        ("--lora_dim 8 and --only_optimize_lora false", "lora_dim=8 and only_optimize_lora=False"),
        ("use --dtype bf16, or --gradient_checkpointing", "use dtype='bf16', or gradient_checkpointing=True"),
        ("--offload moves the optimizer", "offload moves the optimizer"),
        ("the tokenizers of --model_name_or_path 'a b' and x", "the tokenizers of model='a b' and x"),
        ("--metric_for_best_model mine is not there", "metric_for_best_model='mine' is not there"),
        ("--metric_for_best_model yours is not there", "metric_for_best_model yours is not there"),
        ("raise --max_train_steps N", "raise max_train_steps=N"),
        ("unknown flag --data_pathh; did you mean 'data_path'?", "unknown argument data_pathh; did you mean 'rows'?"),
        ("name others with --data_path.", "name others with rows."),
        ("--nobodys_flag stays, as does `threestep sft --resume`", None),
    ],
)
def test_arguments_in_the_place_of_flags(sentence, expected):
    settings = {"metric_for_best_model": "mine", "data_pathh": 1}
    assert in_python(sentence, "sft", settings) == (expected or sentence)


def test_step_3_has_two_models():
    sentence = "--critic_model_name_or_path expects one for --advantage rloo, --actor_model_name_or_path has one"
    expected = "reward_model expects one for advantage='rloo', model has one"
    assert in_python(sentence, "ppo", {"advantage": "rloo"}) == expected


@pytest.mark.needs_plugin("best_model")
def test_the_traceback_is_the_calls(here, monkeypatch):
    """Two frames: the caller's line, and the border. All of them where the variable is set."""
    with pytest.raises(ThreestepError, match="^early_stopping expects a whole number .evaluations., got .true.$") as e:
        threestep.sft("m", ROWS, early_stopping=True)
    assert [frame.name for frame in traceback.extract_tb(e.tb)] == ["test_the_traceback_is_the_calls", "called"]
    assert e.value.__cause__ is None and e.value.__context__ is None
    monkeypatch.setenv(VARIABLE, "1")
    with pytest.raises(ThreestepError, match="^early_stopping expects") as e:
        threestep.sft("m", ROWS, early_stopping=True)
    assert "parse_arguments" in [frame.name for frame in traceback.extract_tb(e.value.__cause__.__traceback__)]


def test_other_exceptions_keep_their_traceback(monkeypatch):
    def main(words):
        raise LookupError("a bug")

    monkeypatch.setitem(sys.modules, "training.step1_sft.main", SimpleNamespace(main=main))
    with pytest.raises(LookupError, match="^a bug$") as e:
        threestep.sft("m", ROWS)
    assert traceback.extract_tb(e.tb)[-1].name == "main"


def test_a_call_is_shown_as_it_is_written():
    import inspect

    assert list(inspect.signature(threestep.sft).parameters)[:2] == ["model", "rows"]
    assert threestep.sft.__doc__.startswith("Fine-tune")
