"""Runs steps by their command lines in one process of each rank, so that a test pays for its imports once: each run
unbroken in one folder, and in another stopped after every optimizer step and resumed. Started by test_resume.py.

    resume_program.py WANTED.json       {"runs": [{"module": ..., "flags": [...], "folder": ..., "times": ...}, ...]}

A run that ends by a mistake of the user's notes its sentence beside its folder.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from training.utils.base.errors import ThreestepError


def main() -> None:
    # One process group serves all the runs: leaving and joining it again would need a port each time.
    import torch

    wanted = json.loads(Path(sys.argv[1]).read_text())
    destroy, torch.distributed.destroy_process_group = torch.distributed.destroy_process_group, lambda *_, **__: None
    for run in wanted["runs"]:
        try:
            importlib.import_module(run["module"]).main(run["flags"])
            ending = "done"
        except SystemExit as end:
            ending = f"exit {end.code}"
        except ThreestepError as mistake:
            ending = str(mistake)
        with open(run["note"] + os.environ["RANK"], "a") as file:
            file.write(ending + "\n")
    torch.distributed.destroy_process_group = destroy
    if torch.distributed.is_initialized():
        destroy()


if __name__ == "__main__":
    main()
