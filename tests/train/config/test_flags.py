"""Reading a command line, whatever the fields are; Megatron-LM's flags that do not exist here."""

import re

import pytest

from runtime.errors import UserError
from train.config import diffusion as dit_config
from train.config import flags, toml_files
from train.config import language as config
from train.config.entries import Config, DiTRunConfig
from train.config.fields import config_fields, fields_by_variant
from train.config.flags import spelled, write_toml
from train.config.language import load_config, parse_args
from train.config.megatron_flags import entries
from train.optimizers import OPTIMIZERS


def test_megatrons_spelling_of_a_flag_and_underscores_are_taken():
    flags = (
        "--override-opt_param-scheduler --lr_decay_style=inverse-square-root --train_iters 7 "
        "--save a_b --load=c_d"
    )
    config = parse_args(flags.split())
    assert config.optimizer.override_opt_param_scheduler
    assert (config.optimizer.lr_decay_style, config.train.train_iters) == ("inverse-square-root", 7)
    assert (config.checkpoint.save, config.checkpoint.load) == ("a_b", "c_d")
    assert parse_args(["--no-use-checkpoint-opt_param-scheduler"]) == parse_args([])


@pytest.mark.parametrize(
    "name", ["llama3_8b", "LLaMA3-8B", "configs/llama3_8b.toml", "configs/models/llama3_8b.toml"]
)
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_model_is_named_by_its_file_of_now_or_before_or_by_name(
    name, elsewhere, tmp_path, monkeypatch, capsys
):
    """A folder of the model's name, such as a download of it, is not its file."""
    (tmp_path / "llama3_8b").mkdir()
    root = flags.MODELS.parents[1]
    monkeypatch.chdir(tmp_path if elsewhere else root)
    argument = str(root / name) if elsewhere and "/" in name else name
    toml_files._note_moved.cache_clear()
    assert parse_args(["--config", argument]) == load_config(flags.MODELS / "llama3_8b.toml")
    assert ("configs/models/llama3_8b.toml; the new file is read" in capsys.readouterr().err) == (
        "configs/l" in name
    )


def test_a_file_beside_comes_before_a_model_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama_tiny.toml").write_text("[model]\nnum_layers = 7\n")
    assert parse_args(["--config", "llama_tiny.toml"]).model.num_layers == 7
    with pytest.raises(
        config.ConfigError, match="there is no model lama3_8b; name one of llama3_8b, "
    ):
        parse_args(["--config", "lama3_8b"])
    with pytest.raises(config.ConfigError, match=r"elsewhere/llama3_8b\.toml"):
        parse_args(["--config", "elsewhere/llama3_8b.toml"])


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("bf16", True, "--bf16"),
        ("bf16", False, "--no-bf16"),
        ("data_path", ["0.3", "a"], "--data-path 0.3 a"),
        ("save_interval", None, "--save-interval none"),
        ("adam_eps", 1e-8, "--adam-eps 1e-08"),
        ("blend_by_length", [], "leaving out --blend-by-length"),
    ],
)
def test_a_field_is_spelled_as_a_command_line_has_it(name, value, words):
    assert spelled(name, value) == words


def another(field):
    """Another value than a field's default, if there is one."""
    if field.choices:
        return next((choice for choice in field.choices if choice != field.default), None)
    return {bool: not field.default, int: 16, float: 0.1 + 0.2, str: 'a "b" \\ é'}[field.base]


