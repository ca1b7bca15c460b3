"""Other processes than a mesh is for: what is chosen for them, and what is refused."""

from types import SimpleNamespace

import pytest

from planner import choice
from planner.choice import divided, fitted_to_world, rearranged
from planner.cluster import CLUSTERS
from runtime.errors import UserError
from train.config.flags import ConfigError
from train.config.language import parse_args, validate

FLAGS = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 256 --device cpu --data-path x"
FLAGS += " --tokenizer-model x.model --global-batch-size 4 --micro-batch-size 2 --context-parallel-size 2"


@pytest.fixture(autouse=True)
def tokenizer(monkeypatch):
    monkeypatch.setattr(choice, "tokenizer_of", lambda config: SimpleNamespace(vocab_size=512))


def config(*more):
    return parse_args([*FLAGS.split(), *more])


def yielded(asked, processes, monkeypatch):
    monkeypatch.setattr(choice, "launched_world_size", lambda: processes)
    with fitted_to_world(asked, validate) as found:
        return found


@pytest.mark.parametrize("method", ["ring", "ulysses", "auto"])
def test_every_number_of_processes_keeps_the_batch_and_the_method(method):
    asked = config("--context-parallel-method", method, "--data-parallel-sharding-strategy", "zero1")
    for processes in (1, 2, 4, 8):
        found, why = rearranged(asked, processes)
        validate(found, processes)
        dp = found.mesh.data_parallel_size(processes)
        assert found.train.micro_batches(dp) * dp * found.train.micro_batch_size == 4
        assert found.context.context_parallel_method == method
        assert (found.data_parallel, found.recompute, found.model) == (
            asked.data_parallel,
            asked.recompute,
            asked.model,
        )
        assert why.startswith("predicted to take ")


def test_each_mesh_has_its_largest_micro_batch_and_a_pipeline_smaller_ones_too():
    found = [(one.mesh.pipeline_model_parallel_size, one.train.micro_batch_size) for one in divided(config(), 2)]
    assert sorted(found) == [(1, 2), (1, 2), (1, 2), (2, 1), (2, 2)]
    asked = config("--micro-batch-size", "4", "--global-batch-size", "12")
    data = [one for one in divided(asked, 6) if one.mesh.data_parallel_size(6) == 6]
    assert [one.train.micro_batch_size for one in data] == [2], "2 divides 4 and the 12 / 6 of a rank"


def test_sharding_gives_way_where_memory_is_short(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text((CLUSTERS / "cpu.toml").read_text().replace("memory_gb = 8 ", "memory_gb = 0.0045 "))
    flags = ("--data-parallel-sharding-strategy", "ddp", "--allow-resize", "--cluster", str(path))
    found, _ = rearranged(config(*flags), 2)
    assert (found.data_parallel, found.recompute) != (config(*flags[:2]).data_parallel, config().recompute)
    validate(found, 2)
    path.write_text((CLUSTERS / "cpu.toml").read_text().replace("memory_gb = 8 ", "memory_gb = 0.0001 "))
    with pytest.raises(ConfigError, match=r"memory_gb of .* is 0.0001 and the smallest of"):
        rearranged(config(*flags), 2)


def test_processes_that_no_mesh_suits_are_told_which_would(monkeypatch):
    """Two copies of the optimizer's shards, and 3 processes."""
    asked = config("--full-world-size", "8", "--num-distributed-optimizer-instances", "2")
    line = r"^allow_resize is set, and no mesh of 3 processes suits the model and keeps global_batch_size 4 of the run "
    with pytest.raises(ConfigError, match=line + r"for 8; on 2, 4, 6, 8 there would be one$"):
        rearranged(asked, 3)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"; on 6 there would be one$"):
        rearranged(asked, 3)


def test_without_the_flag_the_refusal_names_it(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("[mesh]\nfull_world_size = 4\n")
    hint = r"^context_parallel_size is 2, which does not divide the 3 .*; or give --allow-resize: the run is for 4 "
    with pytest.raises(ConfigError, match=hint):
        yielded(config("--load", str(tmp_path)), 3, monkeypatch)
    for more, processes in (
        ((), 3),
        (("--load", str(tmp_path / "none")), 3),
        (("--load", str(tmp_path), "--finetune"), 3),
        (("--load", str(tmp_path), "--global-batch-size", "5"), 3),  # which 4 processes do not suit either
    ):
        with pytest.raises(UserError) as refused:
            yielded(config(*more), processes, monkeypatch)
        assert "allow-resize" not in str(refused.value)


def test_without_the_flag_the_sizes_are_for_the_processes_here(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text("[mesh]\nfull_world_size = 4\n")
    asked = config("--load", str(tmp_path))
    found, written = yielded(asked, 2, monkeypatch)
    assert (found, written) == (asked, asked)
    assert written.mesh.full_world_size == 2


def test_the_number_of_processes_must_fit_the_sizes(monkeypatch):
    with pytest.raises(ConfigError, match="context_parallel_size is 2, which does not divide the 3 processes"):
        yielded(config("--allow-resize", "--full-world-size", "3"), 1, monkeypatch)
    with pytest.raises(UserError, match="full_world_size is 0; it must be 1 or more"):
        config("--full-world-size", "0")


def test_a_cluster_may_be_named_for_it():
    named = ("--cluster", str(CLUSTERS / "cpu.toml"))
    validate(config(*named, "--allow-resize"), 2)
    with pytest.raises(UserError, match="which leaves nothing to choose; leave it out, use method auto, or give"):
        validate(config(*named), 2)
