"""Start and end of a run: its folder, its log, and the one message when it fails."""

import atexit
import os
import select
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch

from model.hf.entries import CONFIG
from model.hf.folder import carry, new_folder
from parallel.mesh import idle_gpus
from runtime.errors import LaunchError, UserError, printable
from runtime.files import FULL, InUseError, not_a_file, owned, unwritable, write_text
from runtime.processes import launched_world_size
from runtime.signals import end_with_launcher
from runtime.slurm import AGAIN, leave_ending
from runtime.together import (
    first_to_report,
    from_first,
    is_first,
    raise_together,
    report_unresponsive_ranks,
)
from train.callbacks.health import FAILURES, Progress, read_failures
from train.callbacks.metrics import (
    METRICS,
    LoggingConfig,
    RunLog,
    check_services,
    disk_errors,
    lacks_validation,
    read_metrics,
)
from train.checkpoint.api import CheckpointConfig
from train.checkpoint.drafts import remove_drafts
from train.checkpoint.local import fingerprint
from train.checkpoint.manifest import STARTS
from train.checkpoint.search import POINTER, saved_iterations
from train.config.common import CommonConfig
from train.config.flags import ConfigError, load, write_toml

# How long failing ranks wait for the others, so that a launcher does not kill the one that reports
# the error.
SECONDS_TO_SPEAK = 5.0
UNFLUSHED = 120  # Python's own status if output is lost at exit
UNREAD = 141  # a shell's, of a program whose reader has enough
FILES = ("config.toml", METRICS, STARTS, FAILURES, POINTER, "loss.png", "wandb_id.txt")
"""Files of a run's folder, besides its lock."""
HF_FOLDER = "hf"
"""Folder of a run with what came with an imported model: config.json, tokenizer, generation
settings.
"""


def exit_status(
    main: Callable[[list[str]], None],
    arguments: list[str],
    seconds_to_speak: float = SECONDS_TO_SPEAK,
) -> int:
    """Call ``main``; print a user's error as one line on stderr with its status, any other as its
    traceback.

    However many ranks fail, only one prints: the error that all agreed on, or that of a rank that
    failed alone.
    """
    try:
        main(arguments)
    except LaunchError as error:
        print(
            f"error: {error}", file=sys.stderr, flush=True
        )  # not through the ranks' agreement, which is what failed
        leave_ending(AGAIN if error.again else 1, f"error: {error}")
        return 1
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno not in FULL:
            raise
        leave_ending(AGAIN if getattr(error, "again", False) else 1, f"error: {_message(error)}")
        with first_to_report(seconds_to_speak) as speaks:
            if speaks:
                print(f"error: {_message(error)}", file=sys.stderr, flush=True)
        return getattr(error, "status", 1)
    except RuntimeError as error:
        if not report_unresponsive_ranks(error, seconds_to_speak):
            raise
        return 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(
                "interrupted; with --load SAVE it goes on from its last checkpoint, if one was saved",
                file=sys.stderr,
            )
        return 130
    return 0


def run_entry(main: Callable[[list[str]], None]) -> NoReturn:
    """Call ``main`` with the command line, and exit with its ``exit_status`` without finalising the
    interpreter.

    A gloo thread releases its collective's tensors some time after the collective has ended. If the
    interpreter is finalising by then, the thread cannot take the GIL and aborts a process whose
    work is done: this ended a third of the tools.sample_dit runs on a busy machine
    (github.com/pytorch/pytorch/issues/190489). Output is flushed and exit handlers are called as
    usual.
    """
    end_with_launcher()
    try:
        status = exit_status(main, sys.argv[1:])
    except Exception as error:
        leave_ending(1, f"{type(error).__name__}: {error}")
        status = UNREAD if isinstance(error, BrokenPipeError) and _reader_has_gone() else 1
        if status == 1:
            sys.excepthook(*sys.exc_info())
    try:
        # As multiprocessing does for its children: wait for non-daemon threads, then call the exit
        # handlers.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None if closed before Python began
                stream.flush()
    except OSError:
        status = status or UNFLUSHED
    finally:
        os._exit(status)


def _reader_has_gone() -> bool:
    """Return whether nobody reads standard output any more: a pipe to a worker may break as well,
    and is a defect.
    """
    poll = select.poll()
    poll.register(1, 0)  # errors are told unasked
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))


def _message(error: Exception) -> str:
    if isinstance(error, OSError):
        fix = (
            "free space there"
            if error.errno in FULL
            else "check that it is there and that you may use it"
        )
        return printable(f"{error.filename or 'a file'}: {error.strerror}; {fix}")
    return str(error)


@contextmanager
def reserve_run_folder(config: CommonConfig) -> Iterator[None]:
    """Reserve ``--save`` for this run until the block ends; collective, before any work.

    Raises:
        InUseError: another run writes there.
        ConfigError: it is not writable, or as ``claim_folder``.
        UserError: the optimizer's kernel is not here.
    """
    with ExitStack() as held:
        with raise_together():
            config.optimizer.spec.require_available(config.optimizer)
            if is_first() and config.checkpoint.save is not None:
                folder = Path(config.checkpoint.save)
                check_writable(folder, "save")
                try:
                    held.enter_context(owned(folder))
                except InUseError as error:
                    raise type(error)(
                        f"save is {folder}, and {error}, or choose another --save"
                    ) from None
                remove_drafts(folder)
        if (local := config.checkpoint.non_persistent_local_ckpt_dir) is not None:
            with raise_together():
                check_writable(Path(local), "non_persistent_local_ckpt_dir")
        from_first(lambda: claim_folder(config))
        if is_first() and (warning := idle_gpus(config.mesh)):
            print(warning, file=sys.stderr, flush=True)
        if (
            is_first() and (several := launched_world_size()) > 1
        ):  # seconds go by until the next line
            print(f"{several} processes have joined; data and model come next", flush=True)
        yield


