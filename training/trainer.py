"""Trainer: one loop for every drafter family.

Owns the optimizer steps, when things are measured and saved, and what a stop leaves behind. A step
is one update: `accumulate` batches on each process, their summed losses divided by their summed
weight over all of them, so that no prediction's say depends on where it landed.
"""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from drafters.base import NeuralDrafter
from drafters.fingerprint import template_digest
from drafters.losses import LossSums
from drafters.rounding import rounded
from drafters.target import Target
from inference.machine import versions
from training.adapters import merged
from training.batches import order_of
from training.calibrate import calibrate
from training.features import Lessons
from training.joint import publish
from training.metrics import Window, held_out_metrics, line, memory_held
from training.mishaps import Mishaps
from training.objective import Objective
from training.on_policy import OnPolicy
from training.optim import make_optimizer, rate_at, set_rate
from training.options import TrainSettings, seconds
from training.processes import Processes
from training.replicas import Replicas, gathered
from training.signals import StopSignals
from training.state import STATE, Progress, load_state, save_state
from training.tracking import rewind


@dataclass(frozen=True)
class Run:
    """What a trainer works with.

    Args:
        objective: drafter and loss, on its device.
        lessons: to learn from.
        held_out: lessons that are only measured on.
        measure: decodes held-out prompts with the drafter and returns metrics by name, tau among
            them; None: tau is not measured.
        identity: what a resumed run must share with the one it goes on with.
        say: gets one line for a person.
        tick: gets the share of the run that is done, after every step.
    """

    objective: Objective
    lessons: Lessons
    held_out: Lessons
    measure: Callable[[NeuralDrafter], Mapping[str, float]] | None
    identity: dict[str, Any]
    say: Callable[[str], None] = lambda _: None
    tick: Callable[[float], None] = lambda _: None


