"""Settings that make no sense, a table of them.

Each is accepted, noted or refused in one line that names it.

Every flag of both entries gets what is at the ends of its type and beyond; then come pairs that
contradict each other, TOML of every wrong shape, paths to what is not there, and the flags of the
tools.
"""

import os
from datetime import timedelta
from pathlib import Path

import pytest

from data.tokenizer import load_tokenizer
from model.families import FAMILIES
from planner.page.measured import read_profile
from runtime.processes import launched_world_size
from tests.endings import end
from tools import convert_hf, plan, plot, prepare_data, prepare_latents, sample, sample_dit
from train.checkpoint.search import find_checkpoint
from train.config import diffusion as dit_config
from train.config import flags
from train.config import language as config
from train.config.entries import Config, DiTRunConfig
from train.config.fields import fields_by_variant
from train.config.toml_files import LONGEST_TOML
from train.run import claim_folder

ENTRIES = {
    "gpt": (Config, config, ["--data-path", "x", "--tokenizer-model", "x.model"]),
    "dit": (DiTRunConfig, dit_config, ["--data-path", "digits"]),
}
EXTREMES = {
    int: ("0", "-1", "1" + "0" * 30, "9" * 5000, "", "x", "0.5"),
    float: ("0", "-1", "1e-300", "1e300", "1e999", "nan", ""),
    str: ("", "x" * 5000, "\udcff"),
}


def values_of(field):
    return ("", "x", "none", "AUTO") if field.choices else EXTREMES[field.base]


def rows_of(entry):
    """Every flag of an entry, of each family its own, with every extreme of its type.

    It is there once without a value, too.
    """
    keys_seen = set()
    for family, table in fields_by_variant(ENTRIES[entry][0]).items():
        chosen = ("--model-type", family) if keys_seen else ()
        for field in (field for name, field in table.items() if name not in keys_seen):
            if field.base is bool:
                yield from (
                    (*chosen, *row)
                    for row in ((f"{field.flag}=x",), (field.flag, "x"), (f"{field.flag}=",))
                )
                continue
            yield from ((*chosen, f"{field.flag}={value}") for value in values_of(field))
            yield (*chosen, field.flag)
        keys_seen |= table.keys()


def checked(entry):
    """An entry's checks before any work, in one process.

    It reads, validates, and looks at the folder.
    """
    _, module, base = ENTRIES[entry]

    def main(arguments):
        parsed_config = module.parse_args([*base, *arguments])
        module.validate(parsed_config, 1)
        claim_folder(parsed_config)
        timedelta(minutes=parsed_config.mesh.distributed_timeout_minutes)
        assert flags.write_toml(parsed_config)

    return main


def wrong_ones(endings):
    return {row: ending.wrong for row, ending in endings.items() if ending.wrong}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder to be in, so that what is accepted is written nowhere else."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("entry", ENTRIES)
def test_every_flag_at_the_ends_of_its_type(entry, folder):
    rows = list(rows_of(entry))
    assert len(rows) > 300
    endings = {row: end(checked(entry), list(row)) for row in rows}
    assert wrong_ones(endings) == {}
    for row, ending in endings.items():
        flag = next((word for word in row if word not in ("--model-type", *FAMILIES)), row[0])
        name = flag.partition("=")[0].lstrip("-")
        assert ending.status == 0 or len(ending.stderr) < 9000, row
        assert ending.status == 0 or name in ending.stderr.replace("_", "-") or row[-1] == "x", (
            row,
            ending.stderr,
        )
    assert any(ending.status == 0 for ending in endings.values())
    assert not list(folder.iterdir())


CONTRADICTIONS = """
    --micro-batch-size 3 --global-batch-size 4 | --device cpu --distributed-backend nccl
    --finetune | --dry-run-html x.html | --dry-run --dry-run-html .
    --softmax-every 2 | --rope-scaling-type yarn | --window-size 8,1 | --window-size 1e9,0
    --window-size 8,0 --window-attn-skip-freq [1]*3
    --window-size 8,0 --window-attn-skip-freq [1]*1000000000000
    --num-attention-heads 1000000000 --hidden-size 1000000000 --tensor-model-parallel-size 3
    --kv-channels 3
    --split 0,0,0 | --split 1,2,3,4 | --split inf,1 | --split ,,,
    --distributed-timeout-minutes 1e-320
    --seed 9223372036854775808 | --exit-duration-in-mins 1e300 | --lr 1\x1b | stray\x07
    --non\x1bsense
    --data-path 1 x 2 | --data-path 0 x 1 y | --data-path nan x | --data-path
    --nonsense 5 | stray | --lr | --lr 1 2 | --lr=1 --lr=2 | -5 | -- | --config | --no-lr 1
    ---lr 1
    --layer-chunk-size 16 | --layer-chunk-size 16 --recompute-granularity selective
    --layer-chunk-size 16 --recompute-granularity full --context-parallel-method none
    --layer-chunk-size 18 --recompute-granularity full --micro-batch-size 4
    --layer-chunk-size 16 --recompute-granularity full --model-type linear_transformer
    --layer-chunk-size 16 --recompute-granularity full --context-parallel-layout zigzag
    --layer-chunk-size 16 --recompute-granularity full --compile
    --layer-chunk-size 16 --recompute-granularity full --model-type qwen3_5 \
--delta-rule-schedule chain
"""
"""Others, with a message of their own, are in ``tests/train/config``."""


