"""Kinds of the sources of a cluster's numbers: of every file, and of the kernel that runs."""

import tomllib

import pytest

from planner.cluster import CLUSTERS, load_cluster
from planner.page.origins import comments_of, kind_of, origins

FILES = sorted(CLUSTERS.glob("*.toml"))
WITHOUT_SOURCE = {
    "what auto takes; its share of the peak, forward and backward together:",
    "driver, CUDA's libraries, NCCL: 0.6 to 6 in torch's out-of-memory messages",
    "one adapter for all GPUs of a node",
}
"""Comments of the cluster files that explain a number without naming its source."""


def numbers_of(file, backend="auto", is_packed=False):
    """Return the page's rows of a cluster file, keyed by the number's name."""
    cluster = load_cluster(file)
    running = cluster.running(backend, is_packed)
    *_, constants = origins({"linear": 1.0}, cluster, running, file, "", file.name)
    rows = [["".join(cell.itertext()) for cell in row] for row in constants.iter("tr")]
    return {row[0]: row[1:] for row in rows[1:]}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_comment_of_a_file_names_a_kind_and_every_other_field_is_a_default(file):
    written = tomllib.loads(file.read_text())
    comments = comments_of(file)
    for key, (_, kind, comment) in numbers_of(file).items():
        if key not in written:
            assert (kind, comment) == ("default", "")
        else:
            is_explained = comment not in WITHOUT_SOURCE | {""}
            assert comment == comments.get(key, "")
            assert (kind != "stated") == is_explained, (key, comment)
        assert ("fitted to published" in kind) == comment.startswith("fitted to public_runs.csv")
        assert ("assumed" in kind) == ("assumed" in comment)
        assert ("data sheet" in kind) == ("data sheet" in comment)


@pytest.mark.parametrize(
    ("file", "key", "kind"),
    [
        ("h100_pod", "public_error", "published runs that nothing was fitted to"),
        ("h100_pod", "block_queries", "default"),
        ("h100_pod", "posted_overlap", "default"),
        ("h100_pod", "gpus_per_node", "stated"),
        ("b200_pod", "flash_attn_fraction", "measured, published"),
        ("b300_pod", "delta_fraction", "of another GPU"),
        ("cpu", "matmul_fraction", "measured"),
    ],
)
def test_kinds_of_single_numbers(file, key, kind):
    assert numbers_of(CLUSTERS / f"{file}.toml")[key][1] == kind


def test_the_rate_of_attention_is_that_of_the_kernel_that_runs():
    file = CLUSTERS / "h100_pod.toml"
    cluster = load_cluster(file)
    assert numbers_of(file)["attention_fraction"][0] == f"{cluster.attention_fraction:g}"
    packed = numbers_of(file, is_packed=True)
    value, kind, source = packed["attention_fraction"]
    assert value == f"{cluster.kernel_fractions['flash_attn']:g}" != f"{cluster.attention_fraction}"
    assert kind == "fitted to published runs"
    assert "FlashAttention 2 on H100" in source
    assert packed["attention_kernel"][:2] == ["flash_attn", "chosen for the plan"]
    assert "public_error" not in packed


def test_a_share_of_the_file_s_rate_is_a_default(tmp_path):
    file = tmp_path / "own.toml"
    lines = (CLUSTERS / "h100_pod.toml").read_text().splitlines()
    others = [line for line in lines if not line.startswith("flash_attn_fraction")]
    file.write_text("\n".join(others))
    _, kind, source = numbers_of(file, is_packed=True)["attention_fraction"]
    assert kind == "default"
    assert "kernels/backends" in source


def test_a_calibrated_file_has_measured_numbers_but_not_those_of_another_file(tmp_path):
    file = tmp_path / "own.toml"
    text = (CLUSTERS / "cpu.toml").read_text()
    text = text.replace("# assumed\n", "# one rank alone\n", 1)
    text = text.replace("# assumed\n", "# not measured: taken from a CPU\n", 1)
    file.write_text(text)
    assert numbers_of(file)["launch_us"][1] == numbers_of(file)["memory_gb"][1] == "stated"
    file.write_text(f"# Measured by python -m tools.calibrate on x.\n{text}")
    assert numbers_of(file)["launch_us"][1] == "measured"
    assert numbers_of(file)["memory_gb"][1] == "stated"
    assert kind_of("not measured: taken from x") == "stated"
