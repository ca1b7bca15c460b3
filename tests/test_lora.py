"""LoRA over any mesh.

It has loss and gradients of one process and of PEFT's, frozen weights, resuming and exports.
"""

import importlib
import json
from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from safetensors.torch import load_file

from model.hf import save_hf
from model.hf.adapter import peft_name, write_adapter
from model.parts.lora import is_adapter, merge
from model.registry import architecture_of, build_model
from runtime.errors import UserError
from tests.model.models import model_config
from tests.parity.cases import REFERENCE
from tests.parity.run import compare, equal, trained
from tests.pretraining import differences
from tools.common.cases import Case, case_of, cases_of
from tools.convert_hf import export_model, import_model, main
from train.checkpoint.api import load_model
from train.checkpoint.manifest import CheckpointError
from train.checkpoint.search import find_checkpoint
from train.config.flags import ConfigError
from train.config.language import load_config, parse_args, validate
from train.resume.start import find_start

SHAPE = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 4099}
KINDS = {
    "llama": model_config(**SHAPE, num_query_groups=2),
    "smollm3": model_config(
        **SHAPE,
        model_type="smollm3",
        num_query_groups=2,
        no_rope_freq="2",
        untie_embeddings_and_output_weights=False,
    ),
    "granite": model_config(
        **SHAPE,
        model_type="granite",
        num_query_groups=2,
        embedding_multiplier=3.0,
        attention_multiplier=0.2,
        residual_multiplier=0.4,
        logits_scaling=1.5,
        untie_embeddings_and_output_weights=False,
    ),
    "gpt": model_config(
        **SHAPE,
        model_type="gpt",
        max_position_embeddings=128,
        untie_embeddings_and_output_weights=False,
    ),
    "qwen3_5": model_config(
        **SHAPE,
        model_type="qwen3_5",
        num_query_groups=2,
        kv_channels=24,
        rotary_percent=0.5,
        softmax_every=2,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=12,
    ),
}
LORA = ("--lora-rank", "4", "--lora-alpha", "6", "--micro-batch-size", "2", "--vocab-size", "4099")
BOUND = 1e-5


class Runs:
    """A base of each kind, a run with adapters that do something, and another.

    The run is of one process, and the other goes on from it.
    """

    def __init__(self, data, folder):
        self.data, self.folder = data, folder

    def finetuned(self, kind, case, load, *more, iterations=3):
        flags = (*LORA, "--finetune", "--load", str(load), *more)
        return trained(kind, case, self.data, None, *flags, iterations=iterations)

    @cache  # noqa: B019
    def base(self, kind):
        model, folder = build_model(KINDS[kind]), self.folder / f"{kind}_hf"
        model.init_weights(7)
        save_hf(folder, KINDS[kind], model.state_dict())
        import_model(folder, self.folder / kind)
        return self.folder / kind

    @cache  # noqa: B019
    def begun(self, kind):
        run = self.folder / f"{kind}_lora"
        self.finetuned(
            kind, REFERENCE, self.base(kind), "--save", str(run), "--lr", "1e-2", iterations=2
        )
        return run

    @cache  # noqa: B019
    def alone(self, kind):
        return self.finetuned(kind, REFERENCE, self.begun(kind))


@pytest.fixture(scope="module")
def runs(default_data, tmp_path_factory):
    return Runs(default_data, tmp_path_factory.mktemp("lora"))


MESHES = """
    llama: cp=2|1 tp=2
    gpt: pp=2 zero1
    llama: dp=2
    llama: cp=2 zigzag
    llama: tp=4
    llama: pp=2
    llama: dp=2 ddp
    llama: dp=2 cp=2 legacy_ddp
    llama: dp=2 tp=2 zero2
    llama: pp=2 cp=2 tp=2 loss_chunk=50
    llama: pp=2 dp=2 zero1 InterleavedZeroBubble virtual=2
    gpt: tp=2 cp=2 ulysses
    gpt: pp=2 dp=2 Interleaved1F1B virtual=2
    qwen3_5: pp=2 tp=2
    qwen3_5: pp=2 cp=2 zigzag Interleaved1F1B virtual=2
    qwen3_5: dp=2 cp=2 exchange
    smollm3|granite: tp=2 cp=2 zigzag
"""
"""Four tensor ranks are more than there are key heads."""
RECOMPUTED = "--recompute-granularity full --ffn-chunk-size 32 --loss-chunk-size 48"


