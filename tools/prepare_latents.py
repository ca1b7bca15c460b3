"""Turn a folder of images into training data of pretrain_dit.py: shards of latents and an index.

The imagefolder builder of the datasets library finds the images: a folder per class, with classes
numbered in the order of their names. Each image is cut to its middle square and resized. With --vae
(the folder of a diffusers AutoencoderKL) the means of its latents are written, without noise;
without --vae the colours themselves, from -1 to 1.

    python -m tools.prepare_latents --input imagenet/train --vae sd-vae-ft-mse --size 256 \\
        --output latents
    python -m tools.prepare_latents --input photographs --size 32 --output pixels
    python -m tools.prepare_latents --check latents   # reads all values, before a long run does

Then: pretrain_dit.py --data-path FOLDER --latent-shape C H W --num-classes N
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

if not __package__:  # run as a script: the packages are one folder up
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.latents.folder import LatentFolder
from data.latents.pictures import Pictures
from data.latents.writing import write_latents
from runtime.errors import DataError
from tools.common.arguments import one_line_errors, parser_for, positive, run_command


@one_line_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Write a folder of latents, or check one, and print the flags to train on it."""
    args = _parse(argv)
    if args.check is not None:
        folder = LatentFolder(args.check)
        folder.check_labels(args.num_classes)
        folder.check_finite()
    else:
        pictures = Pictures()
        batches = _batches(args.input, pictures, args.size, args.vae, args.batch_size)
        write_latents(
            args.output,
            batches,
            dtype=args.dtype,
            samples_per_shard=args.samples_per_shard,
            kind=args.format,
        )
        folder = LatentFolder(args.output)
        for note in pictures.notes():
            print(f"note: {note}", file=sys.stderr)

    shape = " ".join(map(str, folder.shape))
    classes = args.num_classes or int(folder.labels.max()) + 1
    absent = classes - len(np.unique(folder.labels))
    if absent:
        print(f"note: {absent:,} of {classes:,} classes have no sample", file=sys.stderr)
    print(
        f"{folder.folder}: {len(folder):,} samples of {shape} in {len(folder.shards)} shards, "
        f"{classes} classes"
    )
    print(
        f"train on it with --data-path {folder.folder} --latent-shape {shape} "
        f"--num-classes {classes}"
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_for("python -m tools.prepare_latents", __doc__)
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True).add_argument
    source("--input", type=Path, metavar="DIR", help="folder of images, with a subfolder per class")
    source("--check", type=Path, metavar="DIR", help="check all values of a folder of latents")
    add(
        "--num-classes",
        type=positive,
        metavar="N",
        help="with --check: check that all labels are below N, as in training",
    )
    add("--output", type=Path, metavar="DIR", help="folder to write")
    add(
        "--vae",
        type=Path,
        metavar="DIR",
        help="local folder of a diffusers AutoencoderKL (safetensors)",
    )
    add(
        "--size",
        type=positive,
        default=256,
        metavar="N",
        help="side of the square images, in pixels",
    )
    add(
        "--dtype",
        choices=["float32", "float16"],
        default="float32",
        help="dtype of the latents in the files",
    )
    add("--format", choices=["npy", "safetensors"], default="npy", help="format of the files")
    add(
        "--samples-per-shard",
        type=positive,
        default=4096,
        metavar="N",
        help="number of samples per file",
    )
    add(
        "--batch-size",
        type=positive,
        default=32,
        metavar="N",
        help="number of images to encode at once",
    )
    args = parser.parse_args(argv)
    if args.input is not None and args.output is None:
        parser.error("--input needs --output; give --output DIR, the folder to write")
    if args.input is not None and args.num_classes is not None:
        parser.error("--num-classes is for --check; the classes of --input are its folders")
    return args


