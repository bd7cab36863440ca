"""Tokenizing GSM8K for phase 1: the Rust tokenizer alone on the rendered texts, or Threestep's whole build.

python -m benchmarks.competitors.data --workload DIR --how encode_batch|threestep --threads 2 --steps 5
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from transformers import AutoTokenizer


def main() -> None:
    """Do it `--steps` times and print tokens and seconds of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workload", required=True)
    parser.add_argument("--how", required=True, choices=("encode_batch", "threestep"))
    parser.add_argument("--threads", type=int, required=True, help="threads of encode_batch, processes of Threestep")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--dtype")  # given to every competitor
    arguments = parser.parse_args()
    # Read by tokenizers at its first call.
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if arguments.threads > 1 else "false"
    os.environ["RAYON_NUM_THREADS"] = str(arguments.threads)
    workload = Path(arguments.workload)
    prepare = (_encode_batch if arguments.how == "encode_batch" else _threestep)(workload, arguments.threads)
    for _ in range(arguments.steps):
        started = time.perf_counter()
        count = prepare()
        seconds = time.perf_counter() - started
        print(json.dumps({"units": count(), "seconds": seconds}), flush=True)


# Each gives a function that does the work and gives one that counts its tokens, outside of the clock.
Prepare = Callable[[], Callable[[], int]]


def _encode_batch(workload: Path, threads: int) -> Prepare:
    tokenizer = AutoTokenizer.from_pretrained(workload / "model").backend_tokenizer
    rows = [json.loads(line) for line in (workload / "sft.jsonl").read_text().splitlines()]
    texts = [row["prompt"] + row["chosen"] for row in rows]

    def prepare() -> Callable[[], int]:
        encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
        return lambda: sum(len(encoding) for encoding in encodings)

    return prepare


def _threestep(workload: Path, threads: int) -> Prepare:
    from training.utils.data.arguments import CacheArguments, DataArguments, SourceArguments, SplitArguments
    from training.utils.data.build.build import build_phase

    tokenizer = AutoTokenizer.from_pretrained(workload / "model")
    cache = tempfile.mkdtemp(prefix="cache", dir=workload)
    data = DataArguments(
        source=SourceArguments(data_path=[f"jsonl:{workload / 'sft.jsonl'}"]),
        split=SplitArguments(data_split="1,0,0"),
        cache=CacheArguments(data_output_path=cache, num_workers=threads),
    )

    def prepare() -> Callable[[], int]:
        built = build_phase(1, data, tokenizer, seed=1)
        assert not built.report.resumed
        shutil.rmtree(cache)
        return lambda: built.report.train.tokens + built.report.eval.tokens

    return prepare


if __name__ == "__main__":
    main()