class Trainer:
    """Train one drafter.

    Args:
        run: see there.
        settings: of the run.
        accelerator: with its trackers started.
    """

    def __init__(self, run: Run, settings: TrainSettings, accelerator: Accelerator) -> None:
        """Make the optimizer, wrap the objective and, if asked for, take up a stopped run."""
        self.run, self.settings, self.accelerator = run, settings, accelerator
        self.drafter: NeuralDrafter = run.objective.drafter
        self.target: Target = run.objective.target
        self.output = Path(settings.output)
        self.optimizer = make_optimizer(self.drafter, settings.optim)
        self.progress = Progress()
        if settings.resume and (self.output / STATE).exists():
            self.progress = load_state(
                self.output / STATE,
                self.drafter,
                self.optimizer,
                run.identity,
                accelerator.process_index,
            )
            run.say(f"resuming after step {self.progress.step}")
        if accelerator.is_main_process:
            rewind(self.output, self.progress.step)
        self.replicas = Replicas(run.objective, self.optimizer, accelerator, settings)
        self.processes = Processes(accelerator)
        self.source = OnPolicy(run.lessons, self.drafter, settings.on_policy, settings.seed)
        self.window = Window(run.objective.first_depth)
        file = self.output / f"not_finite.{accelerator.process_index}.safetensors"
        self.mishaps = Mishaps(file, run.say)
        self.stop = StopSignals()
        self._indices: list[int] = []
        self._before = self.progress.elapsed
        self._started = time.monotonic()
        self._passed = self._milestones(self.share)

    @property
    def share(self) -> float:
        """Return the share of the run that is done, equal on all processes."""
        schedule = self.settings.schedule
        shares = [0.0]
        if schedule.steps is not None:
            shares.append(self.progress.step / schedule.steps)
        if schedule.epochs is not None:
            total = math.ceil(schedule.epochs * self.steps_an_epoch)
            shares.append(self.progress.step / total)
        if schedule.time_budget is not None:
            # the first process's clock counts: all must stop at the same step
            shares.append(self.processes.first(self.elapsed / seconds(schedule.time_budget)))
        return min(1.0, max(shares))

    @property
    def elapsed(self) -> float:
        """Return the seconds of the training loop, those before a resume included."""
        return self._before + time.monotonic() - self._started

    @property
    def steps_an_epoch(self) -> int:
        """Return the optimizer steps of a pass; the last may hold fewer batches."""
        return math.ceil(len(self.run.lessons) / self._group)

    def train(self) -> int | None:
        """Train to the end of the schedule, or until a signal.

        Returns:
            The signal that stopped it, or None. In both cases `last` and the state are written.
        """
        with self.stop.caught():
            share = self.share
            while share < 1 and not self.processes.any(self.stop.received is not None):
                self.step(share)
                share = self.share
                self.run.tick(share)
                self._log(share)
                self._at_milestones(share)
        self.save()
        return self.stop.received

    def step(self, share: float) -> None:
        """Make one optimizer step at this share of the run."""
        started = time.monotonic()
        rate = set_rate(self.optimizer, rate_at(share, self.settings.schedule))
        self.run.objective.progress = share
        order = order_of(len(self.run.lessons), self.settings.seed, self.progress.epoch)
        total, tokens = self._accumulate(order)
        norm = self._finish_gradients(total[1].sum())
        made = self._update(total, norm)
        self.optimizer.zero_grad(set_to_none=True)
        self.window.add(total if made else None, tokens, time.monotonic() - started, rate)
        self.progress.step += 1
        self.progress.place += self._group
        if self.progress.place >= len(order):
            self.progress.epoch, self.progress.place = self.progress.epoch + 1, 0

    def _update(self, total: Tensor, norm: Tensor) -> bool:
        """Update the weights unless there is nothing to learn, or nothing finite to learn it by."""
        if not (bool(total[1].sum() > 0) and bool(total[4].sum() > 0)):
            self.progress.skipped += 1
            return False
        loss = total[0].sum()
        if bool(torch.isfinite(loss)) and bool(torch.isfinite(norm)):
            self.optimizer.step()
            self.mishaps.good()
            return True
        self.progress.skipped += 1
        if self.mishaps.bad(self.progress.step + 1, float(loss), float(norm)):
            self.save()
            step = self.progress.step
            self.mishaps.end([self.source.lesson(index, step) for index in self._indices])
        return False

    def evaluate(self) -> dict[str, float]:
        """Measure on held-out chats, publish the drafter if its tau is the best so far.

        Returns:
            Metrics by name; empty on all processes but the first.
        """
        metrics: dict[str, float] = {}
        objective = self.replicas.whole()
        if self.accelerator.is_main_process:
            drafter, trained = objective.drafter, objective.drafter.training
            published = objective.drafter = merged(drafter)
            published.eval()
            with rounded(published, self._published_dtype):
                calibrate(objective, self.run.held_out)
                metrics = held_out_metrics(objective, self.run.held_out)
                if self.run.measure is not None:
                    metrics |= self.run.measure(published)
                self._publish_best(published, metrics)
            objective.drafter = drafter
            drafter.train(trained)
        self.accelerator.wait_for_everyone()
        return metrics

    def save(self) -> None:
        """Write the state and the features so far, and publish the drafter as `last`."""
        self.run.lessons.flush()
        self.progress.elapsed = self.elapsed
        generators: list[Tensor] = gather_object([torch.get_rng_state()])
        drafter, moments = self.replicas.whole().drafter, self.replicas.moments()
        if self.accelerator.is_main_process:
            identity = self.run.identity
            save_state(self.output / STATE, drafter, moments, self.progress, identity, generators)
            self._publish("last", merged(drafter), {})
        self.accelerator.wait_for_everyone()

    @property
    def _published_dtype(self) -> torch.dtype:
        return getattr(torch, self.settings.publish_dtype)

    @property
    def _group(self) -> int:
        return self.settings.optim.accumulate * self.accelerator.num_processes

    def _accumulate(self, order: list[int]) -> tuple[Tensor, int]:
        """Run this process's batches of a step backward; return all processes' sums and tokens."""
        accelerator, count = self.accelerator, self.settings.optim.accumulate
        mine = self.progress.place + accelerator.process_index
        places = [mine + i * accelerator.num_processes for i in range(count)]
        # beyond the end of a pass another lesson runs with share 0: processes keep in step
        places = [p for p in places if p < len(order)] or places[:1]
        if accelerator.num_processes > 1:
            places += [len(order)] * (count - len(places))
        total: Tensor | None = None
        tokens = 0
        for number, place in enumerate(places, start=1):
            lesson = self.source.lesson(order[place % len(order)], self.progress.step)
            share = 1.0 if place < len(order) else 0.0
            last = number == len(places)
            with nullcontext() if last else accelerator.no_sync(self.replicas.module):
                sums = self.replicas(lesson, share)
                accelerator.backward(self._loss(sums))
            part = torch.stack([x.detach() for x in sums])
            total = part if total is None else total + part
            tokens += lesson.tokens if share else 0
        self._indices = [order[place] for place in places if place < len(order)]
        assert total is not None
        counts = torch.tensor(float(tokens), device=total.device)
        total, counts = self.processes.summed(total), self.processes.summed(counts)
        return total, int(counts)

    def _loss(self, sums: LossSums) -> Tensor:
        """Return what is run backward: the sum, or under `local` this batch's own mean."""
        loss = sums.loss.sum()
        if self.settings.optim.normalise == "local":
            loss = loss / sums.weight.sum().clamp_min(1e-12)
        return loss

    def _finish_gradients(self, weight: Tensor) -> Tensor:
        """Divide the gradients by the step's weight and clip them; return their norm."""
        processes = self.accelerator.num_processes
        # processes exchange means of gradients, hence the factor
        scale = float(processes / weight.clamp_min(1e-12))
        if self.settings.optim.normalise == "local":
            scale = 1 / self.settings.optim.accumulate
        parameters = [p for p in self.drafter.parameters() if p.grad is not None]
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        clip = self.settings.optim.clip or math.inf
        return gathered(torch.nn.utils.clip_grad_norm_(parameters, clip))

    def _log(self, share: float) -> None:
        """Send the training loss of the last steps to the trackers."""
        if self.progress.step % self.settings.tracking.every and share < 1:
            return
        metrics = self.window.read() | {
            "skipped_steps": self.progress.skipped,
            "epoch": self.progress.step / self.steps_an_epoch,
            "memory": memory_held(self.accelerator.device),
        }
        self.accelerator.log(metrics, step=self.progress.step)

    def _at_milestones(self, share: float) -> None:
        """Evaluate and save where the run passes the next of the evenly spread milestones."""
        evaluations, saves = self._milestones(share)
        evaluate, save = evaluations > self._passed[0], saves > self._passed[1]
        self._passed = evaluations, saves
        if evaluate:
            metrics = self.evaluate()
            self.accelerator.log(metrics, step=self.progress.step)
            self.run.say(line(self.progress.step, share, metrics))
        if evaluate or save:
            self.save()

    def _milestones(self, share: float) -> tuple[int, int]:
        """Return how many evaluations and saves are due by a share of the run."""
        times = self.settings.evaluate.times, self.settings.save_times
        # a share such as 3/10 times 10 falls short of 3 in floating point
        evaluations, saves = (math.floor(share * count + 1e-9) for count in times)
        return evaluations, saves

    def _publish_best(self, drafter: NeuralDrafter, metrics: dict[str, float]) -> None:
        """Publish as `best` what has the highest tau; without tau, what agrees most."""
        score = metrics.get("tau", metrics.get("agreement/1", 0.0))
        # of equals the later one: it has seen more
        if score >= self.progress.best_tau:
            self.progress.best_tau = score
            self._publish("best", drafter, metrics)

    def _publish(self, name: str, drafter: NeuralDrafter, metrics: dict[str, float]) -> None:
        template = template_digest(self.target.tokenizer)
        about = {**self.run.identity, "chat_template": template}
        about |= {"step": self.progress.step, "metrics": metrics, "versions": versions()}
        with rounded(drafter, self._published_dtype):
            publish(drafter, self.output / name, self.target, about, self._published_dtype)
