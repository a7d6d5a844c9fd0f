"""Weights in files, of which a rank reads what it holds: of safetensors, and of torch.distributed.checkpoint.

    files = open_weights("model/")
    keys = files.keys_of(names, shapes)        # all that is missing or of another shape is refused here
    files.read({keys[name]: tensor for name, tensor in held.items()})

Nothing in a file is executed: pickled parts may name torch's own descriptions of tensors only.
"""

from __future__ import annotations

import io
import json
import pickle
import warnings
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from arborcast.pipeline.errors import CheckpointError, first_line
from arborcast.synth.formats.reading import shorten_path

INDEX = "model.safetensors.index.json"
"""Of a model in several files, as its library writes it."""
_SAFE = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata"),
        *("TensorProperties", "StorageMeta", "MetadataIndex", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name, it in vars(torch).items() if isinstance(it, torch.dtype))},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class Stored(ABC):
    """Tensors in files.

    Attributes:
        where: as errors call it.
        shapes: of all tensors, by key.
    """

    where: str
    shapes: Mapping[str, tuple[int, ...]]

    def key_of(self, names: Iterable[str]) -> str | None:
        """What the tensor with one of these names is called here, which may be within `model`."""
        return next((key for it in names for key in (f"model.{it}", it) if key in self.shapes), None)

    def keys_of(
        self, names: Mapping[str, Sequence[str]], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, str]:
        """The key of each tensor of a model.

        Args:
            names: by the first name of each tensor, all that it may have here.
            shapes: of those.

        Raises:
            CheckpointError: one is missing or has another shape.
        """
        keys = {}
        for name, others in names.items():
            keys[name] = self.key_of(others) or name
            check_fits(self.where, name, keys[name], shapes[name], self.shapes)
        return keys

    @abstractmethod
    def read(self, into: Mapping[str, Tensor]) -> None:
        """Put what is stored into tensors of the same shapes, whatever their types, by key.

        Raises:
            CheckpointError: a file cannot be read.
        """


