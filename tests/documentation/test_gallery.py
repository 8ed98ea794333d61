"""The programs of the gallery give the result of one process, and draw it.

They run one after another in one launch of the ranks: starting a launch takes longer than most of them.
"""

import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"

# Each program, its summary, which is the same on any number of ranks, and what --check adds.
PROGRAMS = {
    "heat_halos": ("heat 1475.065524 of 1568.500000, maximum 0.499983 after 400 steps\n", "as NumPy says"),
    "wave_slits": ("behind the slits: highest 0.437809, mean 0.045894 after 300 steps\n", "as NumPy says"),
    "clusters_hdf5": ("5 clusters, squared distances 564786 after 8 rounds\n", "as NumPy and scikit-learn say"),
    "monte_carlo": ("12  1.29280 +- 0.09095  exact 1.33526\n", "as NumPy says"),
    "conjugate_gradients": ("1600 unknowns, 143 iterations, maximum 0.678164716\n", "as NumPy says"),
    "grid_search": ("48 fits, best {'C': 10.0, 'gamma': 0.0001} with accuracy 0.9800\n", "as scikit-learn says"),
}

ALL = f"""
import runpy, sys
for name in {list(PROGRAMS)}:
    sys.argv = [name, *(["--check", "--plot", name + ".png"] if "--check" in sys.argv else [])]
    sys.argv += ["--output", "heat.h5"] if name == "heat_halos" else []
    runpy.run_path({str(EXAMPLES)!r} + "/" + name + ".py", run_name="__main__")
"""


def test_gallery(run_ranks, tmp_path):
    program = tmp_path / "gallery.py"
    program.write_text(ALL)
    ended = run_ranks(1, program, "--check", limit=100, cwd=tmp_path).check()
    ended.shows(*(f"{summary}{check}\n" for summary, check in PROGRAMS.values()))
    for name in PROGRAMS:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG"), name
    ended = run_ranks(2, program, limit=100, cwd=tmp_path).check()
    ended.shows(*(summary for summary, _ in PROGRAMS.values()))


def test_every_example_has_a_card():
    """A card of the gallery leads to the section that shows the program."""
    cards, *sections = (ROOT / "docs" / "examples.md").read_text().split("\n## ")
    links = {each.strip('"') for each in re.findall(r"(?:\]\(|^:link: )([^\s)]*#[^\s)]+)", cards, re.MULTILINE)}
    shown = {"asynchronous.html#tutorials": ["sweep", "train_digits_async"]}
    for section in sections:
        anchor = "#" + section.partition("\n")[0].lower().replace(" ", "-")
        shown[anchor] = re.findall(r"literalinclude:: examples/(\w+)\.py", section)
    assert links == {*shown}
    assert sorted(itertools.chain(*shown.values())) == sorted(path.stem for path in EXAMPLES.glob("*.py"))


def test_every_example_is_on_a_page_and_tested():
    pages = "".join(page.read_text() for page in (ROOT / "docs").glob("*.md"))
    tests = "".join(test.read_text() for test in (ROOT / "tests").rglob("test_*.py"))
    for path in EXAMPLES.glob("*.py"):
        assert f"literalinclude:: examples/{path.name}" in pages, path
        assert path.stem in tests, path
