"""When the certificates expire that the address of a broker names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit


def named_in(url: str) -> Sequence[Path]:
    """Return the files with certificates that the address of a broker names: the authority's, and one's own."""
    named = dict(parse_qsl(urlsplit(url).query))
    return [Path(named[name]) for name in ("cafile", "certfile") if name in named]


def expiry(path: Path) -> datetime:
    """Return when the first of the certificates in a file expires.

    Raises
    ------
    ImportError
        If the library that reads certificates is not installed (the extra `users`).
    OSError, ValueError
        If the file cannot be read, or holds no certificate.
    """
    from cryptography import x509

    ends: list[datetime] = [each.not_valid_after_utc for each in x509.load_pem_x509_certificates(path.read_bytes())]
    return min(ends)


def ends(paths: Sequence[Path]) -> Mapping[str, float]:
    """Return when the first certificate of each file expires, UNIX seconds; of those that can be read here.

    A file is read again only when it has changed.
    """
    found = dict[str, float]()
    for path in paths:
        with suppress(ImportError, OSError, ValueError):  # `doctor` tells why
            found[str(path)] = _end(path, path.stat().st_mtime_ns)
    return found


@lru_cache(maxsize=16)
def _end(path: Path, _changed_ns: int) -> float:
    return expiry(path).timestamp()
