"""Random draws on ranks: dropout differs by rank and is repeated by seed.

NEFTune's noise is that of one process.
"""

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

from parallel.context import context_parallel
from parallel.transformers import draws, shard
from parallel.transformers.batch import pack, shard_batch
from runtime.errors import UserError
from runtime.ranks import run_ranks
from tests.parallel.transformers.families import SIZES, model_of, tokens, transformers

RATES = {"embd_pdrop": 0.5, "resid_pdrop": 0.5, "attn_pdrop": 0.0}
LENGTH = 24


def model_with_dropout():
    torch.manual_seed(1)
    config = transformers.GPT2Config(**{**SIZES, "num_attention_heads": 3, **RATES})
    return transformers.GPT2LMHeadModel(config).train()


def shared(value):
    """Every rank's value."""
    values = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(values, value)
    return values


def dropped(group):
    """Masks of the embeddings by seed, forward and rank; all ranks end in the same state."""
    model = model_with_dropout()
    cp = shard(model, group)
    masks = []
    model.transformer.drop.register_forward_hook(
        lambda module, inputs, output: masks.append(output == 0)
    )
    batch = cp.batch(*tokens(LENGTH))
    for seed in (7, 7, 8):
        torch.manual_seed(seed)
        for _ in range(2):
            model(**batch.inputs)
        states = shared(torch.get_rng_state())
        assert all(torch.equal(x, states[0]) for x in states)
    return [[x.tolist() for x in shared(mask.byte())] for mask in masks]


def adapted():
    """The share of elements that an adapter's dropout treats alike on both ranks.

    The adapter came after shard.
    """
    from peft import LoraConfig, get_peft_model

    model = model_of("Llama", 2, torch.float32)
    cp = shard(model, dist.group.WORLD)
    model = get_peft_model(
        model, LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5, task_type="CAUSAL_LM")
    )
    masks = []
    (dropout, *_) = [
        x for name, x in model.named_modules() if name.endswith("lora_dropout.default")
    ]
    dropout.register_forward_hook(lambda module, inputs, output: masks.append((output == 0).byte()))
    model(**cp.batch(*tokens(LENGTH)).inputs)
    first, second = shared(masks[0])
    return float((first == second).float().mean())


def checkpointed():
    """The largest difference of gradients with and without layers computed again.

    The second is that with another seed.
    """
    gradients = []
    for checkpointing, seed in ((False, 7), (True, 7), (False, 8)):
        model = model_with_dropout()
        cp = shard(model, dist.group.WORLD)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = cp.batch(*tokens(LENGTH))
        torch.manual_seed(seed)
        cp.loss(model(**batch.inputs), batch).backward()
        gradients.append(torch.cat([x.grad.flatten() for x in model.parameters()]))
    first, again, other = gradients
    return float((again - first).abs().max()), float((other - first).abs().max())


