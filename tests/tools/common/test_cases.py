"""Lines of words are the cases that they say.

A word that is none is refused with those that are.
"""

from pathlib import Path

import pytest

from bench.memory import command
from runtime.errors import UserError
from tests.parity.cases import KINDS, chosen_cases, flags_of
from tools.common.cases import Case, case_of, cases_of
from tools.fit import parsed


def test_a_line_is_a_case_and_its_command_line():
    line = "pp=2 cp=4 wallfacer team=2 p2p_intra zero1 layers=1+3 full --recompute-offload"
    more = {"layers": (1, 3), "recompute": "full", "more": ("--recompute-offload",)}
    case = Case(pp=2, cp=4, method="wallfacer", team=2, placement="p2p_intra", mode="zero1", **more)
    assert case_of(line) == case
    ranks, flags = command(f"llama {line}", {"llama": "--num-layers 4"})
    assert ranks == 8
    assert flags.startswith("--num-layers 4 ")
    assert flags.endswith(" --recompute-offload")
    assert flags.count("--pipeline-layers 1 3 ") == 1
    assert case_of("joined=2").flags[0] == "--pack-samples"


def test_a_bar_stands_for_two_lines():
    assert cases_of("cp=2|4 ring|zigzag\n\n tp=2|pp=2") == [
        *(Case(cp=size, method=name) for size in (2, 4) for name in ("ring", "zigzag")),
        Case(tp=2),
        Case(pp=2),
    ]
    assert len(cases_of("tp=1|tp=2\n tp=2")) == 2


@pytest.mark.parametrize("line", ["cp=4 rings", "cp=four", "zigzag=2", "cp"])
def test_a_word_that_is_none_is_refused(line):
    with pytest.raises(UserError, match=r"has the unknown word '.*'; use pp=N, .*, zigzag, "):
        case_of(line)
    with pytest.raises(
        UserError, match="begins with 'lama', but that is not a model; use one of llama"
    ):
        command("lama cp=2", {"llama": ""})


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "llama")) for kind in KINDS]
)
def test_every_mesh_of_parity_is_a_configuration(kind):
    for case in chosen_cases(kind):
        mesh = parsed(flags_of(kind, case, Path("none"))).mesh
        assert (mesh.pipeline_model_parallel_size, mesh.context_parallel_size) == (case.pp, case.cp)
