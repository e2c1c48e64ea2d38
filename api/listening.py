"""Where a server listens: a TCP port or a Unix socket, with TLS or without.

All of it is checked and bound before a model is loaded, so that what is wrong shows at once.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from dataclasses import dataclass
from pathlib import Path

from cuengine.api.settings import ServerSettings
from cuengine.errors import ConfigError

_EVERY_ADDRESS = {"0.0.0.0": "localhost", "::": "localhost", "": "localhost"}


@dataclass(slots=True)
class Listening:
    """A bound socket, which takes connections once a server runs.

    path  of a Unix socket, removed by `close`
    """

    socket: socket.socket
    url: str
    tls: ssl.SSLContext | None = None
    path: Path | None = None

    @property
    def port(self) -> int:
        """0 for a Unix socket."""
        return 0 if self.path is not None else int(self.socket.getsockname()[1])

    @property
    def reachable(self) -> bool:
        """From other machines."""
        if self.path is not None:
            return False
        return not ipaddress.ip_address(self.socket.getsockname()[0]).is_loopback

    def close(self) -> None:
        self.socket.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def listen(settings: ServerSettings) -> Listening:
    """Raises ConfigError where the address cannot be had or a certificate cannot be used."""
    tls = _tls_context(settings)
    if settings.uds is not None:
        path = Path(settings.uds)
        return Listening(_unix_socket(path), f"unix:{path}", tls, path)
    bound = _tcp_socket(settings.host, settings.port)
    host = _EVERY_ADDRESS.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host else host
    scheme = "http" if tls is None else "https"
    return Listening(bound, f"{scheme}://{host}:{bound.getsockname()[1]}{settings.root_path}", tls)


def _tcp_socket(host: str, port: int) -> socket.socket:
    """An empty host is every address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(
            f"host {host!r} is not an address to listen at: {error.strerror}"
        ) from None
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and not host:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        bound.bind(address)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} is in use on {host or 'this machine'}. Choose another with --port."
            ) from None
        raise ConfigError(f"cannot listen at {host}:{port}: {error.strerror}") from None
    return bound


def _unix_socket(path: Path) -> socket.socket:
    """A socket file that a server which is gone left behind is taken over."""
    _remove_stale(path)
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        bound.bind(os.fspath(path))
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot listen at {path}: {error.strerror or error}") from None
    return bound


def _remove_stale(path: Path) -> None:
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"cannot listen at {path}: it is there and is no socket")
    except OSError:
        return  # not there, or not to be seen: bind will say
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(os.fspath(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot listen at {path}: {error.strerror}") from None
        else:
            raise ConfigError(f"cannot listen at {path}: another server listens there")


def _tls_context(settings: ServerSettings) -> ssl.SSLContext | None:
    if settings.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(settings.ssl_certfile, settings.ssl_keyfile, password=_no_password)
    except (OSError, ssl.SSLError) as error:
        files = " and ".join(filter(None, (settings.ssl_certfile, settings.ssl_keyfile)))
        raise ConfigError(f"cannot use {files} for TLS: {_reason(error)}") from None
    if settings.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(settings.ssl_ca_certs)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"cannot use {settings.ssl_ca_certs} as certificate authorities: {_reason(error)}"
            ) from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _no_password() -> str:
    raise ConfigError("the TLS key is encrypted; give one without a password")


def _reason(error: OSError) -> str:
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if error.reason == "KEY_VALUES_MISMATCH":
        return "the key is not that of the certificate"
    if error.reason in (None, "NO_START_LINE", "NO_CERTIFICATE_OR_CRL_FOUND"):  # None: "PEM lib"
        return "there is no certificate or key in PEM form"
    return error.reason
