"""Measures of the model every so many iterations: the validation loss, and a small curve of RULER.

The curve has how many needles are found at each length. Nothing is generated. The model reads each prompt with its
answer in one forward over the run's own mesh, as in a validation, and an answer counts if each of its tokens is the
likeliest after those before. That is so exactly where greedy writing begins with the answer, which is what
``python -m tools.ruler`` asks for.
"""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from data.chat.template import ChatTemplate, load_template, recorded_template
from data.loader import IGNORE_INDEX, Batch, Samples, evaluation_batches
from data.text.megatron import MockTokenizer
from data.text.record import CHAT
from data.tokenizer import Tokenizer
from parallel.data import Runner
from runtime.errors import DataError
from runtime.together import from_first
from runtime.watchdog import Watchdog
from tools.ruler.examples import Prompts, makers
from tools.ruler.tasks import Sources
from train.assemble import Run
from train.batches import Batches, summed
from train.config.common import CommonConfig
from train.config.entries import Config
from train.objectives.language import NextToken
from train.watching import Step, Watcher, say
from train.watching.metrics import RunLog, lacks_validation

SEED = 1
"""Seed of the curve's examples."""


@dataclass(kw_only=True)
class Validation(Watcher):
    """Adds a validation's figures to the records of its iterations."""

    run: Run[CommonConfig]
    runner: Runner
    batches: Batches
    data: Samples
    log: RunLog | None
    watchdog: Watchdog
    constants: Mapping[str, float] = field(default_factory=dict)
    """Figures recorded with each loss, such as the corpus's unigram entropy."""
    then: Callable[[int], None] | None = None
    """Called with the iteration after a validation, while the averages are in place; collective."""

    def begin(self, iteration: int) -> None:
        """Validate the last iteration before this start if it was ended meanwhile."""
        log = self.log
        if self._is_due(iteration) and from_first(lambda: log is not None and lacks_validation(log.records, iteration)):
            found = self.validate(iteration)
            if found and log is not None:
                say(self.run.objective.validation_line(log.amend(found)))

    def after(self, step: Step) -> None:
        """Validate every eval_interval iterations, and after the last one."""
        if step.last or self._is_due(step.iteration):
            step.wait()
            step.record |= self.validate(step.iteration)

    def _is_due(self, iteration: int) -> bool:
        train = self.run.config.train
        return iteration > 0 and (iteration % train.eval_interval == 0 or iteration == train.train_iters)

    @torch.no_grad()
    def validate(self, iteration: int) -> dict[str, float]:
        """Return the validation loss, of the averages of the weights where they are kept, and the constants.

        Nothing where the run was told to end before it was over.
        """
        with nullcontext() if self.run.ema is None else self.run.ema.in_place():
            loss = self._loss()
            if self.batches.stop.agreed:
                return {}
            if self.then is not None:
                with self.watchdog.paused():
                    self.then(iteration)
        return {"validation_loss": loss, **self.constants}

    def _loss(self) -> float:
        """Return the mean loss over the first eval_iters global batches of the validation data, always the same."""
        mesh, wanted = self.run.mesh, self.run.validation_samples
        total, tokens = torch.zeros((), dtype=torch.float64, device=mesh.device), 0
        with self.batches.prefetched(evaluation_batches(self.data, self.batches.batching, wanted)) as steps:
            while (batch := self.batches.take(steps)) is not None:
                self.watchdog.beat()
                total += self.runner.forward(batch.micro_batches)
                tokens += batch.valid
        return summed(total, mesh).item() / max(tokens, 1)


def _template(config: Config, tokenizer: str) -> ChatTemplate:
    """Return the template that the run's conversations were prepared with, or the tokenizer's."""
    chat = config.recorded().get(CHAT)
    if chat is None or chat["chat_template"] is None:
        return load_template(tokenizer, None)
    return recorded_template(tokenizer, "of the conversations", chat["chat_template"], chat["tool_use"])


