import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from model.attention import sdpa
from model.base import initial_weight
from model.config import ModelConfig
from model.llama import Llama
from model.registry import flops_per_token, num_parameters
from tests.ranks import run_ranks

TINY = ModelConfig(num_layers=2, hidden_size=32, num_attention_heads=4, num_query_groups=2, vocab_size=40)
TIED = dataclasses.replace(TINY, untie_embeddings_and_output_weights=False)


def built(config=TINY, seed=1, **kwargs):
    model = Llama(config, **kwargs)
    model.init_weights(seed)
    return model


def tokens(batch=2, length=12, vocabulary=40):
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("field", "value", "fix"),
    [
        ("num_layers", 0, "1 or more"),
        ("vocab_size", 0, "1 or more"),
        ("num_query_groups", 0, "1 or more"),
        ("rotary_base", 0.0, "above 0"),
        ("norm_epsilon", -1e-5, "above 0"),
        ("init_method_std", float("nan"), "above 0"),
        ("hidden_size", 100, "num_attention_heads 8"),
        ("hidden_size", 24, "3 wide"),
        ("kv_channels", 15, "15 wide"),
        ("num_query_groups", 3, "must divide num_attention_heads 8"),
    ],
)
def test_config_names_field_value_and_fix(field, value, fix):
    with pytest.raises(ValueError, match=f"^{field} is {value}; .*{fix}"):
        ModelConfig(**{field: value})


def test_config_defaults():
    config = ModelConfig(hidden_size=256, num_attention_heads=8)
    assert (config.head_dim, config.query_groups, config.ffn_size) == (32, 8, 704)
    assert ModelConfig(hidden_size=100, num_attention_heads=8, kv_channels=16).head_dim == 16
    with pytest.raises(ValueError, match="vocab_size"):
        Llama(config)


@pytest.mark.parametrize("config", [TINY, TIED])
def test_logits_and_hidden_states(config):
    model = built(config)
    logits = model(tokens())
    assert logits.shape == (2, 12, 40)
    assert torch.equal(logits, model.project(model.hidden(tokens())))
    assert torch.equal(logits, model(tokens(), torch.arange(12)))


def test_no_token_sees_a_later_one():
    model, changed = built(), tokens()
    changed[:, 7] = (changed[:, 7] + 1) % 40
    before, after = model(tokens()), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


def test_explicit_positions_make_the_order_of_tokens_free():
    """What a context-parallel layout relies on: permuted tokens with their positions and a mask to match."""
    config, order = TINY, torch.randperm(12, generator=torch.Generator().manual_seed(0))
    back = order.argsort()

    def attend(q, k, v):
        return sdpa(*(x[:, back] for x in (q, k, v)))[:, order]

    expected = built()(tokens())
    permuted = built(config, attend=attend)(tokens()[:, order], order)
    torch.testing.assert_close(permuted[:, back], expected, rtol=0, atol=1e-5)
    wrong = built(config, attend=attend)(tokens()[:, order])[:, back]
    assert (wrong - expected).abs().max() > 1e-3  # the bound sees positions that were not given


def test_initial_weights_are_a_function_of_the_seed_alone():
    torch.manual_seed(0)
    one = built(seed=5).state_dict()
    torch.manual_seed(1)
    torch.randn(7)
    with torch.device("meta"):
        model = Llama(TINY)
    model.to_empty(device="cpu")
    model.init_weights(5)
    other = model.state_dict()
    assert all(torch.equal(one[name], other[name]) for name in one)
    deeper = built(dataclasses.replace(TINY, num_layers=3), seed=5).state_dict()
    assert torch.equal(one["layers.1.attention.wq.weight"], deeper["layers.1.attention.wq.weight"])
    assert not torch.equal(one["embedding.weight"], built(seed=6).embedding.weight)
    matrices = [one[f"layers.{i}.attention.{w}.weight"] for i in (0, 1) for w in ("wk", "wv")]
    assert not any(torch.equal(a, b) for i, a in enumerate(matrices) for b in matrices[:i])
    name = "layers.0.mlp.up.weight"
    assert torch.equal(one[name], initial_weight(TINY, name, one[name].shape, 5))


def test_initial_weights_have_their_deviations():
    config = ModelConfig(num_layers=8, hidden_size=128, vocab_size=300, init_method_std=0.05)
    for name, weight in built(config).named_parameters():
        if "norm" in name:
            assert (weight == 1).all()
            continue
        expected = 0.05 / 4 if name.endswith(("wo.weight", "down.weight")) else 0.05
        assert weight.std().item() == pytest.approx(expected, rel=0.03), name
        assert abs(weight.mean().item()) < 4 * expected / weight.numel() ** 0.5, name


def test_initial_loss_is_that_of_a_uniform_guess():
    config = ModelConfig(vocab_size=500)
    loss = nn.functional.cross_entropy(built(config)(tokens(vocabulary=500)).flatten(0, 1), tokens().flatten())
    assert loss.item() == pytest.approx(torch.tensor(500.0).log().item(), abs=0.15)


def test_weights_on_the_meta_device_are_not_initialised_silently():
    with torch.device("meta"):
        model = Llama(TINY)
    with pytest.raises(ValueError, match="to_empty"):
        model.init_weights(0)


@pytest.mark.parametrize("config", [TINY, TIED, dataclasses.replace(TINY, kv_channels=10, ffn_hidden_size=50)])
def test_number_of_parameters(config):
    assert num_parameters(config) == sum(p.numel() for p in Llama(config).parameters())


def test_known_sizes():
    """LLaMA-2-7B and LLaMA-3-8B have 6,738,415,616 and 8,030,261,248 parameters on Hugging Face."""
    llama2 = ModelConfig(
        num_layers=32, hidden_size=4096, ffn_hidden_size=11008, num_attention_heads=32, vocab_size=32000
    )
    assert num_parameters(llama2) == 6_738_415_616
    llama3 = dataclasses.replace(llama2, ffn_hidden_size=14336, num_query_groups=8, vocab_size=128256)
    assert num_parameters(llama3) == 8_030_261_248


@pytest.mark.parametrize("config", [TINY, TIED])
def test_flops_match_those_torch_counts(config):
    """Attention written as matrix products, so that torch counts the full square, forward and backward."""

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)))
        return ((q @ k.transpose(2, 3)).softmax(-1) @ v).transpose(1, 2)

    model = built(config, attend=attend)
    with FlopCounterMode(display=False) as counter:
        model(tokens()).sum().backward()
    full_mask = flops_per_token(config, 12) + 12 * 2 * 32 * 12 / 2
    assert counter.get_total_flops() == 2 * 12 * full_mask


def test_every_parameter_gets_a_gradient_in_bf16():
    model = built().bfloat16()
    logits = model(tokens())
    assert logits.dtype == torch.bfloat16
    exact = built()(tokens())
    assert (logits - exact).norm() < 0.02 * exact.norm()
    logits.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_recomputed_and_compiled_layers_change_nothing():
    """Layers take a plain object beside the tensor: activation checkpointing and torch.compile must accept it."""
    plain, recomputed, compiled = built(), built(), built()
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
    model, reference = built(TIED), built(TIED).bfloat16()
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

    expected = losses_and_gradients(built().double(), "cpu")
    for got, want in zip(losses_and_gradients(built().to("cuda", dtype), "cuda"), expected, strict=True):
        assert (got.cpu().double() - want).norm() < bound * want.norm()