def test_toml_round_trip_of_every_field(tmp_path):
    changed = {"split": "90,5,5", "window_size": "8,0", "window_attn_skip_freq": "2"}
    changed |= {
        "data_path": ("a b", 'c "d" \\ é'),
        "allow_changed": ("lr", "data_path"),
        "blend_by_length": ("9:0.5",),
        "ruler_lengths": (8, 16),
        "ruler_tasks": ("vt", "cwe"),
        "model_type": "gpt",
        "position_embedding_type": "learned_absolute",
        "data_parallel_sharding_strategy": "fsdp",
        "pipeline_schedule": "Interleaved1F1B",
        "pipeline_layers": (3, 5),
        "lora_target": ("wq", "down_proj"),
    }
    # Which go with no learned positions, no warm-up in iterations and no
    # use_checkpoint_opt_param_scheduler.
    alone = {
        "rotary_base": 5.1 + 0.2,
        "lr_warmup_fraction": 0.1 + 0.2,
        "override_opt_param_scheduler": True,
        "mock_data": True,
    }
    linear = {
        "model_type": "transnormer",
        "linear_decay": "paper",
        "no_scale_embedding": True,
        "softmax_every": 3,
    }
    delta = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), 3) | {
        "linear_gate": "per_channel"
    }
    delta |= {"linear_key_head_dim": 16, "linear_value_head_dim": 24, "linear_conv_kernel_dim": 3}
    delta |= {"model_type": "qwen3_5", "rotary_percent": 0.1 + 0.4, "delta_rule_schedule": "tree"}
    gemma = {
        "model_type": "gemma3",
        "rotary_base_local": 5.1 + 0.2,
        "query_pre_attn_scalar": 16,
        "window_size": "8,0",
    }
    factors = (
        "embedding_multiplier",
        "attention_multiplier",
        "residual_multiplier",
        "logits_scaling",
    )
    granite = {"model_type": "granite", **dict.fromkeys(factors, 0.1 + 0.2)}
    smollm3 = {"model_type": "smollm3", "no_rope_freq": "2"}
    kinds = linear | delta | gemma | granite | smollm3
    # Which go with the model type that the others have no use for.
    llama = {
        "add_qkv_bias": True,
        "qk_layernorm": True,
        "rope_scaling_type": "yarn",
        "rope_scaling_truncate": False,
    }
    every = {
        name: field for table in fields_by_variant(Config).values() for name, field in table.items()
    }
    llama |= {name: 16.0 for name in every if name.startswith("rope_scaling_")} | llama
    llama |= {
        "profile_step_start": 8,
        "profile_ranks": (1, 2),
        "spike_factor": 2.5,
        "watchdog_factor": 2.5,
    }
    llama |= {"rope_scaling_original_max_position_embeddings": 16, "rope_scaling_beta_slow": 0.5}
    length = "rope_scaling_original_max_position_embeddings"
    llama3 = {"rope_scaling_type": "llama3", "rope_scaling_factor": 16.0, length: 16}
    llama3 |= {"rope_scaling_low_freq_factor": 0.5, "rope_scaling_high_freq_factor": 16.0}
    dynamic = {**llama3, "rope_scaling_type": "dynamic", "rope_scaling_seq_length": 16}
    others = (
        "rope_scaling_low_freq_factor",
        "rope_scaling_high_freq_factor",
        "rope_scaling_seq_length",
    )
    dynamic = {name: value for name, value in dynamic.items() if name not in others[:2]}
    alone |= {name: value for name, value in llama.items() if name not in others}
    values_of = {name: another(field) for name, field in every.items()}
    optimizers = [{} if name == "adam" else {"optimizer": name} for name in OPTIMIZERS]
    for settings, spec in zip(optimizers, OPTIMIZERS.values(), strict=True):
        settings |= {name: values_of[name] for name in spec.setting_names}
    families = []
    for family, table in fields_by_variant(Config).items():
        alone_in_it = table.keys() - config_fields(Config).keys() - kinds.keys() - alone.keys()
        if alone_in_it:
            families.append(
                {"model_type": family, **{name: values_of[name] for name in alone_in_it}}
            )
    kinds |= {name: value for settings in families for name, value in settings.items()}
    of_optimizers = {"optimizer", *(name for settings in optimizers for name in settings)}
    for name, value in values_of.items():
        if name in changed or name in alone or name in others or name in kinds:
            continue
        if name not in of_optimizers:
            changed[name] = value
    for values in (
        {},
        alone,
        linear,
        delta,
        gemma,
        granite,
        smollm3,
        changed,
        llama3,
        dynamic,
        *optimizers,
        *families,
    ):
        config = flags.build(Config, values)
        (tmp_path / "config.toml").write_text(write_toml(config))
        assert load_config(tmp_path / "config.toml") == config
        for name, value in values.items():
            field = config_fields(config)[name]
            assert getattr(getattr(config, field.section), name) == value
            assert value != every[name].default or name == "model_type"
    covered = changed | alone | kinds | llama3 | dynamic
    assert covered.keys() | of_optimizers == every.keys()


def test_help_has_defaults_as_they_are_typed():
    words = " ".join(flags._parser(Config, "about", None).format_help().split())
    assert "(default: 0)" in words[words.index("--profile-ranks N [N ...]") :][:200]
    assert "(default: (" not in words


OURS = {field.flag for root in (Config, DiTRunConfig) for field in config_fields(root).values()}
EVERY = OURS | {
    field.flag for table in fields_by_variant(Config).values() for field in table.values()
}


def test_the_table_is_whole_and_names_flags_that_exist():
    table = entries()
    assert len(table) >= 150
    assert not set(table) & OURS, "these exist by their name"
    for entry in table.values():
        assert entry.verdict in "=>!", entry
        assert entry.text, entry
        assert not entry.fits or entry.field in config_fields(Config), entry
        if entry.verdict == ">":
            named = set(re.findall(r"--[a-z][a-z0-9-]+", entry.text))
            assert named & EVERY or "--config" in named, entry


