"""`python -m experiments.site`: the report of all results as a folder of pages."""

import argparse
import pathlib
import shutil
import sys

from experiments.harness.reading import USUAL, Found
from experiments.site import pages
from jaxdp import draw

OWN = ".jaxdp-site"  # the file by which a folder is known as one that may be replaced
BACK = """<nav style="padding: 0.8rem 1.5rem 0">
<a style="color: inherit" href="index.html">Back to the report</a>
</nav>"""


def main(arguments: list[str]) -> int:
    """Writes the site; returns the exit status."""
    options = _parser().parse_args(arguments)
    site = options.output or options.results / "site"
    try:
        _check(options.results, site)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if site.exists():
        shutil.rmtree(site)
    site.mkdir(parents=True)
    (site / OWN).touch()
    found = pages.write(site, options.results)
    _steps(site)
    print(_summary(site, found))
    return 0


def _check(results: pathlib.Path, site: pathlib.Path) -> None:
    """Checks both folders.

    Raises:
        ValueError: There are no results, or the site would replace something else.
    """
    if not results.is_dir() and results != USUAL:
        raise ValueError(
            f"--results got {results}, which is no folder. The report is made of the "
            "folder that experiments have written to, by default results/NAME for each "
            "of them. Give the --output of an experiment, or run one: make experiment "
            "EXP=ring."
        )
    if (
        site.exists()
        and not (site / OWN).exists()
        and (not site.is_dir() or any(site.iterdir()))
    ):
        raise ValueError(
            f"--output got {site}, which exists and is no report. It is replaced as a "
            f"whole, so it must be new, empty, or an earlier report, which has a file "
            f"{OWN}. Use --output {site}/site, for example."
        )


def _steps(site: pathlib.Path) -> None:
    """Writes the page on which a collective is stepped through, with a way back."""
    path = site / pages.STEPS
    draw.write_page(path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("<main>", f"{BACK}\n<main>", 1), encoding="utf-8")


def _summary(site: pathlib.Path, found: dict[str, Found]) -> str:
    """What was written, and of which experiments results are missing or old."""
    lines = [f"{site}/{pages.INDEX}: {len(found)} experiments"]
    for state in pages.STATES:
        names = [name for name, one in found.items() if one.state == state]
        if names:
            lines.append(f"  {len(names):2} {state}: {', '.join(names)}")
    tiny = [name for name, one in found.items() if one.tiny]
    if tiny:
        lines.append(f"  {len(tiny):2} of them from tiny runs: {', '.join(tiny)}")
    if any(one.note for one in found.values()):
        lines.append("Run one anew: make experiment EXP=NAME; its page says why.")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.site", description=__doc__
    )
    parser.add_argument(
        "--results", type=pathlib.Path, default=USUAL, help="what experiments wrote"
    )
    parser.add_argument(
        "--output",
        type=pathlib.Path,
        help="the site's folder; RESULTS/site if left out",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
