"""Commands of README and docs, each run in a scratch copy or left out for a reason: a dated table.

python -m tests.commands                    # all pages, in a new user's order: an hour on 2 cores
python -m tests.commands --pages README.md  # these pages alone; other rows stay as they are
python -m tests.commands --only sampling    # commands with a word in them
python -m tests.commands --logs /tmp/logs   # and what they print
python -m tests.commands --scratch /tmp/x   # a copy that stays, for pages that need its runs
"""

import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from tools.common.arguments import one_line_errors, parser_for, positive, run_command
from tools.common.report import markdown

ROOT = Path(__file__).resolve().parents[1]
TABLE = Path("bench/results/commands.md")
ORDER = (
    "README.md",
    "docs/start/quickstart.md",
    "docs/start",
    "docs/tasks",
    "docs/concepts",
    "docs",
)
PROGRAMS = (
    r"(?:[A-Z_]+=\S+ )*"
    r"(?:make|python|torchrun|sbatch|squeue|scontrol|export|mkdir|git|pip|\.|\.ci/\w+) "
)
NOT_RUN = {
    r"/path/to|\b(?:PREFIX|FILE|HOST|NAME|JOB|RUN)\b(?!=)": (
        "placeholder: a name of yours stands in it"
    ),
    r"^make venv|^git clone|^pip install": (
        "network: it downloads what every other command here already has"
    ),
    r"--vae": "network: weights of a VAE",
    r"^make (?:gpu-|nccl-)": "GPU",
    r"^sbatch|^squeue|^scontrol|SLURM_CONF|tests\.slurm\.cluster": (
        "Slurm: `tests/slurm` runs such, where it is there"
    ),
    r"slurm\.submit(?!.*--dry-run)": "Slurm: `tests/slurm` submits where it is installed",
    r"cuda-stub|tests\.cuda_stub": "another environment: torch's CUDA build, 3 GB",
    r"^torchrun.* pretrain_\w+\.py.*(?:--bf16|8xh100|dit_xl)": (
        "GPU: a model of billions of parameters"
    ),
    r"(?<!--config )llama3_8b(?!\.toml)|Meta-Llama|llama3[/ ]": "input: a model or data of yours",
    r"imagenet|(?<!docs/)images/|sharegpt": "input: a model or data of yours",
    r"their_adapter|texts/|buffer/|book\.txt| tokenizer\.json": "input: a model or data of yours",
    r"runs/(?:long|own|books|lora|exported|adapter)\b|--check (?:latents|clips)": (
        "input: a run of yours, trained on GPUs"
    ),
    r"^make test": "long: CI runs it",
    r"^make pretrain.*(?:--train-iters 240|CONFIG=|NPROC=)": (
        "long: `make pretrain` again, with a setting"
    ),
    r"^make (?:finetune|papers|(?:lasp|rl)-table)$|(?<!configs/)runs/finetune|runs/longer|"
    r"finetune_tiny_512k\.toml.*--(?:profile|layer-chunk-size|train-iters)": (
        "long: by hand, when its figures are made again"
    ),
    r"^make (?:hooks|lock|clean|format)": "it changes the checkout or the environment",
    r"^\. |^export OMP": "shell: what every command here has set",
}
"""Commands that are left out, by what stands in them, and the reason. The first that fits holds."""


