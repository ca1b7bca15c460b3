"""A small model on any mesh of data, context and tensor parallel ranks, and one step of it.

They are for the tests of these.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from kernels.loss import cross_entropy_sum
from model.parts.attention import sdpa
from model.parts.weights import Beginning, normal
from model.registry import build_model, initial_weight
from parallel.context import ContextConfig, context_parallel
from parallel.context.config import HybridConfig
from parallel.data import (
    DataParallelConfig,
    finish_gradients,
    init_parameters,
    shard_model,
    sharding_mesh,
)
from parallel.mesh import MeshConfig
from parallel.recompute import RecomputeConfig, recompute_layers
from parallel.tensor.split import split_model
from planner.choice import with_layout
from tests.model.models import model_config
from tests.parallel.tiny import equal, gradients_of, weights_of
from train.config.entries import Config, TrainConfig
from train.context_attention import context_of
from train.objectives.language import NextToken

LOSS, GRADIENT = 2e-6, 3e-7
"""Bounds of a step's differences from one process.

float32 rounds a gradient near 1 by 6e-8, on every processor in another order of sums. Negative
controls are 100 times these and more.
"""
ZERO3 = DataParallelConfig()
SEED, BATCH, LENGTH = 3, 4, 17
VOCABULARY = 37
"""Neither it nor the length is divisible by any number of ranks."""
PLAIN = RecomputeConfig()
RING = HybridConfig()


def config(tied=False, **changes):
    """A LLaMA unless `changes` has another model_type."""
    sizes = {
        "num_layers": 2, "hidden_size": 24, "ffn_hidden_size": 32,
        "num_attention_heads": 4, "num_query_groups": 2,
        "vocab_size": VOCABULARY, "untie_embeddings_and_output_weights": not tied,
    }  # fmt: skip
    return model_config(**{**sizes, **changes})


def mesh_config(tp=1, cp=1):
    return MeshConfig(tensor_model_parallel_size=tp, context_parallel_size=cp, device="cpu")


def weight_of(model_config, name, shape, part=()):
    """Initial weights, but for biases, sinks and adapters.

    Near 0 these would hide what is done with them.
    """
    if name.endswith(("bias", "lora_B.weight")):
        return normal(model_config.init_method_std)(Beginning(name, shape, SEED, part))
    weight = initial_weight(model_config, name, shape, SEED, part)
    return 50 * weight if name.endswith("sinks") else weight


def plain(model_config, attend=sdpa):
    """In one process."""
    model = build_model(model_config, attend)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weight_of(model_config, name, parameter.shape))
    return model


def build(
    mesh,
    model_config,
    recompute=PLAIN,
    data_parallel=ZERO3,
    method="zigzag",
    hybrid=RING,
    *,
    bf16=False,
):
    """As the entry script does."""
    cp, attend = context(mesh, model_config, method, hybrid, recompute)
    with torch.device("meta"):
        model = build_model(model_config, attend)
    split_model(model, mesh.tp)
    recompute_layers(model.layers, recompute)
    sharding = sharding_mesh(mesh.dp_cp, data_parallel)
    shard_model(model, model.layers, sharding, bf16=bf16, strategy=data_parallel.strategy)
    init_parameters(
        model, mesh.device, lambda name, shape, part: weight_of(model_config, name, shape, part)
    )
    return model, cp


def context(mesh, model_config, method, hybrid=RING, recompute=PLAIN):
    """The context-parallel dimension and the attention of the model.

    ``hybrid`` is for its softmax layers, if any.
    """
    group = mesh.cp.get_group()
    if model_config.softmax_period is not None:
        run = Config(
            model=model_config,
            mesh=mesh_config(mesh.tp.size(), mesh.cp.size()),
            context=ContextConfig(context_parallel_method=method),
            hybrid=hybrid,
            recompute=recompute,
            train=TrainConfig(seq_length=LENGTH, micro_batch_size=1),
        )
        return context_of(with_layout(run), group)
    cp = context_parallel(
        method,
        seq_len=LENGTH,
        group=group,
        multiple=mesh.tp.size(),
        slice_len=recompute.layer_chunk_size,
    )
    return cp, cp.attend_linear if model_config.linear_attention else cp.attend


def data():
    """Tokens and labels [B, S]; the sequences carry unequal numbers of labels."""
    tokens = torch.randint(
        VOCABULARY, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(SEED)
    )
    labels = tokens[:, 1:].clone()
    for row in range(BATCH):
        labels[row, LENGTH - 5 * row :] = -100
    return tokens[:, :-1], labels


@dataclass
class Step:
    """The loss, weights and gradients of one step, in full."""

    loss: float
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]


def whole_step(model_config, model=None):
    """One process, plain modules; with the weights of ``model`` where it is given."""
    model = model or plain(model_config)
    tokens, labels = data()
    loss = cross_entropy_sum(model(tokens), labels)[0] / (labels != -100).sum()
    loss.backward()
    return Step(loss.item(), weights_of(model), gradients_of(model))


def own_batch(mesh, cp):
    """This rank's tokens and labels [B / dp, T]."""
    tokens, labels = (part.chunk(mesh.dp.size())[mesh.dp.get_local_rank()] for part in data())
    return cp.shard(tokens, 1), cp.shard(labels, 1, pad_value=-100)


def split_step(
    mesh,
    model_config,
    recompute=PLAIN,
    data_parallel=ZERO3,
    *,
    local_mean=False,
    method="zigzag",
    hybrid=RING,
    bf16=False,
):
    """The same on this mesh.

    ``local_mean`` divides by this rank's own number of labels, which is wrong.
    """
    model, cp = build(mesh, model_config, recompute, data_parallel, method, hybrid, bf16=bf16)
    weights = weights_of(model)
    tokens, labels = own_batch(mesh, cp)
    valid = (labels != -100).sum() * mesh.dp_cp.size() if local_mean else (data()[1] != -100).sum()
    objective = NextToken(cp, mesh.device, recompute.loss_chunk_size)
    loss = objective.loss_sum(model, {"tokens": tokens, "labels": labels}) / valid
    loss.backward()
    finish_gradients(model, mesh.dp_cp, data_parallel.strategy)
    return model, Step(summed(loss, mesh), weights, gradients_of(model))


def summed(loss, mesh):
    """The sum of the ranks' parts of a loss; collective."""
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.dp_cp.get_group())
    return total.item()


def partly_redistributed(redistribute):
    """A fault: gradients of what is whole on every tp rank are left as each rank's part."""

    def redistributed(tensor, *args, placements, **kwargs):
        if tensor.placements == (Partial(),) and tuple(placements) == (Replicate(),):
            return DTensor.from_local(
                tensor.to_local(), tensor.device_mesh, placements, run_check=False
            )
        return redistribute(tensor, *args, placements=placements, **kwargs)

    return redistributed


def difference(got, want):
    """Largest difference of any element of any gradient."""
    assert got.gradients.keys() == want.gradients.keys()
    return max(
        (got.gradients[name] - want.gradients[name]).abs().max().item() for name in want.gradients
    )


def check_step(got, want, case=None, bound=GRADIENT):
    """Assert that a step over ranks is that of one process; ``bound`` is on its gradients."""
    assert abs(got.loss - want.loss) < LOSS, case
    assert difference(got, want) < bound, case
    assert equal(got.weights, want.weights), case
