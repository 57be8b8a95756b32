"""Hostfiles: one line a host, `NAME slots=N`, as DeepSpeed's launcher reads them."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ds_fp8.config.errors import UserError

MAX_BYTES = 1 << 20
MAX_SLOTS = 1024
"""More GPUs than any host has: a number above is a slip, and a launcher would start as many processes."""
# What ssh, pdsh and a shell take for one name: no lists ([1-4] or commas), no options, no quoting.
_NAME = re.compile(r"([A-Za-z0-9_.-]+@)?[A-Za-z0-9_][A-Za-z0-9_.:-]*")
_SLOTS = re.compile(r"slots=([0-9]{1,9})")
_EXAMPLE = '"node1 slots=8"'


@dataclass(frozen=True)
class Host:
    """A host of a job."""

    name: str
    """Name or address for ssh."""
    slots: int
    """Ranks to start there: one a GPU."""


def read_hostfile(path: str | os.PathLike) -> list[Host]:
    """Read a hostfile.

    Empty lines and everything after "#" are skipped.

    Raises:
        UserError: names file, line and remedy, for lines that DeepSpeed's launcher would fail at or misread.
    """
    file = Path(path)
    try:
        with file.open("rb") as content:
            # One byte more than is allowed tells a file that is too large, without reading all of it.
            data = content.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except FileNotFoundError:
        raise UserError("the hostfile does not exist", file=file, remedy=f"write one line a host: {_EXAMPLE}") from None
    except UnicodeDecodeError:
        raise UserError(
            "the hostfile is not a text file", file=file, remedy=f"write one line a host: {_EXAMPLE}"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"the hostfile cannot be read ({reason})", file=file, remedy="check the path") from None
    if len(data) > MAX_BYTES:
        raise UserError(f"the hostfile has more than {MAX_BYTES} bytes", file=file, remedy="give a hostfile")
    return parse_hostfile(text, file)


def parse_hostfile(text: str, file: Path) -> list[Host]:
    """Parse a hostfile's text.

    Args:
        text: What the file holds.
        file: Its name, for errors.

    Raises:
        UserError: As of `read_hostfile`.
    """
    # With line numbers, for the message about a host listed twice.
    hosts: dict[str, tuple[int, Host]] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        host = _host(words, f"line {number}", file)
        if host.name in hosts:
            raise UserError(
                f"line {number}: {host.name} is already in line {hosts[host.name][0]}",
                file=file,
                remedy="give each host one line with all of its slots",
            )
        hosts[host.name] = number, host
    if not hosts:
        raise UserError("the hostfile lists no hosts", file=file, remedy=f"write one line a host: {_EXAMPLE}")
    return [host for _, host in hosts.values()]


def _host(words: list[str], line: str, file: Path) -> Host:
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise UserError(
            f"{line}: {_shown(name)} is not a host name",
            file=file,
            remedy=f"a name or address as for ssh, and one host a line: {_EXAMPLE}",
        )
    slots = _SLOTS.fullmatch(rest[0]) if len(rest) == 1 else None
    if slots is None:
        after = (
            f"{_shown(' '.join(rest))} after the name is not slots=N" if rest else "slots=N is missing after the name"
        )
        raise UserError(f"{line}: {after}", file=file, remedy=f"slots=N, N GPUs of that host: {_EXAMPLE}")
    if not 0 < int(slots[1]) <= MAX_SLOTS:
        raise UserError(f"{line}: {slots[1]} slots", file=file, remedy=f"1 to {MAX_SLOTS}: the GPUs of that host")
    return Host(name, int(slots[1]))


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 60 else text[:57] + "...")
