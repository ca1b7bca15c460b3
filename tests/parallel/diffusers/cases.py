"""Tiny random models of diffusers with inputs: 45 image tokens or so, padded text, a batch of 2."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from tests.parallel.diffusers.draws import HEADS
from tests.parallel.diffusers.image_models import (
    dit,
    dit_inputs,
    flux,
    flux2,
    flux2_inputs,
    flux_inputs,
    mochi,
    mochi_inputs,
    pixart,
    pixart_inputs,
    qwen,
    qwen_inputs,
    sd3,
    sd3_inputs,
)
from tests.parallel.diffusers.video_models import (
    cogvideox,
    cogvideox_inputs,
    hunyuan,
    hunyuan15,
    hunyuan15_inputs,
    hunyuan_inputs,
    ltx,
    ltx2,
    ltx2_inputs,
    ltx_inputs,
    ltx_time_per_token,
    vace,
    vace_inputs,
    wan,
    wan_i2v_inputs,
    wan_inputs,
    wan_time_per_token,
)

MIN_NORM = 1e-3
"""Smallest norm that a gradient's error is relative to, as a share of all gradients' norm."""


@dataclass(frozen=True)
class Case:
    """A model and inputs of its forward."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, Any]]


def model_of(case: Case, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The case's model with random weights, the zero-initialised ones included."""
    torch.manual_seed(0)
    model = case.build().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.add_(noise, alpha=0.1)
    return model.to(dtype)


def inputs_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """The case's inputs, floating-point ones in ``dtype``."""
    torch.manual_seed(1)

    def cast(x: Tensor) -> Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return tree_map_only(Tensor, cast, case.inputs())


def loss_of(model: nn.Module, inputs: Mapping[str, Any], sum_only: bool = False) -> Tensor:
    """A loss in which every element of the prediction has another weight; its mean, or sum."""
    return loss_of_predictions(model(**inputs, return_dict=False), sum_only)


def loss_of_predictions(predictions: Sequence[Tensor], sum_only: bool = False) -> Tensor:
    """The sum of the losses of predictions; LTX-2 predicts sound, too."""
    losses = []
    for prediction in predictions:
        count = torch.arange(prediction.numel(), device=prediction.device, dtype=torch.float64)
        target = (0.37 * count).sin().view(prediction.shape).to(prediction.dtype)
        squares = (prediction - target) ** 2
        losses.append(squares.sum() if sum_only else squares.mean())
    return torch.stack(losses).sum()


def gradients(
    loss: Tensor, model: nn.Module, group: dist.ProcessGroup | None = None
) -> list[Tensor]:
    """The loss and every gradient, their mean over the ranks of a group; 0 where there is none."""
    parameters = [x for x in model.parameters() if x.requires_grad]
    computed = torch.autograd.grad(loss, parameters, allow_unused=True)
    results = [loss.detach().clone()]
    for parameter, gradient in zip(parameters, computed, strict=True):
        results.append(torch.zeros_like(parameter) if gradient is None else gradient.clone())
    if group is not None:
        for x in results:
            dist.all_reduce(x, group=group)
            x /= dist.get_world_size(group)
    return results


def errors(
    mine: list[Tensor], expected: list[Tensor], model: nn.Module, bound: float
) -> dict[str, float]:
    """The error of each tensor in the 2-norm, of those over the bound.

    It is relative to the tensor's own norm, or to 1e-3 of all gradients' together: the gradient of
    a key's bias is 0 in exact arithmetic.
    """
    names = ["loss", *(name for name, x in model.named_parameters() if x.requires_grad)]
    min_norm = MIN_NORM * torch.stack([x.double().norm() for x in expected[1:]]).norm()
    wrong = {}
    for name, x, reference in zip(names, mine, expected, strict=True):
        difference = (x.double() - reference.double()).norm()
        error = float(difference / reference.double().norm().clamp(min=min_norm))
        if not error < bound:
            wrong[name] = error
    return wrong


CASES = {
    "wan": Case(wan, wan_inputs),
    "wan, time per token": Case(wan, wan_time_per_token),
    "wan, image to video": Case(
        lambda: wan(image_dim=10, added_kv_proj_dim=HEADS * 12), wan_i2v_inputs
    ),
    "wan vace": Case(vace, vace_inputs),
    "ltx": Case(ltx, ltx_inputs),
    "ltx, time per token": Case(ltx, ltx_time_per_token),
    "ltx 2": Case(ltx2, ltx2_inputs),
    "ltx 2, time per token": Case(lambda: ltx2("split"), lambda: ltx2_inputs(True)),
    "hunyuan": Case(hunyuan, hunyuan_inputs),
    "hunyuan, first frame": Case(
        lambda: hunyuan(image_condition_type="token_replace"), hunyuan_inputs
    ),
    "hunyuan 1.5": Case(hunyuan15, hunyuan15_inputs),
    "cogvideox": Case(cogvideox, cogvideox_inputs),
    "flux": Case(flux, flux_inputs),
    "flux, long text": Case(flux, lambda: flux_inputs(9, 40)),
    "flux, few tokens": Case(flux, lambda: flux_inputs(2, 1)),
    "flux 2": Case(flux2, flux2_inputs),
    "qwen": Case(qwen, qwen_inputs),
    "sd3": Case(sd3, sd3_inputs),
    "mochi": Case(mochi, mochi_inputs),
    "pixart": Case(pixart, pixart_inputs),
    "dit": Case(dit, dit_inputs),
}
