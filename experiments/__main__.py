"""`python -m experiments NAME [options]`; without a name, the list of experiments."""

import importlib
import sys

from experiments.harness import command, registry


def main(arguments: list[str]) -> int:
    """Runs one experiment, or lists all; returns the exit status."""
    if not arguments or arguments[0] in ("--list", "--help", "-h"):
        print("\n".join(registry.listing()))
        return 0
    name, *options = arguments
    if name not in registry.names():
        print(registry.unknown(name), file=sys.stderr)
        return 2
    return command.run(importlib.import_module(f"experiments.{name}"), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
