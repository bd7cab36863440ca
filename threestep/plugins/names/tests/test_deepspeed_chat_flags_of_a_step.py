"""Other programs' names where a step reads its own flags: suggested, and read where the launcher has some too."""

from __future__ import annotations

import pytest

from training.step1_sft import STEP
from training.utils.base.errors import ThreestepError
from training.utils.flags.arguments import parse_arguments
from training.utils.run.launch import as_variables


def test_another_programs_name_is_suggested_too():
    with pytest.raises(ThreestepError, match="^unknown flag --max_lenght; did you mean 'max_length'?"):
        parse_arguments(STEP.groups, ["--max_lenght", "8"], "", STEP.old_flags)
    with pytest.raises(ThreestepError, match="^unknown flag --callbacks; did you mean 'callback'"):
        parse_arguments(STEP.groups, ["--callbacks", "mine"], "", STEP.old_flags)


def test_trls_processes_are_ranks_from_the_words_or_the_file(tmp_path, monkeypatch, capsys):
    assert as_variables(["--num_processes", "4"], {})[1] == {"THREESTEP_RANKS": "4"}
    file = tmp_path / "run.yaml"
    file.write_text("model_name_or_path: m\nnum_processes: 4\ndataset_name: a/b\n")
    for words in (["--config", str(file)], [f"--config={file}"]):
        assert as_variables(words, {})[:2] == (words, {"THREESTEP_RANKS": "4"})
        given = as_variables([*words, "--num_ranks", "2"], {})
        assert given[:2] == (words, {"THREESTEP_RANKS": "2"})  # what is typed counts
    assert as_variables(["--config", str(tmp_path / "none.yaml")], {})[1] == {}
    monkeypatch.setenv("WORLD_SIZE", "4")
    parse_arguments(STEP.groups, ["--config", str(file)], "", STEP.old_flags)
    assert "--num_processes 4 is not needed: the launcher has started as many ranks" in capsys.readouterr().out
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ThreestepError, match="^--num_processes 4 is the launcher's, which starts ranks; give it to"):
        parse_arguments(STEP.groups, ["--config", str(file)], "", STEP.old_flags)
