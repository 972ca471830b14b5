"""The site of all results: what it joins, shows, copies and refuses."""

import csv
import html.parser
import pathlib
import re
import urllib.parse

import pytest

from experiments.harness import reading, registry, templates
from experiments.site import __main__ as command
from experiments.site import designs, ledger, measures, overview, pages, sources
from tests import experiments_contract as contract
from tests import site_helpers as helpers


class Links(html.parser.HTMLParser):
    """Collects links, ids and tags of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.ids, self.tags = [], [], []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, attrs)
            if name in ("href", "src"):
                self.links.append(value)
            if name == "id":
                self.ids.append(value)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A site of fabricated results and a real, tiny one."""
    results = tmp_path_factory.mktemp("results")
    helpers.some_results(results)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_steps", lambda site: (site / "step.html").touch())
        assert command.main(["--results", str(results)]) == 0
    return results, results / "site"


def text_of(site, page):
    return (site / page).read_text()


def panel(found, title):
    (chosen,) = [p for p in overview.panels(found) if p.measure.title.startswith(title)]
    return chosen


def test_numbers_are_joined_by_design(made):
    found = reading.find_all(made[0])
    busiest = panel(found, "the busiest device")
    assert {name: tuple(n) for name, n in busiest.numbers.items()} == {
        "DataParallel": (3.5, "traffic", 50.0),
        "gather to root": (7.0, "compare", 100.0),
        "N servers": (1.75, "compare", 25.0),
        "ring": (1.75, "compare", 25.0),  # compare comes before traffic
    }
    assert [one.name for one in busiest.used] == ["traffic", "compare"]
    kept = panel(found, "kept between steps")
    assert {name: n.value for name, n in kept.numbers.items()} == {
        "gather to root": 2.0,  # half a MiB, of 2^18 bytes
        "N servers": 1.25,
        "ring": 2.0,
    }
    assert not panel(found, "on 8 x H100, ResNet-50").numbers
    shown = [design.name for design in overview.designs(overview.panels(found))]
    assert shown == ["DataParallel", "gather to root", "N servers", "ring"]


def test_numbers_are_there_to_be_read_by_programs(made):
    with (made[1] / "designs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    busiest = [row for row in rows if row["measure"] == "the busiest device sends (Φ)"]
    assert [[*row.values()] for row in busiest[:2]] == [
        ["DataParallel", busiest[0]["measure"], "3.5", "traffic", "current", "yes"],
        ["gather to root", busiest[0]["measure"], "7.0", "compare", "current", "no"],
    ]
    assert len(rows) == 4 + 4 + 3 + 3 + 3  # busiest, all, rounds, kept, here


@pytest.mark.parametrize(
    ("value", "text"),
    [(1.7543, "1.75"), (14, "14"), (1923.6, "1,924"), (0.00012345, "0.000123")],
)
def test_numbers_are_short(value, text):
    assert overview.Number(value, "x", 1.0).text == text


def test_claims_are_in_order():
    """CA2 before CA10."""
    claims = [helpers.CLAIM | {"id": name} for name in ("CB1", "CA10", "CA2", "A6")]
    one = reading.Found("x", pathlib.Path(), {"claims": claims}, "current", False, "")
    found = ledger.of_experiments({"x": one})
    assert [claim["id"] for _, claim in found] == ["A6", "CA2", "CA10", "CB1"]


@pytest.mark.parametrize(
    ("name", "devices", "expected"),
    [
        ("8 servers", 8, designs.SERVERS),
        ("ParameterServer, 8 servers", 8, designs.SERVERS),
        ("4 servers", 8, "4 servers"),  # another design
        ("1 server", 1, "1 server"),
        ("RingAllReduce", 8, "ring"),
        (None, 8, "None"),
    ],
)
def test_designs_have_one_name(name, devices, expected):
    assert designs.canonical(name, devices) == expected


def test_every_source_is_an_experiment():
    used = {s.experiment for m in measures.MEASURES for s in m.sources}
    assert used == {*sources.OPTIONS} <= {*registry.names()}
    assert {s.value for s in measures.read_from("memory")} == {"all_mb"}


GPU = {"devices": 8, "tiny": False, "target": "h100", "hosts": 1, "rows": None}


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, {"ring": 12.5}), ({"tiny": True}, {}), ({"target": "h200"}, {})],
    ids=["full", "tiny", "h200"],
)
def test_only_numbers_of_what_the_title_says_count(tmp_path, options, expected):
    rows = [
        {"model": model, "design": "RingAllReduce", "devices": devices, "step_ms": ms}
        for model, devices, ms in (("ResNet-50", 8, 12.5), ("GPT-2 small", 8, 36.0))
    ]
    rows.append(rows[0] | {"devices": 16, "step_ms": 99.0})
    helpers.write(tmp_path, "gpu", config=GPU | options, tables={"designs": rows})
    shown = panel(reading.find_all(tmp_path), "on 8 x H100, ResNet-50 (ms)")
    assert {name: number.value for name, number in shown.numbers.items()} == expected