class Curve:
    """The examples of all lengths, and which of them the model answers."""

    def __init__(self, run: Run[Config], tokenizer: Tokenizer | MockTokenizer) -> None:
        """Make the examples, the same on all ranks. Raises UserError: a task or its answer does not fit a length."""
        assert not isinstance(tokenizer, MockTokenizer)  # or validate would have refused it
        asked, length = run.config.ruler, run.config.train.seq_length
        template = _template(run.config, tokenizer.path) if run.config.data.sft else None
        prompts = Prompts(tokenizer, template, tokenizer.begin())
        self.interval = asked.ruler_interval or 1
        self._run, self.lengths, self._rows = run, asked.lengths(length), list[Batch]()
        for most in self.lengths:
            try:
                makes = makers(asked.ruler_tasks, [most], SEED, prompts, Sources(), flag="--ruler-tasks")
            except DataError as error:
                raise DataError(f"ruler_lengths has {most}, for each of ruler_tasks: {error}") from None
            for number in range(asked.ruler_samples):
                turn, place = divmod(number, len(makes))
                ids, prompt = prompts.with_answer(makes[place].make(turn).question)
                if len(ids) > most:
                    raise DataError(
                        f"ruler_tasks names {makes[place].name}, whose answer takes {len(ids) - prompt} tokens with "
                        f"{tokenizer.path}, more than are kept for it; leave the task out"
                    )
                self._rows.append(_row(ids, prompt, length, len(self._rows)))

    @torch.no_grad()
    def measure(self, runner: Runner) -> dict[str, float]:
        """Return the percentage of right answers by ``ruler_LENGTH``; collective."""
        run, objective = self._run, self._run.objective
        assert isinstance(objective, NextToken)
        size, rank, ranks = run.config.train.micro_batch_size, run.mesh.dp.get_local_rank(), run.mesh.dp.size()
        objective.wrong = wrong = torch.zeros(len(self._rows), dtype=torch.int64, device=run.mesh.device)
        blank = _row([0, 0], 2, run.config.train.seq_length, 0)
        for begin in range(0, len(self._rows), run.batch_samples):
            # All ranks take equally many, since they gather the model together.
            firsts = range(begin + rank * size, begin + run.batch_samples, ranks * size)
            batches = [[self._rows[n] if n < len(self._rows) else blank for n in range(f, f + size)] for f in firsts]
            micro_batches = ({name: torch.stack([row[name] for row in rows]) for name in blank} for rows in batches)
            runner.forward(list(map(objective.local, micro_batches)))
        dist.all_reduce(wrong)  # also over ranks that count the same tokens: only 0 is told from more
        right = (wrong == 0).double().view(len(self.lengths), -1).mean(1) * 100
        return {f"ruler_{length}": share for length, share in zip(self.lengths, right.tolist(), strict=True)}


class Ruler(Watcher):
    """Adds a point of the curve to the records of its iterations."""

    def __init__(self, curve: Curve, runner: Runner, watchdog: Watchdog) -> None:
        self._curve, self._runner, self._watchdog = curve, runner, watchdog

    def after(self, step: Step) -> None:
        """Measure every so many iterations, and after the last one."""
        if step.last or step.iteration % self._curve.interval == 0:
            step.wait()
            with self._watchdog.paused():
                found = self._curve.measure(self._runner)
            step.record |= found
            shares = ", ".join(f"{name.removeprefix('ruler_')}: {share:.1f}" for name, share in found.items())
            say(f"RULER at iteration {step.iteration}, percent of right answers by tokens: {shares}")


def _row(ids: list[int], prompt: int, length: int, number: int) -> Batch:
    """Return tokens [S], the labels of all after the prompt, and the example's number at each."""
    tokens, labels = torch.zeros(length, dtype=torch.int64), torch.full((length,), IGNORE_INDEX)
    tokens[: len(ids) - 1], labels[prompt - 1 : len(ids) - 1] = torch.tensor(ids[:-1]), torch.tensor(ids[prompt:])
    starts = torch.arange(length) == 0
    return {"tokens": tokens, "labels": labels, "starts": starts, "examples": torch.full((length,), number)}
