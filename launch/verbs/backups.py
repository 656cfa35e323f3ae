"""`backup`, `restore`, `journal`: the arbiter's journal and ledger, copied, brought back, and looked over."""

from __future__ import annotations

import tempfile
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer
from msgspec.structs import replace as with_fields

from launch.faults import Fault
from launch.surface import answering, emit, note, plural, say, wants_json
from protocol import exit_codes
from protocol.release import release

if TYPE_CHECKING:
    from arbiter.backup import About
    from arbiter.config import ArbiterConfig

Config = Annotated[Path, typer.Option("--config", "-c", help="the arbiter's TOML file, which says where they are")]
JournalFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="in place of its journal_file, which the service alone can read: the address"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]


def add(app: typer.Typer) -> None:
    """Add this group's verbs to `app`."""
    app.command()(backup)
    app.command()(restore)
    app.command()(journal)


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the new file")],
    config: Config,
    journal_file: JournalFile = None,
    json: Json = False,
) -> None:
    """Copy the arbiter's journal and ledger into one file, also while the arbiter runs.

    gpu-arbiter backup /backup/site.gab --config /etc/gpu-arbiter/arbiter.toml
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from arbiter import backup as backups
        from launch.site.service import faults

        with faults():
            about = backups.write(_loaded(config, journal_file), file, program=release())
        if as_json:
            emit(_document("backup/v1", about))
        else:
            say(f"{file}: {_in_words(about)}")


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a file that `backup` has made")],
    config: Config,
    replace: Annotated[
        bool, typer.Option("--replace", help="put aside the journal that is there; one in a database is deleted")
    ] = False,
    journal_file: JournalFile = None,
    json: Json = False,
) -> None:
    """Bring a backup back, into the store that the configuration names. Then start the arbiter.

    gpu-arbiter restore /backup/site.gab --config /etc/gpu-arbiter/arbiter.toml

    It may have been made of another store: of files, and be restored into a database. The arbiter listens first, and
    keeps what runs.
    """
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from arbiter import backup as backups
        from launch.site.service import faults

        with faults():
            about = backups.restore(_loaded(config, journal_file), file, program=release(), replace=replace)
        if as_json:
            emit(_document("restored/v1", about))
        else:
            say(f"restored {_in_words(about)}")
            note("what was decided since is forgotten; the arbiter says in its log how much, once it has listened")


def journal(
    action: Annotated[Literal["check"], typer.Argument(help="check: replay it, and compare the state with snapshots")],
    config: Config,
    file: Annotated[Path | None, typer.Option("--file", help="check this backup, and not what is there now")] = None,
    journal_file: JournalFile = None,
    json: Json = False,
) -> None:
    """Replay the arbiter's journal as far back as it goes; exit 1 if the state is not what it was.

    gpu-arbiter journal check --config /etc/gpu-arbiter/arbiter.toml
    """
    assert action == "check", "there is no other"
    as_json = wants_json(json)
    with answering(as_json=as_json):
        from arbiter import backup as backups
        from launch.site.service import faults

        with faults(), tempfile.TemporaryDirectory(prefix="gpu-arbiter-check-") as folder:
            looked_at = file or Path(folder) / "journal.gab"
            if file is None:
                backups.write(_loaded(config, journal_file), looked_at, program=release())
            with closing(backups.Backup(looked_at, program=release())) as opened:
                about, checked = opened.about, opened.check()
        replayed = f"{plural(checked.events, 'event')} of {about.place} replayed"
        agreed = plural(checked.agreed, "snapshot")
        fields = {"place": about.place, **msgspec.to_builtins(checked)}
        if checked.differs_after is not None:
            raise Fault(
                f"{replayed}; after event {checked.differs_after} the state is not what it was",
                code=exit_codes.FAILED,
                next_step=f"check it with the version that wrote it ({about.program}); if that differs too, report it",
                done=fields,
            )
        if as_json:
            emit({"schema": "journal-check/v1", **fields})
        else:
            say(f"{replayed}, and the state was that of {agreed}")


def _loaded(config: Path, journal_file: Path | None) -> ArbiterConfig:
    """Return the arbiter's configuration, with the file that names its database if one is given."""
    from arbiter.config import load

    found = load(config)
    return found if journal_file is None else with_fields(found, journal="", journal_file=str(journal_file))


def _in_words(about: About) -> str:
    counts = f"{plural(about.events, 'event')}, {plural(about.snapshots, 'snapshot')}"
    newest = f"the newest of {datetime.fromtimestamp(about.at, UTC):%Y-%m-%d %H:%M:%S} UTC" if about.at else "none yet"
    return f"{counts} ({newest}) and {plural(about.records, 'record')} of the ledger, from {about.place}"


def _document(schema: str, about: About) -> dict[str, object]:
    times = {name: datetime.fromtimestamp(getattr(about, name), UTC).isoformat() for name in ("made_at", "at")}
    return {"schema": schema, **msgspec.to_builtins(about), **times}
