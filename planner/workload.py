"""A step in numbers, for the cost model: its work, the documents of a micro-batch, the layouts of a
hybrid.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, singledispatch
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from torch.overrides import TorchFunctionMode

from data.loader import Batching, batches
from data.text.blend import cumulative_lengths
from data.text.config import blend, length_shares
from data.text.indexed import open_indexed
from data.text.megatron import build_datasets
from data.text.packing import PADDING_DOCUMENT, packed_documents
from data.tokenizer import load_tokenizer
from kernels.delta.rule import CPU_CHUNKS
from kernels.loss import LOSS_CHUNK
from model.config import DecoderConfig
from model.dit import multiply_adds, num_dit_parameters
from model.dit_config import DiTConfig
from model.parts.delta import DeltaConfig
from model.registry import flops_per_token, num_parameters, num_trained, softmax_layers
from parallel.context.config import HybridLayout
from parallel.context.linear.relayout import moved_tokens
from parallel.context.plan import make_plan
from parallel.context.traffic import sizes
from planner.attention_cost import GB, AttentionCost
from planner.cluster import Cluster
from planner.delta_cost import DeltaShape
from planner.step_memory import StepShape
from runtime.errors import UserError
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig

WORKSPACES = 2 * (32 << 20)
"""Bytes that torch gives cuBLAS and cuBLASLt to work in, on Hopper; on older GPUs fewer."""
MOST = 1 << 20
"""Documents of a file to look at; of more, evenly spaced ones."""
DRAWN = 1 << 16
"""Documents to draw from, of all files together."""
FIRST = 32
"""Micro-batches of a run to read for the one that takes most memory."""


def workload_of(config: CommonConfig, dp: int, device: str) -> StepShape:
    """Return the work of a step. The vocabulary of a language model must be known."""
    model = config.model
    fields = {**_numbers(config)}
    if device == "cpu":
        fields["first_layer"] = 0.0
        fields["wide_logits"] = LOSS_CHUNK["cpu"]
        fields["residual"] = (
            10.0 if config.train.bf16 else StepShape.residual
        )  # norms keep copies in float32
        if delta := fields.get("delta"):
            fields |= {
                "delta": delta._replace(slab=CPU_CHUNKS),
                "normed": 3.0 if config.train.bf16 else 1.0,
            }
    else:
        fields["workspaces"] = WORKSPACES
    return StepShape(
        layers=model.num_layers,
        hidden=model.hidden_size,
        ffn=model.ffn_size,
        heads=model.num_attention_heads,
        kv_heads=model.query_groups,
        head_dim=model.head_dim,
        element_size=2 if config.train.bf16 else 4,
        micro_batch=1 if config.packed else config.train.micro_batch_size,
        micro_batches=config.train.micro_batches(dp),
        **fields,
    )


@singledispatch
def _numbers(config: CommonConfig) -> dict[str, Any]:
    """Return the numbers of a kind of model: the fields of ``StepShape`` that are not the same for
    all.
    """
    raise TypeError(f"no numbers of {type(config)}")


@_numbers.register
def _(config: Config) -> dict[str, Any]:
    return _language(config.model)


@_numbers.register
def _(config: DiTRunConfig) -> dict[str, Any]:
    more = {"modulated": 6 * config.packed, "averages": 4 if config.ema_decay else 0}
    return _diffusion(config.model) | more


def with_softmax_layers(work: StepShape, config: CommonConfig, cluster: Cluster) -> StepShape:
    """Return the work with the seconds of a hybrid's layers of softmax attention, in the faster of
    its layouts.
    """
    if not config.hybrid_layouts:
        return work
    seconds = min(layout_seconds(config, cluster).values())
    return replace(work, softmax_layers=len(softmax_layers(config.model)), softmax_seconds=seconds)


@lru_cache
def _language(model: DecoderConfig) -> dict[str, Any]:
    """Return a language model's numbers; weights are counted on the meta device."""
    windows = [window for window in map(model.window, range(model.num_layers)) if window]
    with _Undrawn():
        delta = 3 * model.state_elements if model.delta_rule else 0  # counted apart, in chunks
        products = (
            int(flops_per_token(model.merged(), 0) / 6) - delta
        )  # at length 0 there is no softmax attention
        parameters, trained = num_parameters(model), num_trained(model)
    found: dict[str, Any] = {
        "gated": model.footprint.gated,
        "residual": model.footprint.fused_residual,
        "first_layer": model.footprint.first_layer,
        "vocab": model.vocabulary,
        "parameters": parameters,
        "outside": (
            model.vocabulary * (1 + model.untie_embeddings_and_output_weights)
            + (model.position_table or 0)
        )
        * model.hidden_size,
        "trained": trained,
        "matrix_weights": products,
        "window": windows[0] if windows else None,
        "windowed_layers": len(windows),
    }
    if not isinstance(model, DeltaConfig):
        return found
    heads = DeltaShape(
        *(
            model.key_heads,
            model.value_heads,
            model.key_dim,
            model.value_dim,
            model.linear_conv_kernel_dim,
        ),
        per_channel=model.linear_gate == "per_channel",
    )
    norms = (1 + model.query_groups / model.num_attention_heads) * model.footprint.qk_norms
    gate = model.footprint.output_gate + norms
    return found | {"delta": heads, "softmax_layers": len(softmax_layers(model)), "gate": gate}