def _batches(
    images: Path, pictures: Pictures, size: int, vae: Path | None, batch_size: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield batches of latents [n, C, h, w] and labels [n] of a folder's images."""
    rows = _image_folder(images)
    encode = None
    if vae is not None:
        import torch

        from data.latents.dataset import Vae

        encode = Vae(vae, torch.device("cuda" if torch.cuda.is_available() else "cpu")).encode

    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        squares = []
        for image in batch["image"]:
            squares.append(pictures.square(image["path"], image["bytes"], size))
        latents = np.stack(squares)
        if encode is not None:
            latents = encode(latents)
        yield latents, np.asarray(batch["label"], dtype=np.int64)


def _image_folder(folder: Path) -> Any:
    """Return a local folder's images, undecoded, with labels; print a note on other files.

    This uses the datasets library's own builder, so nothing is downloaded and no remote code runs.

    Raises DataError if the images are not in one folder per class, or some would be left out.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        raise DataError(
            f"input is {folder}, but it is not a folder, or is empty; name a folder that has a "
            "folder per class"
        )

    splits, endings = _load_splits(folder)
    if set(splits) != {"train"} or _named_as_split(folder):
        raise DataError(
            f"input {folder} has a folder that is called train, test, validation or the like, and "
            "the datasets library would take it as a split and leave out others; name that folder "
            f"as the input, such as {folder / 'train'}, or rename it"
        )

    rows = splits["train"]
    if not {"image", "label"} <= set(rows.column_names):
        metadata = sorted(folder.rglob("metadata.*"))
        why = f"; {metadata[0]} replaces the folders' classes: move it away" if metadata else ""
        raise DataError(f"input {folder} has no images in folders, one for each class{why}")

    from datasets import Image

    images = rows.cast_column("image", Image(decode=False))
    column = images.data.column("image").combine_chunks().field("path")
    paths = {Path(path) for path in column.to_pylist()}
    _check_classes({path.parent for path in paths})
    _check_whole(folder, paths, endings)
    return images


def _load_splits(folder: Path) -> tuple[Any, set[str]]:
    """Load a folder with the imagefolder builder of the datasets library.

    Returns the splits, keyed by name, and the file extensions that count as images.

    Raises DataError if the library is not installed, or cannot read the folder.
    """
    try:
        from datasets import disable_progress_bars, load_dataset
        from datasets.exceptions import DatasetGenerationError
        from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
    except ImportError as error:
        raise DataError(
            "input is a folder of images, but the datasets library, which reads it, is not "
            "installed; run pip install datasets (or make venv EXTRAS=images)"
        ) from error

    disable_progress_bars()  # a bar would garble a one-line error message
    try:
        splits = load_dataset("imagefolder", data_dir=str(folder), drop_labels=False)
    except (OSError, ValueError, DatasetGenerationError, BadZipFile) as error:
        cause = error.__cause__ or error  # datasets' own message only says that something failed
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise DataError(f"input {folder} cannot be read as images ({reason:.200})") from error

    return splits, set(ImageFolder.EXTENSIONS)


def _named_as_split(folder: Path) -> bool:
    """Return True if the datasets library would take one of the folders as the training split.

    It would then leave out all other folders.
    """
    folders = [path for path in folder.iterdir() if path.is_dir()]
    return len(folders) > 1 and any(path.name.lower() in ("train", "training") for path in folders)


def _check_classes(folders: set[Path]) -> None:
    """Raise DataError for nested folders of images, and for two folders of the same name.

    The datasets library knows a class only by its folder's name: it would merge two folders of the
    same name, and make two classes of nested folders.
    """
    by_name: dict[str, Path] = {}
    for folder in sorted(folders):
        for parent in folder.parents:
            if parent in folders:
                raise DataError(
                    f"{parent} has images and also folders with images, such as {folder}, and each "
                    "would be a class; move the images into a folder for each class"
                )

        other = by_name.get(folder.name)
        if other:
            raise DataError(
                f"{other} and {folder} have the same name and would be one class; rename one of "
                "them"
            )

        by_name[folder.name] = folder


def _check_whole(folder: Path, read: set[Path], endings: set[str]) -> None:
    """Print a note on files that the datasets library does not read as images, such as .heic.

    Raises DataError if the library leaves out images because others are named like a data split.
    """
    images = []
    others = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or _is_hidden(path.relative_to(folder)):
            continue
        if path.suffix.lower() in endings:
            images.append(path)
        elif path.stem != "metadata":
            others.append(path)

    if others:
        print(
            f"note: {len(others):,} files are not read, since the datasets library does not read "
            f"images with their extension (the first: {others[0]})",
            file=sys.stderr,
        )

    if len(images) > len(read):
        resolved = {path.resolve() for path in read}
        unread = [path for path in images if path.resolve() not in resolved]
        example = unread[0] if unread else images[0]
        raise DataError(
            f"{len(images) - len(read):,} of {len(images):,} images of {folder} would be left out, "
            f"such as {example}, since others have train, test, validation or the like in their "
            "names, and the datasets library takes these as a split; rename the others"
        )


def _is_hidden(path: Path) -> bool:
    """Return True if the datasets library skips this path because a part of it is hidden."""
    return any(part.startswith((".", "__")) for part in path.parts)


if __name__ == "__main__":
    run_command(main)
