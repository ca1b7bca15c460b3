"""Muon equals torch.optim.Muon and AdamW, takes the matrices that models state, and keeps state."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from model.decoder import Decoder
from model.registry import build_model
from runtime.errors import UserError
from tests.model.models import FAMILY, IMAGE, KDA, model_config
from train.config.flags import ConfigError
from train.config.language import parse_args, validate
from train.optimizers import muon
from train.optimizers.config import OptimizerConfig, build_optimizer, trained_weights

TINY = model_config(
    num_layers=2, hidden_size=24, num_attention_heads=4, num_query_groups=2, vocab_size=37
)
TORCH_SCALES = {"spectral": ("match_rms_adamw", 0.2), "shape_scaling": ("original", 1.0)}
"""torch's name of a scale, and the further factor with which it is the same."""
STEPS = 3


def settings(**changes):
    return OptimizerConfig(**{"optimizer": "muon", "lr": 0.02, "weight_decay": 0.1} | changes)


def tiny_model(dtype=torch.float32):
    model = Decoder(TINY)
    model.init_weights(0)
    return model.to(dtype)


def take_steps(model, optimizers, count=STEPS):
    """Take steps of falling rates with drawn gradients."""
    generator = torch.Generator().manual_seed(1)
    for number in range(count):
        for parameter in model.parameters():
            gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.grad = gradient.to(parameter.dtype)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = 0.02 / (number + 1)
            optimizer.step()


def trained(config, dtype=torch.float32):
    model = tiny_model(dtype)
    take_steps(model, [build_optimizer(config, model)])
    return dict(model.named_parameters())


