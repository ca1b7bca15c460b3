"""One rank's part of every batch for a model of transformers, and the loss of the whole.

Shapes: B sequences of T tokens, which become one of N packed documents; n of its tokens are this
rank's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from kernels.loss import cross_entropy_sum
from parallel.context import ContextParallel, context_parallel
from parallel.context.methods import METHODS, method_of
from parallel.transformers.batch import Batch, check_same, pack, part
from parallel.transformers.check import Report, compare
from parallel.transformers.configs import attentions, configs, restore, separate, set_attentions
from parallel.transformers.draws import Draws
from parallel.transformers.layers import CONTEXT, NAME, install
from parallel.transformers.probe import probe
from runtime.errors import UserError

REFUSED = {
    "is_encoder_decoder": "a decoder that attends to an encoder; context parallelism is for decoders alone",
    "output_router_logits": "the loss of its router is of a rank's own tokens; set it to False",
    "layerdrop": "ranks would leave out different layers, and wait for each other; set it to 0",
    "decoder_layerdrop": "ranks would leave out different layers, and wait for each other; set it to 0",
    "attn_temperature_tuning": "it scales queries by a count of a rank's own tokens; make the model with False",
}
"""Settings of a model's configuration, and why they are refused."""
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names of the dropout of attention in configurations."""
BY_LENGTH = {"dynamic", "longrope"}
"""Rotary positions that a model scales by the largest position it is given."""
OF_LAYERS = {
    "causal": "the layers are causal, or refused",
    "documents": "give them with each batch, to cp.batch",
    "window": "each layer has its own, or none",
    "seq_len": "a batch has any length",
}
"""Options of ``context_parallel`` that a model's layers and batches decide, and how."""


