"""From a command line to a result on disk."""

import sys
import time
from types import ModuleType

import tyro

from experiments.harness import saving, show


def run(module: ModuleType, options: list[str]) -> int:
    """Runs one experiment and shows what it found; returns the exit status.

    Args:
        module: Has a docstring, `Config` and `run(config) -> Result`.
        options: The command line after the name.
    """
    name = module.__name__.rpartition(".")[2]
    config = tyro.cli(
        module.Config,
        args=options,
        prog=f"python -m experiments {name}",
        description=module.__doc__,
    )
    try:
        config.check()
        config.start()
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    show.console.print(f"[bold]{name}[/] on {config.where()}", highlight=False)
    start = time.perf_counter()
    found = module.run(config)
    folder = config.output / name
    document = saving.save(module, config, found, folder)
    for title, rows in found.tables.items():
        if title not in found.unprinted:
            show.table(title, rows)
    show.claims(document)
    seconds = time.perf_counter() - start
    show.console.print(f"{folder}/report.html, result.json; {seconds:.0f} s")
    for failure in found.failures:
        print(failure, file=sys.stderr)
    return 1 if found.failures else 0
