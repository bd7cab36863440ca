"""Step 3's loop: roll out, score, advantages, epochs of minibatches.

Deviations from InstructGPT's PPO, stated up front: advantages are whitened over all ranks; rewards are not; the
critic is a whole model of its own, but for --share_trunk; a response that is cut by its length limit is scored at its
last token and its value after the end is 0. Knows neither flags nor files; what it needs comes as arguments.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from tqdm import tqdm

from training.step3_ppo.description import described
from training.step3_ppo.dynamic_sampling import with_differing_groups
from training.step3_ppo.evaluation import Evaluation, Evaluator
from training.step3_ppo.experience import documents_of, make_experience
from training.step3_ppo.learning import (
    Piece,
    everyones_pieces,
    learn_minibatch,
    make_minibatch,
    pieces_of,
    text_sequence,
)
from training.step3_ppo.prompt_source import PromptSource
from training.step3_ppo.records import Experience, Rollout, Samples
from training.step3_ppo.roles import Roles
from training.step3_ppo.rollout.base import RolloutEngine
from training.step3_ppo.scoring import start_scoring
from training.step3_ppo.settings import PpoResult, PpoSettings
from training.utils.data.collate import PromptBatch, collate_prompts
from training.utils.data.phases import PromptRow, TextBlock
from training.utils.engine.bad_steps import BadSteps
from training.utils.engine.checkpoints import Checkpoints
from training.utils.engine.collectives import gathered
from training.utils.engine.host_memory import give_back_freed_memory
from training.utils.engine.out_of_memory import memory_explained
from training.utils.layout.documents import TokenSequence
from training.utils.layout.order import ShuffledStream
from training.utils.run.metrics import MetricsWriter, progress_bar, show
from training.utils.run.phase_clock import PhaseClock, gpu_wait, timed
from training.utils.run.seeds import derived_seed
from training.utils.run.traces import traced


class PpoTrainer:
    """Trains the actor and the critic of `roles`."""

    def __init__(
        self,
        roles: Roles,
        rollout_engine: RolloutEngine,
        prompt_source: PromptSource,
        texts: Sequence[TextBlock] | None,
        evaluator: Evaluator,
        settings: PpoSettings,
        metrics: MetricsWriter,
        checkpoints: Checkpoints | None = None,
        bad_steps: BadSteps | None = None,
    ) -> None:
        self.roles = roles
        self.rollout_engine = rollout_engine
        self.prompt_source = prompt_source
        self.evaluator = evaluator
        self.settings = settings
        self.metrics = metrics
        self.checkpoints = checkpoints or Checkpoints()
        self.bad_steps = bad_steps or BadSteps()
        self.ranks = roles.actor.ranks
        self.texts = texts
        self.text_stream = ShuffledStream(len(texts), settings.seed) if texts is not None else None
        self.texts_taken = 0
        self.kl_control = settings.experience.kl.controller()
        self.clock = PhaseClock(gpu_wait(self.ranks.device))

    def train(self) -> PpoResult:
        """Run every rollout with its updates; return the evaluations on held-out prompts."""
        settings = self.settings
        started = time.monotonic()
        done, saved = self.checkpoints.restore()
        before = after = None
        if saved:
            before, after = (saved[name] and Evaluation(**saved[name]) for name in ("before", "after"))
            self.load_state_dict(saved["trainer"])
        elif settings.evaluates_first:
            after = self.evaluator.evaluate(step=0)
            before = after if settings.total_rollouts else None  # without training it is the only one
        end = done if self.kl_is_over(saved) else settings.total_rollouts
        self.clock.read()
        with progress_bar(settings.total_rollouts, "step 3, PPO", self.ranks.is_main, done=done) as bar:
            for iteration in traced(range(done + 1, end + 1), settings.traces, self.ranks.rank):
                experiences: list[Experience] = []
                rows: list[PromptRow] = []
                for batch in range(settings.generation_batches):
                    prompts, seeds = self.next_prompts(iteration, batch)  # 1
                    rollout = self.roll_out(prompts, seeds)  # 2
                    samples = self.score(prompts, rollout)  # 3
                    if settings.dynamic_sampling_tries:
                        samples = self.replace_equal_groups(samples, iteration, batch)  # 1 to 3 again
                    experiences.append(self.experience_of(samples))  # 4 to 6
                    rows += samples.rows
                    self.prompt_source.tell(samples.rows, experiences[-1])
                figures = self.learn(experiences, iteration, rows)  # 7
                figures |= described(experiences, settings.experience, self.ranks.device)
                self.report(iteration, figures, bar)  # 8
                self.steer_kl(figures, experiences)
                experiences.clear()  # of what they keep nothing is wanted any more
                last = iteration == settings.total_rollouts or self.kl_is_over(figures)
                if last or (settings.eval_interval and iteration % settings.eval_interval == 0):
                    after = self.evaluate(iteration)
                self.keep(iteration, last, figures, before, after)
                give_back_freed_memory(iteration)
                if last:
                    break
        assert after is not None  # the last iteration evaluates, and so does a run without any
        return PpoResult(before, after, time.monotonic() - started)

    @timed("1_prompts")
    def next_prompts(self, iteration: int, batch: int) -> tuple[PromptBatch, list[int]]:
        """Part 1: this rank's prompts, left-padded, and the seed of each one's response."""
        settings, ranks = self.settings, self.ranks
        count = settings.prompts_per_batch * ranks.world_size
        first = ((iteration - 1) * settings.generation_batches + batch) * count
        taken = list(enumerate(self.prompt_source.take(first, count), start=first))[ranks.rank :: ranks.world_size]
        rows = [row for _, row in taken]
        seeds = [derived_seed(settings.seed, "rollout", position) for position, _ in taken]
        return collate_prompts(rows, settings.sampling.pad_token_id), seeds

    @timed("2_rollout")
    def roll_out(self, prompts: PromptBatch, seeds: Sequence[int]) -> Rollout:
        """Part 2: `samples_per_prompt` responses to each prompt, adjacent, from the actor's present weights."""
        count = self.settings.experience.samples_per_prompt
        # The first sample has the prompt's own seed, the others seeds derived from it.
        sample_seeds = [
            derived_seed(seed, "sample", sample) if sample else seed for seed in seeds for sample in range(count)
        ]
        return self._drawn(prompts, count, sample_seeds, self.settings.sampling.temperature)

    @timed("3_score")
    def score(self, prompts: PromptBatch, rollout: Rollout) -> Samples:
        """Part 3: the reward model's scores; reward functions go on working until the scores are read, in part 5."""
        return start_scoring(prompts.rows, rollout, self.roles, self.settings.experience)

    def replace_equal_groups(self, samples: Samples, iteration: int, batch: int) -> Samples:
        """Parts 1 to 3 for further prompts, where all samples of a prompt score the same."""
        settings = self.settings
        # An order of its own, so that the prompts of later iterations stay those that they would have been.
        order = derived_seed(settings.seed, "replacement", iteration, batch)

        def draw(attempt: int, count: int) -> Samples:
            world_size = self.ranks.world_size
            first = attempt * settings.prompts_per_batch * world_size
            places = range(first, first + count * world_size)[self.ranks.rank :: world_size]
            rows = self.prompt_source.spare(order, first, count * world_size)[self.ranks.rank :: world_size]
            seeds = [derived_seed(settings.seed, "replacement", iteration, batch, place) for place in places]
            prompts = collate_prompts(rows, settings.sampling.pad_token_id)
            return self.score(prompts, self.roll_out(prompts, seeds))

        return with_differing_groups(
            samples,
            draw,
            settings.dynamic_sampling_tries,
            settings.experience.samples_per_prompt,
            settings.sampling.pad_token_id,
        )

    def experience_of(self, samples: Samples) -> Experience:
        """Parts 4 to 6; where the estimator asks for it, after a greedy response to each prompt was scored."""
        settings = self.settings.experience
        greedy = None
        if settings.estimator.needs_greedy:
            prompts = collate_prompts(samples.rows, self.settings.sampling.pad_token_id)
            with self.clock.phase("2_rollout"):
                drawn = self._drawn(prompts, 1, [0] * len(samples.rows), temperature=0.0)
            greedy = self.score(prompts, drawn)
        return make_experience(samples, greedy, self.roles, settings, self.kl_control.coefficient, self.clock)

    @timed("7_learn")
    def learn(
        self, experiences: Sequence[Experience], iteration: int, rows: Sequence[PromptRow] = ()
    ) -> dict[str, float]:
        """Part 7: epochs of minibatches, each one optimizer step of actor and critic. rows: this rank's prompts, by
        which a step that goes wrong is told."""
        settings, ranks = self.settings, self.ranks
        kl_coef, train_actor = self.kl_control.coefficient, iteration > settings.critic_warmup
        own = pieces_of(experiences, settings.experience.samples_per_prompt, ranks.rank, ranks.world_size)
        pieces = everyones_pieces(own, ranks.device)
        row_ids = _everyones_row_ids(rows, settings.experience.samples_per_prompt)
        size = settings.sequences_per_minibatch * ranks.world_size
        kept = [forward for experience in experiences for forward in experience.kept]  # only of one minibatch
        told: list[dict[str, float]] = []
        most_kl = math.inf if settings.stop_update_kl is None else settings.stop_update_kl
        empty = 0
        for epoch in range(settings.ppo_epochs):
            seed = derived_seed(settings.seed, "minibatch", iteration, epoch)
            order = ShuffledStream(len(pieces), seed)
            for start in range(0, len(pieces), size):
                places = order.take(start, size)
                chosen = [pieces[index] for index in places]
                texts = self._next_texts(len(chosen)) if train_actor else []
                minibatch = make_minibatch(chosen, texts, settings.experience, settings.learning, seed, ranks.device)
                if not minibatch.totals.sequences:  # of none that counts there is nothing to learn
                    empty += 1
                    continue
                figures = learn_minibatch(
                    minibatch, self.roles, settings.experience, settings.learning, kl_coef, train_actor, kept
                )
                self.bad_steps.check(iteration, figures, [row_ids[place] for place in places] if rows else [])
                if train_actor and self.roles.average is not None and not figures["actor/skipped"]:
                    self.roles.average.update()
                told.append(figures)
                if figures.get("actor/update_kl", 0.0) > most_kl:
                    return self._learned(told, empty, pieces, train_actor)
        return self._learned(told, empty, pieces, train_actor)

    def report(self, iteration: int, figures: dict[str, float], bar: tqdm) -> None:
        """Part 8: record the figures, and show some."""
        seconds = self.clock.read()
        tokens, flops = figures.pop("rollout/tokens"), figures.pop("learn/flops", None)
        if self.roles.reference is not None:
            figures["rollout/kl_coef"] = self.kl_control.coefficient
        figures |= {f"time/{name}": spent for name, spent in seconds.items()}
        step_seconds = sum(spent for name, spent in seconds.items() if name not in ("evaluation", "checkpoint"))
        figures["train/tokens_per_second"] = tokens / step_seconds
        if flops is not None:
            figures["train/mfu"] = flops / seconds["7_learn"] / self.settings.meters[0].peak_flops_per_second
        figures |= self.rollout_engine.figures()
        self.metrics.write(iteration, figures)
        speed = f"{figures['train/tokens_per_second']:,.0f} tok/s"
        kl = f"KL {figures['rollout/kl']:.3f}, " if "rollout/kl" in figures else ""
        show(bar, f"score {figures['rollout/score']:.3f}, {kl}{speed}")

    def steer_kl(self, figures: dict[str, float], experiences: Sequence[Experience]) -> None:
        """Move the KL's coefficient for the next iteration, where its controller does."""
        sequences = sum(len(experience.scores_B) for experience in experiences) * self.ranks.world_size
        if self.roles.reference is not None:
            self.kl_control.update(figures["rollout/kl"], sequences)

    def kl_is_over(self, figures: Mapping[str, Any]) -> bool:
        """Whether the KL of these figures ends the training."""
        bound = self.settings.stop_kl
        return bound is not None and figures.get("rollout/kl", 0.0) > bound

    @timed("evaluation")
    def evaluate(self, iteration: int) -> Evaluation:
        return self.evaluator.evaluate(iteration)

    @timed("checkpoint")
    def keep(
        self,
        iteration: int,
        last: bool,
        figures: Mapping[str, float],
        before: Evaluation | None,
        after: Evaluation | None,
    ) -> None:
        """Save what the run goes on from, where that is due. A collective."""
        if self.checkpoints.due(iteration, iteration if last else self.settings.total_rollouts):
            state = {"before": before and asdict(before), "after": after and asdict(after)}
            told = {name: figures[name] for name in ("rollout/kl",) if name in figures}
            self.checkpoints.save(iteration, {**state, **told, "trainer": self.state_dict()})

    def state_dict(self) -> dict[str, Any]:
        """What iterations change beside the models, as JSON holds it. A collective."""
        return {
            "kl_control": self.kl_control.state_dict(),
            "texts_taken": self.texts_taken,
            "prompt_source": self.prompt_source.state_dict(),
            "rollout_engine": self.rollout_engine.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what `state_dict` gave. A collective."""
        self.kl_control.load_state_dict(state["kl_control"])
        self.texts_taken = state["texts_taken"]
        self.prompt_source.load_state_dict(state["prompt_source"])
        self.rollout_engine.load_state_dict(state["rollout_engine"])

    def _learned(
        self, told: Sequence[dict[str, float]], empty: int, pieces: Sequence[Piece], train_actor: bool
    ) -> dict[str, float]:
        """Means over the minibatches, and what they were worth in FLOPs. empty: passed over."""
        settings, names = self.settings, dict.fromkeys(name for figures in told for name in figures)
        means = {}
        for name in names:
            values = [figures[name] for figures in told if name in figures]
            means[name] = sum(values) / len(values)
        means |= {"train/minibatches": float(len(told)), "train/empty_minibatches": float(empty)}
        if settings.meters:
            _, documents = documents_of([piece.sequence for piece in pieces], settings.experience.plan)
            reads = sum(int(piece.sequence.is_target.sum()) for piece in pieces)
            epochs = len(told) * settings.sequences_per_minibatch * self.ranks.world_size / len(pieces)
            trained = settings.meters if train_actor else settings.meters[1:]
            means["learn/flops"] = epochs * sum(meter.flops(documents, reads) for meter in trained)
        return means

    def _drawn(self, prompts: PromptBatch, count: int, seeds: Sequence[int], temperature: float) -> Rollout:
        device = self.ranks.device
        rows, width = prompts.prompt_ids_BP.shape
        most = self.settings.sampling.max_new_tokens
        shape = f"{rows} prompts of at most {width} tokens, {count} responses of at most {most} tokens to each"
        with (
            memory_explained("a rollout", self.ranks.rank, lambda: shape),
            self.rollout_engine.lent(self.roles.whole_actor) as model,
        ):
            return self.rollout_engine.roll_out(
                model,
                prompts.prompt_ids_BP.to(device),
                prompts.prompt_mask_BP.to(device),
                replace(self.settings.sampling, temperature=temperature),
                seeds,
                samples_per_prompt=count,
            )

    def _next_texts(self, count: int) -> list[TokenSequence]:
        """As many blocks of unsupervised text as the minibatch has sequences; none where no text is given."""
        if self.texts is None or self.text_stream is None:
            return []
        taken = self.text_stream.take(self.texts_taken, count)
        self.texts_taken += count
        return [text_sequence(self.texts[row]) for row in taken]


def _everyones_row_ids(rows: Sequence[PromptRow], samples_per_prompt: int) -> list[int]:
    """Of each of all ranks' pieces, in the order of their numbers. A collective."""
    parts = gathered([row.row_id for row in rows])
    return [row_id for prompts in zip(*parts, strict=True) for row_id in prompts for _ in range(samples_per_prompt)]
