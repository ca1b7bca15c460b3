"""Describe a training step to the cost model: its work, documents, and a hybrid's layouts.

Packed documents decide how unequal the ranks' work is, and a plan has to be made for concrete
lengths. `typical_documents` draws them from the data's own lengths with a fixed seed, so every rank
and every start of a run plans for the same micro-batch.
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
from planner.cluster import Cluster
from planner.layers.attention_cost import AttentionCost
from planner.layers.delta_cost import DeltaShape
from planner.step_shape import StepShape
from runtime.errors import UserError
from train.config.common import CommonConfig
from train.config.entries import Config, DiTRunConfig

WORKSPACES = 2 * (32 << 20)
"""Bytes of torch's workspaces for cuBLAS and cuBLASLt, on Hopper; older GPUs have smaller ones."""
MAX_READ = 1 << 20
"""Maximum number of document lengths to read per file; from a larger file, evenly spaced ones."""
NUM_DRAWN = 1 << 16
"""Number of document lengths to draw in total, from all files."""
MAX_MICRO_BATCHES = 32
"""Maximum number of micro-batches to read in search of the one that takes most memory."""


def workload_of(config: CommonConfig, dp: int, device: str) -> StepShape:
    """Return the work of a step. A language model's vocabulary must be known.

    A CPU has no fused kernels for norms and the delta rule, so more is kept there.

    Args:
        dp: number of data-parallel ranks.
        device: cuda or cpu.
    """
    model = config.model
    fields = dict(_model_numbers(config))
    if device == "cpu":
        fields["first_layer"] = 0.0
        fields["wide_logits"] = LOSS_CHUNK["cpu"]
        fields["residual"] = StepShape.residual
        fields["norm_streams"] = 6.0
        norm_copies = 1.0
        if config.train.bf16:  # norms keep copies in float32
            fields["residual"] = 10.0
            fields["norm_streams"] = 12.0
            norm_copies = 3.0
        if "delta" in fields:
            fields["delta"] = fields["delta"]._replace(slab=CPU_CHUNKS)
            fields["normed"] = norm_copies
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
def _model_numbers(config: CommonConfig) -> dict[str, Any]:
    """Return the fields of ``StepShape`` that depend on the kind of model."""
    raise TypeError(f"_model_numbers does not support {type(config)}; register a function for it")


@_model_numbers.register
def _(config: Config) -> dict[str, Any]:
    return _language(config.model)


@_model_numbers.register
def _(config: DiTRunConfig) -> dict[str, Any]:
    averages = 4 if config.ema_decay else 0
    return {**_diffusion(config.model), "modulated": 6 * config.packed, "averages": averages}


def with_softmax_layers(work: StepShape, config: CommonConfig, cluster: Cluster) -> StepShape:
    """Return the work with the seconds of a hybrid's softmax layers, in the faster layout."""
    if not config.hybrid_layouts:
        return work
    seconds = min(layout_seconds(config, cluster).values())
    return replace(work, softmax_layers=len(softmax_layers(config.model)), softmax_seconds=seconds)


@lru_cache
def _language(model: DecoderConfig) -> dict[str, Any]:
    """Return a language model's fields of ``StepShape``; weights are counted on the meta device."""
    windows = [window for window in map(model.window, range(model.num_layers)) if window]
    with _NoInitialization():
        # DeltaCost counts the delta rule's own matmuls, chunk by chunk.
        delta_products = 3 * model.state_elements if model.delta_rule else 0
        # At length 0 the FLOPs have no part for softmax attention.
        all_products = int(flops_per_token(model.merged(), 0) / 6)
        parameters = num_parameters(model)
        trained = num_trained(model)
    num_tables = 1 + model.untie_embeddings_and_output_weights
    table_entries = model.vocabulary * num_tables + (model.position_table or 0)
    numbers: dict[str, Any] = {
        "gated": model.footprint.gated,
        "residual": model.footprint.fused_residual,
        "first_layer": model.footprint.first_layer,
        "vocab": model.vocabulary,
        "parameters": parameters,
        "outside": table_entries * model.hidden_size,
        "trained": trained,
        "matrix_weights": all_products - delta_products,
        "window": windows[0] if windows else None,
        "windowed_layers": len(windows),
    }
    if not isinstance(model, DeltaConfig):
        return numbers

    heads = DeltaShape(
        key_heads=model.key_heads,
        heads=model.value_heads,
        key_dim=model.key_dim,
        value_dim=model.value_dim,
        taps=model.linear_conv_kernel_dim,
        per_channel=model.linear_gate == "per_channel",
    )
    norms = (1 + model.query_groups / model.num_attention_heads) * model.footprint.qk_norms
    gate = model.footprint.output_gate + norms
    numbers["softmax_last"] = model.has_softmax(model.num_layers - 1)
    return numbers | {"delta": heads, "softmax_layers": len(softmax_layers(model)), "gate": gate}


