"""`make check` and `make full` see to the programs that tests need; where one cannot be had, they say so.

RabbitMQ, PostgreSQL and Prometheus would start a service, which a policy forbids for as long as they are installed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import postgres
from tests.support.needs import lack
from tests.support.pages import ROOT

SCRIPTS = ROOT / "scripts"
EACH = pytest.mark.parametrize(
    "script", ["ensure-chromium.sh", "ensure-postgres.sh", "ensure-prometheus.sh", "ensure-rabbitmq.sh"]
)


def ensured(folder: Path, **programs: str) -> subprocess.CompletedProcess[str]:
    """Run the script of Prometheus where there are these programs alone, each a text for the shell."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return subprocess.run(
        ("/bin/sh", str(SCRIPTS / "ensure-prometheus.sh")),
        env={"PATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_quiet_where_both_programs_are_there(tmp_path: Path) -> None:
    done = ensured(tmp_path, prometheus="", promtool="")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@EACH
def test_it_runs_from_its_own_folder_as_from_any_other(tmp_path: Path, script: str) -> None:
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    for folder, name in ((SCRIPTS, script), (SCRIPTS, f"./{script}"), (SCRIPTS.parent, f"scripts/{script}")):
        line = ("/bin/sh", name)
        done = subprocess.run(
            line, cwd=folder, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
        )
        assert (done.returncode, "ensure.sh" in done.stderr) == (0, False), done.stderr


@pytest.mark.parametrize(("programs", "why"), [({"id": "echo 1000"}, "needs root"), ({"id": "echo 0"}, "no apt-get")])
def test_where_it_cannot_be_installed_it_names_the_mend_and_does_not_fail(
    tmp_path: Path, programs: dict[str, str], why: str
) -> None:
    done = ensured(tmp_path, promtool="", **programs)
    assert (done.returncode, done.stdout) == (0, "")
    assert why in done.stderr
    assert "sudo apt-get install --no-install-recommends prometheus" in done.stderr


def installing(folder: Path, script: str, apt_get: str, ci: str = "") -> subprocess.CompletedProcess[str]:
    """Run a script for root, with another place for the policy, where apt-get is this text for the shell."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("rm", "chmod"):
        (programs / name).symlink_to(str(shutil.which(name)))
    for name, text in {"id": "echo 0", "apt-get": apt_get}.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    texts = {name: (SCRIPTS / name).read_text() for name in (script, "ensure.sh")}
    assert "".join(texts.values()).count("/usr/sbin/policy-rc.d") == 1
    for name, text in texts.items():
        ours = text.replace("/usr/sbin/", f"{folder}/sbin/").replace("/usr/lib/", f"{folder}/nothing/")
        (folder / name).write_text(ours)
    # The tests themselves may run where an interrupt is ignored.
    line = (str(shutil.which("env")), "--default-signal", "/bin/sh", str(folder / script))
    return subprocess.run(line, env={"PATH": str(programs), "CI": ci}, capture_output=True, text=True, check=False)


@EACH
@pytest.mark.parametrize(("signal", "status"), [("HUP", 129), ("INT", 130), ("TERM", 143)])
def test_a_policy_does_not_outlast_a_script_that_is_interrupted(
    tmp_path: Path, script: str, signal: str, status: int
) -> None:
    policy = tmp_path / "sbin" / "policy-rc.d"
    policy.parent.mkdir()
    done = installing(tmp_path, script, f'[ -x "{policy}" ] && echo forbidden >&2; kill -{signal} $PPID')
    assert "forbidden" in done.stderr, "the policy was there while apt-get ran"
    assert done.returncode == status
    assert not policy.exists()


@EACH
def test_a_policy_of_another_hand_stays(tmp_path: Path, script: str) -> None:
    policy = tmp_path / "sbin" / "policy-rc.d"
    policy.parent.mkdir()
    policy.write_text("another's")
    assert installing(tmp_path, script, "exit 100").returncode == 0
    assert policy.read_text() == "another's"


@EACH
def test_where_the_policy_cannot_be_written_nothing_is_installed_and_the_target_goes_on(
    tmp_path: Path, script: str
) -> None:
    done = installing(tmp_path, script, "echo asked >&2")
    assert (done.returncode, done.stdout) == (0, "")
    if script == "ensure-chromium.sh":  # it has no service to keep from starting
        assert done.stderr.count("asked") == 2, done.stderr
        return
    assert "policy-rc.d, which keeps its service from starting, cannot be written" in done.stderr
    assert "asked" not in done.stderr


@EACH
def test_packages_that_cannot_be_had_are_not_waited_for(tmp_path: Path, script: str) -> None:
    (tmp_path / "sbin").mkdir()
    done = installing(tmp_path, script, 'echo "asked: $*" >&2; [ "$6" != install ]')
    asked = [line for line in done.stderr.splitlines() if line.startswith("asked:")]
    assert [line.split()[6] for line in asked] == ["update", "install"]
    assert all("-o Acquire::http::Timeout=15 -o Acquire::Retries=0" in line for line in asked)
    assert (done.returncode, "apt-get install failed" in done.stderr) == (0, True)
    assert not (tmp_path / "sbin" / "policy-rc.d").exists()


@EACH
def test_in_ci_the_tests_on_a_real_broker_and_a_real_database_may_not_be_skipped(tmp_path: Path, script: str) -> None:
    (tmp_path / "sbin").mkdir()
    done = installing(tmp_path, script, "exit 100", ci="true")
    assert done.returncode == (1 if script in ("ensure-rabbitmq.sh", "ensure-postgres.sh") else 0)


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_test_that_lacks_its_program_is_skipped_and_in_ci_fails(
    monkeypatch: pytest.MonkeyPatch, ci: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setattr(postgres, "PROGRAMS", Path("/nowhere"))
    ends = (pytest.fail.Exception, pytest.skip.Exception)
    with pytest.raises(ends, match=r"PostgreSQL is not installed: run scripts/ensure-postgres\.sh") as raised:
        lack(postgres.missing())
    assert raised.type is outcome


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize("target", ["plain", "full"])
def test_make_sees_to_it_before_the_tests(target: str) -> None:
    done = subprocess.run(("make", "-n", target), cwd=ROOT, capture_output=True, text=True, check=True)
    ensure, _, tests = done.stdout.partition("-m pytest")
    for script in ("ensure-postgres.sh", "ensure-prometheus.sh"):
        assert f"sh scripts/{script}\n" in ensure
    assert tests
