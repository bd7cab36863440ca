"""Step 3's loop: roll out, score, advantages, epochs of minibatches.

Deviations from InstructGPT's PPO: advantages are whitened over all ranks; rewards are not; the critic is a model of its
own, or on the actor's trunk; a response that is cut by its length limit is scored at its last token, and its value
after the end is 0. Knows neither flags nor files; what it needs is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from training.step3_ppo.contracts.rollouts import Asked, Asking, RolloutsOfStep
from training.step3_ppo.experience.description import described
from training.step3_ppo.experience.dynamic_sampling import DrawnGroups, GroupCounts, with_differing_groups
from training.step3_ppo.experience.experience import make_experience
from training.step3_ppo.experience.scoring import draw_responses, request_for, start_scoring
from training.step3_ppo.parts.evaluation import Evaluator, PpoEvaluation, PpoResult
from training.step3_ppo.parts.reports import Reports
from training.utils.base.seeds import derived_seed
from training.utils.checkpoints.folder import check_keys, record_of
from training.utils.contracts.run import Checkpoints
from training.utils.data.rows.documents import PromptBatch, collate_prompts
from training.utils.engine.ranks.collectives import gathered
from training.utils.engine.ranks.devices import give_back_freed_memory
from training.utils.run.phase_clock import PhaseClock, gpu_wait, timed
from training.utils.run.progress import progress_bar

if TYPE_CHECKING:
    from tqdm import tqdm

    from training.step3_ppo.contracts.records import Experience, LeftOut, Samples
    from training.step3_ppo.contracts.rollouts import PromptSource, RolloutEvents, RolloutQueue
    from training.step3_ppo.contracts.settings import PpoSettings
    from training.step3_ppo.flags.rollout_choices import RolloutScheduler
    from training.step3_ppo.learning.learning import Updates
    from training.step3_ppo.roles.roles import Roles
    from training.utils.contracts.rollout import Rollout
    from training.utils.contracts.rollout_engine import RolloutEngine, Sampling
    from training.utils.contracts.rows import PromptRow
    from training.utils.run.metrics import MetricsWriter


@dataclass(eq=False)
class PpoTrainer:
    """Train the actor and the critic of `roles`."""

    roles: Roles
    rollout_engine: RolloutEngine
    prompt_source: PromptSource
    updates: Updates
    evaluator: Evaluator
    settings: PpoSettings
    metrics: MetricsWriter
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    events: RolloutEvents | None = None
    scheduler: RolloutScheduler | None = None

    def __post_init__(self) -> None:
        self.ranks = self.roles.actor.ranks
        self.kl_control = replace(self.settings.experience.kl.control)  # its coefficient moves
        self.clock = PhaseClock(gpu_wait(self.ranks.device))
        self.before: PpoEvaluation | None = None
        self.after: PpoEvaluation | None = None
        self.replaced = GroupCounts()
        self.reports = Reports(self.roles, self.settings, self.metrics)
        asking = Asking(self.settings, self.rollout_engine, self.roles.whole_actor, self._asked, self._asked_alone)
        self.queue = None if self.scheduler is None else self.scheduler.open(asking)
        self._taken: RolloutsOfStep | None = None

    def train(self) -> PpoResult:
        """Run all rollouts with their updates; return the held-out evaluations."""
        settings, total = self.settings, self.settings.total_rollouts
        self.reports.begin()
        done, end = self._start()
        self.clock.read()
        is_main, pace = self.ranks.is_main, settings.log_pace
        with progress_bar(total, settings.method, is_main, unit="rollout", done=done, pace=pace) as bar:
            for iteration in settings.step_observers.each(range(done + 1, end + 1)):
                experiences: list[Experience] = []
                rows: list[PromptRow] = []
                for samples in self.samples(iteration):  # 1 to 3
                    experiences.append(self.experience_of(samples, iteration))  # 4 to 6
                    rows += samples.rows
                figures = self.learn(experiences, iteration, rows)  # 7
                figures |= described(experiences, settings.experience)
                self.report(iteration, figures, bar)  # 8
                self.steer_kl(figures, experiences)
                experiences.clear()  # frees what they hold
                done = iteration
                if self.conclude(iteration, figures):
                    break
        return self._result(done)

    def samples(self, iteration: int) -> Iterator[Samples]:
        """Parts 1 to 3: yield this rank's scored responses, batch by batch."""
        self.replaced = GroupCounts()
        for batch, (prompts, rollout) in enumerate(self.rollouts(iteration)):
            samples = self.score(prompts, rollout)
            left_out: Sequence[LeftOut] = ()
            if self.settings.drawing.dynamic_sampling_tries:
                samples, left_out, counts = self.replace_equal_groups(samples, iteration, batch)
                self.replaced += counts
            yield samples
            self.prompt_source.observe(samples, left_out)

    def rollouts(self, iteration: int) -> Iterator[tuple[PromptBatch, Rollout]]:
        """Parts 1 and 2: yield this rank's prompts with their responses, batch by batch; those of the queue, if any."""
        if self.queue is not None:
            yield from self._from_queue(self.queue, iteration)
            return
        self.rollout_engine.shares()  # those of an evaluation
        for batch in range(self.settings.drawing.generation_batches):
            prompts, seeds = self.next_prompts(iteration, batch)
            yield prompts, self.roll_out(prompts, seeds)

    @timed("1_prompts")
    def next_prompts(self, iteration: int, batch: int) -> tuple[PromptBatch, list[int]]:
        """Part 1: return this rank's prompts, left-padded, and one seed for each."""
        drawing = self.settings.drawing
        count = drawing.prompts_per_batch * self.ranks.world_size
        first = ((iteration - 1) * drawing.generation_batches + batch) * count
        return self._own(self.prompt_source.take(first, count), first, "rollout")

    def _own(self, rows: Sequence[PromptRow], first: int, *purpose: str | int) -> tuple[PromptBatch, list[int]]:
        """Return this rank's share of all ranks' prompts from position `first` on, and a seed for each position."""
        own = slice(self.ranks.rank, None, self.ranks.world_size)
        seeds = [derived_seed(self.settings.seed, *purpose, first + place) for place in range(len(rows))[own]]
        return collate_prompts(rows[own], self.settings.drawing.sampling.pad_token_id), seeds

    @timed("2_rollout")
    def roll_out(self, prompts: PromptBatch, seeds: Sequence[int]) -> Rollout:
        """Part 2: return `samples_per_prompt` adjacent responses to each prompt, from the actor's current weights."""
        return self._drawn(prompts, self.settings.drawing.sampling, self._sample_seeds(seeds))

    def _drawn(self, prompts: PromptBatch, sampling: Sampling, seeds: Sequence[int]) -> Rollout:
        layout = self.settings.experience.layout
        return draw_responses(self.rollout_engine, self.roles, prompts, sampling, seeds=seeds, layout=layout)

    def _sample_seeds(self, seeds: Sequence[int]) -> list[int]:
        """Return a seed for each sample: the first has the prompt's, the others seeds derived from it."""
        samples = range(self.settings.experience.samples_per_prompt)
        return [derived_seed(seed, "sample", sample) if sample else seed for seed in seeds for sample in samples]

    @timed("3_score")
    def score(self, prompts: PromptBatch, rollout: Rollout) -> Samples:
        """Part 3: score with the reward model; reward functions run on until the scores are read in part 5."""
        return start_scoring(prompts.rows, rollout, self.roles, self.settings.experience)

    def replace_equal_groups(self, samples: Samples, iteration: int, batch: int) -> DrawnGroups:
        """Repeat parts 1 to 3 with other prompts where all samples of a prompt score the same. A collective."""
        drawing = self.settings.drawing
        # An order of its own, so that later iterations keep their prompts.
        order = derived_seed(self.settings.seed, "replacement", iteration, batch)

        def draw(attempt: int, count: int) -> Samples:
            first = attempt * drawing.prompts_per_batch * self.ranks.world_size
            rows = self.prompt_source.spare(order, first, count * self.ranks.world_size)
            prompts, seeds = self._own(rows, first, "replacement", iteration, batch)
            return self.score(prompts, self.roll_out(prompts, seeds))

        return with_differing_groups(samples, draw, drawing.dynamic_sampling_tries, self.settings.experience)

    def experience_of(self, samples: Samples, iteration: int) -> Experience:
        """Parts 4 to 6; an estimator that needs it first gets a scored greedy response to each prompt."""
        settings, learn_values = self.settings.experience, self.updates.value_learner(iteration)
        greedy = self._greedy(samples.rows) if settings.estimator.needs_greedy else None
        given = (samples, self.roles, settings, self.kl_control.kl_coef)
        return make_experience(*given, clock=self.clock, greedy=greedy, learn_values=learn_values)

    def _greedy(self, rows: Sequence[PromptRow]) -> Samples:
        """Return a scored greedy response to each prompt. A collective."""
        sampling = replace(self.settings.drawing.sampling, temperature=0.0)
        prompts = collate_prompts(rows, sampling.pad_token_id)
        with self.clock.phase("2_rollout"):
            drawn = self._drawn(prompts, sampling, [0] * len(rows))
        return self.score(prompts, drawn)

    @timed("7_learn")
    def learn(
        self, experiences: Sequence[Experience], iteration: int, rows: Sequence[PromptRow] = ()
    ) -> dict[str, float]:
        """Part 7: epochs of minibatches, each one optimizer step of actor and critic. rows: this rank's prompts."""
        return self.updates.learn(experiences, iteration, self.kl_control.kl_coef, rows)

    def report(self, iteration: int, figures: dict[str, float], bar: tqdm) -> None:
        """Part 8: write the figures, and show some."""
        seconds = self.clock.read()
        if self.settings.drawing.dynamic_sampling_tries:
            figures |= self.replaced.figures()
        drawing = [self.rollout_engine.figures(), {} if self.queue is None else self.queue.figures()]
        self.reports.write(iteration, figures, seconds, drawing, kl_coef=self.kl_control.kl_coef)
        self.reports.show(iteration, figures, bar)

    def steer_kl(self, figures: dict[str, float], experiences: Sequence[Experience]) -> None:
        """Let the controller move the KL's coefficient for the next iteration."""
        sequences = sum(len(experience.counts_B) for experience in experiences) * self.ranks.world_size
        if self.roles.reference is not None:
            self.kl_control.update(figures["rollout/kl"], sequences)

    def kl_is_over(self, figures: Mapping[str, Any]) -> bool:
        """Return whether the KL in these figures ends the training."""
        bound = self.settings.stop_kl
        return bound is not None and figures.get("rollout/kl", 0.0) > bound

    def conclude(self, iteration: int, figures: Mapping[str, float]) -> bool:
        """Evaluate and save where that is due; return whether the run ends here. A collective."""
        self.note_drawn(iteration)
        last = iteration == self.settings.total_rollouts or self.kl_is_over(figures) or self.checkpoints.ends(iteration)
        if last or self.settings.evaluation.are_due(iteration):
            self.after = self.evaluate(iteration)
            last = last or self.checkpoints.ends(iteration)
        self.save_checkpoint(iteration, last, figures)
        give_back_freed_memory(iteration)
        return last

    @timed("evaluation")
    def evaluate(self, step: int) -> PpoEvaluation | None:
        """Return the evaluation of the held-out prompts after `step`; None without such prompts."""
        if self.queue is not None:
            self.queue.wait()  # evaluations draw by the same engine
        found = self.evaluator.evaluate(step)
        self.checkpoints.evaluated(step)
        return found

    @timed("checkpoint")
    def save_checkpoint(self, iteration: int, last: bool, figures: Mapping[str, float]) -> None:
        """Write a checkpoint if one is due. A collective."""
        if self.checkpoints.due(iteration, iteration if last else self.settings.total_rollouts):
            evaluations = {"before": self.before, "after": self.after}
            state = {name: found and asdict(found) for name, found in evaluations.items()}
            kl = {name: figures[name] for name in ("rollout/kl",) if name in figures}
            self.checkpoints.save(iteration, {**state, **kl, "trainer": self.state_dict()})

    def _start(self) -> tuple[int, int]:
        """Resume, or evaluate first; return the rollouts that are done, and the last one to do. A collective."""
        done, saved = self.checkpoints.restore()
        if saved:
            check_keys(saved, ("before", "after", "trainer"), "the loop's state", optional=("rollout/kl",))
            self.before, self.after = (
                saved[name] and record_of(PpoEvaluation, saved[name], f"the evaluation {name}")
                for name in ("before", "after")
            )
            self.load_state_dict(saved["trainer"])
        elif self.settings.evaluation.evaluates_first:
            self.after = self.evaluate(0)
            self.before = self.after if self.settings.total_rollouts else None  # without training it is the only one
        is_over = self.checkpoints.ends(done) or self.kl_is_over(saved)
        return done, done if is_over else self.settings.total_rollouts

    def _result(self, done: int) -> PpoResult:
        """Load an earlier checkpoint, if that is asked for; return its evaluation, otherwise the last one."""
        if self.queue is not None and self.events is not None:
            self.queue.note_unused(self.events, "the run ended before they were used")
        earlier = self.checkpoints.load_final(done)
        if earlier:
            self.evaluator.observer.restored()
        after = earlier["after"] and PpoEvaluation(**earlier["after"]) if earlier else self.after
        return PpoResult(self.before, after, self.metrics.seconds, self.reports.closing())

    def state_dict(self) -> dict[str, Any]:
        """Return the state, other than the models, that iterations change, as JSON values. A collective."""
        # Nothing draws from here on.
        queue = {} if self.queue is None else {self.queue.state_name: self.queue.state_dict()}
        return {
            **queue,
            "kl_control": {"coefficient": self.kl_control.kl_coef},
            **self.updates.beside.state_dict(),
            "prompt_source": self.prompt_source.state_dict(),
            "rollout_engine": gathered(self.rollout_engine.state_dict()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned. A collective."""
        mine = self.state_dict()
        # Checkpoints once counted texts also where there were none.
        check_keys(state, mine.keys(), "the trainer's state", optional=("texts_taken",))
        check_keys(state["kl_control"], mine["kl_control"].keys(), "the KL's control")
        self.kl_control.kl_coef = state["kl_control"]["coefficient"]
        self.updates.beside.load_state_dict(state)
        self.prompt_source.load_state_dict(state["prompt_source"])
        saved = state["rollout_engine"]
        self.rollout_engine.load_state_dict(saved[self.ranks.rank % len(saved)])
        if self.queue is not None:
            self.queue.load_state_dict(state[self.queue.state_name])

    @timed("2_rollout")
    def _from_queue(self, queue: RolloutQueue, iteration: int) -> Iterable[tuple[PromptBatch, Rollout]]:
        self._taken = drawn = queue.take(iteration)
        return zip(drawn.prompts, drawn.rollouts, strict=True)

    def _asked(self, iteration: int) -> Asked:
        """Return the prompts of an iteration, and what is asked for them."""
        batches = range(self.settings.drawing.generation_batches)
        return self._asked_for([self.next_prompts(iteration, batch) for batch in batches])

    def _asked_alone(self, position: int) -> Asked:
        """Return the prompt at a position of the run, and what is asked for it."""
        rows = self.prompt_source.take(position, 1)
        prompts = collate_prompts(rows, self.settings.drawing.sampling.pad_token_id)
        return self._asked_for([(prompts, [derived_seed(self.settings.seed, "rollout", position)])])

    def _asked_for(self, batches: Sequence[tuple[PromptBatch, list[int]]]) -> Asked:
        layout, device = self.settings.experience.layout, self.ranks.device
        sampling = self.settings.drawing.sampling
        requests = [
            request_for(prompts, sampling, self._sample_seeds(seeds), layout, device=device)
            for prompts, seeds in batches
        ]
        return Asked([prompts for prompts, _ in batches], requests)

    def note_drawn(self, iteration: int) -> None:
        """Note the rollouts and the outcome of each prompt. A collective."""
        if self.events is not None:
            drawn = self._taken
            if drawn is None:
                drawn = RolloutsOfStep(iteration, iteration - 1, (), (), shares=self.rollout_engine.shares())
            self.events.trained(drawn, self.updates.outcomes)
