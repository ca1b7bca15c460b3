"""Files of a model's folder, untrusted: config.json, and safetensors, read and written tensor by
tensor.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError, first_few
from runtime.files import replacing

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = f"{WEIGHTS}.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
WEIGHT_FILES = (".safetensors", ".index.json", *PICKLES)
TOKENIZERS = ("tokenizer.json", "tokenizer.model")
TOKENIZER_FILES = (
    *TOKENIZERS, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
)  # fmt: skip
CARRIED = (*TOKENIZER_FILES, "chat_template.jinja", "chat_template.json", "generation_config.json")
DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
"""Dtypes of weights, with safetensors' names."""
Read = Callable[[str], Tensor]
"""A parameter's name -> its tensor; each call may read a file."""
_MOST = 2**31 - 1
_KINDS = {
    int: f"a whole number of at most {_MOST}",
    float: "a finite number",
    bool: "true or false",
    list: "a list of whole numbers",
}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file. Raises UserError naming the file and what is wrong with it."""
    if path.exists() and not path.is_file():  # a named pipe would be waited for
        raise UserError(f"{path} is no file; download it again")
    try:
        contents = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the folder of a Hugging Face model") from None
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(contents, dict):
        raise UserError(f"{path} holds no JSON object; download it again")
    return contents


def write_json(path: Path, contents: Mapping[str, Any], *, ensure_ascii: bool = True) -> None:
    """Write a JSON object, as transformers lays it out."""
    path.write_text(
        json.dumps(contents, indent=2, ensure_ascii=ensure_ascii) + "\n", encoding="utf-8"
    )


@contextmanager
def naming(path: Path, missing: str = "") -> Iterator[None]:
    """Say in errors of a file's entries which file it is; ``missing`` says what a file without an
    entry is not.
    """
    try:
        yield
    except KeyError as absent:
        raise UserError(f"{path}: {absent.args[0]} is missing; {missing}") from None
    except ValueError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'{CONFIG}: ')}") from None


def entry(contents: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """Return an entry of config.json of the given kind: int, float, bool or list (of int);
    `default` if missing.

    null means a default of None. Raises KeyError if missing without a default, UserError for
    another type, a non-finite number, or an integer beyond 32 bits, which no shape has.
    """
    if key not in contents and default:
        return default[0]
    value = contents[key]
    if value is None and default == (None,):
        return None
    if not _is(value, kind):
        raise UserError(f"{CONFIG}: {key} is {shown(value)}; it must be {_KINDS[kind]}")
    return float(value) if kind is float else value


def _is(value: Any, kind: type) -> bool:
    if kind is list:
        return isinstance(value, list) and all(_is(one, int) for one in value)
    if kind is bool or isinstance(value, bool):
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, (int, float)) and abs(value) < 1e300 and math.isfinite(value)
    return isinstance(value, int) and abs(value) <= _MOST


def shown(value: Any) -> str:
    """Format a value as JSON, cut to fit a message."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unsupported(key: str, value: Any, rest: str, file: str | Path = CONFIG) -> UserError:
    """Return the error of an entry of a file; the ``rest`` of the message says which values are
    supported.
    """
    return UserError(f"{file}: {key} = {shown(value)} is not supported{rest}")


def check_value(
    file: str | Path, key: str, value: Any, supported: Sequence[Any], fix: str = ""
) -> None:
    """Raise UserError for an entry of a file that has another value, or type, than the supported
    ones.
    """
    if not any(type(one) is type(value) and one == value for one in supported):
        raise unsupported(key, value, f"; only {' or '.join(map(shown, supported))} is{fix}", file)


def check_sizes(state: Mapping[str, Tensor], layers: int, sizes: Mapping[str, int]) -> None:
    """Raise UserError for more layers or larger sizes than the weights can have, before building a
    meta model.
    """
    largest = max((weight.numel() for weight in state.values()), default=0)
    for name, value in sizes.items():
        if value > largest:
            raise UserError(
                f"{name} is {value}, and the largest weight has {largest} values; they are of two models"
            )
    if layers > len(state):
        raise UserError(
            f"num_layers is {layers}, and there are {len(state)} weights; they are of two models"
        )


