"""A command line is read before anything that takes seconds to import."""

import sys

from tests.starts import ROOT, ended

LAZY = """
    PIL datasets diffusers matplotlib megatron sentencepiece sklearn tensorboard tokenizers torch._dynamo
    torch.distributed.checkpoint torch.distributed.fsdp torch.distributed.pipelining torch.distributed.tensor
    transformers wandb
""".split()  # noqa: SIM905


def loaded_by(statements):
    """Top-level names of the modules that a fresh interpreter has loaded after `statements`, and those in LAZY."""
    code = f"import sys\ntry:\n    {statements}\nexcept (SystemExit, ValueError): pass\nprint('LOADED', *sys.modules)"
    done = ended([sys.executable, "-c", code], PYTHONPATH=str(ROOT))
    assert done.returncode == 0, done.stderr
    modules = done.stdout.rsplit("LOADED", 1)[1].split()
    return {name.split(".")[0] for name in modules} | (set(modules) & set(LAZY))


def test_a_command_line_is_read_before_anything_heavy_is_loaded():
    """--help of both entries, and a flag that is refused, which a person waits for; and so the entries' own imports."""
    commands = [("pretrain_gpt.py", "--help"), ("pretrain_dit.py", "--help"), ("pretrain_gpt.py", "--no-such-flag")]
    for entry, flag in commands:
        loaded = loaded_by(
            f"import runpy; sys.argv = ['{entry}', '{flag}']; runpy.run_path('{entry}')['main'](['{flag}'])"
        )
        assert "train" in loaded
        assert not loaded & set(LAZY)


def test_a_heavy_import_is_seen():
    assert {"train", "sentencepiece"} <= loaded_by("import train.config.flags, sentencepiece")
