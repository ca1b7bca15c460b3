"""Shard the sequences of a transformers model: each rank gets some tokens, and the batch's loss.

Shapes: B rows of T tokens, packed into one sequence; n of its tokens are this rank's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from kernels.loss import cross_entropy_sum
from parallel.comparison import Report, mean_loss
from parallel.context import ContextParallel, context_parallel
from parallel.context.methods import METHODS, method_of
from parallel.transformers.batch import Batch, check_same, pack, shard_batch
from parallel.transformers.check import compare
from parallel.transformers.configs import attentions, configs, restore, separate, set_attentions
from parallel.transformers.draws import Draws
from parallel.transformers.layers import CONTEXT, NAME, install
from parallel.transformers.log_probs import (
    SEAM,
    Forward,
    LogProbs,
    causal_model,
    gather_output,
    gather_scores,
    install_seam,
    rows_of_call,
    score_by_trl,
    score_in_chunks,
)
from parallel.transformers.probe import probe
from parallel.transformers.router import RouterLoss
from runtime.errors import UserError

REFUSED = {
    "is_encoder_decoder": (
        "the decoder attends to an encoder; context parallelism supports only models without one"
    ),
    "layerdrop": "ranks would leave out different layers, and wait for each other; set it to 0",
    "decoder_layerdrop": (
        "ranks would leave out different layers, and wait for each other; set it to 0"
    ),
    "attn_temperature_tuning": (
        "each rank would scale queries by a count of its own tokens only; create the model with it "
        "set to False"
    ),
}
"""Settings of a model's configuration that are refused, with the reasons."""
DROPOUTS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
"""Names that configurations use for attention dropout."""
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Types of rotary positions that transformers scales by the largest position in a batch."""
OF_LAYERS = {
    "causal": "layers that are not causal are refused",
    "documents": "each batch has its own documents, which cp.batch takes",
    "seq_len": "a batch may have any length",
    "window": "each layer has its own window, or none",
}
"""Options of ``context_parallel`` that ``shard`` does not take, with the reasons."""


class Sharded:
    """A model whose attention spans the ranks of a group; made by ``shard``."""

    def __init__(
        self, model: nn.Module, context: ContextParallel, world: dist.ProcessGroup | None
    ) -> None:
        self.model = model
        self.group = context.group
        self.world = world
        self.router = RouterLoss(model)
        self._local_attentions = attentions(model)
        self._context_of_length = lru_cache(maxsize=16)(context.over)
        self._last: Batch | None = None
        self._has_seam = False
        first_rank = 0
        if context.group is not None:
            first_rank = min(dist.get_process_group_ranks(context.group))
        self._draws = Draws(first_rank)

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
        """Return this rank's part of a batch; every rank passes the whole batch. Collective.

        Rows become documents of one packed sequence, without their padding. Labels are shifted
        before the sequence is cut.

        Args:
            input_ids: ``[B, T]``.
            labels: a label for each token as in transformers: its own id, or -100; ``[B, T]``. A
                document's first token has no loss, since no token precedes it; with left padding,
                transformers counts it, as the token after the padding.
            position_ids: position of each token in its document, ``[B, T]``; a document begins
                wherever the position does not increase by 1. By default the positions that the
                model computes itself. If those begin later than 0, for example at padding_idx + 1
                in RoBERTa, given positions that begin at 0 are shifted to begin there.
            documents: lengths of the documents, row after row; by default position_ids imply them.
            attention_mask: 1 for tokens, 0 for padding before or after a row's tokens, ``[B, T]``.

        Raises UserError if shapes or lengths do not fit, or another rank has different tokens.
        """
        packed = pack(input_ids, labels, position_ids, documents, attention_mask, self._positions)
        check_same(packed, self.group)
        context = self._context_of_length(packed.cu_seqlens[-1])
        if len(packed.cu_seqlens) > 2:
            context = context.under(documents=packed.cu_seqlens)
        batch = shard_batch(packed, context)
        self._draws.expect(self.model, batch.inputs[CONTEXT], packed.is_token)
        self._last = batch
        return batch

    def loss(
        self,
        output: Any,
        batch: Batch,
        count: Tensor | int | None = None,
        router_aux_loss_coef: float | None = None,
    ) -> Tensor:
        """Return the mean loss of all tokens with a label, equal on all ranks. Collective.

        The router's loss is added if transformers adds it (``output_router_logits``). The gradients
        must be averaged over the ranks of ``world``, as DDP and FSDP do: their mean is then exactly
        the gradient of this loss.

        Args:
            output: output of the model, or its logits ``[1, n, V]``.
            count: number of tokens by which to divide the summed loss, by default those of this
                batch. Give the step's number if the losses of its micro-batches should add up to
                the mean.
            router_aux_loss_coef: weight of the router's loss, by default the model's. Like
                transformers, each of several micro-batches adds its whole router's loss, whatever
                ``count`` is.
        """
        loss_sum, valid = cross_entropy_sum(getattr(output, "logits", output), batch.labels)
        loss = mean_loss(loss_sum, valid, self.world, count)
        if not self.router.is_in(output):
            return loss
        if router_aux_loss_coef is None:
            router_aux_loss_coef = self.router.coefficient
        return loss + router_aux_loss_coef * self.router_loss(output, batch).to(loss.dtype)

    def router_loss(self, output: Any, batch: Batch) -> Tensor:
        """Return the router's loss of all ranks' tokens, without its weight. Collective.

        It is the ``aux_loss`` of transformers for the whole batch, in float64; the one in the
        output is that of this rank's tokens only.
        """
        return self.router.loss(output, batch, self.world)

    def log_probs(
        self,
        model: nn.Module,
        input_ids: Tensor,
        labels: Tensor | None = None,
        *,
        position_ids: Tensor | None = None,
        documents: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> LogProbs:
        """Return log-probability and entropy of each token of whole rows, on every rank.

        Collective, differentiable. Every rank of the group computes the same loss from them;
        gradients must be averaged over all ranks, as for ``loss``. No rank has the logits of all of
        its tokens at once. The router's loss of a model with experts is not part of the scores.

        Args:
            model: the sharded model, also if DDP, FSDP2 or peft wraps it.
            labels: as for ``batch``; by default every token is scored.
            input_ids, position_ids, documents, attention_mask: whole rows, as for ``batch``, but
                positions count from a row's beginning by default, padding included.
        """
        self._check_model(model, "log_probs")
        if not self._has_seam:
            self.answer_seam()
        rows = {
            "input_ids": input_ids,
            "labels": input_ids if labels is None else labels,
            "position_ids": position_ids,
            "documents": documents,
            "attention_mask": attention_mask,
        }
        scores = model(**rows, **{SEAM: True})
        return LogProbs(scores["log_probs"], scores["entropy"])

    def answer_seam(self, *, trl: bool = False) -> None:
        """Let ``model(..., labels=..., fused_lm_head=True)`` score whole rows, on every rank.

        Args:
            trl: score each rank's tokens by TRL's ``add_fused_lm_head``, which the model must have;
                by default by Longmesh.
        """

        def answer(causal: Any, previous: Forward, kwargs: dict[str, Any]) -> Any:
            if self.is_paused:
                return previous(causal, **kwargs)
            batch = self.batch(**rows_of_call(kwargs, self._positions))
            with self._draws.running(self.model, batch.context):
                if trl:
                    output = score_by_trl(causal, previous, batch)
                else:
                    output = score_in_chunks(causal, batch)
            if trl:
                return gather_output(output, batch, kwargs.get("num_items_in_batch"))
            return gather_scores(output, batch)

        install_seam(causal_model(self.model), answer)
        self._has_seam = True

    def gather(self, x: Tensor, batch: Batch | None = None) -> Tensor:
        """Gather every rank's ``[1, n, ...]`` to ``[B, T, ...]``, 0 in padding; no gradient.

        Collective. ``batch`` is the one that x was computed from, by default the last one.
        """
        batch = batch or self._last
        if batch is None:
            raise UserError("there is no batch yet; call gather after the model has run on a batch")
        tokens = batch.context.unshard(x, 1)[0]  # [N, ...]
        is_token = batch.whole.is_token
        out = tokens.new_zeros(*is_token.shape, *tokens.shape[1:])
        out[is_token] = tokens
        return out

    def check(self, model: nn.Module, batch: Batch) -> Report:
        """Compare losses, and gradients of every module, with the model in one process. Collective.

        Rank 0 of the group, as the one process, runs each document separately with the model's own
        attention, once in the model's dtype and once in float64. It holds a copy of the model in
        float64 and three sets of gradients, so give a short batch. Dropout is off, and the model is
        not changed.

        Raises UserError if the model is another one, paused, frozen, sharded or quantised, or too
        large for rank 0's memory; or if the batch has no labels.
        """
        self._check_model(model, "check")
        return compare(model, batch, self.group, self.paused, self.router)

    @property
    def is_paused(self) -> bool:
        """True within ``paused()``."""
        return any(config._attn_implementation != NAME for config in configs(self.model))

    def _check_model(self, model: nn.Module, method: str) -> None:
        """Raise UserError if a method is called with another model, or within paused()."""
        if self.model not in model.modules() and model not in self.model.modules():
            raise UserError(
                f"the model given to {method} is not the one that shard was called with, and does "
                f"not contain it; give {method} the sharded model"
            )
        if self.is_paused:
            raise UserError(
                "the model uses its own attention within paused(), so the ranks do not share its "
                f"sequences; call {method} outside paused()"
            )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Use the model's own attention until the block ends, for example to generate text."""
        previous = attentions(self.model)
        set_attentions(self.model, self._local_attentions, NAME)
        try:
            yield
        finally:
            set_attentions(self.model, previous, NAME)


