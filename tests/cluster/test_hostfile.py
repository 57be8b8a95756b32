"""A hostfile is read as DeepSpeed reads it, or refused with file, line and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from deepspeed.launcher.runner import fetch_hostfile
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_fp8.cluster.hostfile import Host, parse_hostfile, read_hostfile
from ds_fp8.config.errors import UserError

FILE = Path("hostfile")


def test_hosts_come_in_the_order_of_their_lines():
    text = "# the cluster\nnode1 slots=8\n\n  node2\tslots=4   # four of them broke\nadmin@10.0.0.3 slots=8\r\n"
    assert parse_hostfile(text, FILE) == [Host("node1", 8), Host("node2", 4), Host("admin@10.0.0.3", 8)]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "lists no hosts"),
        ("# node1 slots=8\n", "lists no hosts"),
        ("node1 slots=8\nnode2\n", "line 2: slots=N is missing after"),
        ("node1 8", "line 1: '8' after the name"),
        ("node1 slots=8 max_slots=8", "after the name is not slots=N"),
        ("node1 slots=0", "line 1: 0 slots"),
        ("node1 slots=99999", "line 1: 99999 slots"),
        ("node1 slots=1" + "0" * 5000, "after the name is not slots=N"),
        ("node1 slots=-1", "after the name is not slots=N"),
        ("node1 slots=٣", "after the name is not slots=N"),
        ("node1 slots=8\nnode1 slots=4", "line 2: node1 is already in line 1"),
        ("node[1-4] slots=8", "is not a host name"),
        ("node1,node2 slots=8", "is not a host name"),
        ("-oProxyCommand=x slots=8", "is not a host name"),
        ("$(reboot) slots=8", "is not a host name"),
        ("slots=8", "is not a host name"),
        ("ho\x00st slots=8", "is not a host name"),
    ],
)
def test_a_mistake_is_named_with_its_line(text, problem):
    with pytest.raises(UserError, match=problem) as error:
        parse_hostfile(text, FILE)
    assert error.value.file == FILE
    assert error.value.remedy


def test_what_is_no_readable_text_is_refused(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00n")
    (tmp_path / "long").write_bytes(b"a" * (2 << 20))
    for name in ("missing", "binary", "long", ".", "nul\0"):
        with pytest.raises(UserError):
            read_hostfile(tmp_path / name)


LINES = st.one_of(
    st.text(max_size=40),
    st.from_regex(r"\A[a-z0-9.@:-]{1,12}[ \t]{1,2}slots=[0-9]{1,4}[ \t]*\Z"),
    st.sampled_from(["node1 slots=8", "node2 slots=8", "node1", "slots=8", "# x", "", "n  slots = 8", "n slots=8x"]),
)
HOSTFILES = st.one_of(st.binary(max_size=200), st.lists(LINES, max_size=6).map(lambda lines: "\n".join(lines).encode()))


def check(data: bytes, file: Path) -> bool:
    """Assert that the hostfile is refused in words, or read as DeepSpeed reads it; return which."""
    file.write_bytes(data)
    try:
        hosts = read_hostfile(file)
    except UserError:
        return False
    assert dict(fetch_hostfile(str(file))) == {host.name: host.slots for host in hosts}
    return True


@settings(max_examples=300, deadline=1000, derandomize=True)
@given(data=HOSTFILES)
def test_any_hostfile_is_read_as_deepspeed_does_or_refused(tmp_path_factory, data):
    check(data, tmp_path_factory.getbasetemp() / "hostfile")
