"""Where numba cannot be had, or is told not to compile, the same auction ends the same, and says that it is slower."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from arbiter.core.policies.themis.auction import kernel

pytestmark = pytest.mark.usefixtures("compiled_auction")

ROOT = Path(__file__).parents[2]
SCRIPT = """
import json, sys
{before}
from arbiter.core.policies.themis.auction import compiled, kernel
from arbiter.core.policies.themis.policy import Settings, Themis
from msgspec.structs import replace
from tests.support.auctions import random_round, random_entry, settle
found = []
for seed in (3, 11, 345):
    entry = random_entry(seed, gpus_max=6)
    result = settle(entry)
    found.append([[a.app, a.log_c, [g.gpu for g in a.won], [g.gpu for g in a.kept]] for a in result.awards])
    found.append([result.solved.value, result.solved.worst_gap, result.solved.budget.spent])
view, bids = random_round(5)
facts = Themis(Settings(fairness_knob=0.0)).allocate(replace(view, budget_ms=1e5), bids).facts
assert facts["compiled"] == compiled.compiled_in_use(), facts
assert hasattr(kernel.search_packing, "py_func") == compiled.compiled_in_use()
print(json.dumps([compiled.compiled_in_use(), found]))
"""


def run(before: str = "", **environment: str) -> tuple[bool, object]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT.format(before=before)],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compiled, found = json.loads(done.stdout)
    return compiled, found


@pytest.mark.slow
def test_without_numba_and_without_its_compiler_the_answers_are_the_same() -> None:
    compiled, expected = run()
    assert compiled
    assert run(NUMBA_DISABLE_JIT="1") == (False, expected)
    plain = "from arbiter.core.policies.themis.auction import compiled, kernel; compiled.use_plain()"
    assert run(plain) == (False, expected)
    assert run(f"{plain}; compiled.use_compiled()") == (True, expected)
    assert run('sys.modules["numba"] = None  # what the import statement takes for "not installed"') == (
        False,
        expected,
    )


LOAD = """
import json, shutil, sys
from pathlib import Path
from arbiter.core.policies.themis.auction import compiled, kernel
from arbiter.core.policies.themis.auction.instance import load
kept, here = Path(sys.argv[1]), Path(kernel.search_packing.stats.cache_path)
found = []
for pattern in ("none", "kernel.[!s]*.nb?", "kernel.s*.nb?"):
    here.mkdir(parents=True, exist_ok=True)
    for path in kept.glob(pattern):
        shutil.copy(path, here)
    before = len(list(here.iterdir()))
    found.append([load(), compiled.compiled_in_use(), len(list(here.iterdir())) - before])
print(json.dumps(found))
"""


def test_loading_compiles_nothing_and_leaves_plain_python_unless_all_loops_are_on_disk(tmp_path: Path) -> None:
    kept = vars(kernel)["search_packing"].stats.cache_path
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOAD, kept],
        cwd=ROOT, env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[False, False, 0], [False, False, 0], [True, True, 0]]