@dataclass(frozen=True)
class Command:
    page: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is not run, if it is not."""
        return next(
            (why for pattern, why in NOT_RUN.items() if re.search(pattern, self.text)), None
        )


def commands(page: Path, root: Path = ROOT) -> list[Command]:
    """Return the commands in a page's blocks of code without a language.

    Continued lines are joined, and comments cut.
    """
    page_commands = []
    for block in re.findall(
        r"^```\n(.*?)^```$", page.read_text(encoding="utf-8"), flags=re.M | re.S
    ):
        lines = block.replace("\\\n", " ").splitlines()
        while lines:
            text = lines.pop(0)
            if not re.match(PROGRAMS, f"{text} "):
                continue
            while text.count('"') % 2 and lines:
                text += "\n" + lines.pop(0)
            text = text if "\n" in text else re.sub(r" +", " ", re.split(r"\s+# ", text)[0]).strip()
            page_commands.append(Command(page.relative_to(root).as_posix(), text))
    return page_commands


def pages(root: Path = ROOT) -> list[Path]:
    """Return README and the pages of docs in the order in which a new user meets them."""
    paths = [root / "README.md", *sorted(root.glob("docs/**/*.md"))]
    names = [path.relative_to(root).as_posix() for path in paths]
    rank = [
        next(i for i, start in enumerate((*ORDER, "")) if name.startswith(start)) for name in names
    ]
    return [path for _, _, path in sorted(zip(rank, names, paths, strict=True))]


def scratch_copy(root: Path, to: Path) -> None:
    """Copy the checkout's files, and lay out the inputs that pages name.

    They are books/, a.jsonl, b.jsonl and photographs/.
    """
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    files = subprocess.run(listed, cwd=root, capture_output=True, check=True).stdout
    pack = subprocess.run(
        ["tar", "-c", "--null", "--files-from=-"],
        cwd=root,
        input=files,
        capture_output=True,
        check=True,
    )
    subprocess.run(["tar", "-x"], cwd=to, input=pack.stdout, check=True)
    (to / "books").mkdir()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*/*.py"))[:1500]:
        text = path.read_text(encoding="utf-8", errors="ignore")
        (to / "books" / f"{path.parent.name}_{path.stem}.txt").write_text(text, encoding="utf-8")
    texts = [path.read_text(encoding="utf-8") for path in sorted((to / "books").iterdir())[:200]]
    for name in ("a.jsonl", "b.jsonl"):
        (to / name).write_text(
            "".join(json.dumps({"text": text, "content": text}) + "\n" for text in texts)
        )
    from PIL import Image  # of training's requirements, which a listing of commands does without

    for label in range(10):
        (to / "photographs" / str(label)).mkdir(parents=True)
        for i in range(8):
            Image.new("RGB", (48, 40), (20 * label, 30 * i, 99)).save(
                to / "photographs" / str(label) / f"{i}.png"
            )


def run(command: str, folder: Path, limit: float, log: Path | None) -> str:
    """Run a command to its end or the limit; return what became of it, and keep what it printed."""
    python = Path(sys.executable)
    variables = {
        "PATH": f"{python.parent}:{os.environ['PATH']}",
        "PY": str(python),
        "OMP_NUM_THREADS": "1",
    }
    begun = time.monotonic()
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | variables,
        start_new_session=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nkilled after {limit:.0f} s"
    if log is not None:
        log.write_text(f"$ {command}\n{output}")
    if process.returncode == 0:
        return f"ran, {time.monotonic() - begun:.0f} s"
    lines = (output.strip() or "no word").splitlines()
    message = next(
        (line for line in lines if line.startswith("error: ")), lines[-1]
    )  # torchrun has a report below it
    return f"**failed**, status {process.returncode}: {message:.120}"


def read_table(path: Path) -> dict[Command, list[str]]:
    """Return the rows of an earlier table by command: what became of it, and when."""
    rows = re.findall(
        r"^\| (\S+) \| `(.*)` \| (.*) \| (\S*) \|$",
        path.read_text() if path.exists() else "",
        flags=re.M,
    )
    return {Command(page, text): [result, date] for page, text, result, date in rows}


def write_table(path: Path, results: dict[Command, list[str]], left_out: Counter[str]) -> None:
    """Write a row for each command that can run here, and how many are left out for what reason."""
    ran = sum(result.startswith("ran") for result, _ in results.values())
    head = (
        f"Commands of README and docs, written by `python -m tests.commands`: of "
        f"{len(results)} that can run on a\n"
        f"CPU {ran} ran to status 0 in a scratch copy of the checkout, on a busy machine of 2 "
        f"cores.\n"
    )
    rows = ([key.page, f"`{key.text}`", *result] for key, result in results.items())
    reasons = ([reason, str(count)] for reason, count in left_out.most_common())
    tables = [
        *markdown(["page", "command", "result", "on"], rows),
        "",
        *markdown(["left out", "commands"], reasons),
    ]
    path.write_text("\n".join([head, *tables]) + "\n", encoding="utf-8")


def row_key(command: Command) -> Command:
    """Return a command as a table's cell can hold it."""
    return Command(
        command.page, " ".join(command.text.split()).replace("|", "\\|").replace("`", "'")
    )


@one_line_errors
def main(argv: list[str] | None = None) -> int:
    """Run the commands that can run here, one after the other; the status is 1 if one fails."""
    parser = parser_for("python -m tests.commands", __doc__)
    parser.add_argument(
        "--pages", nargs="+", metavar="PAGE", help="pages to take the commands of; all by default"
    )
    parser.add_argument(
        "--only", metavar="WORDS", help="run the commands alone that have these words"
    )
    parser.add_argument(
        "--limit", type=positive, default=900, metavar="S", help="seconds for one command (900)"
    )
    parser.add_argument(
        "--scratch", type=Path, metavar="FOLDER", help="the copy, made where it is not there; kept"
    )
    parser.add_argument(
        "--logs", type=Path, metavar="FOLDER", help="keep there what each command printed"
    )
    args = parser.parse_args(argv)
    chosen = {(ROOT / page).resolve() for page in args.pages} if args.pages else {*pages()}
    commands_by_key = {row_key(command): command for page in pages() for command in commands(page)}
    left_out = Counter(command.reason for command in commands_by_key.values() if command.reason)
    rows = {key: command for key, command in commands_by_key.items() if not command.reason}
    earlier = {key: result for key, result in read_table(ROOT / TABLE).items() if result[1]}
    by_text = {
        key.text: result for key, result in earlier.items()
    }  # a page's command may stand on another one since
    results = {key: earlier.get(key) or by_text.get(key.text, ["not run yet", ""]) for key in rows}
    done: dict[str, str] = {}
    if args.logs:
        args.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="longmesh-commands.") as temporary:
        scratch = args.scratch or Path(temporary)
        scratch.mkdir(parents=True, exist_ok=True)
        if not any(scratch.iterdir()):
            scratch_copy(ROOT, scratch)
        for key, command in rows.items():
            if (ROOT / command.page) not in chosen or (args.only or "") not in command.text:
                continue
            if command.text not in done:
                print(f"{len(done) + 1}. {command.page}: {key.text}", flush=True)
                log = args.logs / f"{len(done) + 1:03}.log" if args.logs else None
                done[command.text] = run(command.text, scratch, args.limit, log)
                print(f"   {done[command.text]}", flush=True)
            results[key] = [done[command.text].replace("|", "\\|"), f"{datetime.now(UTC):%Y-%m-%d}"]
            write_table(ROOT / TABLE, results, left_out)
    write_table(ROOT / TABLE, results, left_out)
    return int(any(result.startswith("**failed**") for result, _ in results.values()))


if __name__ == "__main__":
    run_command(main)
