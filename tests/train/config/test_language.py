import math

import pytest

from model.families import FAMILIES
from parallel.context import METHODS, STATE_METHODS
from runtime.errors import UserError
from tests.starts import ROOT
from train.config import diffusion, flags
from train.config.entries import Config, DiTRunConfig
from train.config.fields import attribute_docs, config_fields, fields_by_variant, sections_of
from train.config.language import load_config, parse_args, validate

CONFIGS = sorted(
    path for path in (ROOT / "configs" / "models").glob("*.toml") if "dit_" not in path.name
)
DATA = ["--data-path", "runs/data/x", "--tokenizer-model", "x.model"]


def write(folder, text):
    path = folder / "run.toml"
    path.write_text(text)
    return path


def refusal(*argv):
    with pytest.raises(UserError) as caught:
        parse_args(argv)
    return str(caught.value)


def contradiction(world_size, *argv):
    config = parse_args([*DATA, *argv])
    with pytest.raises(UserError) as caught:
        validate(config, world_size)
    return str(caught.value)


def test_defaults_and_flags_of_every_kind():
    assert parse_args([]) == Config()
    argv = (
        "--lr 1e-3 --num-layers 2 --bf16 --no-eod-mask-loss --context-parallel-method ring "
        "--data-path 0.3 a 0.7 b"
    )
    config = parse_args([*argv.split(), "--exit-duration-in-mins", "5", "--save", "runs/x"])
    assert (config.optimizer.lr, config.model.num_layers, config.train.bf16) == (1e-3, 2, True)
    assert (config.data.eod_mask_loss, config.context.context_parallel_method) == (False, "ring")
    assert config.data.data_path == ("0.3", "a", "0.7", "b")
    assert (config.train.exit_duration_in_mins, config.checkpoint.save) == (5.0, "runs/x")
    assert type(config.train.exit_duration_in_mins) is float


def test_flags_override_the_file_and_the_rest_stays(tmp_path):
    path = write(
        tmp_path,
        '[train]\nseed = 7\nbf16 = true\n[optimizer]\nlr = 1\n[checkpoint]\nsave = "runs/x"\n',
    )
    config = parse_args(["--config", str(path), "--no-bf16", "--save", "none"])
    assert (config.train.seed, config.train.bf16, config.checkpoint.save) == (7, False, None)
    assert config.optimizer.lr == 1.0
    assert type(config.optimizer.lr) is float


def test_an_optional_choice_is_unset_by_none():
    gpt = ["--model-type", "gpt", "--max-position-embeddings", "64", "--position-embedding-type"]
    assert (
        parse_args([*gpt, "learned_absolute"]).model.position_embedding_type == "learned_absolute"
    )
    unset = parse_args([*gpt, "learned_absolute", "--position-embedding-type", "none"])
    assert unset.model == parse_args(gpt[:4]).model
    message = refusal(*gpt, "alibi")
    assert "--position-embedding-type" in message
    assert "'alibi' is not one of rope, learned_absolute" in message


