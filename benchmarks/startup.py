"""How long does a run take to start? Step 1 on the embedded task, against a bare program with the same libraries.

    python -m benchmarks.startup [--rounds 5] [--folder runs/startup] [-- MORE FLAGS OF STEP 1]

Timed from the command to the end of the first optimizer step, in turns, the tokenized data in its cache:
    bare    imports torch, transformers and deepspeed, loads the model and its tokenizer, builds the same DeepSpeed
            engine, takes one step on a batch of random tokens of the same size
    ours    training.step1_sft.main with the quickstart's model and settings: settings, data, checks, evaluation before
            training, the same step
Prints each time, the medians and their ratio; writes startup.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from training.utils.run.launch import free_port

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "training" / "configs" / "quickstart.yaml"
BATCH_ROWS, BATCH_TOKENS = 32, 20  # the quickstart's batch, and the mean length of its sentences


def main() -> None:
    """Run, print, write."""
    if sys.argv[1:2] == ["bare"]:
        bare(sys.argv[2])
    if sys.argv[1:2] == ["ours"]:
        ours(sys.argv[2:])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/startup")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="flags of step 1, after --")
    arguments = parser.parse_args()
    folder = Path(arguments.folder).resolve()
    model, flags = prepare(folder, arguments.flags)
    programs = {"bare": ["bare", str(model)], "ours": ["ours", *flags]}
    for words in programs.values():  # the files into memory, the rows into their cache
        seconds_of(words)
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(arguments.rounds):
        for name, words in programs.items():
            seconds[name].append(seconds_of(words))
            print(f"{name}: {seconds[name][-1]:.2f} s", flush=True)
    print(summary(seconds))
    (folder / "startup.json").write_text(json.dumps(seconds))


def summary(seconds: dict[str, list[float]]) -> str:
    """The closing line."""
    bare_median, our_median = (statistics.median(seconds[name]) for name in ("bare", "ours"))
    return f"median: bare {bare_median:.2f} s, ours {our_median:.2f} s, ratio {our_median / bare_median:.3f}"


def prepare(folder: Path, flags: Sequence[str]) -> tuple[Path, list[str]]:
    """Make the quickstart's model; return it, and step 1's flags."""
    import yaml

    settings = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    model = folder / "model"
    shape = [word for name, value in settings["new_model"].items() for word in (f"--{name}", str(value))]
    make = [
        sys.executable,
        "-m",
        "threestep.plugins.programs.new_model",
        "--data_path",
        "embedded",
        *shape,
        "--out",
        str(model),
    ]
    subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    config = folder / "step1_sft.yaml"
    config.write_text(yaml.safe_dump({**settings["shared"], **settings["step1_sft"], "seed": settings["seed"]}))
    places = ["--model_name_or_path", str(model), "--output_dir", str(folder / "run")]
    return model, ["--config", str(config), *places, "--data_output_path", str(folder / "cache"), *flags]


def seconds_of(words: Sequence[str]) -> float:
    """Seconds from the command to the end of the first optimizer step, where the program ends at once."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.startup", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{words[0]} ended with {done.returncode}:\n{done.stderr}")
    return time.perf_counter() - started


def ours(flags: Sequence[str]) -> NoReturn:
    """Step 1's program, which ends with its first optimizer step."""
    from training.step1_sft.main import main as step_1
    from training.utils.run.program import quick_imports

    with quick_imports():  # as the program does
        from training.utils.engine.training_engine import TrainingEngine

    real = TrainingEngine.step

    def step(engine: TrainingEngine) -> NoReturn:
        real(engine)
        os._exit(0)

    TrainingEngine.step = step  # type: ignore[method-assign]
    step_1(flags)
    raise AssertionError("step 1 took no step")


def bare(model_path: str) -> NoReturn:
    """The libraries, the model, an engine, a step."""
    import torch

    os.environ["DS_ACCELERATOR"] = "cuda" if torch.cuda.is_available() else "cpu"
    port = str(free_port())
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    import deepspeed
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from training.utils.engine.config.arguments import EngineSettings
    from training.utils.engine.config.config import engine_config

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # not compiled, as in our own runs
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False)
    AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    weights = sum(weight.numel() for weight in model.parameters())
    config = engine_config(EngineSettings(learning_rate=1e-3), 1, weights, torch.cuda.is_available())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
    ids_BT = torch.randint(model.config.vocab_size, (BATCH_ROWS, BATCH_TOKENS), device=engine.device)
    engine.backward(engine(input_ids=ids_BT, labels=ids_BT).loss)
    engine.step()
    os._exit(0)


if __name__ == "__main__":
    main()
