"""A small RULER curve during training: the share of right answers at each context length.

No text is generated. The model reads each prompt with its answer in one forward pass over the run's
own mesh, as in a validation, and an answer is right if each of its tokens is the most likely one
after the tokens before it. In exactly these cases greedy decoding would begin with the answer, and
this is also the condition by which ``python -m tools.ruler`` counts answers.
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
"""Random seed of the examples."""


def _template(config: Config, tokenizer: str) -> ChatTemplate:
    """Return the chat template of the run's conversations, or else the tokenizer's."""
    chat = config.recorded().get(CHAT)
    if chat is None or chat["chat_template"] is None:
        return load_template(tokenizer, None)
    return recorded_template(
        tokenizer, "of the conversations", chat["chat_template"], chat["tool_use"]
    )


class Curve:
    """RULER examples of several lengths; measures the share that the model answers correctly."""

    def __init__(
        self, config: Config, objective: NextToken, mesh: Mesh, tokenizer: Tokenizer | MockTokenizer
    ) -> None:
        """Make the examples, the same on all ranks.

        Raises UserError if a task, or its answer, does not fit a length.
        """
        assert not isinstance(tokenizer, MockTokenizer)  # validate refuses RULER with mock_data
        seq_length = config.train.seq_length
        template = _template(config, tokenizer.path) if config.data.sft else None
        prompts = Prompts(tokenizer, template, tokenizer.begin())
        self.interval = config.ruler.ruler_interval or 1
        self.lengths = config.ruler.lengths(seq_length)
        self._train = config.train
        self._objective = objective
        self._mesh = mesh
        self._examples: list[Batch] = []
        for length in self.lengths:
            self._add_examples(config, prompts, tokenizer, length)

    def _add_examples(
        self, config: Config, prompts: Prompts, tokenizer: Tokenizer, max_tokens: int
    ) -> None:
        """Make ruler_samples examples of at most ``max_tokens``, taking the tasks in turn."""
        ruler = config.ruler
        try:
            task_makers = makers(
                ruler.ruler_tasks, [max_tokens], SEED, prompts, Sources(), flag="--ruler-tasks"
            )
        except DataError as error:
            raise DataError(
                f"ruler_lengths has {max_tokens}, but every task of ruler_tasks must fit into it: "
                f"{error}"
            ) from None

        for number in range(ruler.ruler_samples):
            turn, index = divmod(number, len(task_makers))
            maker = task_makers[index]
            ids, prompt_length = prompts.with_answer(maker.make(turn).question)
            if len(ids) > max_tokens:
                raise DataError(
                    f"ruler_tasks has {maker.name}, but its answer takes "
                    f"{len(ids) - prompt_length} tokens with {tokenizer.path}, more than are "
                    "reserved for answers; leave the task out of ruler_tasks"
                )
            self._examples.append(
                _example(ids, prompt_length, config.train.seq_length, len(self._examples))
            )

    @torch.no_grad()
    def measure(self, runner: Runner) -> dict[str, float]:
        """Return the percentage of right answers, keyed by ``ruler_LENGTH``; collective."""
        mesh = self._mesh
        micro_batch_size = self._train.micro_batch_size
        dp_rank = mesh.dp.get_local_rank()
        dp_size = mesh.dp.size()
        batch_size = self._train.batch_size(dp_size)

        num_examples = len(self._examples)
        wrong = torch.zeros(num_examples, dtype=torch.int64, device=mesh.device)
        self._objective.wrong = wrong
        # Blank examples fill the last batch: all ranks gather the sharded model together, so they
        # must run the same number of micro-batches.
        blank = _example([0, 0], 2, self._train.seq_length, 0)
        for begin in range(0, num_examples, batch_size):
            micro_batches = []
            firsts = range(
                begin + dp_rank * micro_batch_size, begin + batch_size, dp_size * micro_batch_size
            )
            for first in firsts:
                examples = self._examples[first : first + micro_batch_size]
                examples += [blank] * (micro_batch_size - len(examples))
                stacked = {
                    name: torch.stack([example[name] for example in examples]) for name in blank
                }
                micro_batches.append(self._objective.local(stacked))
            runner.forward(micro_batches)

        # Ranks with the same tokens count an error several times, which does not matter, because
        # an answer is right only if it has no error at all.
        dist.all_reduce(wrong)
        right = (wrong == 0).double().view(len(self.lengths), -1).mean(1) * 100  # [lengths]
        return {
            f"ruler_{length}": share
            for length, share in zip(self.lengths, right.tolist(), strict=True)
        }


class Ruler(Callback):
    """Adds a point of the RULER curve to the records, every ruler_interval iterations."""

    def __init__(self, curve: Curve, runner: Runner, watchdog: Watchdog) -> None:
        self._curve = curve
        self._runner = runner
        self._watchdog = watchdog

    def on_step_end(self, step: Step) -> None:
        """Measure every ruler_interval iterations, and after the last one."""
        if not step.last and step.iteration % self._curve.interval:
            return
        step.wait()
        with self._watchdog.paused():
            scores = self._curve.measure(self._runner)
        step.record |= scores
        shares = ", ".join(
            f"{name.removeprefix('ruler_')}: {share:.1f}" for name, share in scores.items()
        )
        say(f"RULER at iteration {step.iteration}, percent of right answers by length: {shares}")


def _example(ids: list[int], prompt_length: int, seq_length: int, number: int) -> Batch:
    """Return a sample [S] with labels only on the answer's tokens, and its example's number."""
    tokens = torch.zeros(seq_length, dtype=torch.int64)
    labels = torch.full((seq_length,), IGNORE_INDEX)
    tokens[: len(ids) - 1] = torch.tensor(ids[:-1])
    labels[prompt_length - 1 : len(ids) - 1] = torch.tensor(ids[prompt_length:])
    return {
        "tokens": tokens,
        "labels": labels,
        "starts": torch.arange(seq_length) == 0,
        "examples": torch.full((seq_length,), number),
    }
