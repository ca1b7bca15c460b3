"""Tensors of a model folder: safetensors files, read without trust, one tensor at a time."""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from model.hf.entries import CONFIG, read_json, write_json
from model.hf.folder import inside
from runtime.errors import UserError, first_few

WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_FILES = (".safetensors", ".index.json", *PICKLES)
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""Dtypes of weights, with their names in safetensors."""
Read = Callable[[str], Tensor]
"""Function that returns a parameter by name; each call may read a file."""


def check_sizes(state: Mapping[str, Tensor], layers: int, sizes: Mapping[str, int]) -> None:
    """Raise UserError for more layers or larger sizes than the stored weights can have.

    Call this before building a meta model: a config.json may ask for 10^9 layers.
    """
    max_elements = max((weight.numel() for weight in state.values()), default=0)
    for name, value in sizes.items():
        if value > max_elements:
            raise UserError(
                f"{name} is {value}, but the largest weight has {max_elements} values; "
                "take the configuration and the weights from the same model"
            )
    if layers > len(state):
        raise UserError(
            f"num_layers is {layers}, but there are only {len(state)} weights; "
            "take the configuration and the weights from the same model"
        )


def check_described(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise UserError for missing, unknown, misshapen or non-float weights.

    ``state`` and ``like`` may hold meta tensors. The message lists the first few missing or unknown
    names.
    """
    missing = sorted(like.keys() - state.keys())
    unknown = sorted(state.keys() - like.keys())
    for problem, names in (("lacks", missing), ("has the unknown", unknown)):
        if names:
            raise UserError(
                f"the state dict {problem} {first_few(names)}; take weights that belong to this "
                "configuration"
            )

    for name, expected in like.items():
        shape = state[name].shape
        if shape != expected.shape:
            raise UserError(
                f"{name} has shape {tuple(shape)}, but the configuration needs "
                f"{tuple(expected.shape)}; take weights that belong to this configuration"
            )
        dtype = state[name].dtype
        if dtype not in DTYPES:
            dtypes = ", ".join(map(_dtype_name, [*DTYPES][:-1]))
            raise UserError(
                f"{name} is {_dtype_name(dtype)}, but weights must be {dtypes} or float64; "
                "take a checkpoint that is not quantized"
            )


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def finite(read: Read) -> Read:
    """Return ``read`` with a check that raises UserError for a weight with non-finite values."""

    def checked(name: str) -> Tensor:
        weight = read(name)
        broken = 0
        # Checked in parts, since torch takes three times the memory of a tensor to check it at
        # once.
        for values in weight.reshape(-1).split(1 << 24):
            broken += values.numel() - int(values.isfinite().sum())
        if broken:
            raise UserError(
                f"{name}: {broken} of {weight.numel()} values are not finite; "
                "take another checkpoint"
            )
        return weight

    return checked


