"""The script of docs/hosts.md runs as the guide says, and goes on where it stopped."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from tests.readme_test import README, code_of

GUIDE = README.parent / "docs" / "hosts.md"
TIMEOUT_S = 150


@pytest.fixture
def folder(tmp_path):
    """A folder with the guide's script alone."""
    (script,) = code_of(GUIDE)
    (tmp_path / "train.py").write_text(script)
    return tmp_path


def printed_by(folder, *command, **variables):
    """What a command prints, which must end well."""
    given = {"JAX_PLATFORMS": "cpu", "NO_COLOR": "1"} | variables
    done = subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=os.environ | given,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_script_of_the_guide_trains_on_two_processes_and_goes_on_alone(folder):
    """As the guide prints it; from its first checkpoint on, the same bits."""
    launch = "-m", "jaxdp.launch", "-n", "2", "--timeout-s", str(TIMEOUT_S - 20)
    printed = printed_by(folder, *launch, "train.py", "run").splitlines()
    (expected,) = re.findall(r"```text\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    for line in expected.splitlines():
        before, _, after = line.partition("…")
        assert any(o.startswith(before) and o.endswith(after) for o in printed), line
    with np.load(folder / "run" / "params.npz") as first:
        whole = {name: first[name].tobytes() for name in first}
    shutil.rmtree(folder / "run" / "00000100")
    printed = printed_by(folder, "train.py", "run", JAX_NUM_CPU_DEVICES="2")
    assert "1 processes, 2 devices" in printed
    assert "step 100" in printed and "step 50" not in printed
    with np.load(folder / "run" / "params.npz") as resumed:
        assert {name: resumed[name].tobytes() for name in resumed} == whole


def test_what_the_guide_names_exists():
    """Functions of jaxdp, files, and the texts of its errors."""
    import jaxdp

    guide = GUIDE.read_text()
    for name in re.findall(r"jaxdp\.((?:processes\.)?\w+)\(", guide):
        place = jaxdp
        for part in name.split("."):
            place = getattr(place, part)
    source = "".join(p.read_text() for p in README.parent.glob("jaxdp/**/*.py"))
    source = re.sub(r'"\s*f?"', "", source)  # texts that go on in the next line
    for text in (
        *("was not found at", "cannot listen at", "did not come to", "in time;"),
        *("two processes say that they are rank", "was started with"),
        *("was called after JAX had started", "on some processes: "),
        *("got another program on", "failed first: ", "rows of a batch"),
    ):
        assert text in source, text
