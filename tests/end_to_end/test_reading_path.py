"""What one reads to follow a run does not grow."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.forked_programs import run_python
from tests.support.reading_path import followed, make_start

# Lines of functions from `main` on, and of the loop; they only shrink. Less than 25 above what is counted: a clock
# decides about some, such as a line of progress.
MOST = {
    "step1_sft": (9_625, 2_030),
    "step2_reward": (9_630, 2_045),
    "step2_dpo": (9_100, 2_230),
    "step3_ppo": (13_005, 4_060),
}


def forked(words: list[str], environment: dict[str, str], place: Path) -> subprocess.CompletedProcess[str]:
    return run_python(words, environment, folder=place)


def test_following_a_run_takes_no_more_lines(tmp_path):
    make_start(tmp_path)
    found = {step: (parts["program"].lines, parts["loop"].lines) for step, parts in followed(tmp_path, forked).items()}
    longer = {step: lines for step, lines in found.items() if lines[0] > MOST[step][0] or lines[1] > MOST[step][1]}
    assert not longer, "following a run takes more lines (whole program, loop): shorten it"
