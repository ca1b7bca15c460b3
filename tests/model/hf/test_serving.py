"""The command that serves an exported model has the rope that the model was trained with."""

import json
import shlex
from pathlib import Path

import pytest
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from model.families import FAMILIES
from model.hf import config_to_hf
from model.hf.serving import vllm_note
from model.parts.rope import yarn_mscale

SHAPE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": 61,
}
YARN = {
    "rope_scaling_type": "yarn",
    "rope_scaling_factor": 16.0,
    "rope_scaling_original_max_position_embeddings": 8192,
}
CASES = {
    "yarn": (YARN, 131072),
    "yarn, too long": (YARN | {"max_position_embeddings": 262144}, 131072),
    "yarn, attention factor": (YARN | {"rope_scaling_attention_factor": 1.5}, 131072),
    "yarn, mscale": (
        YARN | {"rope_scaling_mscale": 0.8, "rope_scaling_mscale_all_dim": 0.5},
        131072,
    ),
    "linear": (
        {
            "rope_scaling_type": "linear",
            "rope_scaling_factor": 4.0,
            "max_position_embeddings": 16384,
        },
        16384,
    ),
    "llama3": (YARN | {"rope_scaling_type": "llama3"}, 131072),
    "dynamic": (YARN | {"rope_scaling_type": "dynamic"}, 131072),
}


def exported(settings, family="llama"):
    return config_to_hf(FAMILIES[family].config(**SHAPE, **settings), {})


def parsed(note):
    """The words after ``vllm serve``, flags as a dictionary."""
    command = note.splitlines()[-1]
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"]
    return Path(words[2]), dict(zip(words[3::2], words[4::2], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_the_command_keeps_the_frequencies_and_the_length(name, tmp_path):
    settings, length = CASES[name]
    written = exported(settings)
    folder, flags = parsed(vllm_note(written, tmp_path / "a folder"))
    assert folder == tmp_path / "a folder"
    assert int(flags["--max-model-len"]) == length

    overrides = json.loads(flags["--hf-overrides"])
    table = overrides["rope_parameters"]
    theirs = AutoConfig.for_model(**written)
    overridden = AutoConfig.for_model(**written | {"rope_scaling": table} | overrides)
    kind = settings["rope_scaling_type"]
    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu")
    frequencies_after, factor_after = ROPE_INIT_FUNCTIONS[kind](overridden, "cpu")
    assert frequencies.equal(frequencies_after)
    assert factor_after == pytest.approx(factor, rel=1e-12)

    # Releases of vLLM that do not read attention_factor multiply attn_factor by the default.
    if kind == "yarn":
        relative = table.get("attn_factor", 1.0)
        assert relative * yarn_mscale(16.0) == pytest.approx(factor, rel=1e-12)


def test_a_model_of_two_ropes_names_both(tmp_path):
    two_ropes = {"window_size": "4,0", "window_attn_skip_freq": "2", "rotary_base_local": 1e4}
    written = exported(YARN | two_ropes, "gemma3")
    _, flags = parsed(vllm_note(written, tmp_path))
    table = json.loads(flags["--hf-overrides"])["rope_parameters"]
    assert table == written["rope_parameters"]
    assert table["full_attention"]["rope_type"] == "yarn"
    assert table["sliding_attention"]["rope_type"] == "default"


def test_plain_rope_needs_no_command(tmp_path):
    written = exported({"max_position_embeddings": 8192})
    assert vllm_note(written, tmp_path) == ""


def test_a_folder_without_a_tokenizer_needs_one(tmp_path):
    assert vllm_note(exported(YARN), tmp_path).endswith(" --tokenizer FOLDER")
    (tmp_path / "tokenizer.json").touch()
    assert "tokenizer" not in vllm_note(exported(YARN), tmp_path)
