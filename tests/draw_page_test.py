"""The step-through page in a real browser: it shows what the library computes."""

import json

import pytest

from jaxdp import algorithms, draw
from jaxdp.draw import catalogue, stepping
from jaxdp.draw.frames import frames, record
from jaxdp.draw.units import bytes_text, seconds_text
from jaxdp.schedule import Round, Schedule, Transfer
from jaxdp.targets import hardware
from tests import browser as browsers

pytestmark = browsers.needs_browser()
MIB = 2**20
SHARED = "2-ethernet-100g"  # two devices in a host share an adapter
ALL_REDUCES = [
    n for n, c in catalogue.choices().items() if c.collective == "all_reduce"
]


@pytest.fixture(scope="module")
def browser():
    with browsers.started() as browser:
        yield browser


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "ring.html"
    draw.write_page(path)
    return path


@pytest.fixture
def page(browser, file):
    with browsers.opened(browser, file) as page:
        yield page


def _go(page, fragment):
    page.evaluate(
        "to => { history.replaceState(null, '', `#${to}`); read(); }", fragment
    )


def _moment(page):
    return page.evaluate("[state.algorithm.id, state.devices, state.done].join('-')")


def _cells(page):
    """What the cells say, by device and chunk: digits, and whether complete."""
    return page.evaluate(
        "() => cells.cells.map(column => column.map(cell => "
        "[cell.innerText.replace(/\\s/g, ''), cell.classList.contains('complete')]))"
    )


def test_frames_of_the_page_are_those_of_the_library(page):
    """Every algorithm and number of devices; 1,000,003 bytes on every kind of link."""
    text = page.evaluate(
        """([size, machine]) => JSON.stringify(data.algorithms.map((algorithm) =>
          [algorithm.id, Object.values(algorithm.schedules).map((schedule) => [
            schedule.devices,
            framesOf(schedule, size, data.machines.find(({ id }) => id === machine)),
            schedule.now, schedule.next,
          ])]))""",
        [1_000_003, SHARED],
    )
    found = json.loads(text)
    assert [name for name, _ in found] == [*draw.names()]
    machine = hardware("h100", devices_per_host=2, network_name="ethernet-100g")
    for name, by_devices in found:
        fits = catalogue.choice(name).fits
        assert [n for n, *_ in by_devices] == [n for n in stepping.DEVICES if fits(n)]
        for devices, shown, now, following in by_devices:
            expected = frames(catalogue.build(name, devices), 1_000_003, machine)
            assert now == [frame.now for frame in expected]
            assert following == [[f.next, f.detail] for f in expected[:-1]]
            for frame, got in zip(map(record, expected), shown, strict=True):
                assert got["held"] == frame["held"]
                assert got["sends"] == frame["sends"]
                assert got["sent"] == list(frame["sent_bytes"])
                assert got["received"] == list(frame["received_bytes"])
                assert got["clock"] == pytest.approx(frame["clock_s"], rel=1e-12)


def test_all_send_what_they_held_before_the_round(page):
    """No algorithm tells: where chunks swap places, sums of both come out alike."""
    pairs = ((0, 1), (1, 2), (2, 0))
    turn = Round((Transfer(pairs, (0, 0, 0), "replace"),))
    everywhere = ((0, 1, 2),)
    rotation = Schedule("rotation", 3, 1, everywhere, everywhere, (turn,))
    held = page.evaluate(
        """() => framesOf({devices: 3, chunks: 1, starts: [[0, 1, 2]], rounds: [
          [{op: "replace", pairs: [[0, 1], [1, 2], [2, 0]], chunks: [[0, 0, 0]]}]]},
          4, data.machines[0]).map((frame) => frame.held)"""
    )
    assert held == [record(frame)["held"] for frame in frames(rotation)]
    assert held[1] == [[[2]], [[0]], [[1]]]