def quiet():
    """True if a forward without random draws, and one that is refused, leave the state."""
    model = model_of("Llama", 2, torch.float32)
    cp = shard(model, dist.group.WORLD)
    batch = cp.batch(*tokens(LENGTH))
    before = torch.get_rng_state()
    model(**batch.inputs)
    with pytest.raises(UserError, match="that is not all 1"):
        model(**batch.inputs, attention_mask=torch.zeros(1, LENGTH // 2))
    return torch.equal(torch.get_rng_state(), before)


def everything(rank, world_size):
    return {
        "one sequence": dropped(dist.group.WORLD),
        "replicas": dropped(None),
        "adapted": adapted() if find_spec("peft") else None,
        "checkpointed": checkpointed(),
        "quiet": quiet(),
        "noise": with_noise(dist.group.WORLD),
    }


@pytest.fixture(scope="module")
def results():
    """Each of two ranks does everything once, and imports transformers once."""
    return run_ranks(everything, 2)


@pytest.mark.parametrize("name", ["one sequence", "replicas"])
def test_ranks_drop_other_elements_and_the_same_ones_by_the_same_seed(name, results):
    first, second, again, once_more, *other_seed = results[0][name]
    for mask, other in ((first[0], first[1]), (first[0], second[0]), (first[0], other_seed[0][0])):
        same = (torch.tensor(mask) == torch.tensor(other)).float().mean()
        assert 0.4 < same < 0.6  # as of coins, half of which fall alike
    assert [first, second] == [again, once_more]


def test_adapters_that_come_later_drop_other_elements_on_each_rank(results):
    pytest.importorskip("peft")
    assert all(0.3 < result["adapted"] < 0.7 for result in results)


def test_layers_that_are_computed_again_drop_the_same(results):
    for same, other in (result["checkpointed"] for result in results):
        assert same < 1e-6
        assert other > 1e-3


def test_a_forward_that_draws_nothing_or_fails_leaves_the_state(results):
    assert all(result["quiet"] for result in results)


def test_layers_that_are_left_out_at_random_are_refused():
    config = transformers.OPTConfig(
        vocab_size=40,
        hidden_size=24,
        ffn_dim=32,
        num_attention_heads=4,
        word_embed_proj_dim=24,
        layerdrop=0.1,
    )
    with pytest.raises(
        UserError, match=r"^OPTConfig\.layerdrop is set: ranks would leave out different layers"
    ):
        shard(transformers.OPTForCausalLM(config))


def activate(model):
    from transformers.integrations.neftune import activate_neftune

    activate_neftune(model, 5.0)


def padded_rows():
    ids = torch.stack([tokens(LENGTH)[0][0], tokens(LENGTH, seed=4)[0][0]])
    mask = torch.ones_like(ids)
    mask[0, 17:] = 0
    mask[1, :5] = 0
    return ids, mask


def with_noise(group):
    """Embeddings of two forwards, ours on the ranks and transformers' alone, without padding."""
    ids, mask = padded_rows()
    noisy_inputs = []

    def embedded(model):
        model.get_input_embeddings().register_forward_hook(
            lambda module, inputs, output: noisy_inputs.append(output)
        )

    plain = model_of("Llama", 2, torch.float32)
    activate(plain)
    embedded(plain)
    torch.manual_seed(7)
    for _ in range(2):
        plain(ids, attention_mask=mask)
    expected = [x[mask.bool()] for x in noisy_inputs]
    state = torch.get_rng_state()

    noisy_inputs.clear()
    model = model_of("Llama", 2, torch.float32)
    cp = shard(model, group)
    activate(model)
    batch = cp.batch(ids, attention_mask=mask)
    torch.manual_seed(7)
    outputs = []
    for _ in range(2):
        handle = model.model.layers[0].register_forward_pre_hook(
            lambda module, inputs: noisy_inputs.append(inputs[0])
        )
        model(**batch.inputs)
        handle.remove()
        outputs.append(cp.gather(noisy_inputs.pop())[mask.bool()])

    without = plain.model.embed_tokens.weight[ids[mask.bool()]]
    assert model.get_input_embeddings().training
    errors = [float((x - y).detach().abs().max()) for x, y in zip(outputs, expected, strict=True)]
    return (
        max(errors),
        float((outputs[0] - without).detach().abs().max()),
        torch.equal(torch.get_rng_state(), state),
    )


def test_noise_on_embeddings_is_that_of_one_process(results):
    for error, noise, same_state in (with_noise(None), *(result["noise"] for result in results)):
        assert error < 1e-6
        assert noise > 0.1
        assert same_state


def noise_of(rank, length=9):
    """Noise of a process with a sequence of its own."""
    torch.manual_seed(7)
    mask = torch.ones(1, length, dtype=torch.bool)
    context = context_parallel("exchange", seq_len=length)
    return draws.local_noise(
        context, mask, 5.0, 8, torch.float32, torch.device("cpu"), first_rank=rank
    )


def test_replicas_have_noise_of_their_own():
    first, second = noise_of(0), noise_of(1)
    assert first.abs().max() > 0.1
    assert (first - second).abs().min() > 0


@pytest.mark.parametrize("block", [7, 4096])
def test_noise_that_is_drawn_in_blocks_is_that_drawn_at_once(monkeypatch, block):
    monkeypatch.setattr(draws, "BLOCK", block)
    ids, mask = padded_rows()
    whole = pack(ids, None, None, None, mask)
    context = context_parallel(
        "exchange", seq_len=whole.cu_seqlens[-1], documents=whole.cu_seqlens, multiple=7
    )
    torch.manual_seed(7)
    limit = 5.0 / (LENGTH * 8) ** 0.5
    expected = torch.empty(*ids.shape, 8).uniform_(-limit, limit)[mask.bool()]
    torch.manual_seed(7)
    noise = draws.local_noise(context, mask.bool(), 5.0, 8, torch.float32, torch.device("cpu"))
    assert noise.shape[1] == shard_batch(whole, context).labels.shape[1] > whole.cu_seqlens[-1]
    assert torch.equal(noise[0, : whole.cu_seqlens[-1]], expected)
    assert not noise[0, whole.cu_seqlens[-1] :].any()