def test_steps_of_dataparallel_are_from_its_samples_a_second(tmp_path):
    """64 images on each of 8 devices, at 32,000 a second."""
    row = {"hardware": "H100, NVLink", "N": 8, "DP": 32_000, "DDP": 1}
    rows = [row | {"model": "ResNet-50"}, row | {"model": "ResNet-50", "N": 4}]
    config = {"images": 64, "sequences": 8}
    helpers.write(tmp_path, "scaling", config=config, tables={"throughput": rows})
    shown = panel(reading.find_all(tmp_path), "on 8 x H100, ResNet-50 (ms)")
    assert {name: number.value for name, number in shown.numbers.items()} == {
        "DataParallel": 16.0
    }


def test_the_first_page_says_what_is_there(made):
    text = text_of(made[1], "index.html")
    for state, count in (("current", 4), ("damaged", 2)):
        assert f'<span class="badge {state}">{count} {state}</span>' in text
    assert "tiny run" in text and "4 claims of two articles" in text
    assert "1 hold<" in text and "2 refuted<" in text
    assert "1 without a verdict<" in text
    for name in registry.names():
        assert f'href="{name}.html"' in text
    lacking = f'make experiment EXP=gpu ARGS="--output {made[0]}"'
    assert f"<code>{lacking}</code>".replace('"', "&#34;") in text
    assert "no measurement of bandwidth" in text


def test_a_page_shows_all_of_a_result(made):
    text = text_of(made[1], "compare.html")
    assert "What does compare find?" in text
    assert '<section class="card" id="CB7">' in text
    assert '<span class="badge holds">holds</span>' in text
    assert "the step of each design" not in text.lower()  # the result's own question
    assert 'class="broad" src="files/compare/step-times.png"' in text
    assert 'width="2000" height="40"' in text
    assert "HloModule &lt;small&gt;" in text
    assert "(20,002 lines)" in text and "This is the beginning" in text
    assert len(text) < 3 * 100_000
    assert "Command:   make experiment EXP=compare" in text
    assert 'href="claims.html" rel="prev"' in text
    assert 'href="compression.html" rel="next"' in text
    assert text_of(made[1], "files/compare/log.txt") == "all is well"


def test_a_missing_result_has_a_page_with_its_command(made):
    text = text_of(made[1], "dp.html")
    assert registry.question("dp") in text
    assert "make experiment EXP=dp ARGS=" in text
    assert "Expected numbers" in text
    assert "is damaged: it is not JSON" in text_of(made[1], "ring.html")
    assert "missing: gone.png" in text_of(made[1], "amp.html")


def test_the_ledger_links_to_what_is_there(made):
    text = text_of(made[1], "claims.html")
    assert re.findall(r"Evidence: (.*)</p>", text) == [
        '<a href="compare.html#CB7">compare</a>; traffic: holds',
        '<a href="compare.html">compare</a>',
        "compare",  # nothing to link to
        "compare",
    ]
    assert '<span class="badge no-verdict">no verdict</span>' in text
    assert "<dt>expected</dt>" in text.rpartition('id="CA3"')[2]
    assert "<dt>measured</dt>" not in text.rpartition('id="CA3"')[2]


