"""Documents of a micro-batch, drawn or read, and layouts by what they cost.

The layouts are those of a hybrid's softmax layers.
"""

from dataclasses import replace

import numpy as np
import pytest

from data.text.config import DataConfig
from data.text.megatron import build_datasets
from data.tokenizer import load_tokenizer
from parallel.context.config import HybridConfig
from parallel.mesh import MeshConfig
from planner.choice import with_layout
from planner.cluster import CLUSTERS, load_cluster
from planner.search import rank
from planner.workload import DocumentsError, heaviest_documents, layout_seconds, typical_documents
from runtime.errors import DataError
from tests.data.text.corpora import write_documents
from tests.model.models import model_config
from tests.planner.test_search import config
from train.config.entries import Config, TrainConfig


def run(length, size, method="ring"):
    return Config(
        model=model_config(
            model_type="transnormer", hidden_size=2048, num_attention_heads=16, softmax_every=2
        ),
        mesh=MeshConfig(context_parallel_size=size),
        train=TrainConfig(seq_length=length, micro_batch_size=1, bf16=True),
        hybrid=HybridConfig(hybrid_softmax_method=method),
    )


@pytest.mark.parametrize("size", [2, 8])
def test_layouts_are_weighed_by_pairs_and_bytes(size):
    """Contiguous gives the last rank (2 P - 1) / P of the mean.

    An exchange sends at most all tokens.
    """
    length, none = 1024 * size, {"launch_us": 0.0, "inside_latency_us": 0.0, "masked_share": 0.0}
    ideal = replace(load_cluster("h100"), **none, posted_overlap=1.0, inside_gb_per_s=1e12)
    for method in ("ring", "allgather"):
        plain_, zigzag = layout_seconds(run(length, size, method), ideal).values()
        assert plain_ / zigzag == pytest.approx(
            (2 * size - 1) / size * length / (length + 1), rel=1e-3
        )
    moved = length // size // (2 if size == 2 else 1)  # of two ranks each keeps half
    busy = replace(ideal, peak_tflops=1.0)  # behind whose computation a ring's messages are hidden
    (plain_, zigzag), (far, balanced) = (
        layout_seconds(run(length, size), replace(busy, inside_gb_per_s=rate)).values()
        for rate in (1e12, 50.0)
    )
    exchanged = 50e9 * ((balanced - far) - (zigzag - plain_))  # both have the same messages besides
    assert exchanged == pytest.approx(2 * (2 * 16 + 2 * 16) * 128 * 2 * moved, rel=1e-3)


def test_auto_takes_the_faster_layout():
    """The balance saves by the square of the length, the exchange costs by the length."""
    chosen = {}
    for length in (1024, 1 << 20):
        for fast in ("h100_pod", "cpu"):
            cluster = load_cluster(CLUSTERS / f"{fast}.toml")
            costs = layout_seconds(run(length, 4), cluster)
            chosen[length, fast] = with_layout(run(length, 4), cluster).hybrid.hybrid_softmax_layout
            assert chosen[length, fast] == min(costs, key=costs.get)
    assert with_layout(config(4)) == config(4), "no hybrid"
    zigzag = replace(
        run(1024, 4), hybrid=replace(run(1024, 4).hybrid, hybrid_softmax_layout="zigzag")
    )
    assert with_layout(zigzag) == zigzag, "named"
    assert chosen[1024, "h100_pod"] == "contiguous"
    assert {chosen[1 << 20, fast] for fast in ("h100_pod", "cpu")} == {"zigzag"}


def packed(size=4, data_path=(), **fields):
    packed_config = config(size)
    data = DataConfig(data_path=data_path, reset_attention_mask=True, reset_position_ids=True)
    return replace(packed_config, data=data, train=replace(packed_config.train, **fields))


