"""Calls that come to no run: one sentence that names arguments, a traceback that is the call's, and nothing left
behind. Runs: tests/end_to_end/test_calls.py."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
import traceback
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import threestep
from tests.support.tiny_models import tiny_causal_lm
from threestep import running, training_calls
from threestep.mistakes import VARIABLE, in_python
from threestep.plugins.names.other_names import translated
from threestep.result import Result
from training.utils.base.console import WARNINGS
from training.utils.base.errors import ThreestepError
from training.utils.base.seeds import random_state_kept, seed_everything
from training.utils.engine.ranks import startup
from training.utils.flags.step import known_steps
from training.utils.plugins.objectives import Estimator, PolicyLoss

ROWS = [{"prompt": "a", "completion": "b"}]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lerning_rate": 1}, "^unknown argument lerning_rate; did you mean 'learning_rate'"),
        ({"learning_rate": -1}, "^learning_rate expects more than 0, got -1.0$"),
        ({"data_path": "x"}, "^unknown argument data_path; pass rows instead$"),
        ({"model_name_or_path": "x"}, "^unknown argument model_name_or_path; pass model instead$"),
        pytest.param(
            {"callback": object()},
            "^callback expects a function .step, figures., got an object of object; write",
            marks=pytest.mark.needs_plugin("callback"),
        ),
        pytest.param(
            {"callback": dict},
            "^callback expects .* got the class dict; write .* to end training$",
            marks=pytest.mark.needs_plugin("callback"),
        ),
        ({"num_ranks": 0}, "^num_ranks expects a positive whole number, got 0$"),
        ({"num_ranks": "2"}, "^num_ranks expects a positive whole number, got '2'$"),
    ],
)
def test_mistakes(settings, sentence, here):
    with pytest.raises(threestep.ThreestepError, match=sentence):
        threestep.sft("some/model", ROWS, **settings)
    assert not list(here.glob("runs/*"))


@pytest.mark.needs_plugin("evaluation")
def test_pairs_are_evaluated_from_python_too(monkeypatch):
    def ran(program, words, functions, folder):
        assert program.endswith(".reward_evaluation.__main__") and "pairs" not in words
        (folder / "evaluation.json").write_text('{"accuracy": 0.5}')

    monkeypatch.setattr(training_calls, "run_here", ran)
    assert threestep.evaluate("pairs", "some/model", "jsonl:pairs.jsonl") == {"accuracy": 0.5}


def test_warnings_of_a_call_that_failed_are_not_the_next_ones(here):
    WARNINGS["of an earlier call"] = None
    with pytest.raises(ThreestepError, match="no_such_setting"):
        threestep.sft("start", [{"prompt": "a", "completion": "b"}], no_such_setting=1)
    assert not WARNINGS


def test_a_launchers_ranks_share_paths_alone(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        threestep.ThreestepError, match="^a call under a launcher such as torchrun expects an output_dir"
    ):
        threestep.sft("some/model", ROWS, output_dir="out")


def test_a_tokenizer_goes_with_an_object():
    with pytest.raises(threestep.ThreestepError, match="^tokenizer is only for a loaded model, but model is 'm'"):
        threestep.sft("m", ROWS, tokenizer=object())


def test_a_model_that_no_folder_stands_for_leaves_nothing(here, tiny_tokenizer):
    model = tiny_causal_lm("llama")
    model.lm_head.register_forward_hook(lambda module, inputs, output: output / 2)
    with pytest.raises(
        threestep.ThreestepError, match=r"^model: this .* would change .*: lm_head has a hook\. Undo these"
    ):
        threestep.ppo(model, [{"prompt": "a"}], tokenizer=tiny_tokenizer, reward="gsm8k")
    assert not list(here.glob("runs/*"))


def test_an_earlier_run_is_not_written_over(here, monkeypatch):
    """Neither its rows nor its models: they are needed to resume it."""
    monkeypatch.setattr(training_calls, "run_here", lambda *_: None)
    checkpoint = here / "out" / "checkpoints" / "step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    with pytest.raises(threestep.ThreestepError, match="holds checkpoints of an earlier run, up to step 1; add"):
        threestep.sft("m", ROWS, output_dir="out")
    assert not (here / "out" / "given").exists()
    for resume in (True, "true", "latest"):
        threestep.sft("m", ROWS, output_dir="out", resume=resume)
    with pytest.raises(threestep.ThreestepError, match="^rows differ from those that the run in .*out started with"):
        threestep.sft("m", [*ROWS, *ROWS], output_dir="out", resume=True)


def test_every_call_has_a_new_folder(here, monkeypatch):
    words = []
    monkeypatch.setattr(
        training_calls, "run_here", lambda program, own, functions, folder: words.append((program, own))
    )
    first, second = threestep.reward("m", ROWS), threestep.reward("m", ROWS, data_split="1,1,1")
    assert [result.folder for result in (first, second)] == [here / "runs/reward", here / "runs/reward_2"]
    assert repr(first) == f"<reward: no figures; in {first.folder}>"
    (program, own), (_, other) = words
    assert program == "training.step2_reward.main"
    assert "--data_split=0,1,0" in own and "--data_split=1,1,1" in other  # all rows, unless the caller shares them
    with pytest.raises(threestep.ThreestepError, match="has no model, because dry_run and val_only do not train one$"):
        _ = first.model


def test_an_earlier_runs_figures_are_not_this_ones(here, monkeypatch):
    monkeypatch.setattr(training_calls, "run_here", lambda *given: None)
    (here / "out").mkdir()
    (here / "out" / "summary.json").write_text('{"seconds": 1.0}')
    with pytest.raises(threestep.ThreestepError, match=r"out' holds a finished run \(summary.json\); use an"):
        threestep.sft("m", "embedded", output_dir="out")
    assert (here / "out" / "summary.json").exists()
    assert threestep.sft("m", "embedded", output_dir="out", overwrite=True).figures == {}


def test_ppo_takes_a_reward_model_and_functions(monkeypatch):
    taken = []
    monkeypatch.setattr(
        training_calls, "run_here", lambda program, words, functions, _: taken.append((words, functions))
    )

    def best(prompts, responses):
        return [1.0]

    threestep.ppo("a/b", "embedded", reward_model="c/d", reward={best: 2.0, "model": 0.5})
    ((words, functions),) = taken
    assert {"--actor_model_name_or_path=a/b", "--critic_model_name_or_path=c/d"} <= set(words)
    assert "--reward=given:best:2.0,model:0.5" in words and functions == {"given:best": best}
    assert "--data_split" not in " ".join(words)  # a path's rows are shared as on the command line
    threestep.grpo("a/b", "embedded", reward=best)
    threestep.rloo("a/b", "embedded", reward=best, advantage="reinforce++")
    assert "--advantage=grpo" in taken[1][0] and "--advantage=reinforce++" in taken[2][0]
    mine = Estimator(best, needs_groups=True)
    threestep.grpo("a/b", "embedded", reward="gsm8k", advantage=mine, policy_loss=PolicyLoss(lambda *_: None))
    words, functions = taken[3]
    assert "--advantage=given:best" in words and functions["given:best"] is mine
    assert "--policy_loss=given:function" in words


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: threestep.sft(model="m", train_dataset=ROWS, args=1),
            "^2 mistakes (.|\n)*unknown argument train_dataset; pass rows instead\n"
            "(.|\n)*unknown argument args; pass its fields instead, such as learning_rate=1e-5$",
        ),
        (
            lambda: threestep.dpo("m", ROWS, ref_model="m"),
            "^unknown argument ref_model; remove it; the reference is the",
        ),
        (
            lambda: threestep.sft("m"),
            "^missing a required argument: 'rows'; call it as threestep.sft.model, rows, name=",
        ),
        (
            lambda: threestep.grpo("m", ROWS, len),
            r"^too many positional arguments; .* threestep.grpo.model, rows, name=",
        ),
        (
            lambda: threestep.evaluate("m", ROWS),
            "'rows'; call it as threestep.evaluate.task, model, rows, name=value, ",
        ),
    ],
)
def test_calls_of_trls_trainers_are_told_what_to_write(call, said):
    with pytest.raises(threestep.ThreestepError, match=said):
        call()


def test_trls_rewards_are_read(monkeypatch):
    taken = []
    monkeypatch.setattr(training_calls, "run_here", lambda program, words, *_: taken.extend(words))

    def best(completions, **columns):
        return [1.0]

    def short(completions, **columns):
        return [0.0]

    threestep.grpo("a/b", "embedded", reward_funcs=best)
    threestep.grpo("a/b", "embedded", reward_funcs=[best, short], reward_weights=[1.0, 0.5])
    threestep.grpo("a/b", "embedded", reward_funcs=["accuracy_reward"])  # a name of TRL's, which the step reads
    shown = " ".join(taken)  # under TRL's name, with which batches are counted as in TRL
    assert " --reward_funcs given:best --output_dir" in shown
    assert " --reward_funcs given:best given:short --reward_weights 1.0 0.5 " in shown
    assert " --reward_funcs accuracy_reward " in shown
    words, _ = translated("--reward_funcs given:best given:short".split(), known_steps()["step3_ppo"].old_flags)
    assert words == ["--reward", "given:best:1,given:short:1"]
    with pytest.raises(threestep.ThreestepError, match="^reward_weights expects 2 weights, one per reward, got 1$"):
        threestep.grpo("a/b", "embedded", reward=[best, short], reward_weights=[1.0])


def test_a_result_and_the_module_name_what_they_have(here):
    result = threestep.Result("grpo", here, {})
    with pytest.raises(AttributeError, match="^a result has no 'log_history'; it has figures, folder, metrics, model,"):
        result.log_history  # noqa: B018
    known = set(dir(result)) - set(dir(object)) - {"kind", "trusts_code", "explain"}
    assert {name for name in known if name[0] != "_"} == {
        "figures", "folder", "metrics", "model", "model_folder", "report", "tokenizer",
    }  # fmt: skip
    with pytest.raises(AttributeError, match="no attribute 'GRPOTrainer'; call threestep.grpo.model, rows, "):
        threestep.GRPOTrainer  # noqa: B018
    with pytest.raises(ImportError, match="no attribute 'SFTConfig'; call threestep.sft.model, rows, "):
        from threestep import SFTConfig  # noqa: F401
    assert not hasattr(threestep, "SFTConfig")


def test_a_result_is_given_as_a_model(here, monkeypatch):
    taken = []
    monkeypatch.setattr(training_calls, "run_here", lambda program, words, *_: taken.extend(words))
    result = threestep.Result("sft", here, {})
    with pytest.raises(threestep.ThreestepError, match="has no model, because dry_run and val_only do not train one$"):
        threestep.dpo(result, "embedded")
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text("{}")
    threestep.dpo(result, "embedded")
    threestep.ppo(result, "embedded", reward_model=result)
    assert f"--model_name_or_path={here}/model" in taken
    assert {f"--actor_model_name_or_path={here}/model", f"--critic_model_name_or_path={here}/model"} <= set(taken)


def test_step_3_without_a_reward(here):
    sentence = (
        r"^no reward is set; set reward to your function \(FILE.py:NAME\) or a name "
        r"\(gsm8k, .*\), or set reward_model to a reward model \(step 2's folder or a hub name\)$"
    )
    (here / "m").mkdir()
    (here / "m" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(threestep.ThreestepError, match=sentence):
        threestep.ppo("m", [{"prompt": "a"}], advantage="grpo", num_samples_per_prompt=2)


def test_settings_as_flags():
    settings = {"seed": 3, "stop": ["a", "b"], "report": False, "lora_dim": None, "bad_words": [], "kwargs": {"x": 1}}
    assert running.flags_of(settings) == ["--seed=3", "--stop", "a", "b", "--report", "false", '--kwargs={"x": 1}']


@pytest.mark.parametrize(
    ("raised", "sentence"),
    [
        (
            SystemExit(0),
            "^the run was stopped and wrote a checkpoint but no model; to resume, repeat the call with resume=True, "
            "output_dir='a/b'$",
        ),
        (SystemExit(1), "^the run exited with code 1; see its output$"),
        (MemoryError("no more"), "^out of memory"),
    ],
)
def test_no_call_ends_the_process(raised, sentence, monkeypatch):
    def main(words):
        raise raised

    monkeypatch.setitem(sys.modules, "a_program", SimpleNamespace(main=main))
    with pytest.raises(threestep.ThreestepError, match=sentence):
        running.run_here("a_program", [], {}, Path("a/b"))


@pytest.mark.parametrize("failure", [None, KeyboardInterrupt("at once")])
def test_a_call_gives_back_the_callers_state(failure, monkeypatch):
    from transformers.utils import logging as transformers_logging

    def drawn():
        return random.random(), numpy.random.rand(), torch.rand(1).item()

    def told():
        return (
            [logging.getLogger(name).level for name in ("transformers", "DeepSpeed", "torch.distributed")],
            transformers_logging.is_progress_bar_enabled(),
            torch.are_deterministic_algorithms_enabled(),
            list(warnings.filters),
        )

    def main(words):
        seed_everything(1, 0)
        torch.use_deterministic_algorithms(True)
        startup._quiet_libraries()
        if failure is not None:
            raise failure

    monkeypatch.setitem(sys.modules, "a_program", SimpleNamespace(main=main))
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    transformers_logging.set_verbosity_info()
    try:
        with random_state_kept():
            random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
            expected = drawn()
            random.seed(3), numpy.random.seed(3), torch.manual_seed(3)
            before = told()
            with pytest.raises(KeyboardInterrupt, match="^at once$") if failure else contextlib.nullcontext():
                running.run_here("a_program", [], {}, Path("a/b"))
            assert told() == before and drawn() == expected
    finally:
        transformers_logging.set_verbosity_warning()


def test_what_ranks_say_against_a_run():
    lines = ["+ deepspeed", "error: 2 mistakes in the configuration:", "  - one", "  - two", "more"]
    assert running._error_message(lines, 2) == "2 mistakes in the configuration:\n  - one\n  - two"
    assert running._error_message(["a", "b"], 1).endswith("see their output; the last line was: b")


def test_what_the_package_exports():
    assert set(dir(threestep)) == set(threestep.__all__)
    with pytest.raises(AttributeError, match="^module 'threestep' has no attribute 'sfft'; it has Result, "):
        _ = threestep.sfft


@pytest.mark.needs_plugin("lora")
@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        (
            "--output_dir /a/done holds a finished run; use another --output_dir, or add --overwrite to replace it",
            "output_dir='/a/done' holds a finished run; use another output_dir, or add overwrite=True to replace it",
        ),
        ("up to step 1; add --resume to continue it", "up to step 1; add resume=True to continue it"),
        ("--resume: no checkpoint there", "resume: no checkpoint there"),
        ("--learning_rate expects more than 0, got -1.0", "learning_rate expects more than 0, got -1.0"),
        ("--lora_dim 8 and --only_optimize_lora false", "lora_dim=8 and only_optimize_lora=False"),
        ("use --dtype bf16, or --gradient_checkpointing", "use dtype='bf16', or gradient_checkpointing=True"),
        ("pass --offload, or remove --gradient_checkpointing", "pass offload=True, or remove gradient_checkpointing"),
        ("--offload moves the optimizer", "offload moves the optimizer"),
        ("the tokenizers of --model_name_or_path 'a b' and x", "the tokenizers of model='a b' and x"),
        ("--metric_for_best_model mine is not there", "metric_for_best_model='mine' is not there"),
        ("--metric_for_best_model yours is not there", "metric_for_best_model yours is not there"),
        ("raise --max_train_steps N", "raise max_train_steps=N"),
        ("unknown flag --data_pathh; did you mean '--data_path'?", "unknown argument data_pathh; did you mean 'rows'?"),
        (
            "unknown flag --beto; did you mean '--beta' or '--bet'?",
            "unknown argument beto; did you mean 'beta' or 'bet'?",
        ),
        ("name others with --data_path.", "name others with rows."),
        (
            "or write it (--chosen_column answer), not (--chosen_column here and there)",
            "or write it (chosen_column='answer'), not (chosen_column here and there)",
        ),
        ("--nobodys_flag stays, as does `threestep sft --resume`", None),
    ],
)
def test_arguments_in_the_place_of_flags(sentence, expected):
    settings = {"metric_for_best_model": "mine", "data_pathh": 1, "beto": 1}
    assert in_python(sentence, "sft", settings) == (expected or sentence)


@pytest.mark.needs_plugin("evaluation")
def test_flags_of_an_evaluation_are_arguments():
    assert in_python("--baseline is missing; add --max_new_tokens 8", "evaluate", {}) == (
        "baseline is missing; add max_new_tokens=8"
    )


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


def test_without_a_run_there_are_figures_alone(tmp_path):
    shown = Result("sft", tmp_path / "<gone>", {"eval_loss_after": 1.25, "seconds": None})._repr_html_()
    assert "<td>eval_loss_after</td><td>1.25</td>" in shown and "seconds" not in shown and "<img" not in shown
    assert "&lt;gone&gt;" in shown


def test_the_report_is_named(tmp_path):
    result = Result("sft", tmp_path, {})
    assert result.report is None and f"sft, in {tmp_path}<" in result._repr_html_()
    (tmp_path / "report.html").write_text("")
    assert result.report == tmp_path / "report.html" and f"sft, in {result.report}<" in result._repr_html_()


def test_a_model_loads_without_bars(tmp_path, capfd, tiny_tokenizer):
    from transformers.utils import logging

    tiny_causal_lm("llama").save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    shown = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar()
        capfd.readouterr()
        assert Result("sft", tmp_path, {}).model.config.model_type == "llama"
        assert "Loading weights" not in capfd.readouterr().err and logging.is_progress_bar_enabled()
    finally:
        if not shown:
            logging.disable_progress_bar()