def check_described(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise UserError for missing, unknown, misshapen or non-float weights; meta tensors will do.

    Names that are too many or too few are listed, the first few of them.
    """
    missing, unknown = sorted(like.keys() - state.keys()), sorted(state.keys() - like.keys())
    for problem, names in (("lacks", missing), ("has the unknown", unknown)):
        if names:
            raise UserError(
                f"The state dict {problem} {first_few(names)}; it is not of this configuration"
            )
    for name, weight in like.items():
        if (shape := state[name].shape) != weight.shape:
            raise UserError(
                f"{name} has shape {tuple(shape)}; the configuration makes it {tuple(weight.shape)}"
            )
        if (dtype := state[name].dtype) not in DTYPES:
            raise UserError(
                f"{name} is {_name(dtype)}; weights must be {', '.join(map(_name, [*DTYPES][:-1]))} or float64: "
                "take a checkpoint that is not quantized"
            )


def finite(read: Read) -> Read:
    """Return ``read`` with a check, which raises UserError for a weight with values that are not
    finite.
    """

    def checked(name: str) -> Tensor:
        weight = read(name)
        # In parts: torch takes three times a tensor's memory to look at all of it.
        if broken := sum(
            part.numel() - int(part.isfinite().sum()) for part in weight.reshape(-1).split(1 << 24)
        ):
            raise UserError(
                f"{name} holds {broken} of {weight.numel()} values that are not finite; take another checkpoint"
            )
        return weight

    return checked


def described(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return meta tensors of a state's."""
    return {name: weight.to("meta") for name, weight in state.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Weights(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files; each is read when it is asked for, and not kept.

    Reads only safetensors, never pickles, and only files directly in the folder, whatever an index
    names. The files are those that transformers reads: model.safetensors before an index, and every
    tensor of each file that an index names.
    """

    def __init__(
        self, folder: Path, tell: Callable[[str], Any] = warnings.warn, single: str = WEIGHTS
    ) -> None:
        """Read the names, and ``tell`` in a line of files and tensors that are passed over.

        Args:
            single: the file that has all tensors where there is no index.

        Raises:
            UserError: naming the file and what is wrong with it.
        """
        self.files: dict[str, Path] = {}
        whole = single != WEIGHTS or (folder / WEIGHTS).exists() or not (folder / INDEX).exists()
        index = {} if whole else _index(folder)
        files = [single] if whole else sorted(set(index.values()))
        names = sorted(path.name for path in folder.glob("*") if path.name.endswith(WEIGHT_FILES))
        beside = [name for name in names if name not in files]
        pickles = [name for name in beside if Path(name).suffix in PICKLES]
        if whole and pickles and not (folder / single).exists():
            raise UserError(
                f"{folder / pickles[0]} is a pickle, which can run code when it is read, and there is no {single}; "
                "take the model's safetensors files"
            )
        for file in files:
            path = inside(folder, file)
            with _opened(path) as opened:
                held = set(opened.keys())
            if lacking := [
                name for name, where in index.items() if where == file and name not in held
            ]:
                raise UserError(
                    f"{path}: lacks {lacking[0]}, which {INDEX} places there; download it again"
                )
            if twice := sorted(held & self.files.keys()):
                tell(
                    f"note: {self.files[twice[0]]}: {twice[0]} is passed over, as transformers does: {file} has it too"
                )
            self.files |= dict.fromkeys(held, path)
        if passed := [name for name in beside if whole or name != INDEX]:
            tell(
                f"note: {folder}: {first_few(passed)} passed over, as transformers does; {files[0]} is read"
            )

    def __getitem__(self, name: str) -> Tensor:
        with _opened(self.files[name]) as file:
            return file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


def _index(folder: Path) -> dict[str, str]:
    """Return which file holds each tensor. Raises UserError for an index that names others than of
    this folder.
    """
    index = read_json(folder / INDEX).get("weight_map")
    if (
        not isinstance(index, dict)
        or not index
        or not all(isinstance(file, str) for file in index.values())
    ):
        raise UserError(
            f"{folder / INDEX}: weight_map is missing or not a table of file names; download it again"
        )
    for file in sorted(set(index.values())):
        if file != Path(file).name or not file.endswith(".safetensors"):
            raise UserError(
                f"{folder / INDEX}: names {file!r}, no safetensors file directly in this folder"
            )
    return index


def inside(folder: Path, name: str) -> Path:
    """Return a file of a folder. Raises UserError for a link that leaves it, but to the blobs of
    the hub's cache.
    """
    path = folder / name
    if not path.is_symlink():
        return path
    try:
        real, home = path.resolve(strict=True), folder.resolve()
    except (OSError, RuntimeError):  # the latter for a loop
        raise UserError(f"{path} is a link that leads nowhere; put a file in its place") from None
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else home
    if real.parent not in (home, blobs):
        raise UserError(
            f"{path} is a link that leaves its folder, to {real}; put a copy in its place"
        )
    return path


def carry(source: Path, target: Path, *more: str) -> None:
    """Copy tokenizer files, generation settings and ``more``. Raises UserError for a link that
    leaves the folder.
    """
    for name in (*CARRIED, *more):
        if (source / name).is_file():
            shutil.copyfile(inside(source, name), target / name)


def _opened(path: Path) -> Any:
    """Open a safetensors file. Raises UserError naming it and what is wrong."""
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        raise UserError(f"{path} is no file; download it again")
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(
            f"{path} does not exist; only safetensors are read, and all shards are needed"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{path} is not a whole safetensors file ({error}); download it again"
        ) from None


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a draft beside ``folder``, which is renamed to it at the end and removed if the block
    raises.

    Raises:
        UserError: the folder exists and is not empty, has no name, or cannot be written.
    """
    if not folder.name:
        raise UserError(f"{folder} has no name; give the name of a new folder")
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise UserError(f"{folder} exists; choose a new folder, nothing is written over")
    try:
        with replacing(folder) as (draft,):
            draft.mkdir()
            yield draft
    except OSError as error:
        why = (
            "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
        )  # of a parent
        raise UserError(
            f"cannot write to {folder} ({why}); free space or choose another"
        ) from error


def write_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    contents: Mapping[str, Any],
    read: Callable[[str], Tensor] | None = None,
    most_bytes: int = 5 * 10**9,
) -> list[Path]:
    """Write config.json and weights into an empty folder, these as files of at most ``most_bytes``,
    with an index.

    One tensor at a time is in memory; safetensors' own ``save_file`` takes whole files.

    Args:
        weights: tensors by name, or with ``read`` meta tensors.
        contents: of config.json.
        read: returns one of the weights, of its shape and dtype.
        most_bytes: of a file; a larger tensor has one of its own.

    Raises:
        OSError: the disk refuses.
    """
    shards: list[dict[str, Tensor]] = [{}]
    for name, weight in weights.items():
        if (
            shards[-1]
            and sum(one.nbytes for one in shards[-1].values()) + weight.nbytes > most_bytes
        ):
            shards.append({})
        shards[-1][name] = weight
    width = f"-of-{len(shards):05d}.safetensors"
    names = (
        [f"model-{number:05d}{width}" for number in range(1, len(shards) + 1)]
        if len(shards) > 1
        else [WEIGHTS]
    )
    for file, shard in zip(names, shards, strict=True):
        write_weights(folder / file, shard, read or weights.__getitem__)
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(one.nbytes for one in weights.values())},
            "weight_map": {
                name: file for file, shard in zip(names, shards, strict=True) for name in shard
            },
        }
        write_json(folder / INDEX, index)
    write_json(folder / CONFIG, contents)
    return [folder / file for file in names]


def write_weights(path: Path, weights: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
    """Write one file in safetensors' format: the header's length, a JSON header, the tensors'
    bytes.

    Arguments as in ``write_model``.
    """
    # Wide types first, as safetensors does, so that each tensor is aligned to its type.
    order = sorted(weights, key=lambda name: -weights[name].element_size())
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        start, end = end, end + weights[name].nbytes
        shape, dtype = list(weights[name].shape), DTYPES[weights[name].dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            tensor = read(name)
            if (tensor.shape, tensor.dtype) != (weights[name].shape, weights[name].dtype):
                raise ValueError(
                    f"{name} is {tensor.dtype} {tuple(tensor.shape)}, and its header says otherwise"
                )
            file.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
