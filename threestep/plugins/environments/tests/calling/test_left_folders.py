"""A folder of a foreign program is removed, however deep, closed or full of links it was left."""

from __future__ import annotations

import os
import subprocess
import sys

from threestep.plugins.environments.calling.left_folders import remove_tree

MAKES_LEVELS = """
import os
for number in range(1500):
    os.mkdir("a")
    open("file", "w").close()
    os.chdir("a")
os.mkdir("closed", 0)
os.chmod("..", 0o500)
"""


def test_thousands_of_levels_are_removed(tmp_path):
    folder = tmp_path / "deep"
    folder.mkdir()
    subprocess.run([sys.executable, "-c", MAKES_LEVELS], cwd=folder, check=True)
    remove_tree(folder)
    assert not folder.exists()


def test_links_are_removed_and_what_they_name_stays(tmp_path):
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("stays")
    kept.chmod(0o500)
    for place in ("a", "a/b"):
        (tmp_path / "gone" / place).mkdir(parents=True)
        (tmp_path / "gone" / place / "link").symlink_to(kept)
    (tmp_path / "gone" / "itself").symlink_to(tmp_path / "gone")
    os.mkfifo(tmp_path / "gone" / "fifo")
    remove_tree(tmp_path / "gone")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and (kept / "file").read_text() == "stays"
    assert kept.stat().st_mode & 0o777 == 0o500


def test_a_folder_that_is_gone_already_and_a_link_in_its_place(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    for name in ("link", "gone"):
        remove_tree(tmp_path / name)
    assert (tmp_path / "kept" / "file").exists() and (tmp_path / "link").is_symlink()