def test_what_contradicts_itself(folder):
    rows = [row.strip() for line in CONTRADICTIONS.strip().splitlines() for row in line.split("|")]
    endings = {row: end(checked("gpt"), row.split()) for row in rows}
    assert wrong_ones(endings) == {}
    assert not list(folder.iterdir())


LAUNCHED = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("name", LAUNCHED)
def test_what_no_launcher_says(name, monkeypatch):
    for variable, value in LAUNCHED.items():
        monkeypatch.setenv(variable, value)
    for value in ("x", "", "-1", "0.5", "1" + "0" * 30, "9" * 5000):
        monkeypatch.setenv(name, value)
        ending = end(lambda _: str(launched_world_size()), [])
        assert ending.wrong is None, value
        assert ending.status == 0 or name in ending.stderr


NESTED = "x = " + "[" * 5000 + "]" * 5000
TOMLS = {
    "": "",
    "BOM": "\ufeff[train]\n",
    "nested": NESTED,
    "nested in a field": f"[train]\ntrain_iters = {NESTED[4:]}",
    "tables 5,000 deep": f"[{'.'.join(['a'] * 5000)}]",
    "half a table": "[train",
    "twice": "[train]\n[train]\n",
    "tables": "[[train]]\nseed = 1",
    "no section": "seed = 1",
    "section as a list": "train = [1]",
    "table in a field": "[train.seed]\na = 1",
    "list": "[train]\nseed = [1]",
    "empty list": "[data]\ndata_path = []",
    "list of numbers": "[data]\ndata_path = [1]",
    "boolean": "[train]\nseed = true",
    "number for a boolean": "[train]\nbf16 = 1",
    "fraction": "[train]\nseed = 1.0",
    "nan": "[optimizer]\nlr = nan",
    "huge": f"[train]\nseed = {'9' * 5000}",
    "float": "[optimizer]\nlr = 1e400",
    "date": "[train]\nseed = 1979-05-27",
    "NUL in a text": '[checkpoint]\nsave = "a\\u0000b"',
    "empty save": "[checkpoint]\nsave = ''",
    "another section's": "[train]\nlr = 1",
    "the other entry's": "[sampling]\nguidance = 1",
    "key of dots": "[train]\na.b.c = 1",
    "empty key": "[train]\n'' = 1",
    "10,000 keys": "[train]\n" + "".join(f"k{i} = 1\n" for i in range(10_000)),
    "key of two lines": '[train]\n"seed\\nerror: no" = 1',
    "section of two lines": '["train\\n\\u001b[31m"]',
    "choice of two lines": '[optimizer]\nlr_decay_style = "a\\nb"',
    "too long": "# " + "x" * LONGEST_TOML,
    "long key": "[train]\n" + "k" * 100_000 + " = 1",
    "long value": f"[train]\nseed = '{'v' * 100_000}'",
}


def test_toml_of_every_shape(folder):
    endings = {}
    for name, text in TOMLS.items():
        (folder / "x.toml").write_text(text)
        endings[name] = end(checked("gpt"), ["--config", "x.toml"])
    (folder / "x.toml").write_bytes(bytes(range(256)))
    endings["bytes"] = end(checked("dit"), ["--config", "x.toml"])
    assert wrong_ones(endings) == {}
    refused = {name for name, ending in endings.items() if ending.status}
    assert set(endings) - refused <= {"", "BOM", "empty list"}


@pytest.fixture
def odd_paths(folder):
    """Paths to whatever a path can lead to, but what is asked for."""
    (folder / "file").write_bytes(bytes(range(256)) * 20)
    (folder / "empty").touch()
    (folder / "folder").mkdir()
    (folder / "mixed").mkdir()
    for name, content in {"text.txt": b"a text " * 4000, "bytes.txt": b"\xff"}.items():
        (folder / "mixed" / name).write_bytes(content)
    os.symlink("gone/away", folder / "dangling")
    os.symlink("loop", folder / "loop")
    # No "/": what lies there is another on every machine.
    inside = [
        "file",
        "empty",
        "folder",
        "mixed",
        "dangling",
        "loop",
        "none",
        "file/x",
        "folder/x/y",
        "dangling/x",
    ]
    return [*inside, "n" * 300, "n/" * 3000, "/proc/x", "/dev/null", "", " ", ".", "\udcff"]


