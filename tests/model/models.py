"""Small models of every kind, their weights as training leaves them.

Here are also the texts that they write on one device.
"""

from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from kernels.cache import States
from model.dit import DiT
from model.dit_config import DiTConfig
from model.families import DEFAULT, FAMILIES
from model.generate import Draw, at_ends, check_lengths, write
from model.registry import build_model


def model_config(model_type=DEFAULT, **settings):
    """The settings of a family."""
    return FAMILIES[model_type].config(**settings)


def as_family(config, model_type, **changes):
    """The settings that another family shares with those of a model, and changes."""
    cls = FAMILIES[model_type].config
    shared = {entry.name for entry in fields(cls)} & {entry.name for entry in fields(config)} - {
        "model_type"
    }
    return cls(**{name: getattr(config, name) for name in shared} | changes)


FAMILY = {name: family.config(**family.tiny) for name, family in FAMILIES.items()}
"""A tiny model of each family, by its model_type."""
LLAMA, GPT, TRANSNORMER, LINEAR = KINDS = [
    FAMILY[name] for name in ("llama", "gpt", "transnormer", "linear_transformer")
]
GEMMA3, OLMO3, QWEN3_5, OLMO_HYBRID = (
    FAMILY[name] for name in ("gemma3", "olmo3", "qwen3_5", "olmo_hybrid")
)
HYBRID = replace(TRANSNORMER, softmax_every=2)
KDA = replace(QWEN3_5, linear_gate="per_channel", linear_num_key_heads=4)
DELTAS = [QWEN3_5, OLMO_HYBRID, KDA]
IMAGE = DiTConfig(
    num_layers=2,
    hidden_size=24,
    num_attention_heads=4,
    latent_shape=(3, 8, 8),
    num_classes=5,
    learn_sigma=True,
)
VIDEO = DiTConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    latent_shape=(3, 6, 4, 8),
    patch_size_t=2,
    num_classes=5,
)


def tied(config):
    return replace(config, untie_embeddings_and_output_weights=False)


def built(config, seed=1, attend=None):
    model = build_model(config, attend)
    model.init_weights(seed)
    return model


def used(config, attend=None, dtype=torch.float32):
    """Biases and norms as training leaves them: not 0 and 1."""
    model, generator = built(config, attend=attend), torch.Generator().manual_seed(2)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model.to(dtype)


def random_dit(config):
    """Build a DiT of weights far from zero, so that zeros hide no error."""
    model, generator = DiT(config), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.15, generator=generator)
    return model


def tokens(length=12, vocabulary=40):
    return torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def generate(model, prompts, max_new_tokens, *, stop=(), **settings):
    """Continue prompts of any lengths.

    Return the new tokens of each, up to the first of ``stop``, at most so many.

    Each token is read once: layers keep their states, those of softmax attention a KV cache.

    Raises:
        UserError: an empty prompt, a number out of range, or more tokens than a table of learned
            positions has.
        DivergedError: the model overflows.
    """
    draw = Draw(**settings)
    check_lengths(prompts, max_new_tokens, model.config.position_table)

    def begin():
        states = States(model.config.num_layers)

        def read(tokens, positions, ends):
            states.read(positions, ends)
            hidden, _ = at_ends(model.hidden(tokens, positions, states=states), positions, ends)
            return draw(hidden, model.project(hidden))

        return read

    device = next(model.parameters()).device
    return write(begin, prompts, max_new_tokens, stop, device, alike=model.config.recurrent)


@contextmanager
def without_float32(module):
    """Let a module of transformers' compute in float64 what it casts to float32."""
    torch_float64 = SimpleNamespace(
        **vars(torch) | {"float32": torch.float64, "float": torch.float64}
    )
    with (
        patch.object(module, "torch", torch_float64),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
    ):
        yield
