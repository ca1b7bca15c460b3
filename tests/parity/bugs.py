"""Bugs of composition, each planted in a process before it trains.

They are as a user's change of the code would be.
"""

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import parallel.data
from parallel.context import plan
from parallel.context.executor import Executor
from parallel.context.linear.state import StateExecutor
from parallel.pipeline.schedule import PipelineRunner
from parallel.tensor import styles
from train import gradients, trainer
from train.batches import Batches
from train.objectives.diffusion import Denoising
from train.objectives.language import NextToken


def mask_shifted():
    """A query sees one key of its future."""
    tiles = plan.tiles
    plan.tiles = lambda q, k, stride, reach: tiles(q, k, stride, (reach[0], reach[1] + 1))


def no_sum_over_tp():
    """Each rank keeps its own tokens of its own partial sum.

    Embeddings, of which one rank has each, stay right.
    """
    scattered = styles.reduce_scatter

    def own(part, mesh):
        if "Where" in type(part.grad_fn).__name__:
            return scattered(part, mesh)
        chunk = part.chunk(mesh.size(), part.ndim - 2)[mesh.get_local_rank()]
        return DTensor.from_local(chunk, mesh, [Shard(part.ndim - 2)], run_check=False)

    styles.reduce_scatter = own


def norm_counted_twice():
    gradients.untracked_replicas = lambda *_: 1


def label_lost():
    """The last token of each rank, whose label is another rank's token, has none."""
    local = NextToken.local

    def without(self, batch):
        local_batch = local(self, batch)
        local_batch["labels"][:, -1] = -100
        return local_batch

    NextToken.local = without


def state_not_passed():
    """Linear attention drops what the ranks before have seen."""
    passed = StateExecutor._pass_states

    def dropped(self, *arguments, reverse=False):
        *others, enter = arguments
        return passed(self, *others, enter if reverse else lambda *_: None, reverse=reverse)

    StateExecutor._pass_states = dropped


def gradient_halved():
    """Attention's backward loses half of the gradient of its values."""
    backward = Executor.backward

    def partly(self, *arguments):
        dq, dk, dv = backward(self, *arguments)
        return dq, dk, dv / 2

    Executor.backward = partly


def layer_not_reduced():
    """Make legacy_ddp skip the second layer's gradients."""
    finish = gradients.finish_gradients

    def some(model, mesh, strategy):
        reduced = [p for name, p in model.named_parameters() if not name.startswith("layers.1.")]
        finish(nn.ParameterList(reduced), mesh, strategy)

    gradients.finish_gradients = some


def local_means():
    """Divide by each rank's own number of valid tokens, and average the means."""
    take = Batches.take

    def local(self, steps):
        step_batch = take(self, steps)
        if step_batch is None:
            return None
        local_count = sum(int(batch["count"]) for batch in step_batch.micro_batches)
        return step_batch._replace(valid=local_count * self._task.mesh.dp_cp.size())

    Batches.take = local


def alike_shards():
    """Start every rank's shard with the values of the first."""

    def first(parameter):
        local_tensor = parameter.to_local()
        return local_tensor, tuple(slice(0, length) for length in local_tensor.shape)

    parallel.data.local_shard = first


def stage_without_norm():
    """Leave most parameters of all but the first stage out of the gradient norm."""
    parameters = PipelineRunner.parameters

    def some(self):
        return {
            name: p
            for name, p in parameters(self).items()
            if 0 in self.stage_numbers or name == "norm.weight"
        }

    PipelineRunner.parameters = some


def noise_of_ranks():
    """Make the noise depend on the rank that draws it."""
    drawn = Denoising._draw
    Denoising._draw = lambda self, sample: drawn(self, 1000 * dist.get_rank() + sample)


def copies_left_alone():
    """Do not sum the gradients of parameters that several pipeline stages hold."""
    PipelineRunner._sum_copies = lambda *_: None


def samples_skipped(count=2):
    """Start so many samples too late.

    One alone might be the fully masked one, replaced by another such one.
    """
    batches = trainer.batches

    def later(dataset, batching, consumed_samples):
        return batches(dataset, batching, consumed_samples + count)

    trainer.batches = later
