"""Profiles: our own table, measurements in place of it, and the crude factors where nothing is known."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.messages import LEVELS
from simulator import profiles
from simulator.profiles import ProfileError, built_in, crude, measured, models
from tests.support.traces import shared

DATA = Path(__file__).resolve().parents[1] / "data" / "simulation" / "measured"


def test_unknown_models_take_the_crude_factors_of_themis() -> None:
    for known in (crude(), built_in()):
        assert [known.slowdown("no-such-model", 4, level) for level in LEVELS] == [1.0, 1.0, 1.1, 1.3]


def test_our_own_table_tells_network_intensive_models_from_others() -> None:
    own = built_in()
    assert [own.slowdown("VGG-16", 2, level) for level in LEVELS] == [1.0, 1.0, 1.3, 2.0]
    assert [own.slowdown("resnet50", 8, level) for level in LEVELS] == [1.0, 1.0, 1.05, 1.1]
    assert own.slowdown("ResNet-50", 8, "rack") == 1.05
    mild = [row.cluster for row in models() if not row.network_intensive]
    strong = [row.cluster for row in models() if row.network_intensive]
    assert max(mild) <= 1.15 < 1.5 <= min(strong)
    assert all(1 <= row.rack <= row.cluster for row in models())
    assert all(0 < row.busy <= 1 for row in models())


def test_one_gpu_is_never_apart_from_itself() -> None:
    assert built_in().slowdown("vgg16", 1, "cluster") == 1.0
    assert crude().slowdown("vgg16", 1, "cluster") == 1.0


def test_two_on_a_gpu_run_as_fast_as_fits() -> None:
    own = built_in()
    assert own.interference("resnet50", "cyclegan") == pytest.approx((1 / 1.85, 1 / 1.85))
    assert own.interference("a3c", "lm") == (1.0, 1.0)
    assert own.interference("unknown", "lm") == pytest.approx((1 / 1.28, 1 / 1.28))
    assert sum(crude().interference("x", "y")) == pytest.approx(1.37, abs=0.001)


def test_measured_slowdowns_are_the_median_over_ways_to_spread_on_one_cluster() -> None:
    known = measured(DATA)
    assert known.slowdown("bert", 2, "rack") == 2.0
    assert known.slowdown("bert", 4, "rack") == 1.8  # of 2.8, 1.8, 1.6
    assert known.slowdown("bert", 3, "rack") == 2.0  # not measured: the next smaller
    assert known.slowdown("bert", 8, "rack") == 1.8  # on two nodes in any case: not what is asked
    assert known.slowdown("bert", 4, "cluster") == pytest.approx(1.8 * 1.3 / 1.1)
    assert known.slowdown("bert", 4, "machine") == 1.0
    assert known.slowdown("cifar10", 2, "rack") == known.slowdown("cifar10", 2, "cluster") == 1.0  # apart was faster
    assert known.slowdown("LM", 2, "rack") == 4.2
    assert known.slowdown("LM", 1, "rack") == 1.0


def test_what_was_not_measured_comes_from_our_own_table() -> None:
    assert measured(DATA).slowdown("vgg16", 2, "cluster") == 2.0
    assert measured(DATA).interference("vgg16", "lm") == built_in().interference("vgg16", "lm")


def test_measured_pairs_are_the_median_of_those_that_fit() -> None:
    known = measured(DATA)
    assert known.interference("ResNet-50", "LM") == (0.8, 0.5)
    assert known.interference("LM", "ResNet-50") == (0.5, 0.8)
    assert known.interference("CycleGAN", "LM") == (0.0, 0.0)  # most batch sizes do not fit
    assert known.interference("A3C", "A3C") == built_in().interference("A3C", "A3C")  # another type of GPU


def test_a_folder_without_tables_and_a_table_without_columns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match=r"holds no table; give one with any of placement/slowdown.csv"):
        measured(tmp_path)
    (tmp_path / "placement").mkdir()
    table = tmp_path / "placement" / "slowdown.csv"
    table.write_text("cluster,model,gpus,packed_nodes\naws,bert,2,1\n")
    with pytest.raises(ProfileError, match=r"slowdown.csv lacks the columns slowdown_median; add them"):
        measured(tmp_path)
    table.write_text("cluster,model,gpus,packed_nodes,slowdown_median\naws,bert,2,1,fast\n")
    with pytest.raises(ProfileError, match=r"slowdown_median of .* is 'fast'; give a number"):
        measured(tmp_path)


def test_recorded_measurements_show_who_suffers_from_lying_apart() -> None:
    known = measured(shared("traces"))
    assert known.slowdown("bert", 2, "rack") == 1.9639
    assert known.slowdown("imagenet", 4, "rack") == pytest.approx(1.0339)
    assert known.slowdown("LM", 2, "rack") == pytest.approx(4.3426)
    assert known.slowdown("ResNet-50", 8, "rack") == 1.0
    a, b = known.interference("ResNet-18", "LM")
    assert 0 < a <= 1
    assert 0 < b <= 1
    assert known.interference("LM", "ResNet-18") == (b, a)


def test_names_are_the_same_however_they_are_written() -> None:
    assert {profiles.key_of(name) for name in ("ResNet-50", "resnet50", "RESNET_50")} == {"resnet50"}
