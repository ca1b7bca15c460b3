"""Compare two checkouts to the bit: what 12 short runs of each leave behind.

For a change that is to change no number. The checkouts may be laid out differently: each is driven by its entry scripts
and their flags alone, and judged by what its runs write. Every configuration trains a tiny model for 4 iterations on
the CPU, three times: BEFORE; AFTER; and AFTER from the checkpoint that BEFORE wrote at iteration 2. The records of
metrics.jsonl (but for times, rates and memory), the manifests and the tensors of all checkpoints must be equal.

    python -m parity.checkouts BEFORE AFTER
    python -m parity.checkouts BEFORE AFTER --only llama-striped dit-ema --table runs/checkouts.md

Exits with status 1 where something differs or a run fails. BEFORE against itself shows that runs are deterministic.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parity.configurations import CONFIGURATIONS, DIFFUSION, ITERATIONS, LANGUAGE, MIDDLE, SHARED, Configuration
from tools.arguments import parser_for, run_command

VARYING = {
    *("iteration_time_ms", "tokens_per_second", "samples_per_second"),
    *("tflops_per_gpu", "mfu", "memory_gb"),
}
"""Fields of a record that may differ between equal runs."""
LOSSES = ("lm_loss", "diffusion_loss")
METRICS, MANIFEST = "metrics.jsonl", "manifest.json"


class RunError(RuntimeError):
    """A run failed, or left something other than records and checkpoints."""


UNREADABLE = (RunError, OSError, ValueError, KeyError)
"""Errors that stop one comparison, but not those of the other configurations."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A configuration's row of the table."""

    configuration: Configuration
    loss: str
    grad_norm: str
    equal: str
    """How the run of AFTER differs from that of BEFORE; "yes" if it does not."""
    resumed: str
    """The same for the run resumed from BEFORE's checkpoint."""

    @property
    def good(self) -> bool:
        """Whether nothing differs."""
        return self.equal == self.resumed == "yes"

    @property
    def line(self) -> str:
        """The row in Markdown."""
        name, ranks = self.configuration.name, self.configuration.ranks
        return f"| {name} | {ranks} | {self.loss} | {self.grad_norm} | {self.equal} | {self.resumed} |"


HEADER = """\
| configuration | processes | last loss | grad norm | equal | resumed equal |
| --- | --- | --- | --- | --- | --- |"""


def facts(folder: Path) -> dict[str, str]:
    """Return what must be equal in two runs, by name: records, manifests and tensors of the run in ``folder``.

    Numbers are kept as written; a tensor is its dtype, shape and the SHA-256 of its bytes.

    Raises:
        RunError: records or the checkpoint of the last iteration are missing.
    """
    found: dict[str, str] = {}
    for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
        record = json.loads(line, parse_float=str)
        iteration = record.pop("iteration")
        found |= {f"iteration {iteration}, {name}": str(record[name]) for name in record if name not in VARYING}
    checkpoints = sorted(path.parent for path in folder.glob(f"iter_*/{MANIFEST}"))
    wanted = {f"iteration {number}, grad_norm" for number in range(1, ITERATIONS + 1)}
    if wanted - found.keys() or not checkpoints or checkpoints[-1].name != f"iter_{ITERATIONS:07d}":
        raise RunError(f"{folder} lacks records or its checkpoint of iteration {ITERATIONS}")
    for path in checkpoints:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"), parse_float=str)
        for name in ("files", "checksum", "torch_version"):  # their table of tensors has a random id
            manifest.pop(name, None)
        for name, value in (leaves(manifest) | tensors(path)).items():
            found[f"{path.name}, {name}"] = value
    return found


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested tables into values by dotted name."""
    found: dict[str, str] = {}
    for name, value in tree.items():
        found |= leaves(value, f"{prefix}{name}.") if isinstance(value, dict) and value else {prefix + name: str(value)}
    return found


def tensors(checkpoint: Path) -> dict[str, str]:
    """Return dtype, shape and SHA-256 of every tensor of a checkpoint, however the ranks sharded it."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(checkpoint)
    entries = reader.read_metadata().state_dict_metadata
    state: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise RunError(f"{checkpoint} holds {name}, which is no tensor")
        state[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
    if not state:
        raise RunError(f"{checkpoint} holds no tensors")
    with warnings.catch_warnings():
        # Loading in one process, without a process group, is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return {
        name: f"{value.dtype} {list(value.shape)} "
        + hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in state.items()
    }


def verdict(got: dict[str, str], want: dict[str, str]) -> str:
    """Return "yes" if all is equal, else "no" with the first difference and the number of further ones."""
    differing = [name for name in want | got if got.get(name) != want.get(name)]
    if not differing:
        return "yes"
    name = differing[0]
    more = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
    return f"no: {name} is {want.get(name, 'absent')} before and {got.get(name, 'absent')} after{more}"


def went_on(resumed: Path, before: Path) -> bool:
    """Return whether a run kept the records, times included, of the one it resumed: a fresh start proves nothing."""
    lines = [(folder / METRICS).read_text(encoding="utf-8").splitlines()[:MIDDLE] for folder in (resumed, before)]
    return lines[0] == lines[1]


def told(error: Exception) -> str:
    """Return the message of an error in ``UNREADABLE``."""
    return str(error) if isinstance(error, RunError) else repr(error)


