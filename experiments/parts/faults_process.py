"""What the launcher starts: python -m experiments.parts.faults_process FOLDER.

It notes its process number at once, before the seconds that importing JAX takes, so
that it can be killed at any moment; then it becomes the training, on a host of its own
if there are any.
"""

import json
import os
import pathlib
import sys
from typing import NoReturn

TRAINING = "experiments.parts.faults_training"
STARTED = "started"  # folder of process numbers, by attempt and rank


def main(folder: pathlib.Path) -> NoReturn:
    """Notes the process and becomes the training of `folder`."""
    rank, attempt = os.environ["JAX_PROCESS_ID"], os.environ["JAXDP_RESTART"]
    unfinished = folder / f"{attempt}.{rank}.unfinished"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(folder / STARTED / f"{attempt}.{rank}")
    command = [sys.executable, "-m", TRAINING, str(folder)]
    hosts = json.loads((folder / "hosts.json").read_text())
    if hosts:
        port = os.environ["JAX_COORDINATOR_ADDRESS"].rpartition(":")[2]
        address = f"{hosts[0]['address']}:{port}"
        os.environ["JAX_COORDINATOR_ADDRESS"] = address
        os.environ["JAX_COORDINATOR_BIND_ADDRESS"] = address
        command = [*hosts[int(rank)]["prefix"], *command]
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