def trained_by_torch(config, dtype=torch.float32):
    """Train with torch.optim.Muon for the layers' matrices, and AdamW for the others."""
    model = tiny_model(dtype)
    name, _ = TORCH_SCALES[config.muon_scale_mode]
    named = list(model.named_parameters())
    matrices = [p for n, p in named if n.startswith("layers.") and p.ndim == 2]
    embeddings = [p for n, p in named if not n.startswith("layers.") and p.ndim == 2]
    norms = [p for _, p in named if p.ndim < 2]
    by_muon = torch.optim.Muon(
        matrices,
        weight_decay=config.weight_decay,
        momentum=config.muon_momentum,
        nesterov=config.muon_use_nesterov,
        ns_steps=config.muon_num_ns_steps,
        adjust_lr_fn=name,
    )
    by_adamw = torch.optim.AdamW(
        [
            {"params": embeddings, "weight_decay": config.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        betas=(config.adam_beta1, config.adam_beta2),
        eps=config.adam_eps,
        fused=True,
    )
    take_steps(model, [by_muon, by_adamw])
    return dict(model.named_parameters())


def update_error(got, want):
    """Return the largest difference of a weight, relative to the norm of its update."""
    start = dict(tiny_model(torch.float64).named_parameters())
    errors = []
    for name, weight in want.items():
        update = weight.double() - start[name]
        errors.append(((got[name] - weight).double().norm() / update.norm()).item())
    return max(errors)


@pytest.mark.parametrize("scale", TORCH_SCALES)
@pytest.mark.parametrize("nesterov", [True, False])
def test_steps_are_those_of_torchs_muon_and_adamw(scale, nesterov, monkeypatch):
    config = settings(
        muon_scale_mode=scale,
        muon_extra_scale_factor=TORCH_SCALES[scale][1],
        muon_use_nesterov=nesterov,
        muon_fp32_matmul_prec="low",
        adam_beta1=0.8,
    )
    got, want = trained(config), trained_by_torch(config)
    assert all(torch.equal(got[name], want[name]) for name in want)

    # torch has no wider precision, so bfloat16 is taken out of it.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    high = replace(config, muon_fp32_matmul_prec="high")
    assert update_error(trained(high), trained_by_torch(config)) < 1e-6
    dtype = torch.float64
    assert update_error(trained(high, dtype), trained_by_torch(config, dtype)) < 1e-12


def test_a_scale_of_the_transposed_matrix_would_be_seen(monkeypatch):
    config = settings(
        muon_scale_mode="shape_scaling",
        muon_extra_scale_factor=1.0,
        muon_fp32_matmul_prec="low",
    )
    want = trained_by_torch(config)
    plain = muon.update_scale
    monkeypatch.setattr(muon, "update_scale", lambda chosen, shape: plain(chosen, shape[::-1]))
    assert update_error(trained(config), want) > 0.1


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (24, 24)])
def test_singular_values_come_near_1_and_vectors_stay(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    before, after = (
        torch.linalg.svd(matrix, False),
        torch.linalg.svdvals(muon.orthogonalize(matrix, 5)),
    )
    assert 0.6 < after.min() <= after.max() < 1.3
    rotated = before.U.T @ muon.orthogonalize(matrix, 5) @ before.Vh.T
    assert (rotated - rotated.diag().diag()).abs().max() < 1e-12
    assert muon.orthogonalize(torch.zeros(shape), 5).abs().max() == 0


MATRICES = {"wq", "wk", "wv", "wu", "wo", "gate", "up", "down", "narrow", "wide"}


@pytest.mark.parametrize("kind", [*FAMILY, "kda", "dit"])
def test_each_family_states_its_matrices(kind):
    """Neither embeddings, heads, norms, biases, taps and gates, nor modulations are among them."""
    config = {**FAMILY, "kda": KDA, "dit": IMAGE}[kind]
    build = muon_model(config)
    orthogonalized = set()
    for weight in trained_weights(build):
        *path, last, parameter = weight.name.split(".")
        if weight.is_hidden_matrix:
            assert (path[0], parameter, weight.parameter.ndim) == ("layers", "weight", 2)
            orthogonalized.add(last)
        elif path[0:1] == ["layers"] and weight.parameter.ndim == 2:
            assert last in {"wa", "wb"} or "adaLN_modulation" in path, weight.name
    assert {"wq", "wk", "wv", "wo", "up", "down"} <= orthogonalized <= MATRICES


def muon_model(config):
    from model.dit import DiT

    with torch.device("meta"):
        return DiT(config) if config is IMAGE else build_model(config)


def test_adapters_are_muons_only_by_choice_and_frozen_weights_are_nobodys():
    model = muon_model(replace(TINY, lora_rank=4))
    groups = build_optimizer(settings(muon_lora=True), model).param_groups
    assert [len(group["params"]) for group in groups] == [28, 0, 0]
    with pytest.raises(UserError, match=r"only adapters are trained, .* give --muon-lora"):
        build_optimizer(settings(), model)
    model.layers[0].mlp.up.weight.requires_grad_(True)
    groups = build_optimizer(settings(), model).param_groups
    assert [len(group["params"]) for group in groups] == [1, 28, 0]


@pytest.mark.parametrize(("dtype", "max_bytes"), [("fp32", 8), ("bf16", 4)])
def test_state_is_one_momentum_of_a_matrix_and_adamws_of_the_others(dtype, max_bytes):
    model = tiny_model()
    config = settings(exp_avg_dtype=dtype, exp_avg_sq_dtype=dtype)
    optimizer = build_optimizer(config, model)
    take_steps(model, [optimizer], 1)
    for weight in trained_weights(model):
        state = optimizer.state[weight.parameter]
        names = {key for key, value in state.items() if value.shape == weight.parameter.shape}
        assert names == set(config.spec.states_of(config, weight))
        assert len(names) == (1 if weight.is_hidden_matrix else 2)
        num_bytes = sum(state[name].nbytes for name in names)
        assert num_bytes == config.spec.state_bytes(config, weight) * weight.parameter.numel()
    assert config.spec.state_bytes(config) == max_bytes, "without a weight, the most of any"


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_other_weights_are_adamws_with_the_same_moments_and_matrices_keep_float32(dtype):
    moments = {"exp_avg_dtype": dtype, "exp_avg_sq_dtype": dtype}
    runs = {}
    for name, config in (
        ("muon", settings(**moments)),
        ("float32", settings()),
        ("adam", OptimizerConfig(lr=0.02, weight_decay=0.1, **moments)),
    ):
        model = Decoder(replace(TINY, hidden_size=64, vocab_size=256))
        model.init_weights(0)
        optimizer = build_optimizer(config, model, seed=5)
        take_steps(model, [optimizer])
        runs[name] = dict(model.named_parameters()), optimizer.state

    weights, state = runs["muon"]
    for weight in trained_weights(model):
        name = weight.name
        expected_weights, expected_state = runs["float32" if weight.is_hidden_matrix else "adam"]
        assert torch.equal(weights[name], expected_weights[name])
        expected = expected_state[expected_weights[name]]
        assert state[weights[name]].keys() == expected.keys()
        for key, value in state[weights[name]].items():
            assert value.dtype == expected[key].dtype
            assert torch.equal(value, expected[key])
    embedding = state[weights["embedding.weight"]]
    assert embedding["exp_avg"].dtype == (torch.bfloat16 if dtype == "bf16" else torch.uint8)


def test_a_rate_of_0_changes_the_state_alone_and_needs_no_other_rank(monkeypatch):
    monkeypatch.setattr(muon, "orthogonalize", lambda *_: pytest.fail("a matrix was computed"))
    model = tiny_model()
    optimizer = build_optimizer(settings(), model)
    before = [parameter.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    matrix = model.layers[0].mlp.up.weight
    assert torch.equal(optimizer.state[matrix]["momentum_buffer"], torch.full(matrix.shape, 0.05))


def test_matrices_without_a_gradient_are_seen():
    model = tiny_model()
    optimizer = build_optimizer(settings(), model)
    optimizer.step()
    assert not optimizer.state
    model.layers[0].mlp.up.weight.grad = torch.ones_like(model.layers[0].mlp.up.weight)
    with pytest.raises(RuntimeError, match="13 of 14 matrices have no gradient"):
        optimizer.step()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("muon_momentum", 1.0),
        ("muon_num_ns_steps", 0),
        ("muon_num_ns_steps", 100),
        ("muon_extra_scale_factor", 0.0),
        ("adam_beta1", 1.0),
    ],
)
def test_a_wrong_setting_is_named(field, value):
    with pytest.raises(ValueError, match=rf"^{field} is {value}; it must"):
        settings(**{field: value})


def test_a_run_that_muon_cannot_step_in_is_refused():
    flags = "--mock-data --vocab-size 64 --optimizer muon --device cuda".split()
    validate(parse_args([*flags, "--no-muon-use-nesterov"]), 1)
    for flag, message in (
        ("--optimizer-cpu-offload", "offload is set, but optimizer muon cannot step with its"),
        ("--optimizer-backend apex", "optimizer_backend is apex, but optimizer is muon"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(parse_args([*flags, *flag.split()]), 1)
    with pytest.raises(ValueError, match=r"^muon_lora is True, but it is a setting of optimizer m"):
        OptimizerConfig(muon_lora=True)


def test_models_without_stated_weights_take_adamw():
    model = nn.Linear(3, 2)
    matrices, *_ = build_optimizer(settings(), model).param_groups
    assert matrices["params"] == []