@pytest.mark.parametrize("parse", [config.parse_args, dit_config.parse_args])
def test_every_flag_of_the_table_is_accepted_or_refused_by_its_own_words(parse):
    accepted = []
    for entry in entries().values():
        line = [entry.flag, *(value.replace("N", "7") for value in entry.values[:1])]
        if entry.verdict != "=":
            with pytest.raises(UserError) as caught:
                parse(line)
            assert f"unknown argument {entry.flag}; it is Megatron-LM's" in str(caught.value)
            assert entry.text in str(caught.value)
        elif not entry.fits:
            accepted.append(line)
    expected = parse(["--train-iters", "5"])
    assert parse([*(word for line in accepted for word in line), "--train-iters", "5"]) == expected
    assert parse([*("=".join(line) for line in accepted), "--train-iters", "5"]) == expected


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--model-type gpt --max-position-embeddings 1024 --swiglu",
            "model_type is gpt; the flag needs llama",
        ),
        ("--use-distributed-optimizer --bf16 --sequence-parallel --calculate-per-token-loss", None),
        (
            "--use-distributed-optimizer --data-parallel-sharding-strategy ddp",
            "data_parallel_sharding_strategy is ddp",
        ),
        ("--normalization LayerNorm", "--normalization is LayerNorm"),
        ("--hidden-dropout", "--hidden-dropout is given without a value"),
        ("--optimizer adam --adam-w-mode", None),
        ("--optimizer sgd", "argument --optimizer: invalid choice: 'sgd' (choose from"),
        ("--muon-fp32-matmul-prec medium", "here give --muon-fp32-matmul-prec low"),
        ("--muon-coefficient-type quintic", "here it can only be simple"),
        ("--sgd-momentum 0.9", "there is no SGD; --optimizer lists the choices"),
        ("--transformer-impl transformer_engine --use-flash-attn --use-mcore-models", None),
        ("--fp16", "here give --bf16"),
        ("--num-experts 8", "there is no mixture of experts"),
        ("--sequence-parallel=false", "--sequence-parallel takes no value, but 'false' is given"),
        ("--attention-dropout 0.00 --hidden-dropout=0.0 --rotary-percent 1.00", None),
        ("--attention-dropout 0.1", "--attention-dropout is 0.1, but here it can only be 0"),
        ("--model-type transnormer --disable-bias-linear", None),
        (
            "--model-type linear_transformer --disable-bias-linear",
            "a gpt and a linear_transformer have them",
        ),
        ("--swigl", "did you mean --swiglu? it is Megatron-LM's: its feed-forward is SwiGLU"),
        ("--fp1=1", "did you mean --fp16? it is Megatron-LM's; here give --bf16"),
        ("--no-such-flag", "unknown argument --no-such-flag; "),
    ],
)
def test_what_contradicts_is_refused(line, words):
    if words is None:
        config.parse_args(line.split())
        return
    with pytest.raises(UserError) as caught:
        config.parse_args(line.split())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_needs_a_kind_of_model_is_refused_where_there_is_none():
    with pytest.raises(UserError, match="--swiglu is given, but this program has no model_type"):
        dit_config.parse_args(["--swiglu"])


@pytest.mark.parametrize(
    "line", ["no_scale_embedding = 0", "rotary_percent = true", "linear_conv_kernel_dim = 4.0"]
)
def test_a_key_of_another_family_is_passed_over_at_its_default_alone_and_never_of_another_type(
    line, tmp_path
):
    file = tmp_path / "config.toml"
    file.write_text(
        "[model]\nno_scale_embedding = false\nrotary_percent = 1\nlinear_conv_kernel_dim = 4\n"
    )
    assert load_config(file) == Config()
    file.write_text(f"[model]\n{line}\n")
    with pytest.raises(
        UserError,
        match=f"unknown key {line.split()[0]} in .model.; model_type llama does not have it",
    ):
        load_config(file)


def test_a_misspelt_flag_of_another_family_is_asked_for():
    with pytest.raises(UserError, match="did you mean --linear-decay"):
        parse_args(["--linear-dcay", "paper"])


def test_a_key_that_no_earlier_version_wrote_is_never_passed_over(tmp_path):
    """At its default it changes the model.

    A SmolLM3 read as a LLaMA would have rope in every layer.
    """
    file = tmp_path / "config.toml"
    file.write_text('[model]\nmodel_type = "llama"\nno_rope_freq = "4"\n')
    with pytest.raises(
        UserError,
        match=r"unknown key no_rope_freq in .model.; model_type llama does not have it; smollm3",
    ):
        load_config(file)


@pytest.mark.parametrize(
    "words", [["--help", "--config", "no.toml"], ["--version", "--config", "no.toml"]]
)
def test_help_and_version_need_no_configuration(words, capsys):
    with pytest.raises(SystemExit) as ended:
        parse_args(words)
    assert ended.value.code == 0
    assert capsys.readouterr().out