def launch(checkout: Path, command: Sequence[str], title: str) -> None:
    """Run a command of a checkout on its own sources, and print how long it took.

    Raises:
        RunError: its status is not 0; the end of its output goes to stderr.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["OMP_NUM_THREADS"] = "1"
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, *command],
        cwd=checkout,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate()
        except BaseException:
            process.terminate()  # the launcher ends its ranks
            raise
    if process.returncode:
        lines = output.splitlines()
        print(*lines[-60:], sep="\n", file=sys.stderr)
        why = next((f": {line}" for line in lines if line.startswith("error: ")), "")
        raise RunError(f"{title} failed with status {process.returncode}{why}")
    print(f"{title}: {time.monotonic() - started:.0f} s", flush=True)


def command_line(configuration: Configuration, data: Path, save: Path) -> list[str]:
    """Return the flags of a run that saves to ``save``, with the corpus at the prefix ``data``."""
    flags = [*SHARED.split(), *configuration.flags.split(), "--save", str(save)]
    if configuration.entry == "pretrain_dit.py":
        return [*flags, *DIFFUSION.split()]
    paths = {"data-path": data, "tokenizer-model": f"{data}.model", "data-cache-path": save / "cache"}
    return [*flags, *LANGUAGE.split(), *(part for name, path in paths.items() for part in (f"--{name}", str(path)))]


def train(checkout: Path, configuration: Configuration, data: Path, save: Path, way: str) -> None:
    """Train into ``save``, from its checkpoint of ``MIDDLE`` if the folder exists. Raises RunError."""
    flags = command_line(configuration, data, save)
    if save.exists():
        flags += ["--load", str(save), "--ckpt-step", str(MIDDLE), "--exit-on-missing-checkpoint"]
    ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(configuration.ranks)]
    launch(checkout, [*ranks, configuration.entry, *flags], f"{configuration.name}, {way}")


def compare(before: Path, after: Path, configuration: Configuration, data: Path, folder: Path) -> Row:
    """Train a configuration three times, into folders below ``folder``, and compare what the runs wrote."""
    old, new, resumed = (folder / name for name in ("before", "after", "resumed"))
    try:
        train(before, configuration, data, old, "before")
        want = facts(old)
    except UNREADABLE as error:
        return Row(configuration=configuration, loss="", grad_norm="", equal=f"no: {told(error)}", resumed="no")

    def judged(save: Path, way: str) -> str:
        try:
            train(after, configuration, data, save, way)
            found = verdict(facts(save), want)
        except UNREADABLE as error:
            return f"no: {told(error)}"
        return found if save == new or went_on(save, old) else "no: it began afresh"

    equal = judged(new, "after")
    resumed.mkdir()
    shutil.copy(old / METRICS, resumed)
    shutil.copytree(old / f"iter_{MIDDLE:07d}", resumed / f"iter_{MIDDLE:07d}")
    last = f"iteration {ITERATIONS}, "
    return Row(
        configuration=configuration,
        loss=next((want[last + name] for name in LOSSES if last + name in want), ""),
        grad_norm=want[last + "grad_norm"],
        equal=equal,
        resumed=judged(resumed, "after, from the checkpoint of before"),
    )


def commit(checkout: Path) -> str:
    """Return a checkout's commit, marked if files are changed; its folder's name if git knows none."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or checkout.name


def parser() -> argparse.ArgumentParser:
    """Build the command line's parser."""
    found = parser_for("python -m parity.checkouts", __doc__)
    found.add_argument("before", type=Path, metavar="BEFORE", help="folder of the checkout whose numbers are right")
    found.add_argument("after", type=Path, metavar="AFTER", help="folder of the checkout that is judged")
    names = [configuration.name for configuration in CONFIGURATIONS]
    found.add_argument("--only", nargs="+", choices=names, metavar="NAME", help=f"of {', '.join(names)}")
    found.add_argument("--table", type=Path, metavar="FILE", help="write the table here too")
    return found


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status, 1 if something differs."""
    args = parser().parse_args(argv)
    before, after = args.before.resolve(), args.after.resolve()
    for checkout in (before, after):
        if not (checkout / "pretrain_gpt.py").is_file():
            print(f"error: {checkout} holds no pretrain_gpt.py; name the folder of a checkout", file=sys.stderr)
            return 1
    chosen = [one for one in CONFIGURATIONS if args.only is None or one.name in args.only]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="longmesh-checkouts-") as temporary:
        folder, data = Path(temporary), Path(temporary) / "text"
        corpus = ["--stdlib", "--max-bytes", "500000", "--vocab-size", "512", "--output-prefix", str(data)]
        try:
            launch(before, ["-m", "tools.prepare_data", *corpus], "data")
        except RunError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        rows = [compare(before, after, configuration, data, folder / configuration.name) for configuration in chosen]
    differing = sum(not row.good for row in rows)
    said = f"{differing} of {len(rows)} differ" if differing else f"all {len(rows)} equal to the bit"
    minutes = (time.monotonic() - started) / 60
    table = "\n".join([HEADER, *(row.line for row in rows)])
    table = f"{commit(before)} before, {commit(after)} after, in {minutes:.1f} minutes: {said}.\n\n{table}\n"
    print(f"\n{table}", end="")
    if args.table is not None:
        args.table.parent.mkdir(parents=True, exist_ok=True)
        args.table.write_text(table, encoding="utf-8")
    return int(differing > 0)


if __name__ == "__main__":
    run_command(main)