def test_the_file_names_the_family_unless_a_flag_does(tmp_path):
    """Earlier versions wrote all families' settings: those at their defaults are passed over."""
    old = (
        "add_qkv_bias = false\nlinear_gate = 'per_head'\nrotary_percent = "
        "1.0\nrope_scaling_truncate = true\n"
    )
    path = write(
        tmp_path, f"[model]\nmodel_type = 'linear_transformer'\nno_scale_embedding = true\n{old}"
    )
    config = parse_args(["--config", str(path)])
    assert type(config.model) is FAMILIES["linear_transformer"].config
    assert config.model.no_scale_embedding
    assert not {"add_qkv_bias", "linear_gate"} & config_fields(config).keys()
    assert "add_qkv_bias" not in flags.write_toml(config)
    assert load_config(write(tmp_path, flags.write_toml(config))) == config
    transnormer = parse_args(
        ["--config", str(path), "--model-type", "transnormer", "--linear-decay", "paper"]
    ).model
    assert (type(transnormer), transnormer.no_scale_embedding) == (
        FAMILIES["transnormer"].config,
        True,
    )
    assert "no_scale_embedding in [model]; model_type llama does not have it" in refusal(
        "--config", str(path), "--model-type", "llama"
    )


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_load_and_are_free_of_contradictions(path):
    mesh = load_config(path).mesh
    sizes = (
        mesh.context_parallel_size,
        mesh.tensor_model_parallel_size,
        mesh.pipeline_model_parallel_size,
    )
    validate(parse_args(["--config", str(path), *DATA]), 2 * math.prod(sizes))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[trian]\nseed = 1", ["unknown section [trian]", "did you mean train?"]),
        (
            "[train]\nglobal_batchsize = 1",
            ["unknown key global_batchsize in [train]", "mean global_batch_size?"],
        ),
        ("[train]\nzzzzzz = 1", ["unknown key zzzzzz", "the known names are"]),
        (
            "[profiling]\nnope = 1",
            ["the known names are profile, profile_step_start, profile_step_end, profile_ranks"],
        ),
        (
            "[model]\nnum_classes = 10",
            ["unknown key num_classes in [model]", "it belongs to pretrain_dit.py"],
        ),
        (
            "[diffusion]\nobjective = 'ddpm'",
            ["unknown section [diffusion]", "it belongs to pretrain_dit.py"],
        ),
        ("[model]\nseq_length = 1", ["seq_length is in the section [model]", "move it to [train]"]),
        ("seq_length = 1", ["seq_length is outside of a section", "[train]"]),
        ("[train]\nseed = 'one'", ["seed is 'one'", "an integer"]),
        ("[train]\nseed = 1.0", ["seed is 1.0", "an integer"]),
        ("[train]\nbf16 = 1", ["bf16 is 1", "true or false"]),
        ("[optimizer]\nlr = inf", ["lr is inf", "a finite number"]),
        ("[data]\ndata_path = 'a'", ["data_path is 'a'", "a list, each a string"]),
        ("[data]\ndata_path = [1]", ["data_path is 1", "a string"]),
        ("[context]\ncontext_parallel_method = 'rign'", ["'rign'", "one of ring, striped"]),
        ("[train]\nseed = ", ["not valid TOML"]),
        ("[model]\nmodel_type = 'bert'", ["model_type is 'bert'", "one of llama, gpt, "]),
        (
            "[train]\nlinear_gate = 'per_head'",
            ["unknown key linear_gate in [train]; model_type llama does not have it; qwen3_5"],
        ),
        ("[model]\nmodel_type = 2", ["model_type is 2", "one of llama, gpt, "]),
        (
            "[model]\nlinear_gate = 'per_channel'",
            ["unknown key linear_gate in [model]; model_type llama does not have it; qwen"],
        ),
        (
            "[model]\nmodel_type = 'gpt'\nadd_qkv_bias = true",
            ["add_qkv_bias in [model]; model_type gpt does not have it; llama"],
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, text, words):
    path = write(tmp_path, text)
    message = refusal("--config", str(path))
    assert all(word in message for word in [str(path), *words]), message


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            "--contxt-parallel-size 2",
            ["--contxt-parallel-size", "did you mean --context-parallel-size?"],
        ),
        ("--seq-lenght 5", ["did you mean --seq-length?"]),
        ("--cp 2", ["--cp", "did you mean --context-parallel-size?"]),
        ("--seq-length 512K", ["'512K' is not an integer", "for 512 x 1,024 give 524288"]),
        ("--nope", ["unknown argument --nope; --help lists them all"]),
        ("--num-classes 10", ["unknown argument --num-classes", "it belongs to pretrain_dit.py"]),
        ("--num-layers 1.5", ["--num-layers", "'1.5' is not an integer"]),
        ("--lr nan", ["--lr", "'nan' is not a finite number"]),
        ("--lr none", ["--lr", "'none'"]),
        ("--context-parallel-method rign", ["rign", "ring", "striped", "zigzag", "allgather"]),
        ("--train-iters 0", ["train_iters is 0"]),
        ("--micro-batch-size -2", ["micro_batch_size is -2"]),
        ("--context-parallel-size 0", ["context_parallel_size is 0"]),
        ("--exit-duration-in-mins 0", ["exit_duration_in_mins is 0.0"]),
        ("--split 95;5", ["split is", "95;5"]),
        ("--loss-chunk-size -1", ["loss_chunk_size is -1"]),
        ("--layer-chunk-size -1", ["layer_chunk_size is -1"]),
        ("--layer-chunk-size 8", ["layer_chunk_size is 8", "granularity to full"]),
        ("--recompute-offload", ["recompute_offload is set", "to full or attention_boundary"]),
        ("--ckpt-step 5", ["ckpt_step is 5", "--load"]),
        ("--model-type bert", ["--model-type", "'bert'", "llama", "gpt"]),
        (
            "--model-type gpt",
            ["max_position_embeddings is not set", "position_embedding_type to rope"],
        ),
        (
            "--position-embedding-type learned_absolute",
            ["position_embedding_type is learned_absolute", "llama has only rope"],
        ),
        (
            "--linear-gate per_head",
            ["--linear-gate; model_type llama does not have it; qwen3_5 and olmo_hybrid have it"],
        ),
        (
            "--model-type qwen3_5 --no-qk-layernorm",
            ["--no-qk-layernorm; model_type qwen3_5 does not have it; llama has it"],
        ),
        (
            "--query-pre-attn-scalar 8 --model-type=olmo3",
            ["model_type olmo3 does not have it; gemma3 has it"],
        ),
        ("--model-type", ["--model-type: expected one argument"]),
        (
            "--no-scale-embedding",
            ["model_type llama does not have it; transnormer and linear_transformer have it"],
        ),
        ("--no-rope-freq 2", ["--no-rope-freq; model_type llama does not have it; smollm3 has it"]),
        ("--no-lr", ["unknown argument --no-lr; did you mean"]),
        ("--exit-on-missing-checkpoint", ["exit_on_missing_checkpoint", "--load"]),
    ],
)
def test_wrong_flags_are_refused_by_name(argv, words):
    message = refusal(*argv.split())
    assert all(word in message for word in words), message


