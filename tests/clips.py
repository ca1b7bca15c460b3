"""Tiny models and videos to cache clips with, written on the spot."""

from fractions import Fraction

import numpy as np
import torch

WORDS = "a b c cat dog runs sleeps in the sun".split()
VAE = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 1, 1, 1],
    "num_res_blocks": 1,
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.0, 2.0, 0.5, 1.5],
}
TEXT_WIDTH = 16


def write_models(folder):
    """Write vae/, text_encoder/ and tokenizer/ of a tiny Wan."""
    from diffusers import AutoencoderKLWan
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    torch.manual_seed(0)
    AutoencoderKLWan(**VAE).save_pretrained(folder / "vae")
    vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    UMT5EncoderModel(
        UMT5Config(
            vocab_size=len(vocabulary),
            d_model=TEXT_WIDTH,
            d_kv=8,
            d_ff=32,
            num_layers=2,
            num_heads=2,
        )
    ).save_pretrained(folder / "text_encoder")
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", vocabulary["</s>"])]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder / "tokenizer")


def write_video(path, frames, *, fps=16, height=48, width=80, codec="libx264", aspect=1, trc=None):
    """Write a video whose frame i has the blue of 8 i."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.sample_aspect_ratio = Fraction(aspect)
        if trc is not None:
            stream.codec_context.color_trc = trc
        y, x = np.mgrid[:height, :width]
        for index in range(frames):
            blue = np.full_like(x, 8 * index % 256)
            pixels = np.stack([3 * x % 256, 5 * y % 256, blue], -1).astype(np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def flags(videos, models, output, **others):
    """The command line of tools.prepare_clips for the tiny models: 9 frames of 32 x 48."""
    values = {
        "videos": videos,
        "output": output,
        "vae": models / "vae",
        "text-encoder": models / "text_encoder",
        "tokenizer": models / "tokenizer",
        "frames": 9,
        "height": 32,
        "width": 48,
        "max-text-tokens": 7,
        **others,
    }
    words = []
    for name, value in values.items():
        words += [f"--{name}", *([] if value is True else [str(value)])]
    return words
