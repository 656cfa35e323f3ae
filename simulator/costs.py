"""The costs of acts on imaginary nodes: explicit, in seconds, printed with every result.

Simulators of this field differ by a factor of two on equal input because of such figures (findings on the peers,
section 2), so none is hidden: `NONE` is the ideal node, `DEFAULT` holds the figures of Themis, a TOML file any others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct, structs

from protocol.config import in_words

Time = Annotated[float, Meta(ge=0, le=1e6)]


class CostsError(ValueError):
    """A file of costs cannot be used; one sentence that names the field and the mend."""


class Costs(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds per act, and switches for effects on speed."""

    message_s: Time = 0.0  #: from one participant to another
    decide_s: Time = 0.0  #: a policy's decision
    sample_s: Time = 0.0  #: measuring a node's GPUs
    start_s: Time = 0.0  #: from starting a process to its first mini-batch
    restore_s: Time = 0.0  #: loading a checkpoint, on top of that
    checkpoint_s: Time = 0.0  #: saving one and leaving the GPU
    suspend_s: Time = 0.0  #: parking in host memory
    resume_s: Time = 0.0  #: and back
    boundaries: bool = False  #: a worker is stopped at the end of a mini-batch, not in its midst
    placement: bool = False  #: jobs are slower the further apart their GPUs lie
    mps: bool = False  #: all GPUs have MPS: the kernels of two jobs on one GPU overlap
    saves: bool = True  #: scripts save when they have to leave; else they can do neither that nor be suspended

    @property
    def change_s(self) -> float:
        """Moving a job by checkpoint."""
        return self.checkpoint_s + self.start_s + self.restore_s


NONE = Costs()
#: Themis measured 35 s for changing an allocation, of which 5 to 10 s are the checkpoint (PAPERS.md section 1). The
#: times of parking and of resuming are those of PyTorch on a local node for some gigabytes.
DEFAULT = Costs(
    message_s=0.005,
    decide_s=0.1,
    sample_s=0.1,
    start_s=20.0,
    restore_s=7.5,
    checkpoint_s=7.5,
    suspend_s=1.0,
    resume_s=1.0,
    boundaries=True,
    placement=True,
)
NAMED = {"none": NONE, "default": DEFAULT}


def shorter(costs: Costs, times: float) -> Costs:
    """Return `costs` whose acts take one part in so many `times` of the time, for workloads of shorter jobs."""
    acts = {name: cost / times for name, cost in structs.asdict(costs).items() if not isinstance(cost, bool)}
    return structs.replace(costs, **acts)


def parse_costs(text: str) -> Costs:
    """Return the costs of that name, or those in a TOML file; with ``/5`` behind it a fifth of all times.

    Raises
    ------
    CostsError
        If it is neither, or the file has a mistake.
    """
    if text in NAMED:
        return NAMED[text]
    path = Path(text)
    whole, slash, times = text.rpartition("/")
    if slash and times.isdecimal() and int(times) and not path.is_file():
        return shorter(parse_costs(whole), int(times))
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Costs)
    except OSError as error:
        raise CostsError(
            f"overheads are {text!r}; write none, default, or a file that can be read, or default/5 for a fifth"
        ) from error
    except msgspec.ValidationError as error:
        fields = ", ".join(Costs.__struct_fields__)
        raise CostsError(f"{path}: {in_words(error)}; it may hold {fields}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CostsError(f"{path} is not TOML: {error}; write lines such as start_s = 20") from error
