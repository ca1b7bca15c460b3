"""Predictions for clips, of which the page keeps those made before any comparison."""

from papers.clips import main, rows


def test_every_configuration_is_predicted(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["clips"])
    assert main() == 0
    head, line, *printed = capsys.readouterr().out.splitlines()
    assert set(line) <= set("| -")
    assert len(printed) == len(list(rows()))
    assert {row.split("|")[1].strip() for row in printed} == {
        f"A{number}" for number in range(1, 9)
    }
    assert {row.count("|") for row in (head, *printed)} == {head.count("|")}


def test_the_clip_has_the_tokens_of_the_published_runs():
    for row in rows():
        if row.model == "wan2.1_14b":
            assert row.prediction().flops == row.run.batch * row_flops()


def row_flops():
    from papers.clips import WAN_CLIP
    from planner.diffusion.clip import load_transformer
    from planner.diffusion.run import ClipRun, clip_flops

    model, _ = load_transformer("wan2.1_14b")
    assert WAN_CLIP.image_tokens(model) == 37_440
    return sum(clip_flops(model, WAN_CLIP, ClipRun(gpus=1).training()))
