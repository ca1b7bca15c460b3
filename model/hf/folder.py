"""Read untrusted config.json and model.safetensors files of a model's folder, and write them whole."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime.errors import UserError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
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
        raise UserError(f"{path} cannot be read ({error.strerror}); check the path and its permissions") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(contents, dict):
        raise UserError(f"{path} holds no JSON object; download it again")
    return contents


@contextmanager
def naming(path: Path, missing: str = "") -> Iterator[None]:
    """Say in errors of a file's entries which file it is; ``missing`` says what a file without an entry is not."""
    try:
        yield
    except KeyError as absent:
        raise UserError(f"{path}: {absent.args[0]} is missing; {missing}") from None
    except ValueError as error:
        raise UserError(f"{path}: {str(error).removeprefix(f'{CONFIG}: ')}") from None


def entry(contents: Mapping[str, Any], key: str, kind: type, *default: Any) -> Any:
    """Return an entry of config.json of the given kind: int, float, bool or list (of int); `default` if missing.

    null means a default of None. Raises KeyError if missing without a default, UserError for another type, a non-finite
    number, or an integer beyond 32 bits, which no shape has.
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
    """Return the error of an entry of a file; the ``rest`` of the message says which values are supported."""
    return UserError(f"{file}: {key} = {shown(value)} is not supported{rest}")


def check_value(file: str | Path, key: str, value: Any, supported: Sequence[Any], fix: str = "") -> None:
    """Raise UserError for an entry of a file that has another value, or type, than the supported ones."""
    if not any(type(one) is type(value) and one == value for one in supported):
        raise unsupported(key, value, f"; only {' or '.join(map(shown, supported))} is{fix}", file)


def check_sizes(state: Mapping[str, Tensor], layers: int, sizes: Mapping[str, int]) -> None:
    """Raise UserError for more layers or larger sizes than the weights can have, before building a meta model."""
    largest = max((weight.numel() for weight in state.values()), default=0)
    for name, value in sizes.items():
        if value > largest:
            raise UserError(f"{name} is {value}, and the largest weight has {largest} values; they are of two models")
    if layers > len(state):
        raise UserError(f"num_layers is {layers}, and there are {len(state)} weights; they are of two models")


def check_state(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise UserError for missing, unknown or misshapen weights, and for non-float or non-finite ones."""
    check_described(state, like)
    for name in like:
        check_finite(name, state[name])


def check_described(state: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Raise UserError for missing, unknown, misshapen or non-float weights; meta tensors will do.

    Names that are too many or too few are listed, the first few of them.
    """
    missing, unknown = sorted(like.keys() - state.keys()), sorted(state.keys() - like.keys())
    for problem, names in (("lacks", missing), ("has the unknown", unknown)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(f"The state dict {problem} {', '.join(names[:3])}{more}; it is not of this configuration")
    for name, weight in like.items():
        if (shape := state[name].shape) != weight.shape:
            raise UserError(f"{name} has shape {tuple(shape)}; the configuration makes it {tuple(weight.shape)}")
        if (dtype := state[name].dtype) not in DTYPES:
            raise UserError(
                f"{name} is {_name(dtype)}; weights must be {', '.join(map(_name, DTYPES[:-1]))} or float64: "
                "take a checkpoint that is not quantized"
            )


def check_finite(name: str, weight: Tensor) -> None:
    """Raise UserError for a weight with values that are not finite."""
    # In parts: torch takes three times a tensor's memory to look at all of it.
    if broken := sum(part.numel() - int(part.isfinite().sum()) for part in weight.reshape(-1).split(1 << 24)):
        raise UserError(
            f"{name} holds {broken} of {weight.numel()} values that are not finite; take another checkpoint"
        )


def finite(read: Read) -> Read:
    """Return what reads as ``read`` does, and raises as ``check_finite``."""

    def checked(name: str) -> Tensor:
        weight = read(name)
        check_finite(name, weight)
        return weight

    return checked


class Joined(Mapping[str, Tensor]):
    """A state whose modules that are stored in parts are whole, joined as they are read."""

    def __init__(self, state: Mapping[str, Tensor], apart: Mapping[str, Sequence[str]]) -> None:
        """Look for the modules of ``apart``, each with its parts in their order."""
        self._state, self._parts = state, {name: [name] for name in state}
        for whole, parts in apart.items():
            for first in [name for name in state if parts[0] in name]:
                names = [first.replace(parts[0], part) for part in parts]
                if all(name in self._parts for name in names):
                    self._parts = {name: own for name, own in self._parts.items() if name not in names}
                    self._parts[first.replace(parts[0], whole)] = names

    def __getitem__(self, name: str) -> Tensor:
        parts = [self._state[part] for part in self._parts[name]]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def described(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return meta tensors of a state's."""
    return {name: weight.to("meta") for name, weight in state.items()}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
