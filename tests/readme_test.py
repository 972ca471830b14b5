"""The README's code runs, and prints what a reader would see."""

import pathlib
import re

README = pathlib.Path(__file__).parent.parent / "README.md"


def code_of(page):
    """Its Python, block by block."""
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def test_code_of_the_guide_runs(capsys):
    names = {}
    for block in code_of(README.parent / "docs" / "ddp.md"):
        exec(block, names)
    printed = capsys.readouterr().out
    assert "loss.total, params['last']" in printed
    assert "65536.0 False 0" in printed
    assert names["sampler"].state()["epoch"] == 1
    assert names["metrics"]["loss"] < 2


def test_code_of_the_readme_runs(capsys):
    training, collectives, analysis, port, ddp, servers, clock = code_of(README)
    names = {}
    exec(training, names)
    assert "(4, 64)" in capsys.readouterr().out
    compile(collectives, "README.md", "exec")
    exec(analysis, names)
    printed = capsys.readouterr().out
    assert names["report"].count("collective-permute") == 14
    assert str(names["report"].sent_bytes) in printed
    exec(port, names)
    assert names["output"].shape == (66, 1)
    assert "2 replicate" in capsys.readouterr().out
    exec(ddp, names)
    assert "loss.total" in capsys.readouterr().out
    exec(servers, names)
    assert capsys.readouterr().out == "[0 0 0 0 0 0 0 0]\n"
    exec(clock, names)
    assert names["run"].pushed == (20,) * 4


def test_files_that_the_readme_names_exist():
    for name in re.findall(r"`((?:jaxdp|docs|tests)/[\w./]+)`", README.read_text()):
        assert (README.parent / name).exists(), name