def check_fits(
    where: str, name: str, key: str, shape: tuple[int, ...], stored: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse what is stored where it does not fit a tensor of a model.

    Args:
        where: it is stored, as errors call it.
        name: of the tensor.
        key: of it there.
        shape: of it.
        stored: the shapes of all that is there, by key.

    Raises:
        CheckpointError: it is missing or has another shape.
    """
    if key not in stored:
        raise CheckpointError(f"{where}: must hold {name} of the model, got {len(stored)} others")
    if stored[key] != shape:
        raise CheckpointError(f"{where}: {name} must have shape {shape} of the model, got {stored[key]}")


def open_weights(path: Path | str) -> Stored:
    """What a file or folder holds, by what is in it.

    Args:
        path: a safetensors file; a folder of them, with the index of its library where there is one; or a
            folder that `torch.distributed.checkpoint` or `Trainer.save` wrote.

    Raises:
        CheckpointError: it cannot be read, or is none of them.
    """
    place = Path(path)
    if not place.exists():
        raise CheckpointError(f"{shorten_path(path)}: cannot be read: No such file or directory")
    if (place / ".metadata").is_file():
        return CheckpointFolder(place)
    files = sorted(place.glob("*.safetensors")) if place.is_dir() else [place]
    if not files:
        raise CheckpointError(
            f"{shorten_path(path)}: must hold .safetensors files, or the .metadata of a checkpoint, got "
            "neither"
        )
    return SafeTensors(place, files)


class SafeTensors(Stored):
    """Files of safetensors; of each tensor only its own bytes are read.

    Args:
        path: as the user gave it.
        files: all of them; where there is an index in the folder, it says which tensor is in which file.

    Raises:
        CheckpointError: one cannot be read, or safetensors is not installed.
    """

    def __init__(self, path: Path, files: Sequence[Path]) -> None:
        """Read their headers."""
        self.where = shorten_path(path)
        self._homes = {}
        shapes = {}
        index = path / INDEX
        if index.is_file():
            with _one_line(shorten_path(index), "an index of safetensors files"):
                listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                files = sorted({path / name for name in listed.values()})
        for file in files:
            with self._opened(file) as content:
                for key in content.keys():  # noqa: SIM118 (it is no dict)
                    self._homes[key] = file
                    shapes[key] = tuple(content.get_slice(key).get_shape())
        self.shapes = shapes

    def read(self, into: Mapping[str, Tensor]) -> None:
        """File by file, tensor by tensor."""
        by_file: defaultdict[Path, dict[str, Tensor]] = defaultdict(dict)
        for key, tensor in into.items():
            by_file[self._homes[key]][key] = tensor
        for file, wanted in by_file.items():
            with self._opened(file) as content, torch.no_grad():
                for key, tensor in wanted.items():
                    tensor.copy_(content.get_tensor(key))

    @contextmanager
    def _opened(self, file: Path) -> Iterator[Any]:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise CheckpointError(
                f"{self.where}: must be read by safetensors, which is missing (pip install safetensors)"
            ) from error
        with _one_line(shorten_path(file), "a safetensors file"), safe_open(file, framework="pt") as content:
            yield content


class CheckpointFolder(Stored):
    """A folder of torch.distributed.checkpoint.

    Args:
        path: of it.

    Attributes:
        dtypes: of all tensors, by key.
        others: keys of what is no tensor.

    Raises:
        CheckpointError: it cannot be read, or one of its files is missing or too short.
    """

    def __init__(self, path: Path | str) -> None:
        """Read what it holds, and see that its files are as long as that says."""
        self.where, self._path = shorten_path(path), Path(path)
        with _one_line(self.where, "a folder of torch.distributed.checkpoint"):
            metadata = _PickleReader(self._path).read_metadata()
            entries = metadata.state_dict_metadata
            ends: defaultdict[str, int] = defaultdict(int)
            for it in metadata.storage_data.values():
                ends[it.relative_path] = max(ends[it.relative_path], it.offset + it.length)
        tensors = {key: it for key, it in entries.items() if isinstance(it, TensorStorageMetadata)}
        self.shapes = {key: tuple(it.size) for key, it in tensors.items()}
        self.dtypes = {key: it.properties.dtype for key, it in tensors.items()}
        self.others = entries.keys() - tensors.keys()
        for name, end in sorted(ends.items()):
            file = self._path / name
            size = file.stat().st_size if file.is_file() else None
            if size is None or size < end:
                got = "no such file" if size is None else f"{size}"
                raise CheckpointError(f"{shorten_path(file)}: must have {end} bytes, got {got}")

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Those tensors alone."""
        self.values(into, into)

    def values(self, keys: Collection[str], into: Mapping[str, Tensor]) -> dict[str, Any]:
        """What some keys stand for: tensors, and numbers, words, None and tuples of them.

        Args:
            keys: of it.
            into: by key tensors that take what is stored; of others there are new ones.
        """
        state: dict[str, Any] = {
            key: into[key] if key in into else torch.empty(self.shapes[key], dtype=self.dtypes[key])
            for key in keys
            if key in self.shapes
        }
        state |= {key: None for key in keys if key in self.others}
        if state:
            with _one_line(self.where, "a folder of torch.distributed.checkpoint"), torch.no_grad():
                planner = _Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
                dcp.load(state, storage_reader=_PickleReader(self._path), planner=planner, no_dist=True)
        return state


class _PickleReader(dcp.FileSystemReader):
    """Reads descriptions without executing what else a pickle may name."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """What the folder holds; ranks have no descriptions of their own."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _Unpickler(file).load()
        metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Descriptions of tensors only."""
        if name not in _SAFE.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no description of tensors does")
        return super().find_class(module, name)


class _Planner(dcp.DefaultLoadPlanner):
    """Likewise of values that are no tensors."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        """One of them."""
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


@contextmanager
def _one_line(where: str, kind: str) -> Iterator[None]:
    """Whatever goes wrong inside as an error of one line; torch warns of what is meant to be so."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except CheckpointError:
        raise
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{where}: must be {kind}, got {cause_of(error)}") from error


def cause_of(error: BaseException) -> str:
    """In one line; of torch's errors of several ranks the first."""
    if isinstance(error, CheckpointException):
        rank, (cause, _) = next(iter(error.failures.items()))
        return f"{first_line(cause)} on rank {rank}" if len(error.failures) > 1 or rank else first_line(cause)
    return first_line(error)
