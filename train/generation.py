"""Text generation with a trained run on a mesh: a prefill under context parallelism, then decoding.

The prefill is an ordinary forward pass under any context-parallel method, in which each rank caches
the keys and values of its own tokens. In decoding, all context-parallel ranks read each new token,
attend to their share of the cache, and merge the results by their log-sum-exp (LSE); they cache the
new tokens in turn. Recurrent layers have the same states on all of them. Pipeline stages pass
hidden states on, and the last one chooses the next token.

Shapes: B prompts, T new tokens of this rank, C hidden size, V vocabulary entries.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from kernels.blocks import merged
from kernels.cache import States
from model.generate import Choose, DivergedError, Draw, Read, at_ends, check_lengths, write
from model.parts.attention import Attention, HybridAttention, LinearCore
from model.parts.delta import DeltaAttention
from model.registry import architecture_of, build_model
from parallel.context.config import HybridLayout
from parallel.mesh import SIZES, Mesh, distributed_mesh
from parallel.pipeline.stages import stage_layers
from runtime.processes import launched_world_size
from runtime.together import raise_together
from train.checkpoint.api import CheckpointConfig, load_model
from train.checkpoint.manifest import read_manifest
from train.checkpoint.search import checkpoint_of
from train.config.derive import config_as_trained, fitted
from train.config.entries import Config
from train.config.finalize import Method, with_method
from train.config.flags import ConfigError, config_file
from train.config.language import load_config
from train.config.sizes import validate_entries
from train.context_attention import Context, context_of

MAX_CONTEXTS = 16
"""Maximum number of prompt lengths whose attention plans are cached."""


@contextmanager
def opened(
    run: Path,
    ckpt_step: int | None = None,
    *,
    context_parallel_method: str | None = None,
    replicas: bool = False,
    choose: Method | None = None,
    dtype: torch.dtype | None = None,
    **sizes: int,
) -> Iterator["Writer"]:
    """Join the launched processes and yield a writer with a run's weights; collective.

    Args:
        ckpt_step: iteration of the checkpoint; by default the newest complete one.
        context_parallel_method: by default the run's if the context-parallel size is the same,
            else that of ``train.config.derive.default_method``.
        replicas: allow a multiple of the mesh's number of processes; each replica of the model
            writes its own texts.
        choose: function that chooses the method if it is "auto".
        dtype: dtype of the weights; by default float32, or bfloat16 on cuda if the run trained in
            it or its model was imported.
        sizes: sizes of the mesh, named as in ``parallel.mesh.SIZES``; by default 1.

    Raises UserError if the folder holds no run or checkpoint, or if the processes or the model do
    not fit the mesh.
    """
    config = load_config(config_file(run))
    num_processes = launched_world_size()
    sizes = dict.fromkeys(SIZES, 1) | sizes
    pp, cp, tp = (sizes[name] for name in SIZES)
    mesh_size = cp * tp * pp
    if num_processes % mesh_size or (num_processes > mesh_size and not replicas):
        fix = "a multiple of that" if replicas else "change the sizes"
        raise ConfigError(
            f"context_parallel_size {cp} x tensor_model_parallel_size {tp} x "
            f"pipeline_model_parallel_size {pp} does not fit {num_processes} started processes; "
            f"start {mesh_size}, or {fix}"
        )
    config = fitted(config, num_processes, context_parallel_method, **sizes)
    with distributed_mesh(config.mesh) as mesh:
        yield Writer(config, mesh, checkpoint_of(run, ckpt_step), dtype, choose)


class Writer:
    """Writes text with a checkpoint's weights on a mesh; all ranks get the same text."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        folder: Path,
        dtype: torch.dtype | None = None,
        choose: Method | None = None,
    ) -> None:
        """Load a checkpoint; collective; ``dtype`` and ``choose`` are those of `opened`.

        Raises UserError if the checkpoint does not fit the mesh.
        """
        with raise_together():
            manifest = read_manifest(folder)
            vocab_size = config.model.vocab_size or manifest.architecture["vocab_size"]
            for num_entries in (vocab_size, config.model.position_table):
                if num_entries:
                    validate_entries(num_entries, mesh.tp.size())
            config = config_as_trained(config.updated(vocab_size=vocab_size), manifest.extra)
        if choose is not None:
            # Drop --load: ``with_method`` could take the method of the run that this one loaded.
            config = replace(config, checkpoint=CheckpointConfig())
            config = with_method(config, dist.get_world_size(), choose)
        if dtype is None:
            trained_in_bf16 = mesh.device.type == "cuda" and config.train.bf16
            dtype = torch.bfloat16 if trained_in_bf16 else torch.float32
        # With this layout a hybrid's softmax layers do not exchange tokens.
        layout: HybridLayout = "contiguous"
        if config.context.context_parallel_layout == "zigzag":
            layout = "zigzag"
        # The attention backend is chosen for the dtype used here, not for the training's.
        config = config.updated(hybrid_softmax_layout=layout, bf16=dtype == torch.bfloat16)

        self.config = config
        self.folder = folder
        self.iteration = manifest.iteration
        self._mesh = mesh
        self.replica = mesh.dp.get_local_rank()
        """Index of this rank's copy of the model; each copy writes its own texts."""
        self.replicas = mesh.dp.size()
        self.group = self._replica_group()
        """Process group of this copy's ranks, which write together; None if they are all ranks."""
        self._part = self._build_part(dtype)
        load_model(folder, self._part, architecture_of(config.model))
        self._contexts: dict[int, Context] = {}

    def _replica_group(self) -> dist.ProcessGroup | None:
        """Return the process group of this rank's copy of the model; collective."""
        if self.replicas == 1:
            return None
        mesh = self._mesh
        pp = mesh.pp.size()
        inner = mesh.cp.size() * mesh.tp.size()
        ranks = torch.arange(pp * self.replicas * inner).view(pp, self.replicas, inner)
        ranks_by_replica = ranks.transpose(0, 1).flatten(1)  # [replicas, pp * inner]
        timeout = timedelta(minutes=self.config.mesh.distributed_timeout_minutes)
        groups = [dist.new_group(members, timeout=timeout) for members in ranks_by_replica.tolist()]
        return groups[self.replica]

    def _build_part(self, dtype: torch.dtype) -> Any:
        """Build this rank's part of the model, with uninitialised weights."""
        mesh = self._mesh
        model = self.config.model
        with torch.device("meta"):
            part = build_model(model)
        layers_by_stage = stage_layers(self.config.pipeline, model.num_layers, mesh.pp.size())
        part.keep(layers_by_stage[mesh.pp.get_local_rank()])
        part.cast(dtype)
        if mesh.tp.size() > 1:
            # Imported here, so that a single process need not wait for DTensor.
            from parallel.tensor.split import split_model

            split_model(part, mesh.tp)
        return part.to_empty(device=mesh.device)

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raise UserError if ``write`` would refuse the prompts or their lengths."""
        model = self.config.model
        check_lengths(prompts, max_new_tokens, model.position_table)
        unknown = []
        for prompt in prompts:
            unknown += [token for token in prompt if not 0 <= token < model.vocabulary]
        if unknown:
            raise ConfigError(
                f"a prompt has token {min(unknown)}, but the model has only tokens 0 to "
                f"{model.vocabulary - 1}; encode prompts with the model's own tokenizer"
            )

    @torch.no_grad()
    def write(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop: Sequence[int] = (),
        seed: int = 1234,
    ) -> list[list[int]]:
        """Continue prompts of any lengths, the same on all ranks; collective.

        Returns:
            The new tokens of each prompt: those before the first of ``stop``, at most
            max_new_tokens; the same on every rank.

        Raises:
            UserError: a prompt is empty or has an unknown token, a setting is out of range, or
                there are more tokens than learned positions.
            DivergedError: the model overflows.
        """
        model = self.config.model
        device = self._mesh.device
        generator = torch.Generator(device).manual_seed(seed)
        draw = Draw(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        self.check(prompts, max_new_tokens)
        length = max(map(len, prompts), default=0)
        # All ranks and tokens need one rope length, since cached keys are rotated only once.
        self._part.config = model.with_rope_length(length + max_new_tokens)
        return write(
            lambda: self.begin(length, draw),
            prompts,
            max_new_tokens,
            stop,
            device,
            alike=model.recurrent,
        )

    def begin(self, length: int, draw: Choose) -> Read:
        """Return a function that reads prompts padded to ``length``, then new tokens.

        Each call reads the tokens of one turn, and returns the next tokens that ``draw`` chooses.
        """
        cp = self._mesh.cp
        cp_size = cp.size()
        num_layers = self.config.model.num_layers
        turns = count()

        def sum_over_cp(x: Tensor) -> Tensor:
            dist.all_reduce(x, group=cp.get_group())
            return x

        states = States(num_layers)
        if cp_size > 1:
            states = States(num_layers, self._merge, sum_over_cp)

        def read(tokens: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
            turn = next(turns)
            is_prefill = turn == 0
            if is_prefill and cp_size > 1:
                tokens, positions = self._shard_prompts(tokens)
            else:
                tokens, positions = self._pad_for_tp(tokens, positions)
            caches = is_prefill or turn % cp_size == cp.get_local_rank()
            states.read(positions, ends, caches, shared=is_prefill and cp_size > 1)
            hidden = self._through_stages(tokens, positions, ends, states)
            return self._next_tokens(hidden, draw, len(ends), is_scattered=is_prefill)

        return read

    def _pad_for_tp(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Pad tokens [B, T] to a multiple of the number of tensor-parallel ranks."""
        missing = -tokens.shape[1] % self._mesh.tp.size()
        if not missing:
            return tokens, positions
        tokens = F.pad(tokens, (0, missing))
        steps = torch.arange(1, missing + 1, device=tokens.device)
        return tokens, torch.cat((positions, positions[:, -1:] + steps), 1)

    def _shard_prompts(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens [B, T] of prompts, with positions [1, T].

        Also sets the layers' attention to the context-parallel one for this length.
        """
        length = tokens.shape[1]
        padded_length = self._padded_length(length)
        if padded_length not in self._contexts:
            config = self.config.updated(seq_length=padded_length)
            oldest_length = next(iter(self._contexts), None)
            like = None if oldest_length is None else self._contexts[oldest_length]
            if len(self._contexts) == MAX_CONTEXTS and oldest_length is not None:
                del self._contexts[oldest_length]
            self._contexts[padded_length] = context_of(config, self._mesh.cp.get_group(), like)

        cp, attend = self._contexts[padded_length]
        softmax: Any = attend.softmax if isinstance(attend, HybridAttention) else attend
        linear: Any = attend.linear if isinstance(attend, HybridAttention) else attend
        delta: Any = cp.delta
        for layer in self._part.modules():
            if isinstance(layer, DeltaAttention):
                layer.attend = delta
                layer.convolve = cp.convolve
            elif isinstance(layer, Attention):
                layer.attend = softmax
            elif isinstance(layer, LinearCore):
                layer.attend = linear

        padded_tokens = F.pad(tokens, (0, padded_length - length))
        return cp.shard(padded_tokens, 1), cp.positions[None].to(tokens.device)

    def _padded_length(self, length: int) -> int:
        """Round a prompt's length up, so that few distinct lengths need an attention plan.

        This adds at most an eighth, except to very short prompts. Recurrent models' prompts are not
        padded, because their states must end at the last token.
        """
        model = self.config.model
        if model.recurrent:
            return length
        step = max(1 << max(length.bit_length() - 4, 0), 2 * self._mesh.cp.size())
        padded_length = -(-length // step) * step
        if model.position_table is not None:
            padded_length = min(padded_length, model.position_table)
        return padded_length

    def _merge(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge this rank's attention to its share of the cache with the other ranks' attention."""
        cp = self._mesh.cp
        local = torch.cat((out, lse[..., None]), -1)  # [..., D + 1]
        parts = [torch.empty_like(local) for _ in range(cp.size())]
        dist.all_gather(parts, local, group=cp.get_group())
        gathered = torch.stack(parts)  # [cp, ..., D + 1]
        return merged(gathered[..., :-1], gathered[..., -1])

    def _through_stages(
        self, tokens: Tensor, positions: Tensor, ends: Tensor, states: States
    ) -> Tensor | None:
        """Return the hidden states [B, C] of the prompts' last tokens; None before the last stage.

        They are zeros on ranks that do not hold the prompt's last token.
        """
        pp = self._mesh.pp
        stage = pp.get_local_rank()
        tp_size = self._mesh.tp.size()
        model = self.config.model

        # Later stages take hidden states, [B, T / tensor-parallel size, C].
        x = tokens
        if stage > 0:
            weight = next(self._part.parameters())
            shape = (*tokens.shape[:1], tokens.shape[1] // tp_size, model.hidden_size)
            x = torch.empty(shape, dtype=weight.dtype, device=tokens.device)
            dist.recv(x, group=pp.get_group(), group_src=stage - 1)

        def head(hidden: Any, _: Tensor) -> Tensor:
            local_hidden: Tensor = hidden.to_local() if tp_size > 1 else hidden
            last_hidden, is_local = at_ends(local_hidden, positions, ends)
            return last_hidden.where(is_local[:, None], 0)

        position_ids = positions
        if model.position_table is not None:
            position_ids = positions.clamp(max=model.position_table - 1)
        x = self._part(x, position_ids, head, states=states)
        if stage == pp.size() - 1:
            return x
        dist.send(x.contiguous(), group=pp.get_group(), group_dst=stage + 1)
        return None

    def _next_tokens(
        self, hidden: Tensor | None, draw: Choose, num_sequences: int, *, is_scattered: bool
    ) -> Tensor:
        """Return the next tokens [B] on every rank; the last stage's first rank chooses them.

        If ``is_scattered``, each sequence's hidden state is on one context-parallel rank only.
        """
        mesh = self._mesh
        tp = mesh.tp.size()
        source = (mesh.pp.size() - 1) * mesh.cp.size() * tp
        error = None
        ids = torch.full((num_sequences,), -1, device=mesh.device)
        if hidden is not None:
            if is_scattered and mesh.cp.size() > 1:
                dist.all_reduce(hidden, group=mesh.cp.get_group())
            weight = self._part.output_weight
            if tp == 1:
                logits = F.linear(hidden, weight)  # [B, V]
            else:
                from torch.distributed.tensor import DTensor, Replicate

                replicated = DTensor.from_local(hidden, mesh.tp, [Replicate()], run_check=False)
                logits = F.linear(replicated, weight).full_tensor()  # type: ignore[attr-defined]
            if dist.get_rank(self.group) == source:
                try:
                    ids = draw(hidden, logits)
                except DivergedError as caught:
                    error = caught
        dist.broadcast(ids, group=self.group, group_src=source)
        if (ids < 0).any():
            with raise_together(self.group):
                if error is not None:
                    raise error
        return ids
