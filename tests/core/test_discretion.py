"""What a task has printed is told to its owner only, in whatever answer; and the ledger has none of it."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
import pytest
from msgspec.structs import replace

from arbiter.core.effects import EventRecord
from arbiter.discretion import told_to
from arbiter.queries import Queries
from protocol.log_ends import INSTEAD, MARK, SAID_INSTEAD, SAID_MARK, with_log_end, with_script_words, without_log_end
from protocol.messages import Answer, AppId, NodeId, Party, Query, QueryKind, TaskId
from tests.core.test_reports import Books
from tests.support.arbiter_site import TEAM, task

PRINTED = "the-password-is-tr0ub4dor"
WHY = with_log_end("exited with code 3", f"Traceback:\n  {PRINTED} ) (")
SAID = with_script_words(f"told to leave by SIGTERM as it refused: the checkpoint of step 7 failed: OSError: {PRINTED}")
#: Of them, those that nobody answers by a document of the arbiter's.
NO_DOCUMENT = {"log", "terminal", "dry-run", "report"}


def fail(books: Books, app: str = "ana-1", why: str = WHY) -> None:
    """An app whose task has failed; its app agent says why, in the words of the node."""
    site = books.site
    books.note(site.app(app) + site.wait(0.0))
    gpus = site.held(app)
    assert gpus
    over = task(app, 0, gpus, "exited", outcome="failed", exit_code=3, reason=why)
    books.note(site.node("n1", tasks=[*books.others, task(app, 0, gpus)], used=[*gpus, *books.others[0].gpus]))
    books.note(site.node("n1", tasks=[*books.others, over], used=books.others[0].gpus))
    books.note(site.app(app, state="failed", reason=f"{app}.0 failed: {why}; and 2 more"))


@pytest.fixture
def books() -> Books:
    """ana-2 has failed, and ben-1 of another owner trains on."""
    made = Books()
    fail(made, "ana-2")
    return made


def answer(books: Books, sender: Party, kind: QueryKind, target: str = "") -> Answer:
    query = Query("q", kind, target)
    (send,) = Queries(books.site.arbiter, books.ledger).ask(sender, query, books.site.now)
    assert isinstance(send.message, Answer)
    return send.message


@pytest.mark.parametrize("sender", [Party("app", "ben"), Party("app", "admin"), Party("node", "ana")], ids=str)
def test_no_answer_to_anyone_else_holds_what_a_task_has_printed(books: Books, sender: Party) -> None:
    books.site.arbiter.state.settings = replace(books.site.arbiter.state.settings, admins=("admin",))
    for kind in sorted({*get_args(QueryKind)} - NO_DOCUMENT):
        for target in ("", "ana-2", "ana-2.0-a0", "GPU-n1-0", "n1", "owner", "app-ana"):
            told = answer(books, sender, kind, target)
            assert PRINTED not in told.document.decode() + told.error, (kind, target)
    story = answer(books, sender, "explain", "ana-2").document.decode()
    assert f"ana-2.0-a0 on n1 is exited: failed (exited with code 3{INSTEAD})" in story


def test_no_answer_to_anyone_else_holds_what_a_save_function_has_raised() -> None:
    books = Books()
    fail(books, "ana-2", SAID)
    for kind in sorted({*get_args(QueryKind)} - NO_DOCUMENT):
        for target in ("", "ana-2", "ana-2.0-a0", "GPU-n1-0", "n1", "owner", "app-ana"):
            told = answer(books, Party("app", "ben"), kind, target)
            assert PRINTED not in told.document.decode() + told.error, (kind, target)
    assert PRINTED in answer(books, Party("app", "ana"), "explain", "ana-2").document.decode()
    events = answer(books, Party("app", "ana"), "events").document.decode()
    assert PRINTED not in events, "the ledger is kept for longer than the logs"
    assert f"the checkpoint of step 7 failed{SAID_INSTEAD}" in events


def test_the_owner_is_told_how_the_log_ends(books: Books) -> None:
    ana = Party("app", "ana")
    explained = msgspec.json.decode(answer(books, ana, "explain", "ana-2").document)
    assert explained["reason"].endswith(f"{WHY}; and 2 more")
    assert [each["what"] for each in explained["story"] if PRINTED in each["what"]]
    (app,) = msgspec.json.decode(answer(books, ana, "apps", "ana-2").document)["apps"]
    assert [each["reason"] for each in app["tasks"]] == [WHY]


def test_the_ledger_tells_that_a_task_has_failed_and_nothing_of_what_it_printed(books: Books) -> None:
    told = msgspec.json.decode(answer(books, Party("app", "ana"), "events").document)["events"]
    about = {each["kind"]: each["what"] for each in told if each["app"] == "ana-2"}
    assert about["exited"] == f"ana-2.0-a0 on n1, failed (exited with code 3{INSTEAD})"
    assert about["failed"] == f"ana-2.0 failed: exited with code 3{INSTEAD}"


def test_what_an_earlier_version_wrote_into_the_ledger_is_for_the_owner_too(books: Books) -> None:
    names = (AppId("ana-9"), TEAM, NodeId("n1"), TaskId("ana-9.0-a0"))
    books.ledger.write(EventRecord(9_000, 1.0, "exited", f"ana-9.0-a0 on n1, failed ({WHY})", *names))
    for kind, target in (("explain", "ana-9"), ("explain", "ana-9.0"), ("events", "")):
        for owner in ("ana", "ben"):
            told = answer(books, Party("app", owner), kind, target)  # type: ignore[arg-type]
            assert told.error == ""
            assert (PRINTED in told.document.decode()) is (owner == "ana"), (kind, target, owner)


@pytest.mark.parametrize(
    ("document", "visible"),
    [
        ({"owner": "ana", "reason": WHY}, True),
        ({"app": "ana-2", "deep": [{"reason": [WHY]}]}, True),
        ({"app": "ben-2", "reason": WHY}, False),
        ({"app": "ana-2", "rivals": [{"app": "ben-2", "reason": WHY}]}, False),
        ({"app": None, "what": WHY}, False),
        ({"owner": 1.0, "what": WHY}, False),
        ({"page": msgspec.Raw(msgspec.json.encode({"app": "ben-2", "reason": WHY}))}, False),
        ({"page": [msgspec.Raw(msgspec.json.encode({"owner": "ana", "reason": WHY}))]}, True),
        ({"task": task("ana-2", 0, (), reason=WHY)}, True),
        ({"task": task("ben-2", 0, (), reason=WHY)}, False),
    ],
)
def test_a_part_of_a_document_belongs_to_the_owner_of_the_app_that_it_names(document: Any, *, visible: bool) -> None:
    assert (PRINTED in msgspec.json.encode(told_to("ana", document)).decode()) is visible
    assert PRINTED not in msgspec.json.encode(told_to("", document)).decode()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("exited with code 3", "exited with code 3"),
        (f"a{MARK}b", f"a{INSTEAD}"),
        (f"is exited (a{MARK}b)", f"is exited (a{INSTEAD})"),
        (f"a{MARK}b{MARK}c", f"a{INSTEAD}"),
        (f"(x) a{MARK}b", f"(x) a{INSTEAD}"),
        (f"is left (a{SAID_MARK}b); c", f"is left (a{SAID_INSTEAD})"),
        (f"a{SAID_MARK}b{MARK}c", f"a{SAID_INSTEAD}"),
        (f"a{MARK}b{SAID_MARK}c", f"a{INSTEAD}"),
    ],
)
def test_all_behind_the_mark_is_left_out(text: str, told: str) -> None:
    assert without_log_end(text) == told