def rows():
    for line in MESHES.strip().splitlines():
        kinds, _, mesh = line.strip().partition(": ")
        for kind, case in product(kinds.split("|"), cases_of(mesh)):
            fast = case == Case(tp=2)
            yield pytest.param(
                kind, case, marks=() if fast else pytest.mark.slow, id=f"{kind}-{case.title}"
            )


@pytest.mark.parametrize(("kind", "case"), [*rows()])
def test_a_mesh_has_the_losses_and_gradients_of_one_process(kind, case, runs):
    """All that is frozen keeps every bit.

    Adapters alone have gradients and an optimizer's state.
    """
    got, want = runs.finetuned(kind, case, runs.begun(kind)), runs.alone(kind)
    row = compare(got, want)
    assert row.within, row
    adapters = {name for name in got.tensors["initial"] if is_adapter(name)}
    assert set(got.tensors["gradients"]) == adapters
    assert all(gradient.any() for gradient in got.tensors["gradients"].values())
    frozen = [
        {n: t for n, t in got.tensors[when].items() if n not in adapters}
        for when in ("initial", "final")
    ]
    assert equal(*frozen)
    assert not equal(
        *({n: got.tensors[when][n] for n in adapters} for when in ("initial", "final"))
    )


@pytest.mark.parametrize(
    "case",
    [
        f"none {RECOMPUTED}",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in (f"cp=2 tp=2 {RECOMPUTED}", "cp=2 selective")
        ),
        pytest.param("cp=2 attention_boundary", marks=pytest.mark.slow),
    ],
)
def test_what_is_computed_again_has_gradients_though_its_input_has_none(case, runs):
    """The embeddings are frozen, so that nothing that enters the first layer has a gradient."""
    row = compare(runs.finetuned("llama", case_of(case), runs.begun("llama")), runs.alone("llama"))
    assert row.within, row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("llama", "tp=2 cp=2", "dp=2 zero2"),
        ("llama", "dp=4", "none"),
        ("gpt", "none", "pp=2 tp=2"),
    ],
)
def test_a_run_goes_on_on_another_mesh_from_the_same_bits(kind, first, second, runs, tmp_path):
    more = ("--save", str(tmp_path), "--save-interval", "2")
    went_on = runs.finetuned(kind, case_of(first), runs.base(kind), *more, iterations=4)
    load = (*LORA, "--load", str(tmp_path), "--ckpt-step", "2")
    resumed = trained(kind, case_of(second), runs.data, None, *load, iterations=4)
    saved = went_on.tensors["saved"]
    assert {name.split("/")[0] for name in saved if "/" in name} == {
        name for name in saved if is_adapter(name)
    }
    assert equal(resumed.tensors["loaded"], saved)
    assert differences(resumed.records, went_on.records[2:]) <= BOUND


@pytest.mark.slow
def test_in_bf16_frozen_weights_take_two_bytes_and_adapters_four(runs, tmp_path):
    save = ("--bf16", "--save", str(tmp_path / "run"))
    run = runs.finetuned("llama", Case(dp=2), runs.base("llama"), *save)
    weights = {n: t for n, t in run.tensors["final"].items() if "/" not in n}
    assert {t.dtype for n, t in weights.items() if not is_adapter(n)} == {torch.bfloat16}
    assert {t.dtype for n, t in weights.items() if is_adapter(n)} == {torch.float32}
    alike = runs.finetuned("llama", Case(tp=2), runs.base("llama"), "--bf16")
    assert differences(alike.records, run.records) <= 2e-2
    resumed = ("--bf16", *LORA, "--load", str(tmp_path / "run"))
    again = trained("llama", Case(tp=2), runs.data, None, *resumed, iterations=4)
    assert equal({n: t for n, t in again.tensors["loaded"].items() if "/" not in n}, weights)


TOKENS = torch.randint(4099, (2, 40), generator=torch.Generator().manual_seed(0))


def peft_of(base, adapter):
    peft = pytest.importorskip("peft", reason="compares with PEFT's adapters")
    model = importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(
        base, dtype=torch.float32
    )
    return peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)


def ours_of(run):
    model = build_model(load_config(run / "config.toml").model)
    load_model(find_checkpoint(run), model, architecture_of(model.config))
    return model


