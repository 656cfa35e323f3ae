"""The settings of `oasis`: those of a site, and those that only evaluations and tests change."""

from __future__ import annotations

from msgspec.structs import asdict

from arbiter.core.seam import PolicySettings, require


class Settings(PolicySettings, frozen=True):
    """The settings of a site: the time slots that are for sale, and the bounds of their prices."""

    slot_s: float = 3600.0  #: GPUs are sold by time slots of so many seconds
    slots: int = 168  #: so many time slots from now on are for sale
    price_max: float = 0.0  #: U, the price of a GPU-hour of a full node; 0: by the apps seen
    price_min: float = 0.0  #: L, the price of a GPU-hour of an empty node; 0: by the apps seen

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        _require_between(self, "slot_s", 1e-3, 1e9)
        _require_between(self, "slots", 1, 10_000)
        _require_between(self, "price_max", 0.0, 1e12)
        _require_between(self, "price_min", 0.0, 1e12)
        if 0.0 < self.price_max < self.price_min:
            raise ValueError(
                f"price_max is {self.price_max}, below price_min ({self.price_min}); raise it, or leave it out"
            )


class Terms(Settings, frozen=True):
    """These, and what no site sets. Evaluations and tests register `Oasis` with these settings to vary them."""

    margin: float = 0.1  #: books so much more than the work that apps say is left
    second_look: bool = True  #: apps that are booked are moved where all are worth more; off: as published
    promise: float = 0.5  #: an app that is moved keeps at least this part of what it was told it would be worth

    def __post_init__(self) -> None:
        """Refuse what is out of range."""
        super().__post_init__()
        _require_between(self, "margin", 0.0, 10.0)
        _require_between(self, "promise", 0.0, 1.0)


def terms_of(settings: Settings) -> Terms:
    """Return all that `oasis` sells by."""
    return settings if isinstance(settings, Terms) else Terms(**asdict(settings))


def _require_between(settings: Settings, name: str, least: float, most: float) -> None:
    value = getattr(settings, name)
    require(least <= value <= most, name, value, f"from {least:g} to {most:g}")
