"""The network links of the nodes, as the system of each node sees them: which node has lost its link."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_ESTABLISHED, _RETRANSMITS = "01", "01"  # a state, and a timer, as /proc/net/tcp gives them
_FLAGS_OF, _ADDRESS_OF = 0x8913, 0x8915  # SIOCGIFFLAGS, SIOCGIFADDR
_UP, _RUNNING = 1, 0x40  # IFF_UP, IFF_RUNNING


class Links(NamedTuple):
    """The links of one node."""

    host: str
    ranks: tuple[int, ...]  # those of the node
    addresses: tuple[str, ...]  # those of the node where this user's processes are connected
    dead: tuple[str, ...]  # the interfaces with one of these addresses that have no carrier
    # the addresses of other nodes that do not acknowledge what was sent to them
    unacknowledged: tuple[str, ...]


def look(ranks: Sequence[int]) -> Links:
    """Return the links of this node, which has these ranks. Empty where the system does not tell them."""
    addresses, silent = set(), set()
    for own, other, resends in _connections():
        if not own.startswith("127.") and own != "::1":
            addresses.add(own)
            if resends:
                silent.add(other)
    dead = [name for name, address in _without_carrier() if address in addresses]
    return Links(socket.gethostname(), tuple(ranks), tuple(sorted(addresses)), tuple(dead), tuple(sorted(silent)))


def at_fault(nodes: Sequence[Links]) -> list[Links]:
    """Return the nodes whose links do not work: one, if the evidence tells which, or the two ends of a link."""
    dead = [each for each in nodes if each.dead]
    if dead:
        return dead
    of_address = {address: each for each in nodes for address in each.addresses}
    pairs = {
        frozenset((each.host, of_address[address].host))
        for each in nodes
        for address in each.unacknowledged
        if address in of_address
    }
    common = frozenset.intersection(*pairs) if pairs else frozenset()
    return [each for each in nodes if each.host in common]


def _connections() -> Iterator[tuple[str, str, bool]]:
    """Yield this user's connections: both addresses, and whether data is sent again."""
    user = str(os.geteuid())
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError, ValueError):
            for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _ESTABLISHED and words[7] == user:
                    resends = words[5].startswith(_RETRANSMITS + ":") and int(words[6], 16) > 0
                    yield _address(words[1]), _address(words[2]), resends


def _address(text: str) -> str:
    """Return an address that the system gives as the hexadecimal digits of its 4-byte words."""
    digits = text.partition(":")[0]
    words = [int(digits[i : i + 8], 16) for i in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    found = socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)
    return found.removeprefix("::ffff:")  # a socket for both versions of IP


def _without_carrier() -> Iterator[tuple[str, str]]:
    """Yield the interfaces that are up but have no carrier, and their addresses."""
    import fcntl

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(any_socket, _FLAGS_OF, request)
                (flags,) = struct.unpack("h", answer[16:18])
                if flags & _UP and not flags & _RUNNING:
                    answer = fcntl.ioctl(any_socket, _ADDRESS_OF, request)
                    yield name, socket.inet_ntoa(answer[20:24])
