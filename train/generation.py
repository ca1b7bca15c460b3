"""Text from a trained run over a mesh: prompts are read under context parallelism, then one token
at a time.

Reading the prompts is an ordinary forward under any method, whose ranks keep the keys and values of
their own tokens. Afterwards all context-parallel ranks read each new token, attend to the rows that
they keep, and merge the results; they keep the new rows in turn. States after the prompts are the
same on all of them. Pipeline stages hand hidden states on, and the last one draws.

Shapes: B prompts, T new tokens of this rank, C width of the residual stream, V vocabulary entries.
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
from model.parts.attention import Attention, LinearCore
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

MOST_CONTEXTS = 16
"""Lengths of prompts whose plans are kept."""


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
    """Join the launched processes and yield what writes with the weights of a run's folder;
    collective.

    Args:
        ckpt_step: iteration of the checkpoint; by default the newest whole one.
        context_parallel_method: by default the run's own on as many ranks, else striped; auto is
            left to ``choose``.
        replicas: let several times as many processes write, each replica of the model its own
            texts.
        choose: chooses the method for auto.
        dtype: of the weights; by default float32, and bfloat16 on cuda for a run in it or an
            imported model.
        sizes: those of the mesh, named as in ``parallel.mesh.SIZES``; by default 1.

    Raises UserError: the folder holds no run or checkpoint, or the processes or the model do not
    fit the mesh.
    """
    config, processes = load_config(config_file(run)), launched_world_size()
    sizes = dict.fromkeys(SIZES, 1) | sizes
    pp, cp, tp = (sizes[name] for name in SIZES)
    if processes % (cp * tp * pp) or (processes > cp * tp * pp and not replicas):
        fix = "a multiple of it" if replicas else "all of them write the same text"
        raise ConfigError(
            f"context_parallel_size {cp} x tensor_model_parallel_size {tp} x pipeline_model_parallel_size {pp} is not "
            f"the {processes} processes started; {fix}: start {cp * tp * pp}"
        )
    config = fitted(config, processes, context_parallel_method, **sizes)
    with distributed_mesh(config.mesh) as joined:
        yield Writer(config, joined, checkpoint_of(run, ckpt_step), dtype, choose)


class Writer:
    """The weights of a checkpoint on the ranks of a mesh; they write together, and every rank gets
    the text.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        folder: Path,
        dtype: torch.dtype | None = None,
        choose: Method | None = None,
    ) -> None:
        """Load a checkpoint; collective; ``dtype``, ``choose`` as in `opened`. Raises UserError if
        it does not fit.
        """
        with raise_together():
            manifest = read_manifest(folder)
            size = config.model.vocab_size or manifest.architecture["vocab_size"]
            for entries in filter(None, (size, config.model.position_table)):
                validate_entries(entries, mesh.tp.size())
            config = config_as_trained(config.updated(vocab_size=size), manifest.extra)
        if choose is not None:
            config = replace(
                config, checkpoint=CheckpointConfig()
            )  # nothing is resumed, whatever the run began with
            config = with_method(config, dist.get_world_size(), choose)
        dtype = dtype or (
            torch.bfloat16 if mesh.device.type == "cuda" and config.train.bf16 else torch.float32
        )
        # Of a hybrid's layouts the one that moves no tokens.
        layout: HybridLayout = (
            "zigzag" if config.context.context_parallel_layout == "zigzag" else "contiguous"
        )
        # Attention's backend is chosen for what is computed here, not for what the run computed in.
        config = config.updated(hybrid_softmax_layout=layout, bf16=dtype == torch.bfloat16)
        self.config, self.folder, self.iteration = config, folder, manifest.iteration
        self._mesh = mesh
        self.replica, self.replicas = mesh.dp.get_local_rank(), mesh.dp.size()
        """This rank's copy of the model, and how many there are; each writes on its own."""
        self.group: dist.ProcessGroup | None = None
        """The ranks of this copy, in order, which write together; None for all."""
        if self.replicas > 1:
            pp, inner = mesh.pp.size(), mesh.cp.size() * mesh.tp.size()
            copies = (
                torch.arange(pp * self.replicas * inner)
                .view(pp, self.replicas, inner)
                .transpose(0, 1)
                .flatten(1)
            )
            timeout = timedelta(minutes=config.mesh.distributed_timeout_minutes)
            self.group = [dist.new_group(ranks, timeout=timeout) for ranks in copies.tolist()][
                self.replica
            ]
        model = config.model
        with torch.device("meta"):
            part = build_model(model)
        part.keep(
            stage_layers(config.pipeline, model.num_layers, mesh.pp.size())[
                mesh.pp.get_local_rank()
            ]
        )
        part.cast(dtype)
        if mesh.tp.size() > 1:
            from parallel.tensor.split import (
                split_model,
            )  # DTensor, which one process need not wait for

            split_model(part, mesh.tp)
        self._part = part.to_empty(device=mesh.device)
        load_model(folder, part, architecture_of(model))
        self._contexts: dict[int, Context] = {}

    def check(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> None:
        """Raise the UserErrors of ``write`` that are about these."""
        model = self.config.model
        check_lengths(prompts, max_new_tokens, model.position_table)
        if unknown := {
            token for prompt in prompts for token in prompt if not 0 <= token < model.vocabulary
        }:
            raise ConfigError(
                f"a prompt has token {min(unknown)}, and the model has 0 to {model.vocabulary - 1}"
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
            The new tokens of each, up to the first of ``stop``, at most max_new_tokens; the same on
            every rank.

        Raises:
            UserError: an empty prompt, an unknown token, a number out of range, or more tokens than
                a table of learned positions has.
            DivergedError: the model overflows.
        """
        model, device = self.config.model, self._mesh.device
        generator = torch.Generator(device).manual_seed(seed)
        draw = Draw(temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
        self.check(prompts, max_new_tokens)
        length = max(map(len, prompts), default=0)
        # One length for all ranks and tokens: keys in the cache are turned once.
        self._part.config = model.with_rope_length(length + max_new_tokens)
        alike = model.recurrent
        return write(
            lambda: self.begin(length, draw), prompts, max_new_tokens, stop, device, alike=alike
        )

    def begin(self, length: int, draw: Choose) -> Read:
        """Return what reads prompts padded to ``length``, then any new tokens; ``draw`` chooses the
        next ones.
        """
        cp, tp = self._mesh.cp, self._mesh.tp.size()
        layers = self.config.model.num_layers
        turns = count()

        def total(x: Tensor) -> Tensor:
            dist.all_reduce(x, group=cp.get_group())
            return x

        states = States(layers, self._merge, total) if cp.size() > 1 else States(layers)

        def read(tokens: Tensor, positions: Tensor, ends: Tensor) -> Tensor:
            turn = next(turns)
            prompts = turn == 0
            if prompts and cp.size() > 1:
                tokens, positions = self._share(tokens)
            elif missing := -tokens.shape[1] % tp:
                tokens = F.pad(tokens, (0, missing))
                more = torch.arange(1, missing + 1, device=tokens.device)
                positions = torch.cat(
                    (positions, positions[:, -1:] + more), 1
                )  # from the ends on: padding
            keep = prompts or turn % cp.size() == cp.get_local_rank()
            states.read(positions, ends, keep, shared=prompts and cp.size() > 1)
            hidden = self._through_stages(tokens, positions, ends, states)
            return self._drawn(hidden, draw, len(ends), spread=prompts)

        return read

    def _share(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's tokens [B, T] of prompts, with positions [1, T], and let attention go
        over the ranks.
        """
        length, model = tokens.shape[1], self.config.model
        # A few lengths for all prompts, since each has plans of its own: at most an eighth is
        # padding. States end with the last token, so that their prompts have many lengths.
        step = (
            1
            if model.recurrent
            else max(1 << max(length.bit_length() - 4, 0), 2 * self._mesh.cp.size())
        )
        padded = -(-length // step) * step
        padded = padded if model.position_table is None else min(padded, model.position_table)
        if padded not in self._contexts:
            config = self.config.updated(seq_length=padded)
            like = next(iter(self._contexts.values()), None)
            if len(self._contexts) == MOST_CONTEXTS:
                del self._contexts[next(iter(self._contexts))]  # the oldest
            self._contexts[padded] = context_of(config, self._mesh.cp.get_group(), like)
        cp, attend = self._contexts[padded]
        for module in self._part.modules():
            own: Any = module
            if isinstance(module, DeltaAttention):
                own.attend, own.convolve = cp.delta, cp.convolve
            elif isinstance(module, Attention | LinearCore):
                own.attend = getattr(
                    attend, "softmax" if isinstance(module, Attention) else "linear", attend
                )
        return cp.shard(F.pad(tokens, (0, padded - length)), 1), cp.positions[None].to(
            tokens.device
        )

    def _merge(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """Merge attention to the rows of this rank with the others'."""
        mine = torch.cat((out, lse[..., None]), -1)
        parts = [torch.empty_like(mine) for _ in range(self._mesh.cp.size())]
        dist.all_gather(parts, mine, group=self._mesh.cp.get_group())
        whole = torch.stack(parts)
        return merged(whole[..., :-1], whole[..., -1])

    def _through_stages(
        self, tokens: Tensor, positions: Tensor, ends: Tensor, states: States
    ) -> Tensor | None:
        """Return the hidden states [B, C] before the ends on the last stage, 0 where other ranks of
        cp have them.
        """
        pp, x = self._mesh.pp, tokens
        rank, group, table = pp.get_local_rank(), pp.get_group(), self.config.model.position_table
        if rank > 0:
            weight = next(self._part.parameters())
            shape = (
                *tokens.shape[:1],
                tokens.shape[1] // self._mesh.tp.size(),
                self.config.model.hidden_size,
            )
            x = torch.empty(shape, dtype=weight.dtype, device=tokens.device)
            dist.recv(x, group=group, group_src=rank - 1)

        def head(hidden: Any, _: Tensor) -> Tensor:
            whole: Tensor = hidden.to_local() if self._mesh.tp.size() > 1 else hidden
            found, here = at_ends(whole, positions, ends)
            return found.where(here[:, None], 0)

        places = positions if table is None else positions.clamp(max=table - 1)
        x = self._part(x, places, head, states=states)
        if rank == pp.size() - 1:
            return x
        dist.send(x.contiguous(), group=group, group_dst=rank + 1)
        return None

    def _drawn(
        self, hidden: Tensor | None, draw: Choose, sequences: int, *, spread: bool
    ) -> Tensor:
        """Return the next tokens [B] on every rank, as the first rank of the last stage draws them.

        With ``spread`` the hidden states are on one rank of cp each.
        """
        mesh, tp = self._mesh, self._mesh.tp.size()
        source, error = (mesh.pp.size() - 1) * mesh.cp.size() * tp, None
        ids = torch.full((sequences,), -1, device=mesh.device)
        if hidden is not None:
            if spread and mesh.cp.size() > 1:
                dist.all_reduce(hidden, group=mesh.cp.get_group())  # 0 but on one rank each
            weight = self._part.output_weight
            if tp == 1:
                logits = F.linear(hidden, weight)  # [B, V]
            else:
                from torch.distributed.tensor import DTensor, Replicate

                whole = DTensor.from_local(hidden, mesh.tp, [Replicate()], run_check=False)
                logits = F.linear(whole, weight).full_tensor()  # type: ignore[attr-defined]
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