USES = {
    "--config": lambda path: checked("gpt")(["--config", path]),
    "--config of a dit": lambda path: checked("dit")(["--config", path]),
    "--save": lambda path: checked("gpt")(["--save", path]),
    "--load": lambda path: find_checkpoint(path),
    "--load and --save": lambda path: checked("gpt")(["--save", path, "--load", path]),
    "--tokenizer-model": lambda path: load_tokenizer(path),
    "sample --load": lambda path: sample.main(["--load", path]),
    "sample_dit --load": lambda path: sample_dit.main(["--load", path]),
    "plot loss": lambda path: plot.main(["loss", path, "--output", "x.png"]),
    "plan --measured": lambda path: read_profile(Path(path)),
    "prepare_data --tokenizer-model": lambda path: prepare_data.main(
        ["--input", "empty", "--output-prefix", "out", "--tokenizer-model", path]
    ),
    "prepare_data --input": lambda path: prepare_data.main(
        ["--input", path, "--output-prefix", "out"]
    ),
    "convert_hf import": lambda path: convert_hf.main(["import", path, "out"]),
    "convert_hf export": lambda path: convert_hf.main(["export", path, "out"]),
    "prepare_latents --check": lambda path: prepare_latents.main(["--check", path]),
}
"""Commands that are given a path to read from or to write to."""


@pytest.mark.parametrize("use", USES)
def test_paths_to_what_is_not_meant(use, odd_paths, folder):
    before = sorted(folder.rglob("*"))
    endings = {path: end(lambda arguments: USES[use](*arguments), [path]) for path in odd_paths}
    assert wrong_ones(endings) == {}
    assert sorted(folder.rglob("*")) == before


TOOLS = {
    plot.main: """
        layout --size 0 | layout --size 1000000000 | layout --size x | layout --seq-length 1e30
        layout --methods nope
        layout --methods | layout --methods ring ring --size 3 --seq-length 1
        layout --methods ring --size 2 --seq-length 4 --output /proc/x.png
        layout --methods ring --size 2 --seq-length 4 --output x.nope
        teams --size 1000000000 | teams --team-size 0 | teams --placement nope
        teams --ranks-per-node 0
        teams --heads 0 | teams --kv-heads 0 | nope | loss | loss none | layout --nope | teams 5""",
    plan.main: """
        --world-size 0 | --world-size x | --world-size 1e30 | --top x | --nope
        --profile --world-size 7
        --fits --html x.html | --measured none | --html . | --html x.html --measured none
        --write x --html x | --write x --html ./x | --html /proc/none/x | --write /proc/none/x
        --config none.toml --world-size 2 | --seq-length 0 --world-size 2
        --config llama3_8b --world-size 8 --cluster a100 --fp8-format hybrid""",
    sample.main: """
        --load none | --load none --num-tokens 0 | --load none --num-tokens 1e30
        --load none --temperature nan
        --load none --top-k 0 | --load none --top-p 1.5 | --load none --seed -1
        --load none --ckpt-step -1
        --load none --by-line | --load none --prompt x --prompt-file y
        --load none --context-parallel-size 0
        --load none --stop | --load none --num-samples 0 | --num-tokens 5 | --load | --nope
        --load a b
        --load none --seed 1000000000000000000000000000000""",
    convert_hf.main: """
        import | import none | import none x | export none x | export none x --dtype int8
        import none x y
        export none x --max-shard-size 0 | export none x --max-shard-size 5XB | nope
        export none x --nope""",
    sample_dit.main: """
        --load none | --load none --num-samples 0 | --load none --steps x
        --load none --guidance nan
        --load none --method nope | --load none --batch-size 0 | --load none --classes x
        --load none --vae none
        --num-samples 5 | --nope | --load none --seed -1""",
    prepare_data.main: """
        --input none --output-prefix x | --input none | --stdlib --input none | --vocab-size 0
        --vocab-size 1e30
        --max-bytes x | --max-bytes -5 | --input --output-prefix x
        --tokenizer-model none.model --vocab-size 5
        --nope | stray | --output-prefix""",
    prepare_latents.main: """
        --input none --output x | --input none | --check none | --check none --input none
        --output x
        --input none --output x --size 0 | --input none --output x --size x
        --input none --output x --dtype float8
        --input none --output x --samples-per-shard 0 | --input none --output x --batch-size 1e30
        --nope
        --input none --output x --vae none""",
}


@pytest.mark.parametrize("main", TOOLS, ids=lambda main: main.__module__)
def test_tools_refuse_in_one_line(main, folder):
    rows = [row.strip() for line in TOOLS[main].strip().splitlines() for row in line.split("|")]
    endings = {row: end(main, row.split()) for row in rows}
    assert wrong_ones(endings) == {}
    assert [row for row, ending in endings.items() if ending.status == 0] == []
    assert not list(folder.iterdir())
