"""Training scripts in the idioms that users write end with the weights of a run alone, whatever is done to them.

What is seen of all twenty is in the table of `docs/training.md`, which `make idioms` makes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import idioms
from tests.support.stand_in import StandIn, cards

#: Suspended at its steps, as most are; `make full` has all of them, on virtual GPUs, too.
QUICK = ("plain",)

pytestmark = [pytest.mark.clock, pytest.mark.slow, pytest.mark.timeout(400)]


EACH = [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in idioms.names()]


@pytest.mark.full
@pytest.mark.parametrize("name", idioms.names())
def test_it_ends_with_the_weights_of_a_run_alone_and_as_the_table_says(tmp_path: Path, name: str) -> None:
    if lacks := idioms.missing(name):
        pytest.skip(f"{', '.join(lacks)} missing: pip install 'gpu-arbiter[dev]'")
    outcome = idioms.run(name, tmp_path)
    assert outcome.state == "finished"
    assert outcome.equal
    assert list(outcome.row) in idioms.rows_in_docs()


@pytest.mark.parametrize("name", EACH)
def test_on_nvidia_gpus_whose_driver_is_played_it_ends_so_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if lacks := idioms.missing(name):
        pytest.skip(f"{', '.join(lacks)} missing: pip install 'gpu-arbiter[dev]'")
    driver = StandIn(tmp_path / "driver", *cards(idioms.constant(name, "GPUS")))
    driver.flag("real", "all-use-cuda")
    driver.load(monkeypatch)
    outcome = idioms.run(name, tmp_path, gpus="nvml")
    assert outcome.state == "finished"
    assert outcome.equal
    assert outcome.suspensions > 0 or name == "numpy_only"  # which never uses the GPU


def test_the_table_has_a_line_for_each_of_the_twenty_scripts_of_the_folder() -> None:
    names = [row[0].split("`")[1] for row in idioms.rows_in_docs()]
    assert names == idioms.names()
    assert len(names) == 20
