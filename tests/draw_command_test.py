"""`python -m jaxdp.draw`: what it writes, and what it refuses."""

import collections
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest
from PIL import Image, ImageSequence

from jaxdp import algorithms
from jaxdp.draw import frames, stepping
from jaxdp.draw.__main__ import main
from jaxdp.draw.cells import NOTHING, colour
from jaxdp.schedule import holdings

GROUP = "{http://www.w3.org/2000/svg}g"


def _run(*arguments):
    return main([*map(str, arguments)])


def _rgb(cell_colour):
    return tuple(round(255 * part) for part in cell_colour)


def _held_colours(schedule, moment):
    """Colours of all cells at a moment, from `holdings` alone."""
    held = [*holdings(schedule)][moment]
    return {
        _rgb(colour(len(devices) / len(starts)))
        for row in held
        for devices, starts in zip(row, schedule.starts, strict=True)
    }


def _common(image, least=2000):
    """Colours that fill whole areas of a picture."""
    counted = image.convert("RGB").getcolors(image.width * image.height)
    return {rgb for count, rgb in counted if count >= least}


def test_the_page_needs_no_device_and_starts_no_backend(tmp_path):
    """JAX would refuse to start on a platform that does not exist."""
    ran = subprocess.run(
        [sys.executable, "-m", "jaxdp.draw", "star", "--devices", "8"],
        env=os.environ | {"JAX_PLATFORMS": "nonsense", "PYTHONPATH": os.getcwd()},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("wrote star.html (3")
    text = (tmp_path / "star.html").read_text(encoding="utf-8")
    assert '"start":["star",8]' in text
    assert f"<h1>{stepping.TITLE}</h1>" in text


def test_the_animation_has_every_frame_in_the_colours_of_the_page(tmp_path):
    ring, out = algorithms.ring(3), tmp_path / "ring.gif"
    assert _run("ring", "--devices", 3, "--out", out) == 0
    with Image.open(out) as animation:
        assert animation.info["loop"] == 0  # for ever
        shown = [_common(frame) for frame in ImageSequence.Iterator(animation)]
    assert len(shown) == len(ring.rounds) + 1 == 5
    for index, colours in enumerate(shown):
        cells = _held_colours(ring, index)
        others = {_rgb(colour(k / 3)) for k in range(1, 4)} - cells
        assert cells <= colours
        assert not others & colours


def test_pictures_of_frames_are_numbered_and_show_cells(tmp_path, capsys):
    out = tmp_path / "star.svg"
    assert _run("star", "--devices", 3, "--out", out, "--frames", "--title", "<&") == 0
    paths = sorted(tmp_path.iterdir())
    assert [path.name for path in paths] == [f"star-0{i}.svg" for i in range(3)]
    assert capsys.readouterr().out.count("wrote ") == 3
    for index, path in enumerate(paths):
        title = ("Round 0", "Round 1", "After round 1")[index]
        cells = _svg_cells(path)
        assert {*cells} == {f"{title}, device {d}, chunk 0" for d in range(3)}
        held = [*holdings(algorithms.star(3))][index]
        for device in range(3):
            share = len(held[device][0]) / 3
            assert cells[f"{title}, device {device}, chunk 0"] == _rgb(colour(share))


def _svg_cells(path):
    """Colours of cells, by their names."""
    cells = {}
    for group in ET.parse(path).iter(GROUP):
        name = group.get("id", "")
        if "chunk" in name and "device" in name:
            style = group[0].get("style", "")
            face = style.split("fill: #")[1][:6]
            cells[name] = tuple(bytes.fromhex(face))
    return cells


def test_a_sheet_has_all_rounds(tmp_path):
    assert _run("ring", "--out", tmp_path / "ring.svg") == 0
    counted = collections.Counter(
        name.split(",")[0] for name in _svg_cells(tmp_path / "ring.svg")
    )
    names = [*(f"Round {i}" for i in range(6)), "After round 2", "After round 5"]
    assert counted == dict.fromkeys(names, 16)


def test_a_picture_has_the_colours_of_the_page(tmp_path):
    out = tmp_path / "ring.png"
    assert _run("ring", "--devices", 4, "--out", out) == 0
    with Image.open(out) as sheet:
        shown = _common(sheet)
    cells = {_rgb(colour(k / 4)) for k in range(1, 5)}
    assert cells <= shown
    page = stepping.hexadecimal(colour(1.0))
    assert page == "#b3172b"
    assert tuple(bytes.fromhex(page[1:])) in shown


def test_empty_cells_are_white(tmp_path):
    assert _run("star_gather", "--out", tmp_path / "g.svg", "--frames") == 0
    cells = _svg_cells(tmp_path / "g-00.svg")
    assert cells["Round 0, device 1, chunk 2"] == _rgb(NOTHING)
    assert cells["Round 0, device 2, chunk 2"] == _rgb(colour(1))


def test_frames_as_data(tmp_path):
    out = tmp_path / "ring.json"
    options = ("--size-mb", "0.5", "--hardware", "v100")
    assert _run("ring", "--devices", 2, "--out", out, *options) == 0
    data = json.loads(out.read_text(encoding="utf-8"))
    expected = frames.frames(algorithms.ring(2), 2**19, "v100")
    assert data["schedule"] == "ring(2)"
    assert data["size_bytes"] == 2**19
    assert data["frames"] == json.loads(json.dumps([*map(frames.record, expected)]))
    assert data["frames"][-1]["clock_s"] == pytest.approx(2 * (15e-6 + 2**18 / 15.75e9))


def test_the_list_has_every_algorithm(capsys):
    assert _run("--list") == 0
    printed = capsys.readouterr().out
    assert "  ring  " in printed
    assert "  halving_doubling  " in printed
    assert "(devices: an even number, for 2 hosts with equally many)" in printed
    headings = [line for line in printed.splitlines() if not line.startswith(" ")]
    assert headings == [
        *("all-reduce", "reduce-scatter", "all-gather", "reduce", "broadcast"),
        *("gather", "scatter"),
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rng",), "Did you mean 'ring'?"),
        (("hierarchical", "--devices", 3), "Choose 2 or 4."),
        (("ring", "--devices", 0), "between 1 and 16"),
        (("ring", "--out", "ring.jpg"), "name the file ring.html"),
        (("ring", "--out", "ring"), "suffix is ''"),
        (("ring", "--out", "nowhere/ring.html"), "mkdir -p nowhere"),
        (("ring", "--out", "ring.gif", "--frames"), "Leave out --frames"),
        (("ring", "--size-mb", "-1"), "a buffer of -1.0 MiB"),
        (("ring", "--size-mb", "nan", "--out", "ring.png"), "a buffer of nan MiB"),
        (("ring", "--hardware", "h10"), "Did you mean 'h100'?"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_bad_input_names_its_remedy(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert _run(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("python -m jaxdp.draw: ")
    assert message in said
    assert [*tmp_path.iterdir()] == []


def test_pictures_without_matplotlib_name_the_extra(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert _run("ring", "--out", tmp_path / "ring.gif") == 2
    said = capsys.readouterr().err
    assert "pip install 'jax-data-parallel[experiments]'" in said
    assert _run("ring", "--out", tmp_path / "ring.html") == 0  # the page needs none
