"""Checkpoints with torch.distributed.checkpoint (DCP): the state of each rank, whole, under keys of its own.

    state = {"model": model, "optimizer": OptimizerState(optimizer)}
    dcp.save(state, checkpoint_id=path)  # or dcp.async_save
    dcp.load(state, storage_reader=Reader(path), planner=LoadPlanner())  # among any number of ranks; runs no code

DCP loads names in alphabetical order: "model", then "optimizer", which puts the rank's local weights into the model.

Keys, after the state's name in the checkpoint: "rank1.shard0.2" is an `_Entry`, rank 1's state of parameter 2. The
shard is the process's part of the parameters that are sharded inside a node (FSDP2); "1_3" if it has part 1 of those
that are cut one way, and part 3 of those that are cut another way. "world_size" and "param_groups" are equal on all
ranks; "folder" is a worker's own state of its run.
"""

import io
import itertools
import pathlib
import pickle
import re
import zipfile
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from demopt.errors import first_line
from demopt.exchange.dtensor import cut_of, placed_as, shard_of, to_local
from demopt.optim.demo import DeMo
from demopt.optim.local_demo import LocalDeMo
from demopt.replicator.rounds import VaryingExchange
from demopt.state import StateDict, overlaps, part_or_share

__all__ = ["LoadPlanner", "OptimizerState", "Reader"]

_KEY = re.compile(r"(?P<prefix>.*\.|)rank(?P<rank>\d+)(?P<rest>\.shard(?P<shard>[\d_]+)\.(?P<number>\d+))")
_SHARDS = "the number of shards inside a node must be that of the checkpoint; the number of nodes may change"


class _Entry:
    """A rank's state of one parameter, or its entry "folder".

    DCP pickles each when it writes it, so that only one is copied at a time.

    In the file it is a mapping: "values" holds tensors, numbers and text; "sharded" names those that are shards of
    DTensors, saved as they lie here; "cut", of a sharded parameter, says how it is cut.
    """

    def __init__(self, values: Mapping[str, Any], sharded: Sequence[str] = (), cut: str = "") -> None:
        self.values, self.sharded, self.cut = values, [*sharded], cut

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Entry":  # called by `dcp.async_save`
        return _Entry(*self._as_saved(), self.cut)

    def __reduce__(self) -> tuple[Any, ...]:
        values, sharded = self._as_saved()
        cut = (("cut", self.cut),) if self.cut else ()
        return OrderedDict, ((("values", values), ("sharded", sharded), *cut),)  # no dict: `weights_only` builds none

    def _as_saved(self) -> tuple[dict[str, Any], list[str]]:
        local = {
            # cloned, because pickle would write the whole storage of a view
            name: to_local(value).detach().cpu().clone() if isinstance(value, Tensor) else value
            for name, value in self.values.items()
        }
        # A copy for `async_save` has local tensors already; which ones were sharded it was told.
        return local, self.sharded or [name for name, value in self.values.items() if to_local(value) is not value]


class LoadPlanner(DefaultLoadPlanner):
    """A planner for `dcp.load` that reads this rank's share of an `OptimizerState` that more or fewer ranks saved.

    Objects other than tensors are read with `weights_only=True`; `torch.serialization.add_safe_globals` allows classes
    of your own. All else is as in DCP's default planner, whose arguments it takes.

    Examples:
        >>> LoadPlanner(allow_partial_load=True).allow_partial_load
        True
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Adds the keys of other ranks; called by DCP."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        in_file = metadata.state_dict_metadata if metadata is not None else {}
        # DCP reads an object per key of `self.state_dict`. `load_bytes` puts it where `self.mappings` says: in the dict
        # that `OptimizerState.load_state_dict` gets. To this rank's keys come those of the old ranks that it takes over
        # from. What is read replaces the value here, so this rank's entry serves for all.
        for key, entry in list(self.state_dict.items()):
            if not (match := _KEY.fullmatch(key)):
                continue
            prefix, rank, rest = match["prefix"], int(match["rank"]), match["rest"]
            world_size = self.state_dict[f"{prefix}world_size"]  # the optimizer's: the file is not read yet
            old_size = next(old for old in itertools.count() if f"{prefix}rank{old}{rest}" not in in_file)
            if not old_size:
                if f"{prefix}rank0.shard0.0" in in_file and match["shard"] != "0":
                    raise ValueError(f"the checkpoint has nothing of shard {match['shard']}: {_SHARDS}")
                continue  # DCP says what the file lacks
            for old in overlaps(rank, world_size, old_size):
                self.state_dict[f"{prefix}rank{old}{rest}"] = entry
                if key in self.mappings:  # of a nested state
                    self.mappings[f"{prefix}rank{old}{rest}"] = (*self.mappings[key][:-1], f"rank{old}{rest}")
            # DCP refuses a key that the file lacks, as when fewer ranks saved it. One that the file has stays, even if
            # another rank takes it over: to DCP, a file that has no key of this rank would be one of torch 2.3.
            if key not in in_file:
                del self.state_dict[key]  # from the planner's table only; the state that DCP loads keeps it

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Reads an object other than a tensor, and puts it where DCP's default planner does; called by DCP."""
        name, holder = read_item.dest_index.fqn, self.state_dict
        try:
            with torch.serialization.safe_globals([_Entry]):  # files of early 0.3.0 name it
                found = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            what = named[1] if named else "damaged"
            raise pickle.UnpicklingError(
                f"{name} is {what}, expected tensors, numbers and text; nothing was run"
            ) from None
        keys: tuple[Any, ...] = (name,)
        if self.flatten_state_dict:
            keys, holder = self.mappings[name], self.original_state_dict
        for key in keys[:-1]:
            holder = holder[key]
        holder[keys[-1]] = found