def test_a_micro_batch_s_documents_have_the_stated_lengths_and_end_with_samples():
    cu_seqlens = typical_documents(packed(seq_length=1000, micro_batch_size=3), (40, 90))
    assert cu_seqlens[0] == 0
    assert cu_seqlens[-1] == 3000
    assert {1000, 2000} <= set(cu_seqlens)
    assert max(np.diff(cu_seqlens)) == 90
    assert min(np.diff(cu_seqlens)) > 0
    assert cu_seqlens == typical_documents(packed(seq_length=1000, micro_batch_size=3), (40, 90))
    assert typical_documents(config(4), (40, 90)) is None


def test_lengths_are_those_of_the_data_by_weight(tmp_path):
    short = write_documents(tmp_path / "short", [[1] * 10] * 50)
    long = write_documents(tmp_path / "long", [[1] * 400] * 5)
    cu_seqlens = typical_documents(packed(data_path=("0.9", short, "0.1", long), seq_length=40000))
    lengths = np.diff(cu_seqlens)
    assert lengths[lengths == 10].sum() / 40000 == pytest.approx(0.9, abs=0.05)
    by_size = np.diff(typical_documents(packed(data_path=(short, long), seq_length=40000)))
    assert by_size[by_size == 10].sum() / 40000 == pytest.approx(0.2, abs=0.08)
    short_long_config = packed(data_path=(short, long), seq_length=40000)
    blended = np.diff(
        typical_documents(
            replace(
                short_long_config,
                data=replace(short_long_config.data, blend_by_length=("100:0.3",)),
            )
        )
    )
    assert blended[blended == 10].sum() / 40000 == pytest.approx(0.7, abs=0.05)


def test_unknown_lengths_are_refused(tmp_path):
    with pytest.raises(DocumentsError, match="--document-lengths"):
        typical_documents(packed())
    with pytest.raises(DocumentsError, match="document_lengths has 0"):
        typical_documents(packed(), (3, 0))
    with pytest.raises(DataError, match="does not exist"):
        typical_documents(packed(data_path=(str(tmp_path / "none"),)))


def test_an_exchange_is_chosen_for_packed_documents_over_nodes_and_offered_for_nothing_else():
    cluster = replace(load_cluster("configs/clusters/h100_pod.toml"), gpus_per_node=4)
    packed_config = packed(16, seq_length=131072)
    candidates = rank([packed_config], 16, cluster, (300, 2000, 20000)).candidates
    assert candidates[0].config.context.context_parallel_method == "exchange"
    assert candidates[0].config.context.context_parallel_ranks_per_node == 4
    whole = replace(packed_config, data=DataConfig())
    assert "exchange" not in {
        c.config.context.context_parallel_method for c in rank([whole], 16, cluster).candidates
    }


def test_the_heaviest_micro_batch_is_the_one_of_the_run_s_first_whose_documents_attend_to_most(
    default_data, tmp_path
):
    tokenizer = load_tokenizer(f"{default_data}.model")
    documents = [
        [tokenizer.eod + 1] * (length - 1) + [tokenizer.eod]
        for length in (100, 100, 100, 1900) * 20
    ]
    mixed = write_documents(tmp_path / "mixed", documents)
    mixed_config = packed(data_path=(mixed,), seq_length=2048, micro_batch_size=2, train_iters=3)
    mixed_config = replace(
        mixed_config, data=replace(mixed_config.data, tokenizer_model=f"{default_data}.model")
    )
    samples, _, _ = build_datasets(mixed_config.data, 2048, mixed_config.train.seed, tokenizer)
    ends = []
    for begin in (0, 2, 4):
        starts = np.concatenate([samples[n]["starts"] for n in (begin, begin + 1)])
        ends.append((*np.flatnonzero(starts).tolist(), 4096))
    pairs = [np.square(np.diff(bounds)).sum() for bounds in ends]
    assert len(set(pairs)) == 3
    assert np.argmax(pairs) > 0, "negative control: the run's first is another"
    assert heaviest_documents(mixed_config) == ends[np.argmax(pairs)]
    assert {2048, 4096} <= set(ends[0])
