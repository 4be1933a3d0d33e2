"""A process of ours that says at which levels it logs: `test_log_levels.py`."""

import logging

import msgspec

from penstock.executor.process_life import begin, send

NAMES = ("", "penstock", "penstock.router", "penstock.cache")


class Nothing(msgspec.Struct):
    pass


class Levels(msgspec.Struct):
    levels: dict[str, int]


def levels() -> Levels:
    return Levels({name: logging.getLogger(name).getEffectiveLevel() for name in NAMES})


def main() -> None:
    _, channel = begin(Nothing)
    send(channel, levels())


if __name__ == "__main__":
    main()