class OptimizerState:
    """The state of a `DeMo` or `LocalDeMo` in torch.distributed.checkpoint (DCP), which takes it as a `Stateful`.

    Each rank saves and loads its part, bit for bit. Give `async_save` a separate gloo group. `dcp.load` needs a
    `LoadPlanner` for more or fewer ranks than saved.

    Raises:
        TypeError: another optimizer.
        ValueError, when loading: more or fewer ranks saved the checkpoint (the message names the `LoadPlanner`), or
            each rank's parameters had another number of shards.

    Examples:
        >>> import demopt, torch
        >>> optimizer = demopt.DeMo([torch.nn.Parameter(torch.zeros(2, 2))])
        >>> list(OptimizerState(optimizer).state_dict())
        ['world_size', 'param_groups', 'rank0.shard0.0']
    """

    def __init__(self, optimizer: DeMo | LocalDeMo) -> None:
        if not hasattr(optimizer, "own_state_dict"):
            raise TypeError(f"the optimizer is {type(optimizer).__name__}; give a DeMo or LocalDeMo")
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        """Returns the entries that this rank saves, by key; when loading, those that DCP replaces."""
        rank, world_size = self._optimizer.replicator.rank_and_size
        state = self._optimizer.own_state_dict()
        parameters = self._parameters
        shards = dict.fromkeys(shard for shard in map(shard_of, parameters) if shard[1] > 1)
        own = f"rank{rank}.shard{'_'.join(str(number) for number, _ in shards) or 0}"
        found = {"world_size": world_size, "param_groups": state["param_groups"]}
        for number, parameter in enumerate(parameters):
            found[f"{own}.{number}"] = _Entry(state["state"].get(number, {}), cut=cut_of(parameter))
        if isinstance(self._optimizer.replicator.session.process_group, VaryingExchange):
            found["folder"] = _Entry(state.get("folder", {}))
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the entries that DCP filled in; if more or fewer ranks saved them, a share of them, with a warning."""
        rank, world_size = self._optimizer.replicator.rank_and_size
        old_size, parameters = state_dict["world_size"], dict(enumerate(self._parameters))  # the file's, now read
        by_rank: dict[int, dict[int, Any]] = {}
        for key, entry in state_dict.items():
            if match := _KEY.fullmatch(key):
                by_rank.setdefault(int(match["rank"]), {})[int(match["number"])] = entry
        if not isinstance(old_size, int) or old_size < 1:
            raise ValueError(f"the checkpoint is damaged: it was saved by {old_size!r} ranks")
        # The first test keeps a damaged number from `overlaps`, which would loop over old_size / world_size ranks.
        if old_size > world_size * len(by_rank) or overlaps(rank, world_size, old_size).keys() - by_rank:
            raise ValueError(
                f"{old_size} ranks saved the checkpoint, and there are {world_size} now: give dcp.load "
                "planner=demopt.checkpoint.LoadPlanner()"
            )
        states: dict[int, StateDict] = {}
        for old in overlaps(rank, world_size, old_size):  # not this rank's own key: the file may lack it
            read = ((number, _values_of(entry, parameters.get(number))) for number, entry in by_rank[old].items())
            entries = {number: values for number, values in read if values}
            states[old] = {"state": entries, "param_groups": state_dict["param_groups"]}
        folder = {"folder": _values_of(state_dict["folder"])} if "folder" in state_dict else {}
        try:
            self._optimizer.load_state_dict({**part_or_share(states, rank, world_size, old_size), **folder})
        except ValueError as error:
            if any(to_local(parameter) is not parameter for parameter in parameters.values()):
                raise ValueError(f"{error}. Of FSDP2 or tensor parallelism, {_SHARDS}") from error
            raise

    def __reduce__(self) -> tuple[Any, ...]:  # DCP pickles objects in an inner container, and only rank 0's
        raise TypeError(
            "an OptimizerState belongs into the outermost dict that dcp.save gets, where DCP asks it for its state; "
            "inside another one give OptimizerState(optimizer).state_dict()"
        )

    @property
    def _parameters(self) -> list[Tensor]:
        return [parameter for group in self._optimizer.param_groups for parameter in group["params"]]


_CUT = re.compile(r"\w+\(\d+, \d+\) over (?!1\b)\d+")  # skips cuts into one shard, which earlier files name, too


def _values_of(entry: Any, like: Tensor | None = None) -> dict[str, Any]:
    """Returns an entry's values for the parameter `like`; an `_Entry` is from early 0.3.0, or was not read."""
    if entry is None:  # with `allow_partial_load`, newer torch leaves None where the checkpoint has nothing
        return {}
    match vars(entry) if isinstance(entry, _Entry) else entry:
        case {"values": Mapping() as values, "sharded": list() as sharded, **more}:
            if like is None:  # a folder's, or of a surplus parameter, which is reported later
                return dict(values)
            cut, here = more.get("cut"), cut_of(like)
            if isinstance(cut, str) and (was := ", ".join(_CUT.findall(cut))) not in ("", here):
                raise ValueError(f"the checkpoint's shards are {was}, those here {here or 'whole'}; {_SHARDS}")
            if not hasattr(like, "placements"):  # a single shard, which is the whole
                return dict(values)
            return {name: placed_as(value, like) if name in sharded else value for name, value in values.items()}
    raise ValueError(f"the checkpoint is damaged: an entry is a {type(entry).__name__}")


