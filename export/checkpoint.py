"""Named tensors on disk, read one at a time and checked: safetensors, whole or in shards, or a pickle that is trusted.

Knows files and tensors, no family of models. What it hands out is float32, finite and of the expected shape.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Protocol, Self, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from export.errors import SourceError, first_line
from export.precision import stored_as
from service.manifest import file_sha256

PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle"})
_INDEX: Final = ".index.json"
_PICKLED: Final = f".bin{_INDEX}"
_WHOLE: Final = "model.safetensors"
T = TypeVar("T")
_FLOATS: Final = frozenset({torch.float32, torch.float16, torch.bfloat16, torch.float64})


class _Store(Protocol):
    """One open file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, key: str) -> Tensor: ...

    def get_slice(self, key: str) -> Any: ...


class Checkpoint:
    """The tensors of one model; a context manager, which closes its files."""

    def __init__(self, path: Path, *, trust_pickle: bool = False) -> None:
        """Open `path` and list its tensors; none is read yet.

        Args:
            path: a `.safetensors` file, the `.safetensors.index.json` of a sharded one, or the folder of either.
            trust_pickle: read a pickle too, with torch's unpickler for weights alone. It still is a program that
                makes data, not data.

        Raises:
            SourceError: a file is missing or unreadable, or its index contradicts it; or it is a pickle.
        """
        self.path = _inside(path) if path.is_dir() else path
        self.dtypes: Counter[str] = Counter()  # of the tensors that were read
        self._open = ExitStack()
        self._stores: dict[str, _Store] = {}
        try:
            if self.path.name.endswith(_INDEX):
                self.files = [self.path, *self._open_shards(trust_pickle)]
            else:
                self.files = [self.path]
                store = self._store(self.path, trust_pickle)
                self._stores = dict.fromkeys(store.keys(), store)
        except BaseException:
            self._open.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def keys(self) -> list[str]:
        """Names of all tensors."""
        return list(self._stores)

    def read(self, key: str, shape: tuple[int, ...] | None = None) -> Tensor:
        """One tensor as float32, of `shape` if it is given.

        Raises:
            SourceError: it is missing, misshapen, of another kind, on no device, or not finite in float32.
        """
        if shape is not None:
            self.check(key, shape)
        tensor = self._taken(key, lambda: self._stores[key].get_tensor(key))
        self.dtypes[str(tensor.dtype).removeprefix("torch.")] += 1
        return self._finite(key, tensor)

    def check(self, key: str, shape: tuple[int, ...]) -> None:
        """Raise SourceError unless there is such a tensor of `shape`; it is not read."""
        if (found := self.shape(key)) != shape:
            raise SourceError(f"{self.path}: {key} has shape {found}, the config says {shape}")

    def shape(self, key: str) -> tuple[int, ...]:
        """Shape of one tensor, which is not read."""
        return tuple(self._taken(key, lambda: self._stores[key].get_slice(key).get_shape()))

    def some_rows(self, key: str, rows: Sequence[int], d: int) -> Tensor:
        """Rows of a table of `d` columns as float32, (len(rows), d); the others are not read.

        Raises:
            SourceError: as for `read`.
        """
        self.table(key, d)

        def take() -> Tensor:
            table = self._stores[key].get_slice(key)
            return torch.cat([table[row : row + 1] for row in rows])

        return self._finite(key, self._taken(key, take))

    def table(self, key: str, d: int) -> int:
        """Rows of a table of `d` columns: embeddings, whose number a config need not say.

        Raises:
            SourceError: it is missing or empty, or has another shape.
        """
        shape = self.shape(key)
        if len(shape) != 2 or shape[0] < 1 or shape[1] != d:
            raise SourceError(f"{self.path}: {key} has shape {shape}, expected one or more rows of {d}")
        return shape[0]

    def _taken(self, key: str, take: Callable[[], T]) -> T:
        if key not in self._stores:
            raise SourceError(f"{self.path}: it has no tensor {key}")
        try:
            return take()
        except (SafetensorError, OSError) as cause:
            raise SourceError(f"{self.path}: {key} cannot be read: {cause}") from cause

    def _finite(self, key: str, tensor: Tensor) -> Tensor:
        if tensor.dtype not in _FLOATS:
            raise SourceError(f"{self.path}: {key} is {tensor.dtype}, expected a floating-point tensor")
        tensor = tensor.float()
        if not bool(tensor.isfinite().all()):
            raise SourceError(f"{self.path}: {key} holds NaN or infinite values (in float32)")
        return tensor

    def provenance(self) -> dict[str, str]:
        """For the manifest: name and SHA-256 of every file, and what the tensors that were read were stored as."""
        weights = [file for file in self.files if not file.name.endswith(_INDEX)]
        facts = {"weights": ", ".join(file.name for file in weights)}
        facts["weights_sha256"] = ", ".join(file_sha256(file) for file in weights)
        if len(weights) != len(self.files):
            facts["weights_index_sha256"] = file_sha256(self.files[0])
        if set(self.dtypes) - {"float32"}:
            facts["weights_dtype"] = stored_as(self.dtypes)
        return facts

    def _open_shards(self, trust_pickle: bool) -> list[Path]:
        weight_map = read_json(self.path).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise SourceError(f"{self.path}: weight_map is missing or is not an object of file names")
        shards = []
        for name in sorted(set(weight_map.values())):
            file = self.path.parent / name
            if file.parent != self.path.parent:
                raise SourceError(f"{self.path}: it names {name!r}, expected a file of its own folder")
            store = self._store(file, trust_pickle)
            mapped, there = {key for key, where in weight_map.items() if where == name}, set(store.keys())
            if absent := sorted(mapped - there):
                raise SourceError(f"{self.path}: {absent[0]} is not in {name}, where it says that it is")
            if extra := sorted(there - mapped):
                raise SourceError(f"{self.path}: it does not list {extra[0]}, which is in {name}")
            self._stores.update(dict.fromkeys(there, store))
            shards.append(file)
        return shards

    def _store(self, path: Path, trust_pickle: bool) -> _Store:
        if path.suffix in PICKLES:
            if not trust_pickle:
                raise SourceError(
                    f"{path}: a pickle can run any code when it is loaded; convert it to safetensors, which holds only "
                    "numbers, or pass --trust-pickle if you know who made it"
                )
            return _Pickle(path)
        if not path.is_file():
            raise SourceError(f"{path}: no such file")
        try:
            store: _Store = self._open.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (SafetensorError, OSError) as cause:
            raise SourceError(f"{path}: not a readable safetensors file: {cause}") from cause
        return store


