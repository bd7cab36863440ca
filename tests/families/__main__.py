"""`python -m tests.families`: judges every family of causal language models of the installed transformers.

    python -m tests.families [--vision] [--only NAME ...] [--skip QUESTION ...] [--processes N] [--json FILE]
        [--out FILE]
    python -m tests.families [--vision] --from FILE ... --out FILE

Each family is judged in a process of its own, forked from this one, which has imported everything once; a hang or a
crash of one is its result. --json: the answers as they come. --out: the page of all families,
docs/reference/families.md; --from: of answers that were kept, without asking again. --vision: families of models of
images and text instead, whose page is threestep/plugins/images/families.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.update(
    CUDA_VISIBLE_DEVICES="", DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vision", action="store_true", help="families of models of images and text instead")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="families, by their model_type; default: all")
    parser.add_argument("--skip", nargs="+", default=(), metavar="QUESTION", help="such as rollout, sft, zero0.bf16")
    parser.add_argument("--processes", type=int, default=1, help="families judged at a time")
    parser.add_argument("--limit_seconds", type=float, default=180.0, help="for one family")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the answers go, family by family")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the page of all families")
    parser.add_argument("--from", nargs="+", type=Path, dest="kept", metavar="FILE", help="later files count")
    flags = parser.parse_args()
    names = flags.only or (vision_families() if flags.vision else families())
    if flags.kept:
        known = {one["family"]: one for file in flags.kept for one in json.loads(file.read_text())}
        results = [known[name] for name in names]
    else:
        import_all_once()
        results = sweep(names, flags.processes, flags.limit_seconds, flags.json, flags.skip, flags.vision)
    if flags.out is not None:
        write_page(flags.out, results, flags.vision)
    bad = [result for result in results if result["verdict"].startswith(("WRONG", "TRACEBACK"))]
    built = sum(not result["built"] for result in results)
    print(f"{len(names)} families, {built} judged, {len(bad)} of them wrong or ended in a traceback")
    sys.exit(1 if bad else 0)


def import_all_once() -> None:
    """Import what every family's process needs, also what DeepSpeed imports late, so that a fork has it."""
    import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # torch's compiler: seconds

    from tests.support.forked_runs import import_everything

    import_everything()


def families() -> list[str]:
    """Return every model_type that has a causal language model in the installed transformers, and the variants."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from tests.families.configs import VARIANTS

    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def write_page(file: Path, results: list[dict[str, Any]], vision: bool) -> None:
    from tests.families.page import page, vision_page

    command = f"python -m tests.families {'--vision ' if vision else ''}--out {file.as_posix()}"
    file.write_text((vision_page if vision else page)(results, command), encoding="utf-8")


def vision_families() -> list[str]:
    """Return every model_type that the installed transformers loads as a model of images and text."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def sweep(
    names: list[str], processes: int, limit_seconds: float, kept: Path | None, skipped: Sequence[str] = (),
    vision: bool = False,
) -> list[dict[str, Any]]:  # fmt: skip
    """Return the results in the order of `names`. vision: as models of images and text."""
    place = Path(tempfile.mkdtemp(prefix="families_"))
    waiting, running = list(reversed(names)), {}
    results: dict[str, dict[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                name = waiting.pop()
                running[_started(name, place / name, skipped, vision)] = (name, time.monotonic())
            for process, (name, started) in list(running.items()):
                ended, status = os.waitpid(process, os.WNOHANG)
                late = time.monotonic() - started > limit_seconds
                if late and not ended:
                    os.killpg(process, signal.SIGKILL)
                    _, status = os.waitpid(process, 0)
                if ended or late:
                    del running[process]
                    how = f"not done after {limit_seconds:g} seconds" if late else _ending(status)
                    results[name] = _result(name, place / name, how)
                    _tell(results[name])
                    shutil.rmtree(place / name, ignore_errors=True)
                    if kept is not None:
                        kept.write_text(json.dumps(list(results.values()), indent=1))
            time.sleep(0.02)
    finally:
        for process in running:
            os.killpg(process, signal.SIGKILL)
        shutil.rmtree(place, ignore_errors=True)
    return [results[name] for name in names]


def _started(name: str, place: Path, skipped: Sequence[str], vision: bool) -> int:
    """Judge a family in a new process; return its id."""
    if vision:
        from tests.families.vision import judged
    else:
        from tests.families.judge import judged

    place.mkdir(parents=True)
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        os.setpgid(0, 0)
        handle = os.open(place / "log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        (place / "result.json").write_text(json.dumps(judged(name, place, skipped)))
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    return f"its process ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"


def _result(name: str, place: Path, how: str) -> dict[str, Any]:
    found = place / "result.json"
    if not found.is_file():
        said = (place / "log").read_text(errors="replace")[-300:] if (place / "log").is_file() else ""
        return {"family": name, "model": "", "built": "", "answers": [], "verdict": f"TRACEBACK {how}: {said}"}
    result = json.loads(found.read_text())
    result.setdefault("verdict", f"not built: {result['built']}")
    return result


def _tell(result: dict[str, Any]) -> None:
    print(f"{result['family']:24} {result.get('seconds', 0):5} s  {result['verdict'][:400]}", flush=True)


if __name__ == "__main__":
    main()