def described(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a meta tensor with the shape and dtype of each tensor."""
    return {name: weight.to("meta") for name, weight in state.items()}


class Weights(Mapping[str, Tensor]):
    """Tensors of a folder's safetensors files; each access reads one tensor, and none is cached.

    Reads only safetensors, never pickles, and only files directly in the folder, even if an index
    names others. Like transformers, it prefers model.safetensors to an index, and reads every
    tensor of each file that an index names.
    """

    def __init__(
        self, folder: Path, notify: Callable[[str], Any] = warnings.warn, single: str = WEIGHTS
    ) -> None:
        """Read the names of the tensors.

        Args:
            notify: function that receives a line for each file or tensor that is ignored.
            single: name of the file with all tensors, if there is no index.

        Raises:
            UserError: the message names the file and the problem.
        """
        self.files: dict[str, Path] = {}
        is_single = (
            single != WEIGHTS or (folder / WEIGHTS).exists() or not (folder / INDEX).exists()
        )
        index = {} if is_single else _read_index(folder)
        files = [single] if is_single else sorted(set(index.values()))

        ignored = []
        for path in sorted(folder.glob("*")):
            if path.name.endswith(WEIGHT_FILES) and path.name not in files:
                ignored.append(path.name)
        if is_single and not (folder / single).exists():
            _refuse_pickles(folder, ignored, single)

        for file in files:
            self._add(inside(folder, file), index, notify)
        if not is_single:
            ignored = [name for name in ignored if name != INDEX]
        if ignored:
            notify(
                f"note: {folder}: reading {files[0]}, as transformers does, and ignoring "
                f"{first_few(ignored)}"
            )

    def _add(self, path: Path, index: Mapping[str, str], notify: Callable[[str], Any]) -> None:
        """Read the names of one file, and compare them with the index."""
        with _open(path) as file:
            names = set(file.keys())
        for name, indexed_file in index.items():
            if indexed_file == path.name and name not in names:
                raise UserError(
                    f"{path} lacks {name}, but {INDEX} lists it there; download the file again"
                )
        duplicates = sorted(names & self.files.keys())
        if duplicates:
            name = duplicates[0]
            notify(
                f"note: {self.files[name]}: {name} is ignored, as in transformers: "
                f"{path.name} has it too"
            )
        self.files |= dict.fromkeys(names, path)

    def __getitem__(self, name: str) -> Tensor:
        with _open(self.files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _refuse_pickles(folder: Path, names: list[str], single: str) -> None:
    for name in names:
        if Path(name).suffix in PICKLES:
            raise UserError(
                f"{folder / name} is a pickle, which can run code when it is read, and there is no "
                f"{single}; download the model's safetensors files"
            )


def _read_index(folder: Path) -> dict[str, str]:
    """Return the name of each tensor's file. Raises UserError for a file outside this folder."""
    index = read_json(folder / INDEX).get("weight_map")
    if (
        not isinstance(index, dict)
        or not index
        or not all(isinstance(file, str) for file in index.values())
    ):
        raise UserError(
            f"{folder / INDEX}: weight_map is missing or not a table of file names; "
            "download it again"
        )
    for file in sorted(set(index.values())):
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise UserError(
                f"{folder / INDEX} names {file!r}, which is not a safetensors file directly in its "
                "folder; download it again"
            )
    return index


def _open(path: Path) -> Any:
    """Open a safetensors file. Raises UserError with the file and the problem."""
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file; download it again")
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; download all of the model's safetensors files"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a complete safetensors file ({error}); download it again"
        ) from None


def write_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    contents: Mapping[str, Any],
    read: Read | None = None,
    max_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write config.json and safetensors files into an empty folder; return the safetensors paths.

    Only one tensor at a time is in memory; safetensors' own ``save_file`` needs all tensors of a
    file.

    Args:
        weights: tensors keyed by name, or meta tensors with ``read``.
        contents: contents of config.json.
        read: function that returns a weight by name, with the shape and dtype given in ``weights``.
        max_bytes: maximum size of a file; a larger tensor gets its own file. Several files get
            an index.

    Raises:
        OSError: the disk is full or cannot be written.
    """
    read = read or weights.__getitem__
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0
    for name, weight in weights.items():
        if shards[-1] and num_bytes + weight.nbytes > max_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = weight
        num_bytes += weight.nbytes

    names = [WEIGHTS]
    if len(shards) > 1:
        numbers = range(1, len(shards) + 1)
        names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in numbers]
    for file, shard in zip(names, shards, strict=True):
        write_weights(folder / file, shard, read)

    if len(shards) > 1:
        weight_map: dict[str, str] = {}
        for file, shard in zip(names, shards, strict=True):
            weight_map |= dict.fromkeys(shard, file)
        total_size = sum(weight.nbytes for weight in weights.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        write_json(folder / INDEX, index)
    write_json(folder / CONFIG, contents)
    return [folder / file for file in names]


def write_weights(path: Path, weights: Mapping[str, Tensor], read: Read) -> None:
    """Write one safetensors file: the header's length, a JSON header, the tensors' bytes.

    Arguments are as in ``write_model``.
    """
    # Tensors with wide dtypes come first, as in safetensors, so that each is aligned to its dtype.
    order = sorted(weights, key=lambda name: -weights[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name in order:
        weight = weights[name]
        header[name] = {
            "dtype": DTYPES[weight.dtype],
            "shape": list(weight.shape),
            "data_offsets": [start, start + weight.nbytes],
        }
        start += weight.nbytes

    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = read(name)
            if (tensor.shape, tensor.dtype) != (weights[name].shape, weights[name].dtype):
                raise ValueError(
                    f"{name} was read as {tensor.dtype} {tuple(tensor.shape)}, but its header "
                    "differs; make read return the dtype and shape given in weights"
                )
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