CONTRADICTIONS = """
6 --context-parallel-size 4 | context_parallel_size is 4 | 6 processes | 1, 2, 3, 6
6 --tensor-model-parallel-size 4 | tensor_model_parallel_size is 4 | 6 processes; | 1, 2, 3, 6;
4 --tensor-model-parallel-size 2 --context-parallel-size 4 | context_parallel_size is 4 | \
2 processes that tensor
3 --tensor-model-parallel-size 3 | tensor_model_parallel_size 3 | num_attention_heads 8 | \
fit this model: 1, 2
2 --tensor-model-parallel-size 2 --ffn-hidden-size 31 | does not divide ffn_hidden_size 31 | \
fit this model: 1
4 --tensor-model-parallel-size 4 --num-attention-heads 12 --hidden-size 96 --num-query-groups 6 | \
num_query_groups is 6
4 --tensor-model-parallel-size 4 --vocab-size 6 | vocab_size is 6 | --vocab-size 7
4 G --max-position-embeddings 5 --seq-length 5 --tensor-model-parallel-size 4 | \
max_position_embeddings is 5
4 --tensor-model-parallel-size 2 --global-batch-size 3 | data-parallel size 2 | 2 or 4
4 --micro-batch-size 2 --global-batch-size 10 | global_batch_size is 10 | data-parallel size 4 | \
8 or 16
4 --global-batch-size 2 | global_batch_size is 2 | nearest that work: 4
8 --tensor-model-parallel-size 2 --num-distributed-optimizer-instances 3 | \
num_distributed_optimizer_instances is 3
2 --num-distributed-optimizer-instances 4 | instances is 4 | the 2 data- | nearest that work: 2
2 --context-parallel-size 2 --context-parallel-method none | none | context_parallel_size is 2
1 --context-parallel-method none --ulysses-degree 2 | method is none | leave these options out
8 --context-parallel-size 4 --ulysses-degree 4 \
--tensor-model-parallel-size 2 --num-attention-heads 4 | ulysses_degree
1 --lr-decay-iters 5 --lr-warmup-iters 6 | lr_warmup_iters is 6 | lr_decay_iters 5
1 --lr-decay-iters 50 --lr-warmup-fraction 0.5 --lr-decay-style WSD --lr-wsd-decay-iters 26 | \
lr_wsd_decay_iters is 26
1 --lr-decay-iters 100 --lr-warmup-iters 95 --lr-decay-style WSD --lr-wsd-decay-iters 6 | \
lr_wsd_decay_iters is 6
1 --attention-backend flash_attn_3 | flash_attn_3 | --bf16
1 --device cpu --recompute-granularity full --recompute-offload | recompute_offload | host memory
1 --device cpu --optimizer-cpu-offload | optimizer_cpu_offload | host memory | --device cuda
1 --device cpu --optimizer-backend apex | optimizer_backend is apex, but device is cpu | \
or use --device cuda
1 --device cuda --optimizer-backend apex --optimizer-cpu-offload | \
apex, but optimizer_cpu_offload is set | leave out --optimizer-backend
1 --device cpu --compile --recompute-granularity attention_boundary | \
compile is set with recompute_granularity att
1 --model-type transnormer --attention-backend aten | attention_backend is aten | \
auto, chunked, triton
1 --attention-backend chunked | attention_backend is chunked | model_type llama has softmax | aten
2 --model-type transnormer --context-parallel-size 2 | context_parallel_method is striped | \
use one of lasp, lasp2
1 --context-parallel-method lasp | context_parallel_method is lasp | \
model_type llama has softmax | use one of ring, striped
2 --context-parallel-size 2 --delta-rule-schedule tree | delta_rule_schedule is tree | \
model_type llama has no layers
2 L --context-parallel-layout striped | context_parallel_layout is 'striped', but method lasp2 | \
consecutive tokens
2 L --attention-backend reference | attention_backend is reference with context_parallel_size 2
4 --model-type linear_transformer --num-attention-heads 2 --tensor-model-parallel-size 4 | \
num_attention_heads 2
1 --save-interval 5 | save_interval is 5 | --save
1 --keep-last 2 | keep_last is 2 | --save
1 --non-persistent-save-interval 2 | non_persistent_save_interval is 2, but save is not set
1 --save x --non-persistent-save-interval 2 | non_persistent_save_interval is 2 | \
--non-persistent-local-ckpt-dir
1 --non-persistent-local-ckpt-dir x | local_ckpt_dir is x | --non-persistent-save-interval
1 --wandb-exp-name x | wandb_exp_name is x | --wandb-project
1 --split 100,0,0 | split is 100,0,0 | --eval-iters 0
1 --tokenizer-model none | tokenizer_model is not set
1 G --max-position-embeddings 512 --seq-length 513 | seq_length is 513 | max_position_embeddings 512
1 G --reset-attention-mask --max-position-embeddings 251 --seq-length 251 | \
reset_attention_mask is set with learned
1 --reset-attention-mask --context-parallel-method none | \
reset_attention_mask is set, but context_parallel_method
4 --balance-over dp_cp | balance_over is dp_cp, | give pretrain_gpt.py --reset-attention-mask
8 B --context-parallel-size 2 --context-parallel-method ulysses --num-attention-heads 4 | \
ulysses_degree is 8 with 4
6 B --context-parallel-size 4 | context_parallel_size is 4, which does not divide the 6 processes
4 B --global-batch-size 6 | global_batch_size is 6, not a multiple of micro_batch_size 4
4 H --softmax-every none --hybrid-softmax-method ulysses | \
hybrid_softmax_method is ulysses, but softmax_every is
4 H --softmax-every none --hybrid-softmax-layout zigzag | \
hybrid_softmax_layout is zigzag, but softmax_every is
4 H --hybrid-softmax-method ulysses --hybrid-softmax-layout zigzag | zigzag | \
same work in any layout; set hybrid
4 H --context-parallel-method ulysses --context-parallel-layout zigzag | \
context_parallel_layout is zigzag, but with method u
4 H --context-parallel-layout zigzag --hybrid-softmax-layout contiguous | \
context_parallel_layout is zigzag for all
4 H --hybrid-softmax-method ulysses --num-attention-heads 2 | \
hybrid_softmax_method is ulysses: ulysses_degree is 4 with
4 H --context-parallel-method zigzag | context_parallel_method is zigzag | \
use one of lasp, lasp2, ulysses
4 H --attention-backend aten | attention_backend is aten, which computes softmax attention
2 Z --softmax-type learnable | pipeline_schedule is InterleavedZeroBubble, | \
softmax_type learnable
"""
SHORT = {
    " H ": (
        "--model-type transnormer --softmax-every 2 --context-parallel-method lasp "
        "--context-parallel-size 4"
    ),
    " L ": "--model-type transnormer --context-parallel-size 2 --context-parallel-method lasp2",
    " G ": "--model-type gpt",
    " B ": "--balance-over dp_cp --reset-attention-mask",
    " Z ": "--pipeline-model-parallel-size 2 --global-batch-size 4 --pipeline-schedule "
    "InterleavedZeroBubble "
    "--data-parallel-sharding-strategy zero1",
}
for letter, flags_of_letter in SHORT.items():
    CONTRADICTIONS = CONTRADICTIONS.replace(letter, f" {flags_of_letter} ")
