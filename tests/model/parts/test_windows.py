"""Windows and the layers that have them, in Megatron-LM's words and as Megatron-LM takes them."""

from dataclasses import replace

import pytest

from model.parts.windows import windows_of
from runtime.errors import UserError
from tests.model.models import model_config


@pytest.mark.parametrize("text", ["8,0", "(8,0)", " (8, 0) "])
def test_a_window_is_the_keys_before_a_token_and_after_it(text):
    assert windows_of(text, None, 3) == ((8, 0),) * 3
    assert windows_of("-1,0", None, 3) == windows_of(None, None, 3) == (None,) * 3


def megatrons(window_attn_skip_freq, layer_number):
    """megatron-core 0.16.1's is_layer_window_attention, where there is a window.

    Its import takes 6 s.
    """
    if window_attn_skip_freq is None:
        return True
    if isinstance(window_attn_skip_freq, int):
        return layer_number % window_attn_skip_freq != 0
    return bool(window_attn_skip_freq[layer_number - 1])


PATTERNS = [None, "2", "13", "([1]*3+[0]*1)*3", "[1,0,1,1]+2*[0]+([1]+[0])*3", "3*([0]+[1]*3)"]


@pytest.mark.parametrize("skip", PATTERNS)
def test_layers_are_those_of_megatron(skip):
    want = [megatrons(None if skip is None else eval(skip), number) for number in range(1, 13)]
    assert [window == (8, 0) for window in windows_of("8,0", skip, 12)] == want


@pytest.mark.parametrize(
    ("size", "skip", "message"),
    [
        ("0,0", None, "window_size is 0,0, with 0 keys before .* from 1 to 999,999,999, or -1"),
        ("-2,0", None, "window_size is -2,0, with -2 keys before"),
        ("1000000000,0", None, "window_size is 1000000000,0, .* from 1 to"),
        (
            "8,1",
            None,
            "window_size is 8,1, with 1 keys after .* causal mask hides .* --window-size 8,0",
        ),
        ("8", None, "window_size is 8; it must be two numbers"),
        ("a,b", None, "window_size is a,b; it must be two numbers"),
        ("1.5,0", None, "window_size is 1.5,0; it must be two numbers"),
        ("9" * 5000 + ",0", None, "it must be two numbers"),
        (
            "8,0",
            "1",
            "window_attn_skip_freq is 1, which leaves no layer with the window; it must be 2",
        ),
        (
            "8,0",
            "-4",
            "window_attn_skip_freq is -4; it must be a number N, .* only have numbers, lists",
        ),
        (
            "8,0",
            "[1]*3",
            "window_attn_skip_freq is .*, a pattern of 3 layers, but num_layers is 4; give each",
        ),
        ("8,0", "[1]*1000000000000", "it has more than 4 layers"),
        ("8,0", "[2]*4", "a list has a 1 for each layer with the window and a 0"),
        ("8,0", "[True]*4", "only have numbers, lists"),
        ("8,0", "[1]*[1]", "lists can only be added to lists and multiplied by numbers"),
        ("8,0", "[1]+4", "lists can only be added to lists"),
        ("8,0", "[1]*4;1", "it is neither"),
        ("8,0", "__import__('os').abort()", "only have numbers, lists"),
        ("8,0", "[1 for _ in range(4)]", "only have numbers, lists"),
        ("8,0", "(" * 3000, "it is neither"),
        ("8,0", "+".join(["[]"] * 3000), "window_attn_skip_freq is"),
        ("8,0", "x" * 10001, "window_attn_skip_freq has 10,001 characters"),
        ("8,0", "\udcff", "it is neither"),
        (None, "2", "window_attn_skip_freq is 2, but window_size is not set, .* --window-size"),
    ],
)
def test_what_is_no_window_or_no_layers_is_refused_and_never_run(size, skip, message):
    with pytest.raises(UserError, match=message):
        windows_of(size, skip, 4)


def test_layers_of_a_hybrid_keep_their_numbers():
    """Every second of 8 layers has softmax attention; Megatron counts all layers."""
    config = model_config(
        model_type="transnormer", num_layers=8, softmax_every=2, window_size="8,0"
    )
    assert [config.window(layer) for layer in range(8)] == [None, (8, 0)] * 4
    fourths = replace(config, window_attn_skip_freq="4")
    assert [fourths.window(layer) for layer in range(8)] == [None, (8, 0), None, None] * 2
    with pytest.raises(
        UserError, match="window_attn_skip_freq is 2; it leaves no layer of softmax attention"
    ):
        replace(config, window_attn_skip_freq="2")
