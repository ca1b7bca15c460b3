"""Clusters: every file is one, and what is no cluster is refused with file, key and fix."""

import pytest
import tomli_w
import torch

from planner.cluster import CLUSTERS, ClusterError, default_cluster, load_cluster


@pytest.mark.parametrize("path", sorted(CLUSTERS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_file_is_a_cluster_and_says_where_its_figures_come_from(path):
    cluster = load_cluster(path)
    assert cluster.inside_gb_per_s >= cluster.between_gb_per_s
    assert 0.02 < cluster.delta_share < cluster.attention_fraction
    assert cluster.node_gb_per_s == cluster.between_gb_per_s * (
        cluster.gpus_per_node if cluster.between_link == "rank" else 1
    )
    assert sum("#" in line for line in path.read_text().splitlines()) >= 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memory_gb": None}, "memory_gb is missing"),
        ({"between_gb_per_s": -1}, "between_gb_per_s is -1"),
        ({"peak_tflops": 0}, "peak_tflops is 0"),
        ({"inside_latency_us": -0.5}, "inside_latency_us is -0.5"),
        ({"inside_gb_per_s": "fast"}, "inside_gb_per_s is 'fast'"),
        ({"inside_gb_per_s": float("nan")}, "inside_gb_per_s is nan"),
        ({"gpus_per_node": 8.5}, "gpus_per_node is 8.5"),
        ({"matmul_fraction": 1.5}, "matmul_fraction is 1.5"),
        ({"between_link": "both"}, "between_link is 'both'"),
        ({"host_memory_gb": None}, "host_gb_per_s is 25, but host_memory_gb is not set"),
        ({"block_keys": 0}, "block_keys is 0"),
        ({"mask_overhead": -0.1}, "mask_overhead is -0.1"),
        ({"name": 3}, "name is 3"),
        ({"speed": 3}, "unknown key speed"),
    ],
)
def test_what_is_no_cluster_is_refused(tmp_path, change, message):
    values = load_cluster(CLUSTERS / "a100_pod.toml").entries() | change
    path = tmp_path / "c.toml"
    path.write_text(
        tomli_w.dumps({name: value for name, value in values.items() if value is not None})
    )
    with pytest.raises(ClusterError, match=f"c.toml: {message}"):
        load_cluster(path)
    with pytest.raises(ClusterError, match=r"none.toml: cannot be read"):
        load_cluster(tmp_path / "none.toml")


def test_the_device_decides_where_no_file_does_and_no_card_is_taken_for_another(monkeypatch):
    """Cards by the names that torch gives are in ``tests/runtime/test_machine.py``."""
    assert default_cluster("cpu") == load_cluster(CLUSTERS / "cpu.toml")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    assert default_cluster("cuda") == load_cluster(CLUSTERS / "h100_pod.toml")
    for name in ("Tesla T4", "NVIDIA A100 80GB PCIe", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        with pytest.raises(
            ClusterError, match=f"no file in configs/clusters describes {name}; give --cluster FILE"
        ):
            default_cluster("cuda")


def test_the_attention_kernel_that_runs_decides_its_rate():
    hopper, ampere = (load_cluster(CLUSTERS / f"{name}_pod.toml") for name in ("h100", "a100"))
    assert hopper.running("auto") == hopper.running("cudnn") == hopper
    slow = hopper.running("flash_attn")
    assert (slow.attention_kernel, slow.attention_fraction) == (
        "flash_attn",
        hopper.kernel_fractions["flash_attn"],
    )
    assert hopper.public_error > slow.public_error == 0, "the runs were cuDNN's"
    assert hopper.running("aten") == hopper.running("auto", is_packed=True) == slow
    assert (
        hopper.running("flash_attn_3").attention_fraction
        > hopper.attention_fraction
        > slow.attention_fraction
    )
    assert ampere.running("auto", is_packed=True) == ampere.running("flash_attn") == ampere
    unknown = hopper.running("triton")
    assert (unknown.attention_kernel, unknown.attention_fraction) == ("", hopper.attention_fraction)
