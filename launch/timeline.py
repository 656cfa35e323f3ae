"""A picture of the leases: the app on each GPU over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.surface import Document


def draw(spans: Sequence[Document], names: dict[str, str], path: Path) -> None:
    """Write a PNG with one row per GPU and one bar per lease; `names` gives each app's label.

    `spans` are leases as in ``leases/v1``: gpu, node, app, from and to in UNIX seconds. Needs matplotlib.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = sorted({(str(span["node"]), str(span["gpu"])) for span in spans})
    apps = sorted({str(span["app"]) for span in spans})
    colours = {app: plt.get_cmap("tab20")(index % 20) for index, app in enumerate(apps)}
    start = min((float(span["from"]) for span in spans), default=0.0)
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.42 * max(1, len(rows))), layout="constrained")
    for span in spans:
        row = rows.index((str(span["node"]), str(span["gpu"])))
        begin, length = float(span["from"]) - start, float(span["to"]) - float(span["from"])
        axes.barh(
            row, length, left=begin, height=0.8, color=colours[str(span["app"])], edgecolor="white", linewidth=0.4
        )
    axes.set_yticks(range(len(rows)), [gpu for _node, gpu in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.set_title("leases by GPU")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[app]) for app in apps]
    axes.legend(handles, [names.get(app, app) for app in apps], loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
