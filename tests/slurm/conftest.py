"""The run that jobs are compared with."""

import pytest

from runtime.ranks import run_ranks
from tests.pretraining import on_rank
from tests.slurm.test_virtual import curve, flags


@pytest.fixture(scope="session")
def undisturbed(default_data, tmp_path_factory):
    save = tmp_path_factory.mktemp("undisturbed") / "run"
    run_ranks(on_rank, 2, [*flags(default_data), "--save", str(save)])
    return curve(save)
