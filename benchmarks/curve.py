"""Two loss curves of step 1 that have to lie on each other: sentences packed into rows, and padded.

    python -m benchmarks.curve [--steps 200] [--folder runs/curve] [-- MORE FLAGS OF STEP 1 FOR BOTH RUNS]

A small Llama shape with random weights learns the embedded task twice, from the same weights, with the same sequences
in each optimizer step. Prints the largest difference between the losses; writes curve.png and curve.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
# As scripts/quickstart.sh trains.
NEW_MODEL = (
    "--data_path embedded --seed 1 --vocab_size 512 --hidden_size 192 --num_hidden_layers 4 --num_attention_heads 6 "
    "--intermediate_size 512 --rope_theta 100"
).split()
STEP_1 = (
    "--data_path embedded --seed 1 --data_split 10,12,3 --max_prompt_seq_len 32 --max_seq_len 64 --dtype fp32 "
    "--num_train_epochs 3 --per_device_train_batch_size 32 --per_device_eval_batch_size 128 --learning_rate 1e-3 "
    "--num_warmup_steps 20"
).split()


@dataclass(frozen=True)
class Curves:
    """The loss of each optimizer step, and on the evaluation rows before and after."""

    packed: list[float]
    padded: list[float]
    eval_packed: list[float]
    eval_padded: list[float]

    @property
    def largest_difference(self) -> float:
        """In nats a token, over all steps and evaluations."""
        pairs = zip([*self.packed, *self.eval_packed], [*self.padded, *self.eval_padded], strict=True)
        return max(abs(one - other) for one, other in pairs)


def main() -> None:
    """Train twice, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", default="runs/curve")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("flags", nargs="*", help="flags of step 1, after --")
    arguments = parser.parse_args()
    folder = Path(arguments.folder).resolve()
    curves = trained_twice(folder, arguments.steps, arguments.flags)
    (folder / "curve.json").write_text(json.dumps(asdict(curves), indent=2))
    draw(curves, folder / "curve.png")
    print(
        f"{arguments.steps} steps, loss {curves.packed[0]:.3f} -> {curves.packed[-1]:.3f}, on evaluation rows "
        f"{curves.eval_packed[0]:.3f} -> {curves.eval_packed[-1]:.3f} nats a token; largest difference between packed "
        f"and padded {curves.largest_difference:.2g}; drawn in {folder / 'curve.png'}"
    )


def trained_twice(folder: Path, steps: int, flags: list[str]) -> Curves:
    """Run step 1 packed and padded on a new model in `folder`."""
    model = folder / "model"
    _run(["threestep.plugins.programs.new_model", *NEW_MODEL, "--out", str(model)])
    found = {}
    for name, layout in (("packed", []), ("padded", ["--padded"])):
        out = folder / name
        places = ["--model_name_or_path", str(model), "--output_dir", str(out), "--max_train_steps", str(steps)]
        places += ["--data_output_path", str(folder / "cache"), "--overwrite"]
        _run(["training.step1_sft.main", *STEP_1, *places, *layout, *flags])
        found[name] = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = {
        (name, metric): [line[metric] for line in lines if metric in line]
        for name, lines in found.items()
        for metric in ("train/loss", "eval/loss")
    }
    return Curves(
        losses["packed", "train/loss"],
        losses["padded", "train/loss"],
        losses["packed", "eval/loss"],
        losses["padded", "eval/loss"],
    )


def draw(curves: Curves, path: Path) -> None:
    """Both curves above, their difference below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = range(1, len(curves.packed) + 1)
    above.plot(steps, curves.padded, color="tab:orange", linewidth=4, alpha=0.5, label="padded")
    above.plot(steps, curves.packed, color="tab:blue", linewidth=1, label="packed")
    above.set_ylabel("loss, nats a target token")
    above.legend()
    below.plot(steps, [one - other for one, other in zip(curves.packed, curves.padded, strict=True)], color="black")
    below.set_ylabel("packed - padded")
    below.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    below.set_xlabel("optimizer step")
    figure.savefig(path, dpi=100)


def _run(command: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with code {done.returncode}:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    main()
