"""Log-probabilities of whole rows, from ranks that each hold some of their tokens.

A preference loss is not a sum over tokens: it sums the log-probabilities of a completion, and then
takes a sigmoid or a square of the sums. So the log-probabilities of all tokens are gathered, and
every rank of a group computes the same loss from them. TRL's trainers ask for them with
``model(..., labels=labels, fused_lm_head=True)``, which ``answer_seam`` lets a sharded model answer
for whole rows.

The gradient of the gathered tensor is the same on all R ranks of a group. Each rank continues with
the gradient of its own tokens, times R: the ranks' gradients then add up to R times the gradient of
the group's loss, and their mean, which DDP and FSDP take, is that gradient. With several groups it
is the mean over the groups, as in data parallelism.

Shapes: B rows of T tokens, packed into one sequence of N tokens; n of them are this rank's. V
vocabulary entries, C channels.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.loss import LOSS_CHUNK, over_chunks
from parallel.context import ContextParallel
from parallel.transformers.batch import FROM_ZERO, IGNORED, Batch, Positions
from parallel.transformers.layers import CONTEXT
from runtime.errors import UserError
from runtime.tensors import accum_dtype

SEAM = "fused_lm_head"
"""Keyword argument by which TRL's trainers ask a model for log-probabilities."""
ROWS = ("input_ids", "position_ids", "attention_mask")
"""Arguments of a forward pass that have a number for each token, ``[B, T]``."""

SCORES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
"""Fields of TRL's output that have a number for each token."""
KEYWORDS = (SEAM, "labels", "documents", "use_cache", "num_items_in_batch")
"""Other arguments of a call for log-probabilities."""

Scores = Mapping[str, Tensor]
"""Numbers of this rank's tokens by name, ``[1, n]``: log_probs, entropy and others."""
Forward = Callable[..., Any]
"""The forward function of a model's class, whose first argument is the model."""


class LogProbs(NamedTuple):
    """Scores of the tokens of whole rows; 0 for a token without a label."""

    log_probs: Tensor
    """Log-probability of each token but a row's first, given the tokens before it: ``[B, T - 1]``.
    """
    entropy: Tensor
    """Entropy of the distribution from which that token was taken, ``[B, T - 1]``."""


class _Unshard(torch.autograd.Function):
    """Gather the shards of a sequence; the backward pass keeps this rank's tokens, times R."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, context: ContextParallel) -> Tensor:
        ctx.context = context
        return context.unshard(x, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        context = ctx.context
        return context.shard(gradients[0], 1) * context.plan.size, None


def gather_rows(x: Tensor, batch: Batch) -> Tensor:
    """Gather every rank's ``[1, n, ...]`` to ``[B, T, ...]``, 0 in padding. Collective.

    Differentiable: gradients of the model's weights must be averaged over the ranks.
    """
    tokens = _Unshard.apply(x, batch.context)[0]  # [N, ...]
    is_token = batch.whole.is_token
    out = tokens.new_zeros(*is_token.shape, *tokens.shape[1:])
    out[is_token] = tokens
    return out


def unpack_labelled(batch: Batch) -> Tensor:
    """Return True for each token that has a label, but a row's first: bool ``[B, T - 1]``."""
    is_token = batch.whole.is_token
    labelled = torch.zeros_like(is_token)
    labelled[is_token] = batch.whole.tokens["labels"][0] != IGNORED
    return labelled[:, :-1]


def gather_scores(scores: Scores, batch: Batch) -> dict[str, Tensor]:
    """Gather scores ``[1, n]`` to ``[B, T - 1]``, in one message. Collective.

    Column t belongs to token t + 1 of a row, since the model predicted it from token t.
    """
    dtype = scores["log_probs"].dtype
    together = torch.stack([x.to(dtype) for x in scores.values()], -1)  # [1, n, scores]
    rows = gather_rows(together, batch)[:, :-1]  # [B, T - 1, scores]
    gathered = {}
    for (name, x), column in zip(scores.items(), rows.unbind(-1), strict=True):
        gathered[name] = column.to(x.dtype)
    return gathered


