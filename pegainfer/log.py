"""Logging: one logger tree below `pegainfer`, one line format, level from `PEGAINFER_LOG_LEVEL`."""

from __future__ import annotations

import logging
import sys

from pegainfer import envs

__all__ = ["get_logger", "setup_logging"]

_FORMAT = "%(levelname)s %(asctime)s [%(name)s] %(message)s"


def get_logger(name: str) -> logging.Logger:
    """The logger of a module; pass `__name__`."""
    return logging.getLogger(name)


def setup_logging(default_level: str = "INFO") -> None:
    """Send the `pegainfer` loggers to stderr. Called by commands and the engine process, never by the
    library. `default_level` counts where `PEGAINFER_LOG_LEVEL` is not set.
    """
    logger = logging.getLogger("pegainfer")
    logger.setLevel(envs.log_level(default_level))
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(_FORMAT, datefmt="%m-%d %H:%M:%S"))
        logger.addHandler(handler)
        logger.propagate = False