@pytest.mark.parametrize("devices", [3, 8])
def test_stepping_to_the_end_completes_every_chunk_everywhere(page, devices):
    for name in ALL_REDUCES:
        if not catalogue.choice(name).fits(devices):
            continue
        schedule = catalogue.build(name, devices)
        rounds = len(schedule.rounds)
        _go(page, f"{name}-{devices}")
        start = _cells(page)
        for _ in range(rounds):
            page.keyboard.press("ArrowRight")
        everyone = "".join(map(str, range(devices)))
        assert _cells(page) == [[[everyone, True]] * schedule.chunks] * devices
        many = "s" if rounds > 1 else ""
        assert (
            page.locator("#count").inner_text() == f"{rounds} of {rounds} round{many}"
        )
        assert page.locator("#forward").is_disabled()
        page.keyboard.press("ArrowRight")  # nothing further
        assert _moment(page) == f"{name}-{devices}-{rounds}"
        page.keyboard.press("Home")
        assert _cells(page) == start


def test_buttons_scrubber_and_keys_step(page):
    def after(name, does):
        does()
        return page.locator("#count").inner_text(), _moment(page)

    press = page.keyboard.press
    assert after("forward", page.locator("#forward").click) == (
        "1 of 6 rounds",
        "ring-4-1",
    )
    assert after("last", page.locator("#last").click)[1] == "ring-4-6"
    assert after("back", page.locator("#back").click)[1] == "ring-4-5"
    assert after("first", page.locator("#first").click)[1] == "ring-4-0"
    assert page.locator("#back").is_disabled()
    assert after("end", lambda: press("End"))[1] == "ring-4-6"
    assert after("left", lambda: press("ArrowLeft"))[1] == "ring-4-5"
    assert after("scrubber", lambda: page.locator("#done").fill("2"))[1] == "ring-4-2"
    page.locator("#done").focus()
    assert after("key in scrubber", lambda: press("ArrowRight"))[1] == "ring-4-3"
    page.locator("body").press("?")
    assert page.locator("details").get_attribute("open") is not None


def test_lists_choose_algorithm_and_devices(page):
    page.locator("#algorithm").select_option("hierarchical")
    assert _moment(page) == "hierarchical-4-0"
    assert page.locator("#devices").inner_text().split() == ["2", "4", "6", "8", "16"]
    page.get_by_role("radio", name="6", exact=True).check(force=True)
    assert _moment(page) == "hierarchical-6-0"
    assert page.locator("#links .host").count() == 2
    page.locator("#rivals").get_by_role("button", name="Direct", exact=True).click()
    assert _moment(page) == "direct-6-0"
    assert page.locator("#algorithm").input_value() == "direct"


def test_an_address_opens_a_moment_and_wrong_ones_do_no_harm(browser, file):
    with browsers.opened(browser, file, fragment="star-8-1") as page:
        assert _moment(page) == "star-8-1"
        for fragment, shown in [
            ("ring-4-99", "ring-4-6"),
            ("hierarchical-7-0", "hierarchical-6-0"),
            ("ring", "ring-6-0"),
            ("nothing-4-1", "ring-6-0"),
        ]:
            _go(page, fragment)
            assert _moment(page) == shown
    with browsers.opened(browser, file, fragment="%3Cscript%3E") as page:
        assert _moment(page) == "ring-4-0"


def test_play_moves_chunks_and_reaches_the_end(browser, file):
    with browsers.opened(
        *(browser, file),
        fragment="star-5",
        reduced_motion=False,
        bypass_csp=True,  # for wait_for_function
    ) as page:
        page.locator("#speed").select_option("4")
        page.locator("body").press(" ")
        assert page.locator("#play").get_attribute("aria-label") == "Pause"
        packets = "document.querySelectorAll('#flights .packet').length"
        page.wait_for_function(f"{packets} === 4")
        page.wait_for_function("location.hash === '#star-5-2' && !state.playing")
        assert page.evaluate(packets) == 0
        assert page.locator(".cell.complete").count() == 5
        assert page.locator("#play").get_attribute("aria-label") == "Play"
        page.locator("#speed").select_option("0.5")
        page.locator("#play").click()  # from the start again
        assert page.evaluate("[state.done, state.playing]") == [0, True]
        page.locator("#play").click()
        assert page.evaluate("[state.done, state.playing]") == [0, False]


