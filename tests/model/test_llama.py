import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from runtime.ranks import run_ranks
from tests.model.models import LLAMA, built, tied, tokens


def test_recomputed_and_compiled_layers_change_nothing():
    """Layers take a plain object beside the tensor: activation checkpointing and torch.compile must accept it."""
    plain, recomputed, compiled = built(LLAMA), built(LLAMA), built(LLAMA)
    for index, layer in enumerate(recomputed.layers):
        recomputed.layers[index] = Recomputed(layer)
    for layer in compiled.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    expected = gradients(plain)
    for model in (recomputed, compiled):
        for got, want in zip(gradients(model), expected, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


class Recomputed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args):
        return checkpoint(self.layer, *args, use_reentrant=False)


def gradients(model):
    model(tokens()).square().sum().backward()
    return [p.grad for p in model.parameters()]


def fully_sharded(rank, world_size):
    """Dtypes of a layer's input and rotary tables inside FSDP2's bf16 mixed precision, and a gradient's error."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtypes = []
    model, reference = built(tied(LLAMA)), built(tied(LLAMA)).bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        layer.attention.register_forward_pre_hook(lambda _, args: dtypes.append((args[0].dtype, args[1].cos.dtype)))
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model(tokens()).square().sum().backward()
    reference(tokens()).square().sum().backward()
    got, want = model.embedding.weight.grad.full_tensor(), reference.embedding.weight.grad
    return dtypes, ((got - want).norm() / want.norm()).item()


def test_fsdp_keeps_rotary_tables_in_float32():
    for dtypes, error in run_ranks(fully_sharded, 2):
        assert dtypes == [(torch.bfloat16, torch.float32)] * 2
        assert error < 0.01


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; make gpu-check runs it")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
def test_cuda_computes_what_the_cpu_does(dtype, bound):
    def losses_and_gradients(model, device):
        logits = model(tokens().to(device))
        logits.float().logsumexp(-1).sum().backward()
        return [logits, *(p.grad for p in model.parameters())]

    expected = losses_and_gradients(built(LLAMA).double(), "cpu")
    for got, want in zip(losses_and_gradients(built(LLAMA).to("cuda", dtype), "cuda"), expected, strict=True):
        assert (got.cpu().double() - want).norm() < bound * want.norm()