class Sharded:
    """A model's way to its sequences' ranks; made by ``shard``."""

    def __init__(
        self, model: nn.Module, context: ContextParallel, world: dist.ProcessGroup | None
    ) -> None:
        self.model, self.group, self.world = model, context.group, world
        self._own = attentions(model)
        self._over = lru_cache(maxsize=16)(context.over)
        self._last: Batch | None = None
        self._draws = Draws(
            0 if context.group is None else min(dist.get_process_group_ranks(context.group))
        )
        replaced = separate(model)
        install(model)
        set_attentions(model, {}, NAME)
        try:
            self._positions = probe(model, context.plan)
        except BaseException:
            restore(replaced)
            raise

    def batch(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        documents: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Batch:
        """Return this rank's part of a batch, which is the same on every rank of the group.
        Collective.

        Rows become documents of one packed sequence, without their padding. Labels are shifted
        first, then cut.

        Args:
            input_ids: ``[B, T]``.
            labels: a label for each token, as transformers takes them: its own id, or -100; ``[B,
                T]``. A document's first is no one's next token, and has no loss; transformers has
                it under left padding, whose last token it takes for the one before.
            position_ids: of each token in its document, ``[B, T]``; a document begins where they do
                not go on by 1. By default those that the model takes by itself; where these begin
                later than 0, such as at padding_idx + 1 in RoBERTa, documents that are given from 0
                begin there too.
            documents: lengths of the documents, row after row, instead of what position_ids say.
            attention_mask: 1 for tokens, 0 for padding before or after those of a row, ``[B, T]``.

        Raises UserError: shapes or lengths that do not fit, or other tokens on another rank.
        """
        whole = pack(input_ids, labels, position_ids, documents, attention_mask, self._positions)
        check_same(whole, self.group)
        context = self._over(whole.bounds[-1])
        batch = part(
            whole, context.under(documents=whole.bounds) if len(whole.bounds) > 2 else context
        )
        self._draws.expect(self.model, batch.inputs[CONTEXT], whole.kept)
        self._last = batch
        return batch

    def loss(self, output: Any, batch: Batch, count: Tensor | int | None = None) -> Tensor:
        """Return the mean loss of all tokens with a label, of all ranks: the same number on each.
        Collective.

        Its gradients are to be averaged over the ranks of ``world``, as DDP and FSDP do: the mean
        is exact.

        Args:
            output: the model's, or its logits ``[1, n, V]``.
            count: tokens that the sum is divided by, for micro-batches whose losses add up to a
                mean.
        """
        total, valid = cross_entropy_sum(getattr(output, "logits", output), batch.labels)
        sums = torch.stack([total.detach().double(), valid.double()])
        if self.world is not None:
            dist.all_reduce(sums, group=self.world)
        ranks = 1 if self.world is None else dist.get_world_size(self.world)
        tokens = (
            sums[1].clamp(min=1)
            if count is None
            else torch.as_tensor(count, device=sums.device).double()
        )
        share = total * (ranks / tokens).to(total.dtype)
        return share - share.detach() + (sums[0] / tokens).to(total.dtype)

    def gather(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """Return ``[B, T, ...]`` of every rank's ``[1, n, ...]``, 0 in padding. Collective; no
        gradient.

        ``batch`` is the one that x was computed of, by default the last one.
        """
        batch = batch or self._last
        if batch is None:
            raise UserError("there is no batch yet; call gather on what the model returned for one")
        found, kept = batch.context.unshard(x, 1), batch.whole.kept
        out = found.new_zeros(*kept.shape, *found.shape[2:])
        out[kept] = found[0]
        return out

    def check(self, model: nn.Module, batch: Batch) -> Report:
        """Compare losses, and gradients of every module, with the model in one process. Collective.

        There each document is alone, and attention is the model's own: once in the model's dtype,
        once in float64. Rank 0 of the group holds all of it, a copy of the model in float64 and
        three gradients, so give a short batch. Nothing is dropped out, and no number of the model
        changes.

        Raises UserError: the model is another one, paused, frozen, sharded or quantised, or too
            large for rank 0's memory; or the batch has no labels.
        """
        if self.model not in model.modules() and model not in self.model.modules():
            raise UserError(
                "the model is not the one that shard was called with, nor holds it; check that one"
            )
        if any(config._attn_implementation != NAME for config in configs(self.model)):
            raise UserError(
                "the model has its own attention within paused(), and the ranks none; check it outside"
            )
        return compare(model, batch, self.group, self.paused)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Give the model its own attention back, such as to generate; afterwards it has what it had
        before.
        """
        before = attentions(self.model)
        set_attentions(self.model, self._own, NAME)
        try:
            yield
        finally:
            set_attentions(self.model, before, NAME)


def _check_settings(model: nn.Module, ranks: int) -> None:
    """Raise UserError for a setting of the model that a forward of a few tokens does not show."""
    if any(config._attn_implementation == NAME for config in configs(model)):
        raise UserError(
            "the model is sharded already; use what that call of shard returned, or, for another group or method, "
            "call shard again within its paused()"
        )
    for config in configs(model):
        for name, reason in REFUSED.items():
            if getattr(config, name, False):
                raise UserError(f"{type(config).__name__}.{name} is set: {reason}")
        for name in DROPOUTS:
            if rate := getattr(config, name, 0):
                kind = type(config).__name__
                raise UserError(
                    f"{kind}.{name} is {rate}, which no kernel here draws; make the model with {name}=0"
                )
    for name, module in model.named_modules():
        kinds = getattr(module, "rope_type", ()) or ()
        found = BY_LENGTH.intersection([kinds] if isinstance(kinds, str) else dict(kinds).values())
        if found and ranks > 1:
            raise UserError(
                f"{name} has rope_type {found.pop()}, which depends on the largest position among a rank's own tokens; "
                "use rope_type yarn or linear, or one rank"
            )


def shard(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    method: str = "exchange",
    world: dist.ProcessGroup | None = None,
    **options: Any,
) -> Sharded:
    """Let a model of transformers attend over the ranks of a group, which share every sequence.
    Collective.

    Args:
        model: a causal language model with its weights, also within peft's or FSDP2's wrapping.
        group: None is this process alone.
        method: a name in ``METHODS``, of softmax attention.
        world: the ranks whose gradients are averaged, by default all processes.
        options: as for ``context_parallel``, without what each batch and layer brings.

    Raises UserError: a layer that these ranks cannot compute, with its name and the reason; a
        method that passes states on; a model that is sharded already.
    """
    method_of(method).check_kind("shard", "softmax attention", METHODS)
    if wrong := sorted(OF_LAYERS.keys() & options.keys()):
        raise UserError(
            f"shard: {wrong[0]} is {options[wrong[0]]!r}; leave it out: {OF_LAYERS[wrong[0]]}"
        )
    size = 1 if group is None else dist.get_world_size(group)
    _check_settings(model, size)
    context = context_parallel(method, seq_len=size, group=group, **options)
    return Sharded(
        model, context, dist.group.WORLD if world is None else world
    )  # None where nothing is joined
