"""Where a Ray cluster is, and whether one answers there: asked before Ray, which tries for minutes.

Imports no Ray.
"""

from __future__ import annotations

import os
import socket

from cuengine.errors import ConfigError

PORT = 6379
"""Where a cluster's first machine listens, unless `ray start --head` was told another port."""

AUTO = "auto"

_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 10.0

# HTTP/2, which Ray's gRPC is spoken in: the client's preface with empty settings. A server begins
# with its settings, too. RFC 9113, sections 3.4 and 4.1.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_FRAME_HEADER = 9
_TYPE_AT, _SETTINGS = 3, 4


class NoClusterError(ConfigError):
    def __init__(self, address: str, why: str) -> None:
        super().__init__(
            f"There is no Ray cluster at {address}: {why}. Start one with `ray start --head` on "
            f"its first machine, which then listens at port {PORT}, and give that machine's address"
        )


def cluster_address(flag: str | None) -> str | None:
    """HOST:PORT of the cluster, or AUTO for the one that this machine belongs to; None: Ray is
    started here.

    flag  what `--ray-address` says; where it says nothing, or auto, $RAY_ADDRESS counts, as in Ray
    Raises ConfigError.
    """
    address = flag
    name = "ray_address"
    if flag in (None, "", AUTO) and os.environ.get("RAY_ADDRESS"):
        address, name = os.environ["RAY_ADDRESS"], "$RAY_ADDRESS"
    if address in (None, "", "local"):
        return None
    check_form(address, name)
    return address


def check_form(address: str, name: str = "ray_address") -> None:
    """Raises ConfigError."""
    if address in (AUTO, "local"):
        return
    if "://" in address:
        raise ConfigError(
            f"{name}={address} is for Ray's client, which cannot serve. Give HOST:{PORT} of the "
            "cluster's first machine, or auto where this machine belongs to the cluster"
        )
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(f"{name}={address} is neither auto nor HOST:PORT, as 10.0.0.1:{PORT}")


def check_reachable(address: str) -> None:
    """Raises NoClusterError where nothing listens at HOST:PORT, or something that is not Ray.

    It may have to wait for some seconds.
    """
    host, _, port = address.rpartition(":")
    why = _unreachable(host.strip("[]"), int(port))
    if why is not None:
        raise NoClusterError(address, why)


def _unreachable(host: str, port: int) -> str | None:
    """What is wrong there."""
    try:
        peer = socket.create_connection((host, port), timeout=_CONNECT_SECONDS)
    except socket.gaierror as error:
        return f"the host name {host!r} is not known ({error.strerror})"
    except TimeoutError:
        return f"nothing answers within {_CONNECT_SECONDS:g} s"
    except OSError as error:
        return f"nothing listens there ({error.strerror or error})"
    with peer:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return None  # it would not speak before it has seen a certificate
        peer.settimeout(_ANSWER_SECONDS)
        try:
            peer.sendall(_PREFACE)
            answer = peer.recv(_FRAME_HEADER, socket.MSG_WAITALL)
        except TimeoutError:
            return f"something listens there, and does not answer within {_ANSWER_SECONDS:g} s"
        except OSError:
            answer = b""
    if len(answer) == _FRAME_HEADER and answer[_TYPE_AT] == _SETTINGS:
        return None
    return "what listens there is something else"
