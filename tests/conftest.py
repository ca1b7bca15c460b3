"""Programs that tests need, and the default corpus, made once per session."""

import gc
import os
import shutil
from pathlib import Path

import pytest

gc.disable()  # until all is imported and collected

# Helpers of tests are rewritten too, so that a bound that fails prints both of its numbers.
HELPERS = [
    path.stem
    for path in Path(__file__).parent.iterdir()
    if path.stem not in ("conftest", "__init__")
]
pytest.register_assert_rewrite(*(f"tests.{name}" for name in HELPERS))

from data.text.prepare import Request, prepare  # noqa: E402
from runtime.files import owned  # noqa: E402
from runtime.machine import usable_cores  # noqa: E402
from runtime.ranks import preload  # noqa: E402

preload("tests.preload")


def pytest_xdist_auto_num_workers():
    """Return one more than there are cores, at most 4.

    Tests that start ranks wait for much of their time.
    """
    return min(len(usable_cores()) + 1, 4)


LONG = """
    test_parity.py test_packed.py test_split.py test_schedule.py test_trainer.py test_dit.py
    test_bad_input.py
    test_step_memory.py test_delta.py test_plan.py test_plan_memory.py test_trainer.py
    test_steps.py test_offload.py test_strategies.py
    test_apex.py test_dry_run.py test_attention.py test_linear_attention.py test_lora.py
    test_resume.py test_resume_state.py
""".split()
"""Names of the files that take longest."""


def pytest_collection_modifyitems(items):
    """Let long files come first: at the end they would leave all processes but one without work."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


def pytest_collection_finish():
    """Let collections of garbage pass over all modules and tests.

    That would take half a second each.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """Skip a test if a program is missing, or for a reason.

    The ``needs`` marks name the programs, and ``unless`` gives the reason.
    """
    for mark in item.iter_markers("needs"):
        missing = [name for name in mark.args if shutil.which(name) is None]
        why = f"there is no {', '.join(missing)}" if missing else mark.kwargs.get("unless", str)()
        if why:
            pytest.skip(why)


VOCABULARY = 1024
"""Entries of the tokenizer: with 4096, logits were a third of what tests compute."""


@pytest.fixture(scope="session")
def default_data(tmp_path_factory):
    """Prefix of a part of the default corpus, with a small tokenizer beside it.

    The corpus is the standard library's sources.

    The first worker that asks makes it, once for all of them.
    """
    base = tmp_path_factory.getbasetemp()
    prefix = (base if "PYTEST_XDIST_WORKER" not in os.environ else base.parent) / "data" / "stdlib"
    with owned(prefix.parent.with_name("data-lock"), wait=True):
        if not prefix.parent.exists():
            draft = prefix.parent.with_name("data-draft")
            prepare(
                Request(max_bytes=1_000_000, vocab_size=VOCABULARY),
                draft / prefix.name,
                progress=False,
            )
            draft.rename(prefix.parent)
    return prefix