def claim_folder(config: CommonConfig) -> None:
    """Refuse to overwrite another run in ``--save``, or to start a run that could not be saved.

    Raises:
        ConfigError: the folder holds a run that ``--load`` does not continue, or checkpoints later
            than the requested one; it is not writable; something there, or to be taken over, is not
            a regular file; or a logging service is not installed.
        TrainingError: failures.jsonl there is not one that a run writes.
    """
    check_services(config.logging)
    if config.checkpoint.save is None:
        return
    folder = Path(config.checkpoint.save)
    check_writable(folder, "save")
    for path in (folder / name for name in FILES):
        if kind := not_a_file(path):
            raise ConfigError(
                f"save is {folder}, and {path.name} there is {kind}, not a file; remove it"
            )
    read_failures(folder / FAILURES)
    load = config.checkpoint.load
    source = Path(load or "") / HF_FOLDER
    for path in source.rglob("*") if load and not (folder / HF_FOLDER).exists() else ():
        if (kind := not_a_file(path)) not in ("", "a folder"):
            found = f"{HF_FOLDER}/{path.relative_to(source)} there is {kind}"
            raise ConfigError(f"load is {load}, and {found}, not a file; remove it")
    iterations = saved_iterations(folder)[::-1]
    same = load is not None and os.path.realpath(load) == os.path.realpath(
        folder
    )  # Path.resolve fails on a loop
    goes_on = same and not config.checkpoint.finetune
    begun = iterations or ((folder / METRICS).exists() and not _begins_again(config, folder))
    if not goes_on and begun:
        name = fingerprint(folder)
        held = (
            f"with a checkpoint of iteration {iterations[-1]}"
            if iterations
            else "without a checkpoint"
        )
        held = f"a run {f'({name}) ' if name else ''}{held}"
        how = f"go on with --load {folder}{' and without --finetune' * config.checkpoint.finetune}"
        how = how if iterations or not config.checkpoint.finetune else "move it away"
        raise ConfigError(f"save is {folder}, which holds {held}; {how}, or choose another --save")
    step = config.checkpoint.ckpt_step
    if goes_on and step is not None and iterations and iterations[-1] > step:
        raise ConfigError(
            f"ckpt_step is {step} and {folder} holds a checkpoint of iteration {iterations[-1]}, which going on from "
            f"there would meet; choose another --save"
        )


def _begins_again(config: CommonConfig, folder: Path) -> bool:
    """Return whether a folder is of an earlier start of this run, killed before its first
    checkpoint.

    That is, of the same schedule, batches and steps.
    """
    if not (file := folder / "config.toml").is_file():
        return False
    before = load(type(config), file)
    return (before.optimizer, before.train) == (config.optimizer, config.train)


def check_writable(folder: Path, name: str) -> None:
    """Raise ConfigError, which names the folder as the argument ``name``, if it takes no files."""
    if why := unwritable(folder, f"choose another --{name.replace('_', '-')}"):
        raise ConfigError(f"{name} is {folder}, {why}")


def open_log(config: CommonConfig, saved: CommonConfig, progress: Progress) -> RunLog | None:
    """Write ``saved`` as config.toml and open the run's log on the first rank; return None on the
    others. Collective.

    Nothing is written if nothing is left to do.
    """
    log: RunLog | None = None
    with raise_together():
        if is_first():
            folder = Path(config.checkpoint.save) if config.checkpoint.save else None
            if (
                progress.iteration >= config.train.train_iters
            ):  # no steps, but perhaps a validation that is missing
                file = None if folder is None else folder / METRICS
                kept = read_metrics(file) if file is not None and file.exists() else []
                kept = [record for record in kept if record["iteration"] <= progress.iteration]
                if not (config.train.eval_iters and lacks_validation(kept, progress.iteration)):
                    return RunLog(None, LoggingConfig(), {}, progress.iteration)
            device = torch.cuda.get_device_name() if config.mesh.device_type == "cuda" else "cpu"
            log = RunLog(folder, config.logging, asdict(saved), progress.iteration, device)
            if folder is not None and progress.iteration < config.train.train_iters:
                with disk_errors(folder):
                    write_text(folder / "config.toml", write_toml(saved))
                    _copy_hf_files(config.checkpoint, folder)
    return log


def _copy_hf_files(given: CheckpointConfig, folder: Path) -> None:
    """Copy the files that an imported model came with from this run's source, so that an export has
    them.
    """
    source = given.hugging_face or Path(given.load or "") / HF_FOLDER
    if given.load is not None and source.is_dir() and not (folder / HF_FOLDER).exists():
        with new_folder(folder / HF_FOLDER) as draft:
            if given.hugging_face is None:
                shutil.copytree(source, draft, dirs_exist_ok=True)
            else:
                carry(source, draft, CONFIG)