def _check_settings(model: nn.Module, ranks: int) -> None:
    """Raise UserError for a setting of the model that the probe's forwards would not reveal."""
    if any(config._attn_implementation == NAME for config in configs(model)):
        raise UserError(
            "the model is sharded already; use the result of that call of shard, or, for another "
            "group or method, call shard again within that result's paused()"
        )
    for config in configs(model):
        kind = type(config).__name__
        for name, reason in REFUSED.items():
            if getattr(config, name, False):
                raise UserError(f"{kind}.{name} is set: {reason}")
        for name in DROPOUTS:
            rate = getattr(config, name, 0)
            if rate:
                raise UserError(
                    f"{kind}.{name} is {rate}, but context parallelism has no kernel with dropout; "
                    f"make the model with {name}=0"
                )

    if ranks == 1:
        return
    for name, module in model.named_modules():
        rope_type = getattr(module, "rope_type", ()) or ()
        types = [rope_type] if isinstance(rope_type, str) else dict(rope_type).values()
        unsupported = LENGTH_DEPENDENT_ROPE.intersection(types)
        if unsupported:
            raise UserError(
                f"{name} has rope_type {unsupported.pop()}, which depends on the largest position "
                "among a rank's own tokens; use rope_type yarn or linear, or one rank"
            )


def shard(
    model: nn.Module,
    group: dist.ProcessGroup | None = None,
    *,
    method: str = "exchange",
    world: dist.ProcessGroup | None = None,
    **options: Any,
) -> Sharded:
    """Make a transformers model attend over a group of ranks that share every sequence.

    Collective.

    Args:
        model: a causal language model with its weights, also if peft or FSDP2 wraps it.
        group: ranks that share every sequence; None means only this process.
        method: name in ``METHODS`` of a method for softmax attention.
        world: group of ranks whose gradients are averaged, by default all processes.
        options: as for ``context_parallel``, except those that each batch or layer decides.

    Raises UserError if these ranks cannot compute a layer (the message has its name and the
    reason), if the method passes states on, or if the model is sharded already.
    """
    method_of(method).check_kind("shard", "softmax attention", METHODS)
    for name, reason in OF_LAYERS.items():
        if name in options:
            raise UserError(f"shard: {name} is {options[name]!r}; leave out {name}: {reason}")

    ranks = 1 if group is None else dist.get_world_size(group)
    _check_settings(model, ranks)
    context = context_parallel(method, seq_len=ranks, group=group, **options)
    if world is None:
        world = dist.group.WORLD  # None if no process group is initialised
    return Sharded(model, context, world)
