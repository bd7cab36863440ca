"""The code that one reads to understand one PPO step: `python -m tests.support.reading_path [CHECKOUT]`.

A listed path from step 3's program to the doors of generate, forward and backward: functions and records by their
names, in the order of reading. All lines of each are counted, from decorators to end, docstrings too; of a class that
has methods, its head, docstring and fields. Left out, since their names say enough: the opening of models and engines;
checks, clocks, figures and guards against rounding; and what lies behind the doors: rollout engines, models, the
training engine, the planner of rows.

A test keeps the list whole (tests/test_reading_path.py): every function of step 3 that a plain step runs
is on the path or in ASIDE.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.sources import modules, tree

# module, below `training`: names
PATH = """
step3_ppo.main: train
step3_ppo.run: run
step3_ppo.parts.settings: loop_settings
step3_ppo.roles.roles: Roles
step3_ppo.contracts.settings: PpoSettings DrawingSettings ExperienceSettings ReadingSettings KlSettings UpdateSettings
    LearningSettings ScoringSettings
step3_ppo.trainer: PpoTrainer PpoTrainer.train PpoTrainer.samples PpoTrainer.rollouts PpoTrainer.next_prompts
    PpoTrainer._own PpoTrainer.roll_out PpoTrainer._sample_seeds PpoTrainer._drawn PpoTrainer.score
    PpoTrainer.experience_of PpoTrainer.learn PpoTrainer.steer_kl
step3_ppo.parts.prompt_source: PromptSource.take
utils.data.rows.collate: PromptBatch collate_prompts
step3_ppo.experience.drawing: draw_responses request_for
utils.contracts.rollout_engine: RolloutRequest
utils.contracts.rollout: Rollout Rollout.drawn Rollout.sequences
step3_ppo.contracts.records: Scored Samples Samples.scored Forward Readings Experience sequence_number
step3_ppo.experience.scoring: start_scoring score outcome_scores
step3_ppo.experience.reward_shaping: shaped_rewards missing_eos_punishment
step3_ppo.experience.experience: make_experience token_rewards read_tokens _read
step3_ppo.experience.exchange: read_balanced
step3_ppo.mismatch.weights: old_policy
step3_ppo.kl.estimators: k1
step3_ppo.advantages.inputs: AdvantageInputs AdvantageInputs.inside_BR discounted_sums
step3_ppo.advantages.returns: gae
step3_ppo.advantages.whiten: moments whiten
step3_ppo.kl.control: KlControl KlControl.update
step3_ppo.learning.learning: Updates Updates.learn Updates._minibatches Learner Learner.learn Learner._totals
    Learner.forwards Learner._read Learner._actor_loss Learner._critic_loss
step3_ppo.learning.values: critic_loss
step3_ppo.learning.notes: LearntRollout LearntRollout.laid_out Minibatch
step3_ppo.experience.sequences: TrainingSequence TokenColumns TokenColumns.__init__ training_sequences
    sequences_of_all_ranks
step3_ppo.losses.tokens: PolicyTokens PolicyTokens.log_ratio_M
step3_ppo.losses.policy: ppo
step3_ppo.losses.added: value_loss
step3_ppo.losses.aggregation: StepTotals token_mean
utils.layout.order: ShuffledStream ShuffledStream.take
utils.layout.rank_share: SequenceLayout rank_share
utils.contracts.documents: TokenSequence
utils.contracts.token_rows: TokenRows
utils.contracts.guests: GuestSteps
utils.models.target_head: TokenLogprobs
utils.engine.accumulate: MicroLoss MicroBatch Trainee Trainee.begin Trainee.learn TakenStep accumulate
"""

# Functions of step 3 that a plain step runs too, and that a reader passes by: what each name says is enough.
ASIDE = {
    "keep rounding from deciding": """
step3_ppo.advantages.inputs: settled alike _of_group
""",
    "check and warn": """
step3_ppo.experience.scoring: _check_finite _warn_of_none
""",
    "do nothing without the flag of their name": """
step3_ppo.learning.notes: LearntRollout.learnt
step3_ppo.experience.reward_shaping: overlong_punishment
step3_ppo.experience.scoring: further_columns
step3_ppo.learning.learning: Learner._selected Learner._text_batches Learner._added Learner._has_kl Updates._next_texts
    Updates.value_learner
step3_ppo.learning.selection: selected_tokens
step3_ppo.parts.prompt_source: PromptSource.observe
""",
    "note, record and report": """
step3_ppo.learning.notes: StepNotes.__post_init__ StepNotes.begun StepNotes._next StepNotes.taken StepNotes.outcomes
    StepNotes.figures rank_token_figures row_ids_of_all_ranks
step3_ppo.learning.outcomes: prompt_outcomes
step3_ppo.measures.measures: spread moments figures_of _row
""",
    "are short, and say what they return": """
step3_ppo.experience.exchange: targets_of
step3_ppo.experience.sequences: _parts counted_by_the_actor
step3_ppo.roles.roles: Roles.actor_model Roles.scorer Roles.reading Roles.whole_actor Reference.__call__
""",
}


def listed(path: str = PATH) -> dict[str, list[str]]:
    """Return the names of each module."""
    lines = path.strip().replace("\n    ", " ").splitlines()
    return {f"training.{module}": names.split() for module, _, names in (line.partition(":") for line in lines)}


def lines_of(source: str) -> dict[str, int]:
    """Return the lines of each function and class by its name, as they are counted."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
                inner = [each for each in child.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))]
                last = child.end_lineno or child.lineno
                if isinstance(child, ast.ClassDef) and inner:
                    own = [each for each in child.body if each not in inner]
                    last = max([child.lineno, *(each.end_lineno or each.lineno for each in own)])
                yield f"{name}{child.name}", last - first + 1
                yield from visit(child, f"{name}{child.name}.")

    return dict(visit(tree(source), ""))


def counted(sources: Mapping[str, str]) -> dict[str, dict[str, int]]:
    """Return the lines of each listed name, by module. KeyError for a name that its module lacks."""
    return {module: {name: lines_of(sources[module])[name] for name in names} for module, names in listed().items()}


def is_class(name: str) -> bool:
    return name.rpartition(".")[2].lstrip("_")[0].isupper()


def main() -> None:
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    found = counted(modules(checkout / "training"))
    print("| module | lines | of which |\n| --- | --- | --- |")
    for module, names in found.items():
        of_which = ", ".join(f"{name} {count}" for name, count in names.items())
        print(f"| {module} | {sum(names.values())} | {of_which} |")
    every = [(name, count) for names in found.values() for name, count in names.items()]
    of_classes = sum(count for name, count in every if is_class(name))
    total = sum(count for _, count in every)
    print(f"| {len(found)} files | {total} | functions {total - of_classes}, records and settings {of_classes} |")


if __name__ == "__main__":
    main()