def score_in_chunks(model: Any, batch: Batch) -> dict[str, Tensor]:
    """Return log_probs and entropy of this rank's tokens, ``[1, n]``, differentiable.

    Logits exist for one chunk of tokens at a time, in the forward and in the backward pass. The
    router's loss of a model with experts is not computed.
    """
    outputs = model.base_model(**batch.inputs)
    hidden = outputs.last_hidden_state[0]  # [n, C]
    labels = batch.labels[0]  # [n]
    arguments = {"use_cache": False}
    if getattr(model.config, "output_router_logits", False):
        arguments["output_router_logits"] = False

    def score(rows: Tensor, chunk: slice) -> Tensor:
        fields = {**outputs, "last_hidden_state": rows[None]}
        with _returning(model.base_model, type(outputs)(**fields)):
            ids = batch.inputs["input_ids"][:, chunk]
            # Called without the model's hooks, which FSDP allows only once.
            forward = type(model).forward
            logits = forward(model, input_ids=ids, **arguments).logits[0]  # [rows, V]
        return _scores_of_logits(logits, labels[chunk])

    head = model.get_output_embeddings()
    size = max(1, LOSS_CHUNK.get(hidden.device.type, LOSS_CHUNK["cuda"]) // head.weight.shape[0])
    parameters = _parameters_of_head(model, lambda: score(hidden[:1].detach(), slice(0, 1)))
    log_probs, entropy = over_chunks(score, hidden, size, parameters).unbind(-1)
    return {"log_probs": log_probs[None], "entropy": entropy[None]}


def _parameters_of_head(model: Any, score_a_token: Callable[[], Tensor]) -> list[Tensor]:
    """Return the parameters that a model uses behind its backbone.

    RoBERTa has a dense layer and a norm there, besides the output embedding. A model may also have
    parameters that scores do not use; to find those, ``score_a_token`` runs the head once.
    """
    output_embedding = list(model.get_output_embeddings().parameters())
    known_ids = {id(x) for x in (*model.base_model.parameters(), *output_embedding)}
    others = []
    for parameter in model.parameters():
        if id(parameter) not in known_ids and parameter.requires_grad:
            others.append(parameter)
    if not others or not torch.is_grad_enabled():
        return output_embedding

    gradients = torch.autograd.grad(score_a_token().sum(), others, allow_unused=True)
    used = [x for x, gradient in zip(others, gradients, strict=True) if gradient is not None]
    return [*output_embedding, *used]


def score_by_trl(model: Any, previous: Forward, batch: Batch) -> Any:
    """Return TRL's output for this rank's tokens: its fields are ``[1, n]``, or None."""
    arguments = {**batch.inputs, "shift_labels": batch.labels, SEAM: True}
    return previous(model, **arguments)


def gather_output(output: Any, batch: Batch, count: Tensor | int | None) -> Any:
    """Return TRL's output for whole rows from that for this rank's tokens. Collective.

    ``count`` divides the loss, by default the number of tokens with a label.
    """
    scores = {}
    for name in SCORES:
        field = getattr(output, name)
        if field is not None:
            scores[name] = field
    rows = gather_scores(scores, batch)

    labelled = unpack_labelled(batch)
    if count is None:
        count = labelled.sum().clamp(min=1)
    loss = -rows["log_probs"].sum() / count
    return type(output)(loss=loss, label_mask=labelled, **rows)


def _scores_of_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Return log-probability of the label and entropy for each row of logits: [rows, 2]."""
    logits = logits.to(accum_dtype(logits.dtype))
    lse = logits.logsumexp(-1)  # [rows]
    label_logits = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    probabilities = (logits - lse[:, None]).exp()
    entropy = lse - (probabilities * logits).sum(-1)
    scores = torch.stack([label_logits - lse, entropy], -1)  # [rows, 2]
    return scores.masked_fill((labels == IGNORED)[:, None], 0)


@contextmanager
def _returning(module: nn.Module, output: Any) -> Iterator[None]:
    """Let a module return the output, whatever its arguments, until the block ends."""
    previous = module.__dict__.get("forward")
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        if previous is None:
            del module.forward
        else:
            module.forward = previous


def causal_model(model: Any) -> Any:
    """Return the causal language model inside peft's wrapper, or the model itself."""
    unwrapped = getattr(model, "get_base_model", None)
    return model if unwrapped is None else unwrapped()


def install_seam(model: Any, answer: Callable[[Any, Forward, dict[str, Any]], Any]) -> None:
    """Let ``answer`` reply to calls of the model's forward that have the argument SEAM.

    Args:
        model: a causal language model without wrappers.
        answer: function of the model, its previous forward and the keyword arguments of the call.
    """
    bound = model.forward
    # The function rather than the bound method, so that a copy of the model calls itself.
    previous = getattr(bound, "__func__", lambda self, *args, **kwargs: bound(*args, **kwargs))

    @wraps(type(model).forward)  # generate() reads the names of the arguments
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get(SEAM) or CONTEXT in kwargs:
            return previous(self, *args, **kwargs)
        if args:
            raise UserError(
                f"the model was called with {SEAM}=True and {len(args)} positional arguments; give "
                "input_ids, labels and others by name"
            )
        return answer(self, previous, kwargs)

    model.forward = MethodType(forward, model)


def rows_of_call(kwargs: Mapping[str, Any], positions: Positions) -> dict[str, Any]:
    """Return the arguments of ``Sharded.batch`` for a call of the seam.

    Positions count from the beginning of a row, padding included, as transformers counts.

    Raises UserError if the call has an argument that belongs to tokens in another way.
    """
    others = []
    for name, value in kwargs.items():
        is_set = value is not None and value is not False
        if is_set and name not in (*ROWS, *KEYWORDS):
            others.append(name)
    if others or kwargs.get("input_ids") is None or kwargs.get("labels") is None:
        raise UserError(
            f"the model was called with {', '.join(sorted(kwargs))}; for {SEAM}=True, ranks that "
            f"share rows need input_ids and labels, and take only {', '.join(ROWS[1:])} and "
            "documents besides: leave out the others, and use no prompt-learning adapter"
        )

    arguments: dict[str, Any] = {}
    for name in (*ROWS, "labels", "documents"):
        arguments[name] = kwargs.get(name)
    if arguments["position_ids"] is None and arguments["documents"] is None:
        input_ids = arguments["input_ids"]
        if positions == FROM_ZERO and arguments["attention_mask"] is not None:
            row = torch.arange(input_ids.shape[1], device=input_ids.device)
            arguments["position_ids"] = row.expand_as(input_ids)
    return arguments