class _NoInitialization(TorchFunctionMode):
    """Skips ``nn.init.normal_``: its operators for meta tensors take a second to import."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is nn.init.normal_:
            return kwargs["tensor"]
        return func(*args, **kwargs)


@lru_cache
def _diffusion(model: DiTConfig) -> dict[str, Any]:
    """Return a DiT's fields of ``StepShape``; a patch's prediction counts as its logits."""
    attention = 2 * model.num_layers * model.num_patches * model.hidden_size
    modulation = 6 * model.num_layers * model.hidden_size**2  # makes shifts, scales and gates
    return {
        "gated": False,
        "vocab": model.out_width,
        "parameters": num_dit_parameters(model),
        "outside": 2 * model.out_width * model.hidden_size,
        "matrix_weights": multiply_adds(model) // model.num_patches - attention,
        "replicated": modulation,
    }


def layout_seconds(config: Any, cluster: Cluster) -> dict[HybridLayout, float]:
    """Return the seconds of a softmax layer, forward and backward, in each layout of a hybrid.

    An exchange moves q, k and v to the layout and the output back, and their gradients in the
    backward pass: 2 x (2 heads + 2 kv_heads) x head_dim elements of each token that changes its
    rank. It overlaps with nothing.
    """
    model = config.model
    size = config.mesh.context_parallel_size
    tp = config.mesh.tensor_model_parallel_size
    seq_len = config.joined_length
    batch = 1 if config.packed else config.train.micro_batch_size
    heads = model.num_attention_heads // tp
    kv_heads = max(1, model.query_groups // tp)
    element_size = 2 if config.train.bf16 else 4
    link = cluster.between_bytes_per_s
    if size * tp <= cluster.gpus_per_node:
        link = cluster.inside_bytes_per_s

    seconds = {}
    linear_layout = config.context.context_parallel_layout
    for layout in config.hybrid.layouts(linear_layout):
        method = config.hybrid.context(layout).context_parallel_method
        plan = make_plan(method, seq_len=seq_len, size=size, multiple=tp, layout=layout)
        linear_plan = make_plan(
            "lasp",
            seq_len=seq_len,
            size=size,
            multiple=plan.local_len,
            layout="zigzag" if linear_layout == "zigzag" else "auto",
        )
        num_moved = moved_tokens(linear_plan.geometry, plan.geometry)
        exchanged_bytes = (
            2 * (2 * heads + 2 * kv_heads) * model.head_dim * element_size * batch * num_moved
        )
        rank_sizes = sizes(plan.geometry, batch, heads, kv_heads, model.head_dim, element_size)
        cost = AttentionCost(plan, rank_sizes, cluster, tp)
        seconds[layout] = cost.forward() + cost.backward() + exchanged_bytes / link
    return seconds


class DocumentsError(UserError):
    """Raised if the documents' lengths are unknown or below 1."""


def typical_documents(
    config: CommonConfig, lengths: tuple[int, ...] = ()
) -> tuple[int, ...] | None:
    """Return cu_seqlens of a typical micro-batch; None if tokens attend across documents.

    Documents are drawn with a fixed seed and arranged as in the dataset: a shuffled stream is cut
    into samples, or whole documents are packed into samples.

    Args:
        lengths: document lengths to draw from, in tokens; by default the lengths in the data's .idx
            files, with the files' weights.

    Raises:
        DocumentsError: lengths below 1, or no data to take them from.
        DataError: a file is missing or broken.
    """
    if not config.packed:
        return None
    if config.sample_ends is not None:
        return config.sample_ends
    if lengths and min(lengths) < 1:
        raise DocumentsError(f"document_lengths has {min(lengths)}; give lengths of 1 or more")
    if not lengths and not config.data.data_path:
        raise DocumentsError(
            "reset_attention_mask is set, but data_path is empty, so the documents' lengths are "
            "not known; give --data-path PREFIX, or typical lengths as in "
            "--document-lengths 300 2000 40000"
        )
    if lengths:
        population = np.array(lengths)
    else:
        population = _lengths(config.data.data_path, config.data.blend_by_length)
    fill = _packed if config.data.pack_documents else _cut
    return fill(
        np.random.default_rng(0),
        population[population > 0].astype(np.int64),
        config.sequence_length,
        config.joined_length,
    )


def known_documents(config: CommonConfig) -> tuple[int, ...] | None:
    """Return ``typical_documents``, or whole samples if the data are not on this machine.

    Raises DataError if a file is broken.
    """
    if not config.packed or config.sample_ends is not None:
        return typical_documents(config)
    paths = config.data.data_path
    if paths and Path(f"{blend(paths)[0][0]}.idx").exists():
        return typical_documents(config)
    return tuple(range(0, config.joined_length + 1, config.sequence_length))


