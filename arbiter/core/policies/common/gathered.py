"""The gangs that get GPUs which were brought together for them (`View.gathered`), before a round's other decisions.

Leases are aligned for a gang that no round had room for (`arbiter.core.leases.alignment`). In the round that follows it
would seldom get these GPUs: dealt one by one, or auctioned, they go to apps of one GPU, and what is left has no room
for the gang. So it could wait until all others had ended. A policy that deals GPUs so serves these gangs first, in its
own order, and as far as it finds each of them worse off than the apps that have the GPUs now.

*Source:* ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from arbiter.core.placement.assignment import Holes, pick
from arbiter.core.seam import AppView, GpuView, View
from protocol.messages import AppId

Bundles = Mapping[AppId, tuple[GpuView, ...]]


def gang_bundles(
    view: View, order: Iterable[AppView], is_worse_off: Callable[[AppView, AppView], bool]
) -> Iterator[tuple[AppView, tuple[GpuView, ...]]]:
    """Yield the apps that get GPUs which were brought together, one after the other, with these GPUs.

    An app that holds GPUs already gets none in this way, nor does one whose gang is of one GPU. GPUs that no app has
    come first.

    Parameters
    ----------
    view
        The round.
    order
        The apps that may be served, in the order of their turns.
    is_worse_off
        Whether the first app is worse off than the second, which has some of the GPUs that the first would get; it is
        asked after all that was yielded before.
    """
    holders = {app.app: app for app in view.apps}
    left = {gpu.gpu: gpu for gpu in view.gpus if gpu.gpu in view.gathered}
    misfits = set()  # GPUs only become fewer, so what does not fit will not
    for app in order:
        kind = app.gang, app.spans, app.level_max, app.only
        if not 1 < app.gang <= min(app.want, len(left)) or app.kept or app.renewable or kind in misfits:
            continue
        departures = {gpu.gpu: 1 for gpu in left.values() if gpu.holder in holders}
        bundle = pick(Holes(app.usable(left.values()), departures), app, app.gang)
        if not bundle:
            misfits.add(kind)
        elif all(is_worse_off(app, holders[gpu.holder]) for gpu in bundle if gpu.holder in holders):
            for gpu in bundle:
                del left[gpu.gpu]
            yield app, tuple(bundle)
