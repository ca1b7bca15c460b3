"""Training steps of one LLaMA by this project and by others, in one process, on the same tokens.

Everyone has the same shapes, the same micro-batches, the mean loss over all tokens, clipping to norm 1 and torch's
fused AdamW in float32; what differs is the package's own model and loss. The weights are each package's own draw.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pretrain_gpt
from bench.rounds import turns
from data.loader import batches
from model.config import ModelConfig
from model.hf import config_to_hf
from tools.training import Records, trainer_of
from train.batches import summed
from train.optim import reduce_and_clip

Step = Callable[[], float]
"""One optimizer step on fixed tokens -> its loss."""


@contextmanager
def steps_of(packages: Sequence[str], config: Path, data: Path, flags: Sequence[str]) -> Iterator[dict[str, Step]]:
    """Yield a step of ``pretrain_gpt.py --config`` in this process, as "longmesh", and one of each package.

    Args:
        data: prefix of the text, with its tokenizer beside it.
        flags: more of ours.
    """
    own = ["--config", str(config), "--save", str(data.parent / "run")]
    own += ["--data-path", str(data), "--tokenizer-model", f"{data}.model"]
    with trainer_of(pretrain_gpt, [*own, "--context-parallel-size", "1", *flags], Records()) as trainer:
        mesh = trainer.run.mesh
        step = next(batches(trainer.train_data, trainer.batches.batching, 0))
        local = [trainer.run.objective.local(batch) for batch in step]
        valid = sum(int(batch["count"]) for batch in local)

        def ours() -> float:
            loss = summed(trainer.runner.forward_backward(local, valid), mesh)
            mean, _ = reduce_and_clip(trainer.runner, mesh.dp_cp, trainer.run.config.optimizer.clip_grad, loss)
            trainer.optimizer.step()
            trainer.optimizer.zero_grad(set_to_none=True)
            return mean

        sequences = [(batch["tokens"], batch["labels"]) for batch in local]
        with ExitStack() as given_back:
            length = len(sequences[0][0][0])
            made = {name: MODELS[name](trainer.run.config.model, length, given_back) for name in packages}
            yield {"longmesh": ours} | {name: _step(model, sequences) for name, model in made.items()}


def timed(steps: dict[str, Step], repeats: int, settle: int = 2) -> dict[str, list[float]]:
    """Take turns, and return each one's seconds, without its first ``settle`` steps."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for name in turns([*steps], repeats + settle):
        start = time.perf_counter()
        steps[name]()
        seconds[name].append(time.perf_counter() - start)
    return {name: found[settle:] for name, found in seconds.items()}


def _step(model: nn.Module, sequences: Sequence[tuple[Tensor, Tensor]]) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        total = 0.0
        for tokens, labels in sequences:
            loss = model(tokens, labels) / len(sequences)
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


class _WithLoss(nn.Module):
    """A model of (tokens, labels) ``[B, S]`` whose output is the mean loss."""

    def __init__(self, model: nn.Module, logits_of: Callable[[Any], Tensor] = lambda out: out) -> None:
        super().__init__()
        self.model, self.logits_of = model, logits_of

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.logits_of(self.model(tokens))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=-100)


def _transformers(model: ModelConfig, length: int, _: ExitStack) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_dict(config_to_hf(model, {"max_position_embeddings": length}) | {"use_cache": False})
    return _WithLoss(LlamaForCausalLM(config).train(), lambda out: out.logits)


def _x_transformers(model: ModelConfig, length: int, _: ExitStack) -> nn.Module:
    from x_transformers import Decoder, TransformerWrapper

    on = ("attn_flash", "rotary_pos_emb", "use_rmsnorm", "ff_swish", "ff_glu", "ff_no_bias")
    heads = {"heads": model.num_attention_heads, "attn_dim_head": model.head_dim, "attn_kv_heads": model.query_groups}
    sizes = {"dim": model.hidden_size, "depth": model.num_layers, "ff_mult": model.ffn_size / model.hidden_size}
    vocabulary = {"num_tokens": model.vocabulary, "tie_embedding": not model.untie_embeddings_and_output_weights}
    decoder = Decoder(**sizes, **heads, **dict.fromkeys(on, True))
    return _WithLoss(TransformerWrapper(max_seq_len=length, attn_layers=decoder, use_abs_pos_emb=False, **vocabulary))


class _Megatron(nn.Module):
    """megatron-core's GPTModel with a LLaMA's layers, of torch's modules: Transformer Engine and apex need a GPU."""

    def __init__(self, model: ModelConfig, length: int) -> None:
        super().__init__()
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer import TransformerConfig

        names = ("num_layers", "hidden_size", "num_attention_heads")
        sizes = {name: getattr(model, name) for name in names} | {"num_query_groups": model.query_groups}
        dense = dict.fromkeys(("hidden_dropout", "attention_dropout"), 0.0) | {"ffn_hidden_size": model.ffn_size}
        fused = ("bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion", "persist_layer_norm")
        layer = {"normalization": "RMSNorm", "gated_linear_unit": True, "activation_func": F.silu}
        config = TransformerConfig(
            **sizes, **dense, **layer, **dict.fromkeys(fused, False), add_bias_linear=False, use_cpu_initialization=True
        )
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        tied = not model.untie_embeddings_and_output_weights
        more = {"position_embedding_type": "rope", "share_embeddings_and_output_weights": tied}
        self.model = GPTModel(config, spec, model.vocabulary, length, **more)
        self.register_buffer("hidden", torch.ones(1, 1, length, length, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        valid = labels != -100
        losses = self.model(tokens, positions, self.hidden, labels=labels.where(valid, 0))
        return losses.where(valid, 0).sum() / valid.sum()


def _megatron(model: ModelConfig, length: int, given_back: ExitStack) -> nn.Module:
    """Make it without a GPU, though its code asks for the current one and forks its random states for dropout."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    no_states = SimpleNamespace(fork=lambda *_: nullcontext())
    given_back.enter_context(patch.object(torch.cuda, "current_device", lambda: "cpu"))
    given_back.enter_context(patch.object(random, "_CUDA_RNG_STATE_TRACKER", no_states))
    given_back.enter_context(patch.object(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True))
    parallel_state.initialize_model_parallel()
    given_back.callback(parallel_state.destroy_model_parallel)
    return _Megatron(model, length)


MODELS: dict[str, Callable[[ModelConfig, int, ExitStack], nn.Module]] = {
    "transformers": _transformers,
    "x-transformers": _x_transformers,
    "megatron-core": _megatron,
}
