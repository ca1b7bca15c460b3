"""A tiny model, sharded or not, and its checkpoints, for the tests of these.

Weights and gradients in full.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from train.checkpoint.api import save_checkpoint
from train.checkpoint.manifest import Manifest, read_manifest, write_manifest

VOCABULARY, WIDTH = (
    7,
    6,
)  # neither is divisible by 4 ranks: shards are uneven, and one rank's are empty
ARCHITECTURE = {"num_layers": 2, "sizes": (VOCABULARY, WIDTH)}


class Tiny(nn.Module):
    def __init__(self, tied=False):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)  # (B, S, D)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * self.scale[0]
        return self.head(x)  # (B, S, V)


def build(seed, sharded, tied=False):
    torch.manual_seed(seed)
    model = Tiny(tied)
    if sharded:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def loss_of(model, step):
    rank = dist.get_rank() if dist.is_initialized() else 0
    tokens = torch.randint(
        VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(100 * step + rank)
    )
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def train(model, optimizer, steps):
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_tensors(model, optimizer):
    """Everything that training depends on, by name and in full."""
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, parameter in model.named_parameters():
        named |= {f"{name}/{key}": value for key, value in optimizer.state[parameter].items()}
    return {name: full(value) for name, value in named.items()}


def equal(left, right):
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(left[name], right[name])
        for name in left
    )


def save(folder, iteration, model, optimizer):
    extra = {"consumed_samples": 4 * iteration}
    return save_checkpoint(
        folder, iteration, model, optimizer, architecture=ARCHITECTURE, extra=extra
    )


def two_checkpoints(folder):
    """Iterations 1 and 2 of a model in this process, without a process group."""
    model, optimizer = build(0, sharded=False)
    for iteration in (1, 2):
        train(model, optimizer, range(iteration, iteration + 1))
        save(folder, iteration, model, optimizer)
    return model, optimizer


def flip_a_byte(folder, name="__0_0.distcp"):
    path = folder / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite_manifest(folder, **changes):
    """Forge a manifest whose checksums are right."""
    write_manifest(folder, Manifest(**{**vars(read_manifest(folder)), **changes}))


def full(value):
    """A copy of its own; collective where the value is shared."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def weights_of(model):
    return {name: full(p) for name, p in model.named_parameters()}


def gradients_of(model):
    """The gradients, in full, of the parameters that have one."""
    return {name: full(p.grad) for name, p in model.named_parameters() if p.grad is not None}
