"""A command line is read before anything that takes seconds to import."""

import sys

from tests.starts import ROOT, ended

LAZY = """
    PIL datasets diffusers matplotlib megatron sentencepiece sklearn tensorboard tokenizers torch._dynamo
    torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.pipelining torch.distributed.tensor
    transformers wandb
""".split()  # noqa: SIM905
READING = """
import runpy, sys
def tell():
    print("LOADED", *sys.modules)
for command in ("pretrain_gpt.py --help", "pretrain_dit.py --help", "pretrain_gpt.py --no-such-flag"):
    sys.argv = command.split()
    try:
        runpy.run_path(sys.argv[0])["main"](sys.argv[1:])
    except (SystemExit, ValueError):
        tell()
import sentencepiece
tell()
"""


def test_a_command_line_is_read_before_anything_heavy_is_loaded():
    """--help of both entries, and a flag that is refused, which a person waits for; and so the entries' own imports."""
    done = ended([sys.executable, "-c", READING], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    *read, control = [line.split() for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert len(read) == 3
    for modules in read:
        assert "train.config.flags" in modules
        assert not ({name.split(".")[0] for name in modules} | set(modules)) & set(LAZY)
    assert "sentencepiece" in control, "a heavy import is seen"