class _Pickle:
    """A pickled state dict that is trusted. torch's weights-only unpickler refuses everything but tensors in dicts."""

    def __init__(self, path: Path) -> None:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except OSError as cause:
            raise SourceError(f"{path}: {cause.strerror or cause}") from cause
        except Exception as cause:
            raise SourceError(f"{path}: it does not load as weights alone: {first_line(cause)}") from cause
        if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
            loaded = loaded["state_dict"]
        if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
            raise SourceError(f"{path}: expected a state dict, names to tensors")
        for key, tensor in loaded.items():
            if tensor.device.type == "meta" or tensor.layout != torch.strided:
                raise SourceError(f"{path}: {key} is on {tensor.device}, {tensor.layout}: expected dense values")
        self._tensors = {str(key): tensor.detach() for key, tensor in loaded.items()}

    def keys(self) -> list[str]:
        return list(self._tensors)

    def get_tensor(self, key: str) -> Tensor:
        tensor: Tensor = self._tensors[key]
        return tensor

    def get_slice(self, key: str) -> _Slice:
        return _Slice(self._tensors[key])


class _Slice:
    """safetensors' own interface, for a tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, rows: slice) -> Tensor:
        taken: Tensor = self._tensor[rows]
        return taken


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        SourceError: it cannot be read, or is something else.
    """
    try:
        values = json.loads(path.read_bytes())
    except OSError as cause:
        raise SourceError(f"{path}: {cause.strerror}") from cause
    except (ValueError, RecursionError) as cause:
        raise SourceError(f"{path}: not JSON: {cause}") from cause
    if not isinstance(values, dict):
        raise SourceError(f"{path}: expected an object")
    return values


def _inside(folder: Path) -> Path:
    for name in (_WHOLE, _WHOLE + _INDEX):
        if (folder / name).is_file():
            return folder / name
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES or file.name.endswith(_PICKLED))
    hint = ""
    if pickles:
        hint = f", only {pickles[0]}, a pickle: convert it to safetensors, or name it and pass --trust-pickle"
    raise SourceError(f"{folder}: neither {_WHOLE} nor {_WHOLE}{_INDEX} in it{hint}")
