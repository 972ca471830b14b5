"""The history of benchmarks: nothing that was measured is ever lost."""

import concurrent.futures
import json
import platform

import pytest

from benchmarks import history, machine
from benchmarks.history import History
from tests.benchmarks_helpers import row, run


@pytest.fixture
def kept(tmp_path):
    return History(tmp_path / "bench" / "history.json")


def names(folder):
    return {path.name for path in folder.iterdir()}


def test_a_run_comes_back_as_it_was_kept(kept):
    assert kept.runs() == []
    one = run(1, [row("ring", 1.25, 0.5, limit=2.0, ours_ms=5.0, theirs_ms=4.0)])
    assert kept.keep(one) == ""
    assert kept.runs() == [one]
    assert history.read(kept.runs()[0]["rows"][0]) == row(
        "ring", 1.25, 0.5, limit=2.0, ours_ms=5.0, theirs_ms=4.0
    )


def test_a_run_that_grows_stays_one_run_in_its_place(kept):
    first, second = run(1, []), run(2, [row("psum")])
    for each in (first, second):
        kept.keep(each)
    first["rows"].append(history.written(row("ring")))
    kept.keep(first)
    assert kept.runs() == [first, second]


def test_runs_that_write_at_once_keep_each_others_rows(kept):
    runs = [run(hour, [row(f"of {hour}")]) for hour in range(40)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(kept.keep, runs))
    found = sorted(each["rows"][0]["name"] for each in kept.runs())
    assert found == sorted(f"of {hour}" for hour in range(40))
    assert names(kept.path.parent) == {"history.json", "history.lock"}


def test_a_reader_keeps_the_file_that_it_opened(kept):
    kept.keep(run(1, [row()]))
    before = kept.path.read_text()
    with kept.path.open() as opened:
        kept.keep(run(2, [row()]))
        assert opened.read() == before != kept.path.read_text()


def test_a_write_that_is_cut_off_leaves_the_old_file(kept, monkeypatch):
    kept.keep(run(1, [row()]))
    before = kept.path.read_bytes()

    def half(document, file, **options):
        file.write('{"format": 1, "ru')
        raise OSError("No space left on device")

    monkeypatch.setattr(json, "dump", half)
    with pytest.raises(OSError, match="No space left"):
        kept.keep(run(2, [row()]))
    assert kept.path.read_bytes() == before
    assert names(kept.path.parent) == {"history.json", "history.lock"}


def without(fact):
    damaged = run(1, [row()])
    del damaged[fact]
    return {"format": 1, "runs": [damaged]}


def with_row(**changed):
    damaged = run(1, [row()])
    damaged["rows"][0] |= changed
    return {"format": 1, "runs": [damaged]}


UNUSABLE = {
    "older": ({"jax": "0.10.2", "platform": "cpu", "rows": []}, "has format None"),
    "newer": ({"format": 2, "runs": []}, "has format 2, and .* writes 1"),
    "no object": ([1, 2], "has format None"),
    "no runs": ({"format": 1, "runs": {}}, "has no list of runs"),
    "no commit": (without("commit"), "run, number 0, without a right commit"),
    "no run": ({"format": 1, "runs": ["x"]}, "number 0, without a right id"),
    "value": (with_row(value="1.0"), "malformed row in run 0 .*'1.0' where a number"),
    "quartiles": (with_row(quartiles=[1.0]), "malformed row in run 0"),
}


@pytest.mark.parametrize("unusable", UNUSABLE)
def test_a_file_that_cannot_be_used_is_moved_aside(kept, unusable):
    document, problem = UNUSABLE[unusable]
    kept.path.parent.mkdir()
    text = json.dumps(document)
    kept.path.write_text(text)
    assert kept.runs() == []
    one = run(1, [row()])
    aside = kept.path.with_name("history.aside-1.json")
    with pytest.raises(AssertionError, match=problem):
        raise AssertionError(kept.keep(one))
    assert aside.read_text() == text
    assert kept.runs() == [one]


def test_files_that_are_cut_off_are_moved_aside_one_by_one(kept):
    for number in (1, 2):
        kept.keep(run(number, [row()]))
        kept.path.write_text(kept.path.read_text()[:-20])
        cut = kept.path.read_text()
        said = kept.keep(run(3, [row()]))
        aside = kept.path.with_name(f"history.aside-{number}.json")
        assert "is no JSON" in said and f"the old file is {aside}" in said
        assert aside.read_text() == cut
    assert len(kept.runs()) == 1


def test_what_is_no_number_is_refused_and_changes_nothing(kept):
    kept.keep(run(1, [row()]))
    before = kept.path.read_text()
    with pytest.raises(ValueError, match="not JSON compliant"):
        kept.keep(run(2, [row(value=float("nan"))]))
    assert kept.path.read_text() == before


def test_this_machine_and_this_code_make_a_run(kept):
    begun = history.begun(machine.code(), machine.facts(), machine.now())
    kept.keep(begun)
    assert kept.runs() == [begun]
    assert begun["cores"] >= 1 and begun["cpu"] and begun["platform"] == "cpu"
    assert begun["complete"] is False and begun["rows"] == []


def test_code_outside_of_git_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    assert machine.code() == {"commit": None, "committed": None, "dirty": False}


def test_times_of_all_zones_are_in_order_as_texts():
    assert machine.utc("2026-01-02T01:30:00+02:00") == "2026-01-01T23:30:00+00:00"
    assert machine.now() > machine.utc("2026-01-01T00:00:00-05:00")


def test_glibc_is_asked_to_keep_memory_and_no_other(monkeypatch):
    assert machine.keep_memory() == (platform.libc_ver()[0] == "glibc")
    asked = {}

    class Library:
        def mallopt(self, option, value):
            asked[option] = value
            return int(option != -3)

    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: Library())
    assert not machine.keep_memory()  # one of both was refused
    assert asked == {-1: 2**30, -3: 32 * 2**20}
    monkeypatch.setattr(machine.ctypes, "CDLL", lambda name: object())
    assert not machine.keep_memory()