def heaviest_documents(config: CommonConfig) -> tuple[int, ...] | None:
    """Return cu_seqlens of the run's own micro-batch with the longest documents.

    Among the run's first micro-batches it is the one with the largest sum of squared lengths: the
    rows of a long document travel farthest. None if tokens attend across documents.

    Raises:
        DataError: data or tokenizer are missing or broken.
    """
    if not config.packed or config.sample_ends is not None:
        return typical_documents(config)
    tokenizer = load_tokenizer(str(config.data.tokenizer_model))
    size = config.train.micro_batch_size
    samples, _, _ = build_datasets(
        config.data, config.sequence_length, config.train.seed, tokenizer, config.model.vocab_size
    )
    num_micro_batches = config.train.train_iters * (config.train.global_batch_size or size) // size
    micro_batches = batches(samples, Batching(global_batch_size=size, micro_batch_size=size), 0)

    all_cu_seqlens = []
    for step in islice(micro_batches, min(MAX_MICRO_BATCHES, num_micro_batches)):
        all_cu_seqlens.append(tuple(cumulative_lengths(step[0]["starts"].view(-1))))
    return max(all_cu_seqlens, key=lambda cu_seqlens: np.square(np.diff(cu_seqlens)).sum())


@lru_cache(maxsize=4)
def _lengths(data_path: tuple[str, ...], blend_by_length: tuple[str, ...]) -> np.ndarray:
    """Draw document lengths so that tokens follow the sources' weights and ``blend_by_length``."""
    generator = np.random.default_rng(0)
    prefixes, weights = blend(data_path)

    # Sources are mixed by their weights, by default by their tokens.
    lengths_by_source = []
    for prefix in prefixes:
        lengths = open_indexed(prefix).document_lengths
        stride = -(-len(lengths) // MAX_READ)
        lengths_by_source.append(lengths[::stride])
    if weights is None:
        weights = [float(lengths.sum(dtype=np.int64)) for lengths in lengths_by_source]
    drawn = _by_share(generator, lengths_by_source, weights)
    if not blend_by_length:
        return drawn

    # With blend_by_length, draw again from these, grouped by length.
    min_lengths, shares = zip(*length_shares(blend_by_length), strict=True)
    groups = []
    for low, high in pairwise((*min_lengths, np.inf)):
        in_group = (drawn >= low) & (drawn < high)
        groups.append(drawn[in_group])
    return _by_share(generator, groups, shares)


def _by_share(
    generator: np.random.Generator, groups: Sequence[np.ndarray], shares: Sequence[float]
) -> np.ndarray:
    """Draw documents of every group that is not empty, so that tokens follow the shares."""
    nonempty = []
    for share, group in zip(shares, groups, strict=True):
        if len(group):
            nonempty.append((share, group))

    # Shares are of tokens, so a group of long documents needs fewer documents.
    rates = np.array([share / group.mean() for share, group in nonempty])
    counts = np.ceil(NUM_DRAWN * rates / rates.sum()).astype(int)

    drawn = []
    for (_, group), count in zip(nonempty, counts, strict=True):
        drawn.append(generator.choice(group, count))
    return np.concatenate(drawn)


def _cut(
    generator: np.random.Generator, lengths: np.ndarray, sample: int, joined: int
) -> tuple[int, ...]:
    """Return cu_seqlens of ``joined`` tokens that are cut from a stream of documents.

    The stream begins at a random point of a document; every end of a sample ends a document too.
    """
    # Draw enough documents, even if nothing remains of the first one.
    num_documents = 8 + 2 * joined // int(lengths.mean())
    drawn = generator.choice(lengths, num_documents)
    while drawn[1:].sum() < joined:
        drawn = np.concatenate((drawn, generator.choice(lengths, len(drawn))))

    ends = np.cumsum(drawn) - generator.integers(drawn[0])
    sample_ends = np.arange(0, joined + 1, sample)
    cu_seqlens = np.union1d(ends[ends < joined], sample_ends)
    return tuple(cu_seqlens.tolist())


def _packed(
    generator: np.random.Generator, lengths: np.ndarray, sample: int, joined: int
) -> tuple[int, ...]:
    """Return cu_seqlens of samples of whole documents and padding, as pack_documents packs them.

    They are drawn from 16 times as many samples: packing fewer documents would add more padding.
    """
    num_documents = 16 + 16 * joined // int(lengths.mean())
    drawn = generator.choice(lengths, num_documents).astype(np.int32)
    while drawn.sum(dtype=np.int64) < 16 * joined:
        further = generator.choice(lengths, len(drawn)).astype(np.int32)
        drawn = np.concatenate((drawn, further))
    fragments, bounds = packed_documents(drawn, np.arange(len(drawn)), sample, 0)

    # Every fragment of a drawn sample starts a document, and so does every stretch of padding.
    starts = {joined}
    numbers = generator.choice(len(bounds) - 1, joined // sample, replace=False)
    for index, number in enumerate(numbers):
        fragment_lengths = fragments["length"][bounds[number] : bounds[number + 1]]
        ends = np.cumsum(fragment_lengths).tolist()
        padding = range(ends[-1], sample, PADDING_DOCUMENT)
        starts |= {index * sample + start for start in (0, *ends, *padding)}
    return tuple(sorted(starts))