def loss_of(logits):
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def test_peft_has_the_same_loss_and_gradients_and_transformers_the_merged_logits(
    runs, tmp_path, monkeypatch
):
    transformers = pytest.importorskip("transformers", reason="compares with Hugging Face's models")
    run = runs.begun("llama")
    assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
    assert main(["export", str(run), str(tmp_path / "merged")]) == 0
    adapter_config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert adapter_config["base_model_name_or_path"] == str(runs.folder / "llama_hf")
    peft, ours = peft_of(runs.folder / "llama_hf", tmp_path / "adapter"), ours_of(run)
    logits, expected = ours(TOKENS), peft(TOKENS).logits
    for model_logits in (logits, expected):
        loss_of(model_logits).backward()
    assert (logits - expected).abs().max().item() <= BOUND
    assert abs(loss_of(logits) - loss_of(expected)).item() <= 1e-6
    want = {name: p.grad for name, p in peft.named_parameters() if p.grad is not None}
    got = {
        peft_name(name).replace(".weight", ".default.weight"): p.grad
        for name, p in ours.named_parameters()
        if p.grad is not None
    }
    assert got.keys() == want.keys()
    assert len(got) == 4 * 7 * 2
    largest = max(gradient.abs().max().item() for gradient in want.values())
    assert max((got[name] - want[name]).abs().max().item() for name in want) <= BOUND * largest
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (merged(TOKENS).logits - expected).abs().max().item() <= BOUND
    # There and back: a run of the base and the adapter has every bit, goes on from there, and
    # exports both again.
    import_model(runs.folder / "llama_hf", back := tmp_path / "back", tmp_path / "adapter")
    assert torch.equal(ours_of(back)(TOKENS), logits)
    for more in ((), ("--finetune",)):
        went_on = trained(
            "llama", REFERENCE, runs.data, None, *LORA, "--load", str(back), *more, iterations=1
        )
        assert equal(went_on.tensors["initial"], ours.state_dict())
    assert main(["export", str(back), str(tmp_path / "again"), "--adapter"]) == 0
    assert main(["export", str(back), str(tmp_path / "merged again")]) == 0
    for once, again, file in (
        ("adapter", "again", "adapter_model"),
        ("merged", "merged again", "model"),
    ):
        tensors = [load_file(tmp_path / folder / f"{file}.safetensors") for folder in (once, again)]
        assert equal(*tensors)
    assert json.loads((tmp_path / "again" / "adapter_config.json").read_text()) == adapter_config
    # Controls: alpha / rank is left out.
    unscaled = build_model(replace(ours.config, lora_alpha=None))
    unscaled.load_state_dict(ours.state_dict())
    assert (unscaled(TOKENS) - expected).abs().max().item() > 100 * BOUND
    monkeypatch.setattr(
        "tools.convert_hf.merge", lambda weights, read, scale: merge(weights, read, 1.0)
    )
    export_model(run, tmp_path / "unscaled", None, None, 10**9)
    wrong = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "unscaled")
    assert (wrong(TOKENS).logits - expected).abs().max().item() > 100 * BOUND


def test_what_adapters_cannot_begin_with_is_refused_in_a_line(runs, tmp_path, capsys):
    flags = ["--data-path", "x", "--tokenizer-model", "x.model"]
    with pytest.raises(ConfigError, match="lora_rank is 4, but load is not set: the adapters"):
        validate(parse_args([*flags, *LORA]), 1)
    base, run = runs.base("llama"), runs.begun("llama")
    (tmp_path / "empty").mkdir()
    for load, more, message in (
        (base, LORA, "lora_rank is 4, but .* has no adapters; add --finetune"),
        (tmp_path / "empty", LORA, "lora_rank is set, but load is .*, which has no checkpoint"),
        (run, ("--finetune",), "has adapters with lora_rank 4, lora_scale 1.5, lora_target wq,"),
        (run, ("--finetune", "--lora-rank", "8"), "but this run has lora_rank 8, lora_scale 1.0"),
    ):
        config = parse_args(
            [*flags, "--config", str(base / "config.toml"), "--load", str(load), *more]
        )
        with pytest.raises(CheckpointError, match=message):
            find_start(config, architecture_of(config.model), {}).load(
                [], torch.optim.SGD([torch.zeros(1)])
            )
    assert main(["export", str(base), str(tmp_path / "out"), "--adapter"]) == 1
    assert "--adapter is set, but the run has no adapters" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    with pytest.raises(
        UserError, match="the linear layers of model_type gpt are different in transformers"
    ):
        write_adapter(tmp_path, {}, lambda name: TOKENS, replace(KINDS["gpt"], lora_rank=4), None)
