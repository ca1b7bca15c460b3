"""Turn a folder of videos with captions into cached latents and text embeddings of Wan.

Each video has its caption in a text file of the same name (clip.mp4, clip.txt), or in a row of the
folder's metadata.jsonl with file_name and text. Frames are taken from the video's start at --fps,
resized to cover the size, and cut to it. The models are local folders of diffusers and
transformers, such as those of Wan-AI/Wan2.1-T2V-14B-Diffusers.

    python -m tools.prepare_clips --videos videos --output clips --vae WAN/vae \\
        --text-encoder WAN/text_encoder --tokenizer WAN/tokenizer \\
        --frames 81 --height 480 --width 832 --fps 16
    python -m tools.prepare_clips --check clips   # reads all values, before a long run does

Then: docs/examples/finetune_clip.py
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if not __package__:  # run as a script: the packages are one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.clips.sources import Source, list_sources
from data.clips.videos import VideoReader
from runtime.errors import DataError, first_few
from runtime.progress import Progress, counted
from tools.common.arguments import at_least, one_line_errors, parser_for, positive, run_command

FOLDERS = ("output", "vae", "text_encoder", "tokenizer")


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Prepare a folder of clips, or check one, and print its sizes."""
    args = _parse(argv)
    if args.check is None:
        _prepare(args)

    from data.clips.folder import ClipFolder

    folder = ClipFolder(args.output if args.check is None else args.check)
    if args.check is not None:
        folder.check()
    latents = " x ".join(map(str, folder.latents_shape))
    text = " x ".join(map(str, folder.text_shape))
    print(
        f"{folder.folder}: {counted(len(folder.files), 'clip')} with latents of {latents} and text "
        f"of {text}, {folder.index['dtype']}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_for("python -m tools.prepare_clips", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source("--videos", type=Path, metavar="DIR", help="folder of videos with captions")
    source("--check", type=Path, metavar="DIR", help="read all values of a folder of clips")
    add("--output", type=Path, metavar="DIR", help="folder to write")
    add("--vae", type=Path, metavar="DIR", help="local folder of an AutoencoderKLWan")
    add(
        "--text-encoder",
        type=Path,
        metavar="DIR",
        help="local folder of a UMT5EncoderModel or T5EncoderModel",
    )
    add("--tokenizer", type=Path, metavar="DIR", help="folder of the encoder's tokenizer")
    add(
        "--frames",
        type=positive,
        default=81,
        metavar="N",
        help="number of frames per clip: 1, 5, 9 and so on",
    )
    add("--height", type=positive, default=480, metavar="N", help="height of each clip, in pixels")
    add("--width", type=positive, default=832, metavar="N", help="width of each clip, in pixels")
    add(
        "--fps",
        type=at_least(0.1),
        default=16.0,
        metavar="F",
        help="number of frames to take per second of video",
    )
    add(
        "--max-text-tokens",
        type=positive,
        default=512,
        metavar="N",
        help="number of tokens of a text embedding; longer captions are cut",
    )
    add(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="dtype of the tensors in the files",
    )
    add("--skip-short", action="store_true", help="leave out videos with too few frames")
    args = parser.parse_args(argv)
    if args.videos is not None:
        for name in FOLDERS:
            if getattr(args, name) is None:
                parser.error(f"--videos needs --{name.replace('_', '-')}")
    return args


def _prepare(args: argparse.Namespace) -> None:
    """Check everything that can be checked before the first clip is encoded; then encode."""
    import torch

    from data.clips.encoders import Encoders, check_sizes, text_encoder_folder, vae_folder
    from data.clips.folder import check_unwritten, write_clips

    check_unwritten(args.output)
    vae = vae_folder(args.vae)
    text_encoder = text_encoder_folder(args.text_encoder)
    check_sizes(vae, frames=args.frames, height=args.height, width=args.width)
    sources, unread = list_sources(args.videos)
    if unread:
        _note(f"{counted(len(unread), 'file')} of {args.videos} are not read: {first_few(unread)}")
    reader = VideoReader(frames=args.frames, height=args.height, width=args.width, fps=args.fps)
    sources = _long_enough(sources, reader, args)
    for note in reader.notes():
        _note(note)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    encoders = Encoders(vae, text_encoder, args.tokenizer, args.max_text_tokens, device)
    cut = [source.name for source in sources if encoders.is_cut(source.caption)]
    if cut:
        _note(
            f"{len(cut)} of {counted(len(sources), 'caption')} are cut to {args.max_text_tokens} "
            f"tokens: {first_few(cut)}"
        )
    write_clips(
        args.output,
        _clips(sources, reader, encoders),
        empty_text=encoders.text(""),
        dtype=args.dtype,
        description={
            "frames": args.frames,
            "height": args.height,
            "width": args.width,
            "fps": args.fps,
            "vae": vae.described(),
            "text_encoder": text_encoder.described(),
        },
    )


def _long_enough(
    sources: list[Source], reader: VideoReader, args: argparse.Namespace
) -> list[Source]:
    """Return the videos that have enough frames.

    Raises DataError if a video has too few and --skip-short is not set, if all have too few, or if
    one cannot be read.
    """
    counts = {}
    with Progress() as progress:
        for source in sources:
            counts[source.name] = reader.count(source.path)
            progress(f"{args.videos}: {len(counts)} of {len(sources)} videos checked")

    short = [f"{name} ({count})" for name, count in counts.items() if count < args.frames]
    if not short:
        return sources
    message = (
        f"{len(short)} of {counted(len(sources), 'video')} of {args.videos} have fewer than "
        f"{args.frames} different frames at {args.fps:g} frames per second"
    )
    if not args.skip_short:
        raise DataError(
            f"{message}: {first_few(short)}; give fewer --frames, another --fps, or --skip-short "
            "to leave them out"
        )
    if len(short) == len(sources):
        raise DataError(f"{message}, so no video is left: {first_few(short)}; give fewer --frames")
    _note(f"{message} and were left out: {', '.join(short)}")
    return [source for source in sources if counts[source.name] == args.frames]


def _clips(sources: list[Source], reader: VideoReader, encoders: Any) -> Iterator[Any]:
    """Yield encoded clips, one in memory at a time."""
    from data.clips.folder import Clip

    with Progress() as progress:
        for number, source in enumerate(sources, start=1):
            latents = encoders.latents(reader.read(source.path))
            text = encoders.text(source.caption)
            yield Clip(video=source.name, caption=source.caption, latents=latents, text=text)
            progress(f"{number} of {len(sources)} clips encoded")


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


if __name__ == "__main__":
    run_command(main)