class Reader(FileSystemReader):
    """Reads a checkpoint of DCP's `FileSystemWriter`; with `LoadPlanner`, nothing in the folder can run code.

    DCP's own reader unpickles `.metadata` unchecked, and its planner every object other than a tensor.

    Raises:
        pickle.UnpicklingError, in DCP's CheckpointException: `.metadata` names something other than DCP's own records,
            or a file outside the folder.

    Examples:
        >>> Reader("checkpoint").path
        PosixPath('checkpoint')
    """

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        """Returns a saved object's bytes after checking their checksums, which torch does not; called by DCP."""
        found = io.BytesIO(super()._slice_file(file, sinfo).read())
        if zipfile.is_zipfile(found):  # otherwise transformed, such as compressed; torch refuses anything else
            try:
                broken = zipfile.ZipFile(found).testzip()
            except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError, EOFError, zlib.error) as error:
                broken = first_line(error)
            if broken:
                raise pickle.UnpicklingError(f"{sinfo.relative_path} is damaged: {broken}")
        found.seek(0)
        return found

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Returns the checkpoint's table of contents; called by DCP."""
        del args
        place: Any = getattr(self, "_get_metadata_path", None)  # newer torch: a rank may have its own file
        with open(place(kwargs.get("rank")) if place else self.fs.concat_path(self.path, ".metadata"), "rb") as file:
            found = _Records(file).load()
        if not isinstance(found, Metadata):
            raise pickle.UnpicklingError(f"it holds a {type(found).__name__}, expected a Metadata")
        for info in found.storage_data.values():
            if re.fullmatch(r"\w+\.distcp", info.relative_path) is None:
                raise pickle.UnpicklingError(f"it names {info.relative_path!r}, expected a .distcp file beside it")
        found.storage_meta = StorageMeta(load_id=self.load_id)
        return found


class _Records(pickle.Unpickler):
    """Reads a `.metadata` file; knows only the classes and functions that DCP writes, none of which has effects."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch.distributed.checkpoint.metadata" and name in _RECORDS:
            return getattr(dcp_metadata, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) in _OTHER_RECORDS:
            return _OTHER_RECORDS[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of DCP does: nothing was run")


_RECORDS = {*dcp_metadata.__all__, "_MEM_FORMAT_ENCODING"}
_OTHER_RECORDS = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _StorageInfo,
    **{  # the folder that was written to, on any system; the second module is of Python 3.13
        (module, f"{system}Path"): getattr(pathlib, f"Pure{system}Path")
        for module in ("pathlib", "pathlib._local")
        for system in ("Posix", "Windows")
    },
}