def test_clock_and_bytes_are_those_of_the_cost_model(page):
    _go(page, "star-8-1")
    now, end = frames(algorithms.star(8), 64 * MIB)[1:]

    def text(name):
        return page.locator(f"#{name}").inner_text()

    assert text("clock") == seconds_text(now.clock_s)
    assert text("clock-of") == f"of {seconds_text(end.clock_s)}, 2 rounds"
    assert text("busiest-what") == f"of {bytes_text(7 * 64 * MIB)} sent by device 0"
    assert "device 0 sent 0 B and received 448 MiB;" in page.locator(
        "#bytes"
    ).get_attribute("aria-label")
    page.locator("#machine").select_option("1-ethernet-10g")
    page.locator("#size").fill("20")
    slow = hardware("h100", devices_per_host=1, network_name="ethernet-10g")
    slower = frames(algorithms.star(8), MIB, slow)[1]
    assert text("clock") == seconds_text(slower.clock_s)
    assert text("size-text") == "1 MiB"
    assert "1 MiB" in text("bytes")
    units = "([bytes, seconds]) => [bytes.map(bytesText), seconds.map(secondsText)]"
    sizes, times = [0, 999, 1000, 1536, 2**34], [0, 1e-10, 9.999e-4, 0.5, 75]
    assert page.evaluate(units, [sizes, times]) == [
        [*map(bytes_text, sizes)],
        [*map(seconds_text, times)],
    ]


def test_working_it_out_by_hand(page):
    _go(page, "ring-4-2")  # the next round completes chunk r of device r
    page.locator("body").press("h")
    assert page.locator("#by-hand").is_checked()
    assert page.locator("#links .packet text").all_text_contents() == ["?"] * 4
    assert page.locator("#flights .arrow").count() == 0
    assert "goes from" not in page.locator("#said").inner_text()

    def mark(device, chunk, times):
        for _ in range(times):
            page.locator(f"[data-device='{device}'][data-chunk='{chunk}']").click()

    for device in range(3):
        mark(device, device, 2)
    mark(3, 3, 1)  # it does not only change
    mark(0, 2, 1)  # it does not change
    page.locator("#check").click()
    verdict = page.locator("#verdict").inner_text()
    assert verdict.startswith("3 of 4 right.")
    assert "Device 3, chunk 3 becomes complete" in verdict
    assert "Device 0, chunk 2 does not change" in verdict
    judged = (
        "[...document.querySelectorAll('[data-judged]')].map(c => c.dataset.judged)"
    )
    assert sorted(page.evaluate(judged)) == ["right"] * 3 + ["wrong"] * 2
    assert page.locator("#score").inner_text() == "0 of 1 rounds right at once"
    page.locator("body").press("ArrowRight")
    assert page.locator("[data-mark], [data-judged]").count() == 0
    for device in range(4):
        mark(device, (device + 3) % 4, 2)
    page.locator("body").press("c")
    assert page.locator("#verdict").inner_text().startswith("Right: all 4 cells.")
    assert page.locator("#score").inner_text() == "1 of 2 rounds right at once"
    assert page.locator("#links .packet text").all_text_contents() == [
        "0",
        "1",
        "2",
        "3",
    ]


def test_cells_are_walked_and_marked_with_keys(page):
    page.locator("body").press("h")
    page.locator(".cell[tabindex='0']").focus()
    for key in ("Right", "Right", "Down", "Down", "Left"):
        page.keyboard.press(f"Arrow{key}")
    page.keyboard.press("Enter")
    assert _moment(page) == "ring-4-0"  # arrow keys did not step
    marked = page.locator("[data-mark]")
    assert marked.count() == 1
    said = "Device 1, chunk 2: the contribution of device 1, 1 of 4; marked: changes"
    assert marked.get_attribute("aria-label") == said
