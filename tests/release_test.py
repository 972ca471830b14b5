"""What is installed, and that `jaxdp` needs nothing that is not installed with it."""

import pathlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TIMEOUT_S = 120
# What the extras bring: an interpreter in which none of it can be imported.
OPTIONAL = (
    *("IPython", "chex", "hypothesis", "jinja2", "jupytext"),
    *("matplotlib", "pandas", "playwright", "pytest"),
    *("sklearn", "sphinx", "torch", "tyro"),
)
WITHOUT = f"import sys\nfor name in {OPTIONAL}:\n    sys.modules[name] = None\n"
EVERY_MODULE = """
import importlib, pathlib, pkgutil
import jaxdp
assert pathlib.Path(jaxdp.__file__).is_relative_to(pathlib.Path.cwd()), jaxdp.__file__
names = [module.name for module in pkgutil.walk_packages(jaxdp.__path__, "jaxdp.")]
for name in names:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(names))
"""
MISSING = """
sys.modules["jax_plugins.xla_cuda12"] = sys.modules["jax_plugins.xla_cuda13"] = None
import jax, jax.numpy as jnp, jaxdp, jaxdp.draw
from jaxdp import algorithms

def message(function, *args, **keywords):
    try:
        function(*args, **keywords)
    except ModuleNotFoundError as error:
        print(str(error).replace("\\n", " "))

message(jaxdp.draw.draw_schedule, algorithms.ring(2))
message(jaxdp.compile_for, lambda x: x, jnp.ones(2), target="h100", devices=1)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the sdist, and the wheel made from it."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder]
    made = subprocess.run(
        [*command, ROOT], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return folder


@pytest.fixture(scope="module")
def unpacked(built, tmp_path_factory):
    """Where the wheel's files lie as after an installation."""
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


def python(code, folder):
    """What code prints in an interpreter that finds the wheel's files first."""
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=TIMEOUT_S,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def tracked(*folders):
    """Files of the project, without what lies about."""
    return {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_holds_the_package_and_nothing_else(unpacked):
    files = {
        str(path.relative_to(unpacked))
        for path in unpacked.rglob("*")
        if path.is_file() and "dist-info" not in str(path)
    }
    assert files == tracked("jaxdp")
    assert "jaxdp/py.typed" in files
    (licence,) = unpacked.glob("*.dist-info/licenses/LICENSE")
    assert licence.read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_source_distribution_can_be_tested(built):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert {"Makefile", "README.md", "tests/conftest.py", "pyproject.toml"} <= names
    assert tracked("jaxdp", "experiments", "benchmarks") <= names
    assert not any(name.startswith(("results", ".venv")) for name in names)


def test_metadata_says_what_there_is(unpacked):
    (metadata,) = unpacked.glob("*.dist-info/METADATA")
    text = metadata.read_text()
    assert "\nName: jax-data-parallel\n" in text
    assert f"\nVersion: {PROJECT['version']}\n" in text
    extras = set(re.findall(r"^Provides-Extra: (.*)$", text, re.MULTILINE))
    assert extras == set(PROJECT["optional-dependencies"])


def test_every_module_is_imported_without_extras(unpacked):
    count = int(python(WITHOUT + EVERY_MODULE, unpacked))
    assert (
        count == len([name for name in tracked("jaxdp") if name.endswith(".py")]) - 1
    )  # jaxdp itself


def test_a_missing_extra_is_answered_by_its_install_line(unpacked):
    figures, compiler = python(WITHOUT + MISSING, unpacked).splitlines()
    line = "pip install 'jax-data-parallel[{}]'"
    assert line.format("experiments") in figures and "matplotlib" in figures
    assert line.format("compile") in compiler


def test_install_lines_name_extras_that_exist():
    texts = {
        path: path.read_text(encoding="utf-8")
        for folder in ("jaxdp", "experiments", "benchmarks", "docs")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".ipynb") and "_build" not in path.parts
    }
    texts |= {path: path.read_text(encoding="utf-8") for path in ROOT.glob("*.md")}
    named = {
        extra
        for text in texts.values()
        for found in re.findall(r"(?:jax-data-parallel|'\.)\[([\w,]+)\]", text)
        for extra in found.split(",")
    }
    assert {"compile", "experiments", "cuda12"} <= named
    assert named <= set(PROJECT["optional-dependencies"])


def test_importing_takes_what_training_needs_and_no_more(unpacked):
    code = "import sys, jaxdp\nprint(*sys.modules)"
    loaded = set(python(code, unpacked).split())
    assert {"jax", "optax"} <= loaded
    late = {"flax", "orbax.checkpoint", "rich", "jaxdp.batch_norm", *OPTIONAL}
    assert not late & loaded
    code = "import jaxdp\nassert 'BatchNorm' in dir(jaxdp)\nprint(jaxdp.BatchNorm)"
    assert "jaxdp.batch_norm.BatchNorm" in python(code, unpacked)


def test_a_name_that_does_not_exist_is_none():
    import jaxdp

    with pytest.raises(AttributeError, match="'jaxdp' has no attribute 'BatchNrm'"):
        jaxdp.BatchNrm  # type: ignore[attr-defined]  # noqa: B018