def test_without_a_ledger_single_claims_are_listed(tmp_path, monkeypatch):
    helpers.write(tmp_path, "dp", claims=[helpers.CLAIM | {"id": "CA1"}])
    (tmp_path / "site").mkdir()
    pages.write(tmp_path / "site", tmp_path)
    text = text_of(tmp_path / "site", "claims.html")
    assert '<a href="dp.html#CA1">CA1</a>' in text
    assert "make experiment EXP=claims" in text


def test_every_link_leads_to_something_inside(made):
    site = made[1]
    found = {path.name: Links(path) for path in site.glob("*.html")}
    assert len(found) == len(registry.names()) + 2
    for page, own in found.items():
        for link in own.links:
            if link == "data:,":
                continue
            parts = urllib.parse.urlsplit(link)
            assert not parts.scheme and not parts.netloc, link
            path = site / urllib.parse.unquote(parts.path or page)
            assert path.resolve().is_relative_to(site.resolve())
            assert path.is_file(), (page, link)
            if parts.fragment:
                assert urllib.parse.unquote(parts.fragment) in found[path.name].ids


def test_hostile_results_stay_text(made):
    _, site = made
    own = Links(site / "errors.html")
    assert "script" not in own.tags
    text = text_of(site, "errors.html")
    assert "&lt;script&gt;" in text and "\\ud800 half" in text
    copied = {path.name for path in (site / "files" / "errors").iterdir()}
    assert copied == {
        *("result.json", "javascript:alert(1)", "<script>alert(1).png"),
        *('" onload="x.png', "evil.html.txt"),
    }
    assert "Named in the result, and not to be read" in text
    assert "not.hlo.txt.gz, .., away.txt" in text and "root:" not in text
    assert '"in Φ"' not in text_of(site, "index.html")


def test_nothing_at_all_says_what_to_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # no folder `results` here
    monkeypatch.setattr(command, "_steps", lambda site: None)
    assert command.main([]) == 0
    text = text_of(tmp_path / "results" / "site", "index.html")
    assert "No experiment has a result" in text
    assert "<code>make experiment EXP=ring</code>" in text
    out = capsys.readouterr().out
    count = len(registry.names())
    assert f"index.html: {count} experiments\n  {count} missing: " in out
    assert "Run one anew: make experiment EXP=NAME" in out


def test_folders_that_do_not_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "_steps", lambda site: None)
    absent = tmp_path / "absent"
    assert command.main(["--results", str(absent)]) == 2
    message = capsys.readouterr().err
    assert re.search(
        "absent, which is no folder.*results/NAME.*make experiment", message
    )
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "thesis.txt").write_text("all of it")
    given = ["--results", str(tmp_path), "--output", str(kept)]
    assert command.main(given) == 2
    assert re.search(
        "kept, which exists.*must be new.*kept/site", capsys.readouterr().err
    )
    assert (kept / "thesis.txt").exists() and len([*kept.iterdir()]) == 1


def test_an_earlier_report_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_steps", lambda site: None)
    given = ["--results", str(tmp_path)]
    assert command.main(given) == 0
    (tmp_path / "site" / "old.html").touch()
    assert command.main(given) == 0
    assert not (tmp_path / "site" / "old.html").exists()
    assert (tmp_path / "site" / "index.html").exists()


def test_a_real_result_is_shown_whole(tmp_path):
    ran = contract.run("ring", tmp_path, "--devices", "2")
    contract.check_report(ran.folder, ran.document)
    site = tmp_path / "site"
    site.mkdir()
    pages.write(site, tmp_path)
    text, report = text_of(site, "ring.html"), (ran.folder / "report.html").read_text()
    for claim in ran.document["claims"]:
        assert f'id="{claim["id"]}"' in text and f'id="{claim["id"]}"' in report
    assert text.count("<img ") == len(ran.found.figures)
    copied = {path.name for path in (site / "files" / "ring").iterdir()}
    assert copied == {"result.json", *ran.document["artifacts"]} - {"report.html"}
    style = (site / pages.STYLE).read_text()
    shared = (templates.HERE / "look.css").read_text().strip()
    assert shared in style and shared in report
