"""A small curve of RULER during training: how many needles are found at each length.

Nothing is generated. The model reads each prompt with its answer in one forward over the run's own
mesh, as in a validation, and an answer counts if each of its tokens is the likeliest after those
before. That is so exactly where greedy writing begins with the answer, which is what ``python -m
tools.ruler`` asks for.
"""

import torch
import torch.distributed as dist

from data.chat.template import ChatTemplate, load_template, recorded_template
from data.loader import IGNORE_INDEX, Batch
from data.text.blend import MockTokenizer
from data.text.record import CHAT
from data.tokenizer import Tokenizer
from parallel.data import Runner
from parallel.mesh import Mesh
from runtime.errors import DataError
from runtime.watchdog import Watchdog
from tools.ruler.examples import Prompts, makers
from tools.ruler.tasks import Sources
from train.callbacks import Callback, Step, say
from train.config.entries import Config
from train.objectives.language import NextToken

SEED = 1
"""Seed of the curve's examples."""


def _template(config: Config, tokenizer: str) -> ChatTemplate:
    """Return the template that the run's conversations were prepared with, or the tokenizer's."""
    chat = config.recorded().get(CHAT)
    if chat is None or chat["chat_template"] is None:
        return load_template(tokenizer, None)
    return recorded_template(
        tokenizer, "of the conversations", chat["chat_template"], chat["tool_use"]
    )


class Curve:
    """The examples of all lengths, and which of them the model answers."""

    def __init__(
        self, config: Config, objective: NextToken, mesh: Mesh, tokenizer: Tokenizer | MockTokenizer
    ) -> None:
        """Make the examples, the same on all ranks. Raises UserError: a task or its answer does not
        fit a length.
        """
        assert not isinstance(tokenizer, MockTokenizer)  # or validate would have refused it
        asked, length = config.ruler, config.train.seq_length
        template = _template(config, tokenizer.path) if config.data.sft else None
        prompts = Prompts(tokenizer, template, tokenizer.begin())
        self.interval = asked.ruler_interval or 1
        self._train, self._objective, self._mesh = config.train, objective, mesh
        self.lengths, self._rows = asked.lengths(length), list[Batch]()
        for most in self.lengths:
            try:
                makes = makers(
                    asked.ruler_tasks, [most], SEED, prompts, Sources(), flag="--ruler-tasks"
                )
            except DataError as error:
                raise DataError(
                    f"ruler_lengths has {most}, for each of ruler_tasks: {error}"
                ) from None
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
        objective, mesh = self._objective, self._mesh
        size, rank, ranks = self._train.micro_batch_size, mesh.dp.get_local_rank(), mesh.dp.size()
        batch = self._train.batch_size(ranks)
        objective.wrong = wrong = torch.zeros(
            len(self._rows), dtype=torch.int64, device=mesh.device
        )
        blank = _row([0, 0], 2, self._train.seq_length, 0)
        for begin in range(0, len(self._rows), batch):
            # All ranks take equally many, since they gather the model together.
            firsts = range(begin + rank * size, begin + batch, ranks * size)
            batches = [
                [self._rows[n] if n < len(self._rows) else blank for n in range(f, f + size)]
                for f in firsts
            ]
            micro_batches = (
                {name: torch.stack([row[name] for row in rows]) for name in blank}
                for rows in batches
            )
            runner.forward(list(map(objective.local, micro_batches)))
        dist.all_reduce(
            wrong
        )  # also over ranks that count the same tokens: only 0 is told from more
        right = (wrong == 0).double().view(len(self.lengths), -1).mean(1) * 100
        return {
            f"ruler_{length}": share
            for length, share in zip(self.lengths, right.tolist(), strict=True)
        }


class Ruler(Callback):
    """Adds a point of the curve to the records of its iterations."""

    def __init__(self, curve: Curve, runner: Runner, watchdog: Watchdog) -> None:
        self._curve, self._runner, self._watchdog = curve, runner, watchdog

    def on_step_end(self, step: Step) -> None:
        """Measure every so many iterations, and after the last one."""
        if step.last or step.iteration % self._curve.interval == 0:
            step.wait()
            with self._watchdog.paused():
                found = self._curve.measure(self._runner)
            step.record |= found
            shares = ", ".join(
                f"{name.removeprefix('ruler_')}: {share:.1f}" for name, share in found.items()
            )
            say(
                f"RULER at iteration {step.iteration}, percent of right answers by tokens: {shares}"
            )


def _row(ids: list[int], prompt: int, length: int, number: int) -> Batch:
    """Return tokens [S], the labels of all after the prompt, and the example's number at each."""
    tokens, labels = torch.zeros(length, dtype=torch.int64), torch.full((length,), IGNORE_INDEX)
    tokens[: len(ids) - 1], labels[prompt - 1 : len(ids) - 1] = (
        torch.tensor(ids[:-1]),
        torch.tensor(ids[prompt:]),
    )
    starts = torch.arange(length) == 0
    return {
        "tokens": tokens,
        "labels": labels,
        "starts": starts,
        "examples": torch.full((length,), number),
    }