ROWS = [row.split(" | ") for row in CONTRADICTIONS.strip().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_contradictions_are_refused_with_the_fix(row):
    processes, *flags = row[0].split()
    message = contradiction(int(processes), *flags)
    assert all(word in message for word in row[1:]), message


def test_missing_data_is_refused_and_consistent_settings_are_not():
    with pytest.raises(UserError, match="data_path is empty"):
        validate(Config(), 1)
    argv = (
        "--context-parallel-size 2 --micro-batch-size 2 --global-batch-size 8 --save runs/x "
        "--save-interval 5"
    )
    validate(parse_args([*DATA, *argv.split()]), 4)
    for backend in ("auto", "chunked", "reference"):
        argv = (
            f"--model-type transnormer --context-parallel-method none --attention-backend {backend}"
        )
        validate(parse_args([*DATA, *argv.split()]), 2)
    argv = "--tensor-model-parallel-size 4 --num-query-groups 2 --seq-length 251 --vocab-size 37"
    validate(parse_args([*DATA, *argv.split()]), 4)
    gpt = "--model-type gpt --max-position-embeddings 251 --loss-chunk-size 50 --ffn-chunk-size 50"
    validate(parse_args([*DATA, *argv.split(), *gpt.split()]), 4)
    validate(parse_args([*DATA, "--eval-iters", "0", "--split", "1,0,0"]), 1)
    for method in ("ring", "allgather", "ulysses"):
        hybrid = [*DATA, *SHORT[" H "].split(), "--hybrid-softmax-method", method]
        validate(parse_args(hybrid), 4)
        validate(parse_args([*hybrid, "--context-parallel-size", "1"]), 4)


def test_the_methods_offered_are_those_that_exist():
    offered = set(config_fields(Config)["context_parallel_method"].choices)
    assert offered == {*METHODS, *STATE_METHODS, "none", "auto"}


@pytest.mark.parametrize(
    ("parse", "root", "absent"),
    [(parse_args, Config, "--latent-shape"), (diffusion.parse_args, DiTRunConfig, "--seq-length")],
)
def test_help_explains_every_flag(parse, root, absent, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert not ended.value.code
    done = capsys.readouterr()
    assert done.err == ""
    assert "torchrun" in done.out
    assert absent not in done.out
    for variant, table in fields_by_variant(root).items():
        sections = sections_of(root, variant or None)
        for name, field in table.items():
            section = sections[field.section]
            text = attribute_docs(section).get(name, "")
            assert len(text) > 10, f"{section.__name__}.{name} has no attribute docstring"
            assert f"  {field.flag}" in done.out
            assert text.split()[0] in done.out
