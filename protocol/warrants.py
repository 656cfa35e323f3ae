"""Signed launches: how a gateway signs a launch, and how a launcher checks that it did.

The signed text is one line of JSON with sorted keys, made anew from the fields on both sides. So a launcher has checked
every field that it uses, and no field can be altered, added or left out on the way. Ed25519 (RFC 8032) by the package
`cryptography`, in the extra ``users``.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from protocol.messages import AppId, JobId, LaunchSpec, Warrant

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

#: The first words of each statement: the same key signs nothing else that could be taken for a launch.
PURPOSE = "a launch for gpu-arbiter, 1"


class WarrantError(Exception):
    """A key or a signature cannot be used; the message names the file or the field, and the mend."""


def statement(launch: LaunchSpec, warrant: Warrant, *, app: AppId, job: JobId, attempt: int) -> bytes:
    """Return the bytes that a gateway signs: all of the launch and of the warrant but for the signature."""
    said = {
        "purpose": PURPOSE,
        "app": app,
        "job": job,
        "attempt": attempt,
        "command": launch.command,
        "cwd": launch.cwd,
        "checkpoint_dir": launch.checkpoint_dir,
        "env": launch.env,
        "run": launch.run,
        "secrets": launch.secrets,
        "gateway": warrant.gateway,
        "user": warrant.user,
        "uid": warrant.uid,
        "gids": warrant.gids,
        "gpus": warrant.gpus,
        "signed_at_s": warrant.signed_at_s,
    }
    if launch.terminal is not None:  # left out else, so that a launcher of the version before checks what it knows
        said["terminal"] = {"idle_s": launch.terminal.idle_s}
    return json.dumps(said, sort_keys=True, separators=(",", ":")).encode("ascii")


def signed(
    launch: LaunchSpec, warrant: Warrant, key: Ed25519PrivateKey, *, app: AppId, job: JobId, attempt: int
) -> LaunchSpec:
    """Return `launch` with `warrant`, signed by the gateway's `key`."""
    signature = key.sign(statement(launch, warrant, app=app, job=job, attempt=attempt)).hex()
    return replace(launch, warrant=replace(warrant, signature=signature))


def is_signed(launch: LaunchSpec, key: Ed25519PublicKey, *, app: AppId, job: JobId, attempt: int) -> bool:
    """Whether the holder of `key` has signed this launch, as it is here, for this attempt of this job."""
    from cryptography.exceptions import InvalidSignature

    if launch.warrant is None:
        return False
    said = statement(launch, launch.warrant, app=app, job=job, attempt=attempt)
    try:
        key.verify(bytes.fromhex(launch.warrant.signature), said)
    except InvalidSignature:
        return False
    return True


def check_available() -> None:
    """Raise `WarrantError` if nothing can be signed or checked here."""
    if importlib.util.find_spec("cryptography") is None:
        raise WarrantError("signed launches need the package cryptography; install gpu-arbiter[users]")


def make_key(path: Path) -> None:
    """Write a new private key to `path` (PEM, for this user only), and its public key to ``path.pub``.

    Raises
    ------
    WarrantError
        If one of the files is there already, or cannot be written.
    """
    check_available()
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    for file, content, mode in ((path, private, 0o600), (public_file(path), public, 0o644)):
        try:
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        except OSError as error:
            raise WarrantError(f"the key {file} cannot be written: {error.strerror}; name another file") from error
        with os.fdopen(descriptor, "wb") as opened:
            opened.write(content)


def public_file(path: Path) -> Path:
    """Return where the public key of the private key at `path` is."""
    return path.with_name(path.name + ".pub")


def private_key(path: Path) -> Ed25519PrivateKey:
    """Return the private key in a PEM file.

    Raises
    ------
    WarrantError
        If the file cannot be read, other users may read it, or it holds no such key.
    """
    check_available()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    content, mode = _read(path)
    if mode & 0o077:
        raise WarrantError(f"other users may use the key {path}; run: chmod 600 {path}")
    try:
        key = load_pem_private_key(content, password=None)
    except (ValueError, TypeError) as error:
        raise WarrantError(f"{path} holds no private key in PEM without a password; {error}") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise WarrantError(f"{path} holds no Ed25519 key; move it away, and the gateway makes one at its next start")
    return key


def public_key(path: Path) -> Ed25519PublicKey:
    """Return the public key in a PEM file.

    Raises
    ------
    WarrantError
        If the file cannot be read, users other than its owner may write to it, or it holds no such key.
    """
    check_available()
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    content, mode = _read(path)
    if mode & 0o022:
        raise WarrantError(f"other users may change the key {path}; run: chmod 644 {path}")
    try:
        key = load_pem_public_key(content)
    except ValueError as error:
        raise WarrantError(f"{path} holds no public key in PEM; copy the .pub file of the gateway there") from error
    if not isinstance(key, Ed25519PublicKey):
        raise WarrantError(f"{path} holds no Ed25519 key; copy the .pub file of the gateway there")
    return key


def _read(path: Path) -> tuple[bytes, int]:
    try:
        with path.open("rb") as file:
            return file.read(2**16), os.fstat(file.fileno()).st_mode
    except OSError as error:
        raise WarrantError(f"the key {path} cannot be read: {error.strerror}") from error