class _Undrawn(TorchFunctionMode):
    """Leaves weights as they are: torch draws those of the meta device by operators that take a
    second to import.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if func is nn.init.normal_ else func(*args, **kwargs)


@lru_cache
def _diffusion(model: DiTConfig) -> dict[str, Any]:
    """Return a diffusion transformer's numbers: a patch's prediction stands in the place of logits."""
    attention = 2 * model.num_layers * model.num_patches * model.hidden_size
    return {
        "gated": False,
        "vocab": model.out_width,
        "parameters": num_dit_parameters(model),
        "outside": 2 * model.out_width * model.hidden_size,
        "matrix_weights": multiply_adds(model) // model.num_patches - attention,
        "replicated": 6
        * model.num_layers
        * model.hidden_size**2,  # which make shifts, scales and gates
    }


def layout_seconds(config: Any, cluster: Cluster) -> dict[HybridLayout, float]:
    """Return the seconds of a softmax layer, forward and backward, in each layout that a hybrid may
    have.

    An exchange moves q, k and v inward and the output outward, and their gradients in the backward:
    2 x (2 heads + 2 kv_heads) x head_dim elements of each token that changes its rank. It is not
    overlapped.
    """
    model, size, tp = (
        config.model,
        config.mesh.context_parallel_size,
        config.mesh.tensor_model_parallel_size,
    )
    seq_len, batch = config.joined_length, 1 if config.packed else config.train.micro_batch_size
    heads, kv_heads = model.num_attention_heads // tp, max(1, model.query_groups // tp)
    element_size = 2 if config.train.bf16 else 4
    link = (
        cluster.inside_gb_per_s if size * tp <= cluster.gpus_per_node else cluster.between_gb_per_s
    )

    found = {}
    linear = config.context.context_parallel_layout
    for layout in config.hybrid.layouts(linear):
        method = config.hybrid.context(layout).context_parallel_method
        plan = make_plan(method, seq_len=seq_len, size=size, multiple=tp, layout=layout)
        lies = "zigzag" if linear == "zigzag" else "auto"
        outside = make_plan(
            "lasp", seq_len=seq_len, size=size, multiple=plan.local_len, layout=lies
        )
        moved = moved_tokens(outside.geometry, plan.geometry)
        exchanged = 2 * (2 * heads + 2 * kv_heads) * model.head_dim * element_size * batch * moved
        of = sizes(plan.geometry, batch, heads, kv_heads, model.head_dim, element_size)
        cost = AttentionCost(plan, of, cluster, tp)
        found[layout] = cost.forward() + cost.backward() + exchanged / (link * GB)
    return found


class DocumentsError(UserError):
    """Lengths of documents that are not known, or are none."""


def typical_documents(
    config: CommonConfig, lengths: tuple[int, ...] = ()
) -> tuple[int, ...] | None:
    """Return the cumulative lengths of the documents of one micro-batch; None if documents do not
    attend apart.

    Drawn with a fixed seed as the dataset does: a shuffled stream of documents is cut into samples,
    or whole ones are fitted into them.

    Args:
        lengths: tokens of documents to draw from; by default those of the data's .idx files, by
            their weights.

    Raises:
        DocumentsError: lengths below 1, or no data to take them from.
        DataError: a file is missing or broken.
    """
    if not config.packed:
        return None
    if config.sample_ends is not None:
        return config.sample_ends
    if lengths and min(lengths) < 1:
        raise DocumentsError(f"document_lengths has {min(lengths)}; a document has 1 token or more")
    if not lengths and not config.data.data_path:
        raise DocumentsError(
            "reset_attention_mask is set and data_path is empty, so that the documents' lengths are not known; give "
            "--data-path PREFIX, or state them: --document-lengths 300 2000 40000"
        )
    draw = (
        np.array(lengths)
        if lengths
        else _lengths(config.data.data_path, config.data.blend_by_length)
    )
    fill = _fitted if config.data.pack_documents else _cut
    return fill(
        np.random.default_rng(0),
        draw[draw > 0].astype(np.int64),
        config.sequence_length,
        config.joined_length,
    )


def known_documents(config: CommonConfig) -> tuple[int, ...] | None:
    """Return ``typical_documents``, or whole samples where this machine has no lengths of the
    data's documents.

    Raises DataError: a file is broken.
    """
    paths = config.data.data_path
    if (
        not config.packed
        or config.sample_ends is not None
        or (paths and Path(f"{blend(paths)[0][0]}.idx").exists())
    ):
        return typical_documents(config)
    return tuple(range(0, config.joined_length + 1, config.sequence_length))


def heaviest_documents(config: CommonConfig) -> tuple[int, ...] | None:
    """Return the cumulative lengths of the run's own micro-batch with the longest documents, as
    `typical_documents`.

    It is the one of the run's first FIRST whose squared lengths add up to most: a long document's
    rows travel farthest.

    Raises:
        DataError: data or tokenizer are missing or broken.
    """
    if not config.packed or config.sample_ends is not None:
        return typical_documents(config)
    tokenizer, size = (
        load_tokenizer(str(config.data.tokenizer_model)),
        config.train.micro_batch_size,
    )
    samples, _, _ = build_datasets(
        config.data, config.sequence_length, config.train.seed, tokenizer, config.model.vocab_size
    )
    reads = config.train.train_iters * (config.train.global_batch_size or size) // size
    steps = batches(samples, Batching(global_batch_size=size, micro_batch_size=size), 0)
    read = islice(steps, min(FIRST, reads))
    ends = [tuple(cumulative_lengths(step[0]["starts"].view(-1))) for step in read]
    return max(ends, key=lambda bounds: np.square(np.diff(bounds)).sum())


@lru_cache(maxsize=4)
def _lengths(data_path: tuple[str, ...], blend_by_length: tuple[str, ...]) -> np.ndarray:
    """Draw documents of every source, so many that their tokens are as its weight says; then of
    every length.
    """
    generator, (prefixes, weights) = np.random.default_rng(0), blend(data_path)
    lengths = [open_indexed(prefix).document_lengths for prefix in prefixes]
    lengths = [found[:: -(-len(found) // MOST)] for found in lengths]
    tokens = [float(found.sum(dtype=np.int64)) for found in lengths] if weights is None else weights
    drawn = _by_share(generator, lengths, tokens)
    if not blend_by_length:
        return drawn
    longer, shares = zip(*length_shares(blend_by_length), strict=True)
    bounds = pairwise((*longer, np.inf))
    return _by_share(generator, [drawn[(drawn >= a) & (drawn < b)] for a, b in bounds], shares)


def _by_share(
    generator: np.random.Generator, groups: Sequence[np.ndarray], shares: Sequence[float]
) -> np.ndarray:
    """Draw documents of every group that has some, whose tokens are as its share says."""
    found = [(share, group) for share, group in zip(shares, groups, strict=True) if len(group)]
    often = np.array([share / group.mean() for share, group in found])
    counts = np.ceil(DRAWN * often / often.sum()).astype(int)
    return np.concatenate(
        [generator.choice(group, count) for (_, group), count in zip(found, counts, strict=True)]
    )


def _cut(
    generator: np.random.Generator, lengths: np.ndarray, sample: int, joined: int
) -> tuple[int, ...]:
    """Fill ``joined`` tokens from a point inside a document; samples end documents too."""
    drawn = generator.choice(lengths, 8 + 2 * joined // int(lengths.mean()))
    while drawn[1:].sum() < joined:
        drawn = np.concatenate((drawn, generator.choice(lengths, len(drawn))))
    ends = np.cumsum(drawn) - generator.integers(drawn[0])
    bounds = np.union1d(ends[ends < joined], np.arange(0, joined + 1, sample))
    return tuple(bounds.tolist())


def _fitted(
    generator: np.random.Generator, lengths: np.ndarray, sample: int, joined: int
) -> tuple[int, ...]:
    """Take samples from 16 times as many, which whole documents fill as in a run of pack_documents,
    and padding.
    """
    drawn = generator.choice(lengths, 16 + 16 * joined // int(lengths.mean())).astype(np.int32)
    while drawn.sum(dtype=np.int64) < 16 * joined:
        drawn = np.concatenate((drawn, generator.choice(lengths, len(drawn)).astype(np.int32)))
    fragments, bounds = packed_documents(drawn, np.arange(len(drawn)), sample, 0)
    found = set[int]()
    for place, number in enumerate(
        generator.choice(len(bounds) - 1, joined // sample, replace=False)
    ):
        ends = np.cumsum(fragments["length"][bounds[number] : bounds[number + 1]]).tolist()
        found |= {
            place * sample + start
            for start in (0, *ends, *range(ends[-1], sample, PADDING_DOCUMENT))
        }
    return tuple(sorted(found | {joined}))
