"""What Ray is told by the environment, which it reads when it is imported."""

from __future__ import annotations

import os
import secrets


def prepare(*, starts_ray: bool) -> None:
    """To be called before Ray is imported. What the user has set stays.

    starts_ray  it is not that of a cluster, which has rules of its own
    """
    # Ray would show a SIGTERM as a crash, with the stacks of its threads.
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    # Ray Serve's threads would start another Ray once this one is left.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    if starts_ray and "RAY_AUTH_MODE" not in os.environ:
        # Ray does the same, with a warning and a token that stays in the user's home, where
        # clusters that are started later find it.
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
