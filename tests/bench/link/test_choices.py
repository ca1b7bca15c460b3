"""Which settings there are, and what is said of a choice."""

import pytest

from bench.link.choices import LENGTHS, LINKS, MODELS, judged, markdown, settings
from planner.choice import combine_prediction_and_profile

ROW = {
    "predicted": {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0},
    "turns": {
        "a": [1.02, 1.2, 1.0, 1.1],
        "b": [1.0, 1.0, 1.0, 1.3],
        "c": [3.0, 3.0, 3.0, 3.0],
        "d": [2.0, 2.0, 2.0, 2.0],
    },
}


def test_each_link_has_each_model_once_and_each_length():
    found = settings(list(LINKS), list(MODELS))
    assert len({(link, model) for link, model, _ in found}) == len(found) == len(LINKS) * len(MODELS)
    for link in LINKS:
        assert {length for name, _, length in found if name == link} == set(LENGTHS)
    assert settings([LINKS[1]], ["llama"]) == [one for one in found if one[:2] == (LINKS[1], "llama")]


def test_a_choice_is_held_against_the_best_measured():
    said = judged(ROW)
    assert (said["predicted"], said["choice"], said["best"], said["ranks"]) == ("a", "a", "b", [2, 1, 4, 3])
    assert said["behind"] == said["predicted_behind"] == pytest.approx(0.1)
    assert said["spread"] == pytest.approx(0.3)
    better = judged({**ROW, "predicted": {"b": 1.0, "a": 2.0, "c": 3.0, "d": 4.0}})
    assert (better["choice"], better["behind"], better["ranks"]) == ("b", 0.0, [1, 2, 4, 3])
    profiled = judged({**ROW, "turns": {**ROW["turns"], "a": [2.0, 1.2, 1.0, 1.1]}})
    assert (profiled["predicted"], profiled["choice"], profiled["behind"]) == ("a", "b", 0.0)


def test_prediction_and_profile_are_weighed_by_their_errors():
    assert combine_prediction_and_profile([1.0, 2.0], [1.1, 2.2]) == pytest.approx([1.1, 2.2])
    near = combine_prediction_and_profile([1.0, 1.2], [1.01, 1.0])  # the profile says 1 %, the predictions 20 %
    assert near[0] < near[1]
    far = combine_prediction_and_profile([1.0, 1.2], [1.2, 1.0])
    assert far[1] < far[0]


def test_settings_with_two_candidates_are_counted_apart():
    cluster = {"between_link": "node"} | dict.fromkeys(("peak_tflops", "matmul_fraction", "attention_fraction"), 1.0)
    cluster |= {f"{where}_{what}": 1.0 for where in ("inside", "between") for what in ("gb_per_s", "latency_us")}
    common = {"link": LINKS[0], "length": 768}
    two = {"predicted": {"lasp": 1.0, "lasp2": 2.0}, "turns": {"lasp": [1.0, 1.0], "lasp2": [2.0, 2.0]}}
    machine = dict.fromkeys(("device", "cores", "platform", "torch", "date"), "x")
    result = {"machine": machine, "load_average": [1.0], "note": None, "turns": 1}
    cluster |= {"launch_us": 1.0, "masked_share": 0.25, "posted_overlap": 1.0, "shared_overlap": 0.0}
    result["clusters"] = {LINKS[0]: cluster}
    result["settings"] = [{**common, "model": "gpt", **ROW}, {**common, "model": "transnormer", **two}]
    text = markdown(result)
    assert "in 0 of 1 settings of softmax attention, and the first predicted in 0; of linear attention" in text
    assert "in 1 and 1 of 1." in text
    assert "| link | peak_tflops | matmul_fraction | attention_fraction | masked_share |" in text
    assert "| gpt | 768 | a 1.00 | 1.10 | 10.0% | a 1.00 | 1.10 | 10.0% | b 1.00 | 2 1 4 3 | 4 | 30% |" in text
