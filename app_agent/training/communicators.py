"""NCCL's communicators give their GPU memory back while a gang is parked. Standard library only.

NCCL has buffers on every GPU, some hundred MiB for each communicator, that no tensor shows. From PyTorch 2.13 and NCCL
2.29.7 on a backend can `suspend` them, and `resume` them in place. Both are collective: a rank waits in them for the
same call of all other ranks of its process group. So all ranks call `suspend`, or none does. They agree on that over
the store of their default process group, which needs no GPU: each says that it is here, once nothing else stands
against parking. The last one says `all`. One that cannot be parked says `none`, and so does one that has waited for
`AGREE_S`. The first of these words stays, and all ranks obey it.

Process groups are taken in the order of their names, which is the same on all ranks: two ranks that took two groups in
different order would wait for each other.

Where `suspend` is missing or fails, the memory stays, which is said once, and the rank is parked all the same. If it
has failed on some ranks only, all call `resume` none the less: the others would wait for them. It is not tried again.
A rank that cannot resume stays parked, and the node agent asks it again; meanwhile the others wait in their call. A
process that waits there for ever is ended by the node agent, as one that hangs in any collective.

All ranks must be on one node. Across nodes NCCL may leave buffers of peers out as it resumes.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

#: Ranks reach a boundary within a mini-batch of each other, since each waits for the gradients of all. One that has not
#: come by then was told something else.
AGREE_S = 5.0
_AGREE_GAP_S = 0.002
_ALL, _NONE = "all", "none"

_given_up = False  #: on all ranks alike: it has failed once, on some rank


class NotResumed(Exception):  # noqa: N818 - an expected no
    """A communicator could not be resumed: there may be no memory for it yet. The message is for the user."""


class Communicators:
    """The NCCL communicators of this rank, for one parking.

    Parameters
    ----------
    groups
        The NCCL backends by the name of their process group, in the order in which all ranks take them.
    store
        The store that all ranks share.
    world
        The number of ranks.
    key
        The prefix of the keys of this parking, the same on all ranks and never used before.
    """

    def __init__(self, groups: Mapping[str, Any], store: Any, world: int, key: str) -> None:
        self._groups, self._store, self._world, self._key = groups, store, world, key
        self._called: dict[str, bool] = {}  #: groups of which `suspend` was called and not resumed, and if it succeeded

    def suspend(self) -> None:
        """Give their memory back together with all other ranks, if all are there for it. The GPU must stand still."""
        if not (self._groups and self._agree()):
            return
        for name, backend in self._groups.items():
            try:
                backend.suspend()
            except RuntimeError as error:
                _tell_once(f"NCCL's memory stays on the GPU while this job is parked: {error}")
                self._called[name] = False
            else:
                self._called[name] = True
        with contextlib.suppress(RuntimeError):  # `resume` will find that the store is gone
            for name in [name for name, succeeded in self._called.items() if succeeded]:
                self._store.add(f"{self._key}/group/{name}", 1)
            if all(self._called.values()):
                self._store.add(f"{self._key}/whole", 1)

    def decline(self) -> None:
        """Say that this rank cannot be parked, so that no other waits for it."""
        if self._groups:
            with contextlib.suppress(RuntimeError):  # the store is gone: the others find that, too
                self._settle(_NONE)

    def resume(self) -> None:
        """Take the memory again together with all other ranks. To be called when all are told to go on.

        Raises
        ------
        NotResumed
            If that failed. Those that were not resumed stay suspended, and it may be tried again.
        """
        global _given_up  # noqa: PLW0603 - the communicators are those of the process
        try:
            if self._called and self._store.add(f"{self._key}/whole", 0) < self._world:
                _given_up = True
            for name, succeeded in list(self._called.items()):
                if self._store.add(f"{self._key}/group/{name}", 0):  # else it failed on all ranks, and none waits
                    with contextlib.nullcontext() if succeeded else contextlib.suppress(RuntimeError):
                        self._groups[name].resume()
                del self._called[name]
        except RuntimeError as error:
            raise NotResumed(f"NCCL could not take its memory again, all state is still parked: {error}") from error

    def kept_bytes(self) -> int:
        """Return the GPU memory that they have now, as far as NCCL tells."""
        return _held_bytes(self._groups)

    def _agree(self) -> bool:
        """Whether all ranks call `suspend`: the same answer on all of them."""
        try:
            if self._store.add(f"{self._key}/here", 1) == self._world:
                return self._settle(_ALL)
            until_s = time.monotonic() + AGREE_S
            while not self._store.check([f"{self._key}/word"]) and time.monotonic() < until_s:
                time.sleep(_AGREE_GAP_S)
            return self._settle(_NONE)
        except RuntimeError as error:  # it ends with the process that keeps it
            _tell_once(f"the ranks could not agree to suspend NCCL: {error}")
            return False

    def _settle(self, word: str) -> bool:
        """Say `word` unless another rank has spoken; return whether the first word is `all`."""
        return bytes(self._store.compare_set(f"{self._key}/word", "", word)) == _ALL.encode()


def found(rank: int, world: int, key: str) -> Communicators:
    """Return the communicators of this process, which is one of `world` on this node; none if they are to stay."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if _given_up or world < 2 or c10d is None or not c10d.is_initialized():
        return Communicators({}, None, world, key)
    groups = dict(_nccl_groups(c10d))
    if not groups or c10d.get_world_size() != world:
        return Communicators({}, None, world, key)
    if not all(hasattr(backend, "suspend") for backend in groups.values()):
        if rank == 0:
            _tell_once("NCCL's memory stays on the GPU while this job is parked: PyTorch 2.13 or newer can suspend it")
        return Communicators({}, None, world, key)
    return Communicators(groups, c10d._get_default_store(), world, f"gpu-arbiter/{key}")


def held_bytes() -> int:
    """Return the GPU memory of NCCL's communicators in this process, as far as NCCL tells; 0 while unknown."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    return 0 if c10d is None or not c10d.is_initialized() else _held_bytes(dict(_nccl_groups(c10d)))


def _nccl_groups(c10d: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and the backend of each process group of this rank that uses NCCL, by name."""
    cuda, names = sys.modules["torch"].device("cuda"), getattr(getattr(c10d, "_world", None), "pg_names", {})
    for group in sorted(names, key=lambda group: str(names[group])):
        with contextlib.suppress(RuntimeError):  # of the CPU alone
            backend = group._get_backend(cuda)
            if backend.name() == "nccl":
                yield str(names[group]), backend


def _held_bytes(groups: Mapping[str, Any]) -> int:
    total = 0
    for backend in groups.values():
        with contextlib.suppress(RuntimeError, AttributeError):  # PyTorch or NCCL is too old
            told = backend.memory_stats()
            total += told["persist"] + (0 if told["suspended"] else told["suspend"])
    return total


@functools.cache
def _tell_once(text: str) -> None:
    sys.stderr.write(f"gpu-arbiter: {text}\n")
