"""Starts an image's root file system as Docker would with --read-only: as its user, with its
command, writable nowhere but in /cache; and says when the first token of a stream has come.

By then this process has left the machine's network: there is a loopback and nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import http.client
import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from image import Image, in_chroot, lent_network, mounted, system_folders

_CLONE_NEWNET = 0x40000000
_PORT = 8000
_SECONDS = 1800
"""For a start to succeed; it only fails to where something is broken."""
_SECONDS_TO_END = 60


class StartError(RuntimeError):
    """The server did not do what it is there for."""


def leave_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace of its own can be had")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@contextmanager
def read_only(image: Image, cache: Path) -> Iterator[None]:
    """The root file system as --read-only makes it, with `cache` as the volume at /cache."""
    uid, gid = map(int, image.user.split(":"))
    subprocess.run(["chown", f"{uid}:{gid}", cache], check=True)
    with ExitStack() as mounts:
        mounts.enter_context(mounted("--rbind", image.root, image.root))
        mounts.enter_context(mounted("--bind", cache, image.root / "cache"))
        mounts.enter_context(system_folders(image.root))
        subprocess.run(["mount", "-o", "remount,bind,ro", image.root], check=True)
        yield


def fetch(image: Image, cache: Path, model: str) -> float:
    """`cuengine pull MODEL` in the image; seconds."""
    with lent_network(image.root) as environment, read_only(image, cache):
        start = time.monotonic()
        subprocess.run(
            in_chroot(image.root, image.user, ["cuengine", "pull", model]),
            env=image.environment | environment,
            stdin=subprocess.DEVNULL,
            check=True,
        )
    return time.monotonic() - start


def serve(image: Image, cache: Path, arguments: Sequence[str]) -> dict[str, float]:
    """The image's own command with `arguments` instead of CMD's; seconds from its start, by event.

    Raises StartError.
    """
    with read_only(image, cache):
        start = time.monotonic()
        server = subprocess.Popen(
            in_chroot(image.root, image.user, [*image.entrypoint, *arguments]),
            env=image.environment,
            stdin=subprocess.DEVNULL,
        )
        try:
            times = {}
            _wait_until_ready(server, start)
            times["ready"] = time.monotonic() - start
            times["first token"] = _first_token() - start
            health = subprocess.run(
                in_chroot(image.root, image.user, image.healthcheck),
                env=image.environment,
                check=False,
            )
            if health.returncode:
                raise StartError(f"HEALTHCHECK ended with status {health.returncode}")
            _refuses_writes(image)
        finally:
            server.terminate()
            code = _ended(server)
        if code:
            raise StartError(f"after SIGTERM the server ended with status {code}")
        return times


def _ended(server: subprocess.Popen[bytes]) -> int:
    try:
        return server.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()
        raise StartError(f"{_SECONDS_TO_END} s after SIGTERM the server still ran") from None


def _wait_until_ready(server: subprocess.Popen[bytes], start: float) -> None:
    while time.monotonic() - start < _SECONDS:
        if server.poll() is not None:
            raise StartError(f"the server ended with status {server.returncode}")
        try:
            if _get("/ready") == http.client.OK:
                return
        except OSError:
            pass
        time.sleep(0.05)
    raise StartError(f"not ready after {_SECONDS} s")


def _get(path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=_SECONDS)
    connection.request("GET", path)
    return connection.getresponse().status


def _first_token() -> float:
    """When the first text of a chat's stream has come."""
    connection = http.client.HTTPConnection("127.0.0.1", _PORT, timeout=_SECONDS)
    body = {"messages": [{"role": "user", "content": "Hello!"}], "stream": True, "max_tokens": 8}
    connection.request(
        "POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"}
    )
    answer = connection.getresponse()
    if answer.status != http.client.OK:
        raise StartError(f"status {answer.status}: {answer.read().decode()}")
    first = None
    for line in answer:
        event = line.decode().removeprefix("data: ").strip()
        if event == "[DONE]":
            break
        if event and json.loads(event)["choices"][0]["delta"].get("content"):
            first = first or time.monotonic()
    if first is None:
        raise StartError("the stream had no text")
    return first


def _refuses_writes(image: Image) -> None:
    """That the test is one: nothing can be written outside /cache."""
    for folder in ("/", "/tmp", "/opt/cuengine"):
        touched = subprocess.run(
            in_chroot(image.root, image.user, ["touch", f"{folder}/probe"]),
            env=image.environment,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if touched.returncode == 0:
            raise StartError(f"{folder} can be written")


def compiled_for(flags: str) -> list[str]:
    """The architectures, as sm_90, that these flags of `cuengine compile` name."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--arch", default="")
    known, _ = parser.parse_known_args(flags.split())
    return known.arch.split(",") if known.arch else []


def check_gpu_parts(image: Image, cache: Path, architectures: Sequence[str]) -> None:
    """In an image for GPUs, with none here: cuBLAS and CuPy load, and there are kernels, built
    ahead for `architectures` or else made by NVRTC."""
    script = Path(__file__).with_name("gpu_parts.py").read_text(encoding="utf-8")
    with read_only(image, cache):
        for command in (["cuengine", "info"], ["python3", "-c", script, *architectures]):
            subprocess.run(
                in_chroot(image.root, image.user, command),
                env=image.environment,
                stdin=subprocess.DEVNULL,
                check=True,
            )
