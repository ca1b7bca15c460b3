"""Start and end of a run: its folder, its log, and the one error message if it fails."""

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
from train.callbacks.health import FAILURES, RunProgress, read_failures
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

SECONDS_TO_SPEAK = 5.0
"""Number of seconds that failed ranks wait before they exit, so that one can report the error."""
UNFLUSHED = 120
"""Exit status if output cannot be flushed at exit; Python itself uses the same one."""
UNREAD = 141
"""Exit status if the reader of standard output has closed the pipe; shells report the same."""
FILES = ("config.toml", METRICS, STARTS, FAILURES, POINTER, "loss.png", "wandb_id.txt")
"""Names of the files that a run writes into its folder, except the lock."""
HF_FOLDER = "hf"
"""Subfolder with an imported model's files: config.json, tokenizer, generation settings."""


def exit_status(
    main: Callable[[list[str]], None],
    arguments: list[str],
    seconds_to_speak: float = SECONDS_TO_SPEAK,
) -> int:
    """Call ``main`` and return its exit status; print a user's error as one line on stderr.

    Any other error is raised with its traceback. However many ranks fail, only one prints: the
    error that all agreed on, or that of a rank that failed alone.
    """
    try:
        main(arguments)
    except LaunchError as error:
        # Printed by each rank: they have not joined, so they cannot agree on one that reports.
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave_ending(AGAIN if error.again else 1, f"error: {error}")
        return 1
    except (UserError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None and error.errno not in FULL:
            raise
        message = f"error: {_message(error)}"
        leave_ending(AGAIN if getattr(error, "again", False) else 1, message)
        with first_to_report(seconds_to_speak) as reports:
            if reports:
                print(message, file=sys.stderr, flush=True)
        return getattr(error, "status", 1)
    except RuntimeError as error:
        if not report_unresponsive_ranks(error, seconds_to_speak):
            raise
        return 1
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            print(
                "interrupted; --load SAVE resumes from the last checkpoint, if one was saved",
                file=sys.stderr,
            )
        return 130
    return 0


def run_entry(main: Callable[[list[str]], None]) -> NoReturn:
    """Call ``main`` with the command line, and exit without finalising the interpreter.

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
        if isinstance(error, BrokenPipeError) and _stdout_is_closed():
            status = UNREAD
        else:
            status = 1
            sys.excepthook(*sys.exc_info())

    try:
        # In the order in which multiprocessing ends children: non-daemon threads, exit handlers.
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:  # None if closed before Python began
                stream.flush()
    except OSError:
        status = status or UNFLUSHED
    finally:
        os._exit(status)


def _stdout_is_closed() -> bool:
    """Return True if nobody reads standard output any more.

    A broken pipe to a worker process raises the same error, but is a bug to be reported.
    """
    poll = select.poll()
    poll.register(1, 0)  # errors are reported without being requested
    return any(state & (select.POLLERR | select.POLLHUP) for _, state in poll.poll(0))


def _message(error: Exception) -> str:
    """Return an error's text; an error of the operating system gets its file and a fix."""
    if not isinstance(error, OSError):
        return str(error)
    fix = "check that it exists and that you have permission to use it"
    if error.errno in FULL:
        fix = "free space there"
    return printable(f"{error.filename or 'a file'}: {error.strerror}; {fix}")


@contextmanager
def reserve_run_folder(config: CommonConfig) -> Iterator[None]:
    """Reserve ``--save`` for this run until the block ends; collective, before any work.

    Raises:
        InUseError: another run writes there.
        ConfigError: the folder is not writable, or ``claim_folder`` refuses it.
        UserError: the optimizer's kernel is not installed.
    """
    with ExitStack() as reserved:
        with raise_together():
            config.optimizer.spec.require_available(config.optimizer)
            if is_first() and config.checkpoint.save is not None:
                folder = Path(config.checkpoint.save)
                check_writable(folder, "save")
                try:
                    reserved.enter_context(owned(folder))
                except InUseError as error:
                    raise type(error)(
                        f"save is {folder}, but {error}, or choose another --save"
                    ) from None
                remove_drafts(folder)

        local_folder = config.checkpoint.non_persistent_local_ckpt_dir
        if local_folder is not None:
            with raise_together():
                check_writable(Path(local_folder), "non_persistent_local_ckpt_dir")
        from_first(lambda: claim_folder(config))

        if is_first():
            warning = idle_gpus(config.mesh)
            if warning:
                print(warning, file=sys.stderr, flush=True)
            world_size = launched_world_size()
            if world_size > 1:  # the next line of output may take some seconds
                print(f"{world_size} processes joined; building data and model", flush=True)
        yield


def claim_folder(config: CommonConfig) -> None:
    """Refuse to overwrite another run in ``--save``, or to start a run that could not be saved.

    Raises:
        ConfigError: the folder holds a run that ``--load`` does not resume, or checkpoints later
            than the requested one; it is not writable; something there, or in the files to copy, is
            not a regular file; or a logging service is not installed.
        TrainingError: failures.jsonl there was not written by a run.
    """
    check_services(config.logging)
    if config.checkpoint.save is None:
        return
    folder = Path(config.checkpoint.save)
    check_writable(folder, "save")
    _check_files(folder)
    read_failures(folder / FAILURES)
    if config.checkpoint.load and not (folder / HF_FOLDER).exists():
        _check_hf_files(config.checkpoint.load)
    _check_no_other_run(config, folder)


def _check_files(folder: Path) -> None:
    """Raise ConfigError if a file that the run would write is a folder, link or device."""
    for name in FILES:
        path = folder / name
        kind = not_a_file(path)
        if kind:
            raise ConfigError(
                f"save is {folder}, but {path.name} in it is {kind}, not a file; remove it"
            )


def _check_hf_files(load: str) -> None:
    """Raise ConfigError if the imported model's files, to be copied, include a link or device."""
    source = Path(load) / HF_FOLDER
    for path in source.rglob("*"):
        kind = not_a_file(path)
        if kind not in ("", "a folder"):
            raise ConfigError(
                f"load is {load}, but {HF_FOLDER}/{path.relative_to(source)} in it is {kind}, "
                "not a file; remove it"
            )


def _check_no_other_run(config: CommonConfig, folder: Path) -> None:
    """Raise ConfigError if a folder holds a run that this one would overwrite."""
    checkpoint = config.checkpoint
    iterations = saved_iterations(folder)  # newest first
    # os.path.realpath, because Path.resolve fails on a loop of links.
    resumes = (
        checkpoint.load is not None
        and os.path.realpath(checkpoint.load) == os.path.realpath(folder)
        and not checkpoint.finetune
    )
    holds_run = bool(iterations)
    if not iterations and (folder / METRICS).exists():
        # Checked for a resumed run too, so that an unreadable config.toml is not overwritten.
        holds_run = not _is_same_run(config, folder)
    if holds_run and not resumes:
        raise ConfigError(_refusal(folder, iterations, checkpoint.finetune))

    step = checkpoint.ckpt_step
    if resumes and step is not None and iterations and iterations[0] > step:
        raise ConfigError(
            f"ckpt_step is {step}, but {folder} has a checkpoint of iteration {iterations[0]}, and "
            "the resumed run would reach that iteration again; choose another --save"
        )


def _refusal(folder: Path, iterations: list[int], finetune: bool) -> str:
    """Return the message that a folder holds another run, with the fixes."""
    name = fingerprint(folder)
    content = f"a run ({name}) " if name else "a run "
    if iterations:
        content += f"with a checkpoint of iteration {iterations[0]}"
    else:
        content += "without a checkpoint"

    remedy = f"continue it with --load {folder}"
    if finetune:
        remedy += " and without --finetune"
        if not iterations:
            remedy = "move it away"
    return f"save is {folder}, but it holds {content}; {remedy}, or choose another --save"


def _is_same_run(config: CommonConfig, folder: Path) -> bool:
    """Return True if a folder is from an earlier start of this run.

    This is the case if its optimizer, schedule, batches and steps are the same.
    """
    file = folder / "config.toml"
    if not file.is_file():
        return False
    before = load(type(config), file)
    return (before.optimizer, before.train) == (config.optimizer, config.train)


def check_writable(folder: Path, name: str) -> None:
    """Raise ConfigError for the argument ``name`` if a folder cannot be written to."""
    problem = unwritable(folder, f"choose another --{name.replace('_', '-')}")
    if problem:
        raise ConfigError(f"{name} is {folder}, {problem}")


def open_log(config: CommonConfig, saved: CommonConfig, progress: RunProgress) -> RunLog | None:
    """Write ``saved`` as config.toml and open the run's log; collective.

    Returns None on all ranks but the first. Nothing is written if there is nothing left to do.
    """
    log: RunLog | None = None
    with raise_together():
        if is_first():
            log = _open_log_here(config, saved, progress)
    return log


def _open_log_here(config: CommonConfig, saved: CommonConfig, progress: RunProgress) -> RunLog:
    folder = Path(config.checkpoint.save) if config.checkpoint.save else None
    is_complete = progress.iteration >= config.train.train_iters
    if is_complete and not _owes_validation(config, folder, progress.iteration):
        return RunLog(None, LoggingConfig(), {}, progress.iteration)

    device = "cpu"
    if config.mesh.device_type == "cuda":
        device = torch.cuda.get_device_name()
    log = RunLog(folder, config.logging, asdict(saved), progress.iteration, device)
    if folder is not None and not is_complete:
        with disk_errors(folder):
            write_text(folder / "config.toml", write_toml(saved))
            _copy_hf_files(config.checkpoint, folder)
    return log


def _owes_validation(config: CommonConfig, folder: Path | None, iteration: int) -> bool:
    """Return True if a complete run ended before its last validation."""
    records = []
    if folder is not None and (folder / METRICS).exists():
        records = read_metrics(folder / METRICS)
    records = [record for record in records if record["iteration"] <= iteration]
    return bool(config.train.eval_iters) and lacks_validation(records, iteration)


def _copy_hf_files(checkpoint: CheckpointConfig, folder: Path) -> None:
    """Copy an imported model's files from the run's source to its folder, for a later export."""
    source = checkpoint.hugging_face or Path(checkpoint.load or "") / HF_FOLDER
    if checkpoint.load is None or not source.is_dir() or (folder / HF_FOLDER).exists():
        return
    with new_folder(folder / HF_FOLDER) as draft:
        if checkpoint.hugging_face is None:
            shutil.copytree(source, draft, dirs_exist_ok=True)
        else:
            carry(source, draft, CONFIG)
