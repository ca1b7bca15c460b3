"""The method and the layout that ``auto`` takes, and the mesh of a run on other processes."""

from dataclasses import replace

import pytest
import tomli_w

from parallel.context import ContextConfig
from parallel.context.config import FullContextConfig
from planner import choice
from planner.choice import fastest_method, rearranged, with_schedule
from planner.cluster import CLUSTERS, load_cluster
from planner.rehearsal import fake_process_group
from planner.search import predicted, rank
from tests.model.models import model_config
from tests.planner.test_search import A100, config
from train.config import diffusion
from train.config.finalize import config_to_save, with_method
from train.config.flags import ConfigError
from train.config.language import parse_args, validate


def test_the_schedule_of_a_delta_rule_is_the_one_predicted_fastest():
    """A chain passes the fewest bytes, and waits for as many states as a document has parts."""
    model = model_config(
        model_type="qwen3_5", num_attention_heads=4, softmax_every=2, vocab_size=512
    )

    def run(size, schedule="auto"):
        context = ContextConfig(context_parallel_method="zigzag", delta_rule_schedule=schedule)
        return replace(config(size), model=model, context=context)

    node = replace(load_cluster(CLUSTERS / "cpu.toml"), gpus_per_node=16)
    slow_link = replace(node, inside_gb_per_s=1e-3, inside_latency_us=1.0)
    slow_start = replace(node, inside_gb_per_s=1e3, inside_latency_us=1e5)
    for size, cluster, expected in (
        (2, slow_link, "chain"),
        (16, slow_link, "tree"),
        (16, slow_start, "tree"),
    ):
        assert with_schedule(run(size), cluster) == run(size, expected)
        times = {
            name: predicted(run(size, name), size, cluster).time
            for name in ("auto", "chain", "tree")
        }
        assert times.pop("auto") == times[expected] == min(times.values())
    assert with_schedule(run(1)) == run(1)
    with fake_process_group(0, 16, 8):
        assert config_to_save(run(16, "tree"), run(16), 16) == run(16), (
            "other ranks that go on choose again"
        )
    unread = replace(
        run(16), data=replace(run(16).data, reset_attention_mask=True, data_path=["/nowhere/data"])
    )
    assert with_schedule(unread, slow_start).context.delta_rule_schedule == "tree", "whole samples"
    assert with_schedule(run(16, "chain"), slow_start) == run(16, "chain")


@pytest.mark.parametrize("kind", ["transnormer", "linear_transformer"])
def test_linear_attention_gets_the_faster_of_the_methods_that_pass_states_on(kind, tmp_path):
    """A state to the next rank waits for all before it: one latency after the other.

    Gathered they hide.
    """
    model = model_config(model_type=kind, hidden_size=512, num_attention_heads=8, vocab_size=512)
    linear = replace(config(16), model=model)
    assert {
        c.config.context.context_parallel_method for c in rank([linear], 16, A100).candidates
    } == {"lasp", "lasp2"}
    node = replace(load_cluster(CLUSTERS / "cpu.toml"), gpus_per_node=16, inside_gb_per_s=1e3)
    chosen = []
    for latency in (0.0, 1e5):
        fields = replace(node, inside_latency_us=latency).entries()
        path = tmp_path / f"{latency}.toml"
        path.write_bytes(tomli_w.dumps(fields).encode())
        context = ContextConfig(context_parallel_method="auto", cluster=str(path))
        chosen.append(
            with_method(
                replace(linear, context=context), 16, fastest_method
            ).context.context_parallel_method
        )
    assert chosen == ["lasp", "lasp2"]


def test_a_diffusion_transformer_gets_what_is_planned_first_for_it():
    dit = replace(
        diffusion.load_config(CLUSTERS.parent / "models" / "dit_tiny.toml"), mesh=config(2).mesh
    )
    auto_config = replace(dit, context=FullContextConfig(context_parallel_method="auto"))
    chosen = with_method(auto_config, 2, fastest_method)
    assert (
        chosen.context
        == rank([auto_config], 2, load_cluster(CLUSTERS / "cpu.toml")).candidates[0].config.context
    )
    assert chosen.context.context_parallel_method in (
        "ring",
        "allgather",
        "ulysses",
        "wallfacer",
        "double_ring",
    )
    assert with_method(dit, 2, fastest_method) == dit


def test_auto_says_why_it_finds_nothing(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        (CLUSTERS / "cpu.toml").read_text().replace("memory_gb = 8 ", "memory_gb = 0.001 ")
    )
    context = ContextConfig(context_parallel_method="auto", cluster=str(path))
    with pytest.raises(
        ConfigError, match=r"memory_gb of .* is 0.001, but the smallest of .* use more processes"
    ):
        with_method(replace(config(2), context=context), 2, fastest_method)


FLAGS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --device cpu "
    "--data-path x"
)
FLAGS += (
    " --tokenizer-model x.model --global-batch-size 4 --micro-batch-size 2 "
    "--context-parallel-size 2"
)


def flagged(*more):
    return parse_args([*FLAGS.split(), *more])


@pytest.mark.parametrize("method", ["ring", "ulysses", "auto"])
def test_every_number_of_processes_keeps_the_batch_and_the_method(method):
    resized_config = flagged(
        "--context-parallel-method", method, "--data-parallel-sharding-strategy", "zero1"
    )
    for processes in (1, 2, 4, 8):
        chosen, why = rearranged(resized_config, processes, 512)
        validate(chosen, processes)
        dp = chosen.mesh.data_parallel_size(processes)
        assert chosen.train.micro_batches(dp) * dp * chosen.train.micro_batch_size == 4
        assert chosen.context.context_parallel_method == method
        for name in ("data_parallel", "recompute", "model"):
            assert getattr(chosen, name) == getattr(resized_config, name)
        assert why.startswith("predicted to take ")


def test_sharding_gives_way_where_memory_is_short(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        (CLUSTERS / "cpu.toml").read_text().replace("memory_gb = 8 ", "memory_gb = 0.0045 ")
    )
    flags = ("--data-parallel-sharding-strategy", "ddp", "--allow-resize", "--cluster", str(path))
    chosen, _ = rearranged(flagged(*flags), 2, 512)
    assert (chosen.data_parallel, chosen.recompute) != (
        flagged(*flags[:2]).data_parallel,
        flagged().recompute,
    )
    validate(chosen, 2)


def test_processes_that_no_mesh_suits_are_told_which_would(monkeypatch):
    """Two copies of the optimizer's shards, and 3 processes."""
    resized_config = flagged("--full-world-size", "8", "--num-distributed-optimizer-instances", "2")
    line = (
        r"^allow_resize is set, but no mesh of 3 processes suits the model "
        r"and keeps the run's global_batch_size 4 \(set for "
    )
    with pytest.raises(ConfigError, match=line + r"8 processes\); start 2, 4, 6, 8 processes$"):
        rearranged(resized_config, 3, 512)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"; start 6 processes$"):
        rearranged(resized_config, 3, 512)


def test_prediction_and_profile_are_weighed_by_their_errors():
    assert choice.combine_prediction_and_profile([1.0, 2.0], [1.1, 2.2]) == pytest.approx(
        [1.1, 2.2]
    )
    near = choice.combine_prediction_and_profile(
        [1.0, 1.2], [1.01, 1.0]
    )  # the profile says 1 %, the predictions 20 %
    assert near[0] < near[1]
    far = choice.combine_prediction_and_profile([1.0, 1.2], [1.2, 1.0])
    assert far[1] < far[0]
