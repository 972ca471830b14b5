"""The README's code runs, and prints what a reader would see."""

import os
import pathlib
import re

from jaxdp import targets
from tests.compilers import needs_compiler

README = pathlib.Path(__file__).parent.parent / "README.md"
CHINESE = README.with_name("README.zh.md")


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


@needs_compiler("h100")
def test_code_of_the_page_about_programs_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = README.parent / "docs" / "programs.md"
    names = {}
    for block in code_of(page):
        exec(block, names)
    printed = capsys.readouterr().out
    for expected in re.findall(r"```text\n(.*?)```", page.read_text(), re.DOTALL):
        for line in expected.splitlines():
            before, _, after = line.partition("…")
            assert any(
                one.startswith(before) and one.endswith(after)
                for one in printed.splitlines()
            ), line
    assert names["verdict"].kept
    assert (tmp_path / "trace.json").exists()
    assert [row.source for row in names["prediction"].rows] == [
        *("compiled", "cost", "cost")
    ]


def test_code_of_the_page_about_zero_runs(capsys):
    names = {}
    for block in code_of(README.parent / "docs" / "zero.md"):
        exec(block, names)
    printed = capsys.readouterr().out
    assert "params['last'], params['blocks']['b']" in printed
    assert "opt_state.shards" in printed
    assert printed.endswith("bfloat16\n")


def test_code_of_the_readme_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = code_of(README)
    training, collectives, analysis, port, ddp, ways, parts, *rest = blocks
    elsewhere, servers, clock = rest
    names = {}
    exec(training, names)
    assert "(4, 64)" in capsys.readouterr().out
    compile(collectives, "README.md", "exec")
    exec(analysis, names)
    printed = capsys.readouterr().out
    assert names["report"].count("collective-permute") == 14
    assert str(names["report"].sent_bytes) in printed
    assert "kept: 1 of 1 buckets" in printed
    assert "of which exposed" in printed
    exec(port, names)
    assert names["output"].shape == (66, 1)
    assert "2 replicate" in capsys.readouterr().out
    exec(ddp, names)
    assert "loss.total" in capsys.readouterr().out
    exec(ways, names)
    assert "on 8 devices, H100 (nvlink4): halving_doubling" in capsys.readouterr().out
    exec(parts, names)
    assert int(names["state"].step) == 1
    if not targets.missing("h100") or "CI" in os.environ:
        exec(elsewhere, names)
        assert "one step on H100" in capsys.readouterr().out
    exec(servers, names)
    assert capsys.readouterr().out == "[0 0 0 0 0 0 0 0]\n"
    exec(clock, names)
    assert names["run"].pushed == (20,) * 4


def test_files_that_the_readme_names_exist():
    for page in (README, CHINESE):
        text = page.read_text()
        named = re.findall(r"`((?:jaxdp|docs|tests|experiments)/[\w./]+)`", text)
        linked = re.findall(r"\]\(([\w./]+)\)", text)
        for name in [*named, *linked]:
            assert (README.parent / name).exists(), name


def test_both_readmes_say_the_same():
    """Code, commands, rows of tables and links are the same in both languages."""
    texts = [page.read_text() for page in (README, CHINESE)]
    fence = re.compile(r"```\w*\n.*?```", re.DOTALL)
    ours, theirs = (fence.findall(text) for text in texts)
    assert ours == theirs
    for found in (r"`[^`]+`", r"\]\((docs/[^)]+)\)"):
        ours, theirs = (
            sorted(re.findall(found, " ".join(fence.sub("", text).split())))
            for text in texts
        )
        assert ours == theirs
    rows, headings = (
        [
            [line for line in text.splitlines() if line.startswith(sign)]
            for text in texts
        ]
        for sign in ("|", "## ")
    )
    assert len(rows[0]) == len(rows[1]) and len(headings[0]) == len(headings[1])
