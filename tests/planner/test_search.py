"""Candidates that the planner enumerates, refuses and takes, and the method auto of a real run."""

from dataclasses import replace

import pytest

from parallel.context.methods import METHODS
from parallel.mesh import MeshConfig
from planner.cluster import CLUSTERS, load_cluster
from planner.levers import settings
from planner.search import arrangements, contexts, rank
from tests.model.models import model_config
from tests.pretraining import pretrain
from train.config.entries import Config, TrainConfig
from train.config.language import load_config
from train.config.sizes import validate_sizes

A100 = load_cluster(CLUSTERS / "wallfacer_a100_8.toml")


def config(size, heads=8, groups=8):
    model = model_config(
        hidden_size=512, num_attention_heads=heads, num_query_groups=groups, vocab_size=512
    )
    return Config(
        model=model,
        mesh=MeshConfig(context_parallel_size=size),
        train=TrainConfig(seq_length=4096, bf16=True),
    )


def test_every_method_team_degree_and_placement_is_there_once():
    all_contexts = list(contexts(config(16), 8))
    assert len(all_contexts) == len(set(all_contexts))
    methods = {context.context_parallel_method for context in all_contexts}
    assert methods == METHODS.keys() - {"exchange", "allgather_q"}, "for packed documents, slices"
    teams = {
        (c.context_parallel_team_size, c.ulysses_degree, c.context_parallel_placement)
        for c in all_contexts
        if c.context_parallel_method == "wallfacer"
    }
    pairs = {(2, 1), (2, 2)}
    assert teams == {(4, 1, "collect_intra"), (2, 4, "collect_intra")} | {
        (*pair, placement) for pair in pairs for placement in ("collect_intra", "p2p_intra")
    }
    assert all(
        c.context_parallel_ranks_per_node == 8
        for c in all_contexts
        if c.context_parallel_method == "double_ring"
    )


def test_heads_come_in_stages_only_where_nothing_else_fits():
    long = config(4, heads=32, groups=32)
    long = replace(
        long,
        train=replace(long.train, seq_length=2**18),
        model=replace(long.model, kv_channels=128),
    )
    roomy = rank([long], 4, A100).candidates
    assert {candidate.config.context.ulysses_head_chunks for candidate in roomy} == {1}
    min_bytes = min(candidate.prediction.bytes for candidate in roomy)
    short = rank([long], 4, replace(A100, memory_gb=0.999 * min_bytes / 1e9)).candidates
    assert {candidate.config.context.context_parallel_method for candidate in short} >= {"ulysses"}
    for candidate in short:
        degree = (
            4
            if candidate.config.context.context_parallel_method == "ulysses"
            else candidate.config.context.ulysses_degree
        )
        assert candidate.config.context.ulysses_head_chunks == 32 // degree > 1
        validate_sizes(candidate.config, 4)


def test_what_cannot_be_is_refused_with_its_reason_and_what_is_large_set_aside():
    ranking = rank([config(16, heads=4, groups=4)], 16, A100)
    assert ranking.refused
    assert all("ulysses_degree is" in reason for reason in ranking.refused)
    assert {c.config.context.ulysses_degree for c in ranking.candidates} == {1, 2, 4}
    times = [candidate.prediction.time for candidate in ranking.candidates]
    assert times == sorted(times)
    small = rank([config(16)], 16, replace(A100, memory_gb=1e-3))
    assert not small.candidates
    assert small.over_memory


def test_all_arrangements_of_four_processes_and_nothing_to_choose_on_one():
    meshes = [c.mesh for c in arrangements(config(1), 4)]
    assert len(set(meshes)) == 10  # ordered triples of powers of 2 whose product divides 4
    assert len(meshes) == len(set(meshes))
    assert len(list(contexts(config(1), 8))) == 1
    linear = replace(config(1), model=model_config(model_type="transnormer", vocab_size=512))
    assert len(list(contexts(linear, 8))) == 1


def test_settings_are_varied_until_it_fits():
    """LLaMA 3 8B at 512K on 8 H100, which was once refused: 40.9 by full recomputation."""
    whole, cluster = (
        load_config("configs/models/llama3_8b.toml"),
        load_cluster(CLUSTERS / "h100_pod.toml"),
    )
    mesh = replace(whole.mesh, context_parallel_size=8)
    long_config = replace(
        whole, mesh=mesh, train=replace(whole.train, seq_length=1 << 19, bf16=True)
    )
    assert rank([long_config], 8, cluster).candidates == []
    best = rank([long_config], 8, cluster, vary=settings).candidates[0].config.recompute
    assert (best.recompute_granularity, best.loss_chunk_size, best.ffn_chunk_size) == (
        "attention_boundary",
        2048,
        0,
    )
    tight = replace(cluster, memory_gb=45, host_gb_per_s=0.0)
    candidates = {
        candidate.config.context.title: candidate
        for candidate in rank([long_config], 8, tight, vary=settings).candidates
    }["zigzag"]
    assert candidates.config.recompute.recompute_granularity == "full"
    assert candidates.prediction.bytes == pytest.approx(40.9e9, rel=0.001)


def test_a_run_with_auto_trains_and_goes_on_with_what_it_chose(default_data, tmp_path):
    flags = (
        "--context-parallel-size",
        "2",
        "--context-parallel-method",
        "auto",
        "--train-iters",
        "2",
    )
    save = tmp_path / "run"
    first = pretrain(2, default_data, save, *flags, "--exit-interval", "1")
    chosen = load_config(save / "config.toml").context
    assert chosen.context_parallel_method not in ("auto", "none")
    assert chosen.cluster is None
    # Had another been chosen then, it would be kept too, whatever the model predicts now.
    text = (save / "config.toml").read_text()
    (save / "config.toml").write_text(
        text.replace(f'"{chosen.context_parallel_method}"', '"allgather"')
    )
    second = pretrain(2, default_data, save, *flags, "--load", str(save))
    assert load_config(save / "config.toml").context.context_parallel_method == "allgather"
    assert [record["iteration"] for record in first] == [1]
    assert [record["iteration"] for record in second] == [1, 2]
