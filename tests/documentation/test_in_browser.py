"""The pages of the documentation in a browser: on a desktop, on a phone, and dark.

Runs only if it is named. It needs Chromium with its driver, and the extra ``browser``. ``MPISTRAT_TEST_HTML`` names
pages that are built already.
"""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
import urllib.parse
from pathlib import Path

import pytest

# Whichever test comes first loads all pages, beside all that the machine has to do.
pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).parents[2]
webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install '.[browser]'")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait
CHROMIUM, DRIVER = (shutil.which(name) for name in ("chromium", "chromedriver"))
if not (CHROMIUM and DRIVER):
    pytest.skip("chromium or chromedriver is not in PATH", allow_module_level=True)

DESKTOP, PHONE = (1280, 900), (390, 844)

VIEWS = {"desktop": (DESKTOP, "light"), "phone": (PHONE, "light"), "dark": (DESKTOP, "dark")}

# Words of users, some with capitals as they type them, and the page that the search must show first.
SEARCHES = {
    "allgather": "collectives",
    "batch size": "data",
    "benchmark": "performance",
    "checkpoint": "checkpoints",
    "CUDA": "gpu",
    "deadlock": "hangs",
    "domain decomposition": "mesh",
    "early stopping": "checkpoints",
    "embarrassingly parallel": "task-farms",
    "environment variables": "options",
    "fault tolerance": "elastic",
    "finite differences": "mesh",
    "ghost cells": "mesh",
    "grid search": "gallery/grid-search",
    "halo": "mesh",
    "hang": "hangs",
    "hyperparameter": "task-farms",
    "install": "install",
    "job array": "launching",
    "jupyter": "notebooks",
    "Monte Carlo": "gallery/monte-carlo",
    "mpi4py": "migration",
    "netcdf": "data-files",
    "parameter server": "asynchronous",
    "parameter sweep": "task-farms",
    "parallel I/O": "data-write",
    "profiling": "troubleshooting",
    "pytorch": "torch",
    "random seed": "reproducibility",
    "requeue": "preemption",
    "restart": "preemption",
    "sbatch": "launching",
    "stencil": "mesh",
    "time limit": "preemption",
    "wandb": "checkpoints",
    "weak scaling": "scaling",
}

# Of the page that is shown: what is wider than the screen, its links and anchors, pictures that are missing, and text
# that stands out from its background less than WCAG asks for large text (3).
LOOK = """
const root = document.documentElement, wide = [];
if (root.scrollWidth > root.clientWidth)
    for (const each of document.body.querySelectorAll("*")) {
        const box = each.getBoundingClientRect();
        if (box.width && box.right > root.clientWidth + 1 && box.left >= 0) wide.push(each.outerHTML.slice(0, 120));
    }
for (const table of document.querySelectorAll("article table.docutils"))  // on a phone it may scroll
    if (root.clientWidth > 1000 && table.parentElement.scrollWidth > table.parentElement.clientWidth + 1)
        wide.push("a table is cut: " + table.innerText.slice(0, 80));
for (const each of document.querySelectorAll("article .highlight-text pre, article .highlight-console pre"))
    if (root.clientWidth > 1000 && each.scrollWidth > each.clientWidth + 1)
        wide.push("a report is cut: " + each.innerText.slice(0, 80));
const numbers = color => color.match(/[\\d.]+/g).map(Number);
const light = color => numbers(color).slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = element => {
    for (; element; element = element.parentElement) {
        const color = getComputedStyle(element).backgroundColor, parts = numbers(color);
        if (parts.length < 4 || parts[3] > 0.5) return color;
    }
    return "rgb(255, 255, 255)";
};
const faint = [], looked = new Set();
for (const each of document.querySelectorAll("article *")) {
    const kind = each.tagName + each.className + each.parentElement.className;
    if (looked.has(kind) || ![...each.childNodes].some(node => node.nodeType == 3 && node.data.trim())) continue;
    looked.add(kind);
    if (!each.getClientRects().length) continue;
    const [a, b] = [getComputedStyle(each).color, behind(each)].map(light).sort((x, y) => y - x);
    if ((a + 0.05) / (b + 0.05) < 3) faint.push(each.outerHTML.slice(0, 120));
}
// Words of tables of which a part is on another line. A name ends its line after a dot or an underscore.
const broken = [];
for (const table of document.querySelectorAll("article table.docutils")) {
    const texts = document.createTreeWalker(table, NodeFilter.SHOW_TEXT), range = document.createRange();
    for (let text = texts.nextNode(); text; text = texts.nextNode())
        for (const word of text.data.matchAll(/[\\p{L}\\p{N}]+/gu)) {
            range.setStart(text, word.index);
            range.setEnd(text, word.index + word[0].length);
            const tops = [...range.getClientRects()].map(box => box.top);
            if (Math.max(...tops) - Math.min(...tops) > 4) broken.push(word[0]);
        }
}
const shown = (element, name) => [...element.querySelectorAll(name)].filter(each => each.getClientRects().length);
return {
    broken: broken.slice(0, 5),
    names: shown(document, "article a.sphinx-codeautolink-a").map(each => each.innerText),
    programs: shown(document, "article div.highlight pre").length,
    copied: document.querySelectorAll("article div.highlight button.copybtn").length,
    terminals: shown(document, "article .highlight-console pre").map(each => each.innerText),
    height: root.scrollHeight,
    entries: document.querySelectorAll(".sidebar-tree > ul > li").length,
    wide: wide.slice(0, 5),
    faint: faint.slice(0, 5),
    links: [...document.querySelectorAll("a[href]")].map(each => each.href),
    anchors: [...document.querySelectorAll("[id]")].map(each => each.id),
    missing: [...document.images].filter(each => each.complete && !each.naturalWidth).map(each => each.src),
    background: light(behind(document.querySelector("article"))),
};
"""


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The folder of the pages."""
    if "MPISTRAT_TEST_HTML" in os.environ:
        return Path(os.environ["MPISTRAT_TEST_HTML"])
    pytest.importorskip("sphinx", reason="Sphinx is not installed: pip install '.[browser]'")
    folder = tmp_path_factory.mktemp("html")
    subprocess.run([sys.executable, "-m", "sphinx", "-q", "-b", "html", ROOT / "docs", folder], check=True)
    return folder


@pytest.fixture(scope="module")
def address(html):
    """Where a server gives out the pages."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # keeps connections open

        def log_message(self, *arguments):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, directory=html)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.page_load_strategy = "eager"
    options.set_capability("goog:loggingPrefs", {"browser": "SEVERE"})
    for switch in ("headless", "no-sandbox", "disable-gpu", "no-first-run", "hide-scrollbars"):
        options.add_argument(f"--{switch}")
    for switch in ("background-networking", "component-update", "sync", "dev-shm-usage"):
        options.add_argument(f"--disable-{switch}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('chromium')}")
    driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
    driver.set_script_timeout(100)
    yield driver
    driver.quit()


def show_as(browser, size, scheme):
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def names_of(html):
    """All pages, but for the sources of modules."""
    pages = sorted(str(page.relative_to(html)) for page in html.rglob("*.html"))
    return [name for name in pages if not name.startswith("_")]


@pytest.fixture(scope="module")
def looks(browser, html, address):
    """What each view of each page shows. A page is loaded once, since views change without loading it again."""
    found = {view: {} for view in VIEWS}
    for name in names_of(html):
        browser.get(f"{address}/{name}")
        for view, (size, scheme) in VIEWS.items():
            show_as(browser, size, scheme)
            found[view][name] = browser.execute_script(LOOK)
    return found


@pytest.mark.parametrize("view", VIEWS)
def test_pages_fit(looks, view):
    findings = []
    for name, seen in looks[view].items():
        findings += [
            f"{name}: {kind}: {each}" for kind in ("wide", "faint", "missing", "broken") for each in seen[kind]
        ]
        if (seen["background"] < 0.2) != (view == "dark"):
            findings.append(f"{name}: the background is not {VIEWS[view][1]}")
    assert findings == []
    assert len(looks[view]) > 30


def test_names_in_programs_are_links(looks):
    """To the class, and to methods of objects that the program has made."""
    names = {name: seen["names"] for name, seen in looks["desktop"].items()}
    assert {"mpistrat.MultiWorkerMirroredStrategy", "mpistrat.data.Dataset.from_hdf5", "strategy.reduce"} <= {
        *names["index.html"]
    }
    programs = ("tutorial", "concepts", "collectives", "checkpoints", "data", "gallery/heat-equation", "sharp-edges")
    assert [name for name in programs if not names[f"{name}.html"]] == []


def test_programs_can_be_copied(looks):
    counts = {name: (seen["copied"], seen["programs"]) for name, seen in looks["desktop"].items()}
    assert {name: each for name, each in counts.items() if each[0] < each[1]} == {}
    assert counts["index.html"][0] == 10


def test_terminals_are_text(looks):
    """They can be copied and searched, and follow the theme."""
    for view in VIEWS:
        text = "\n".join(looks[view]["index.html"]["terminals"])
        for line in ("have waited for rank 2 since", "cause: sleep.", "rank  host"):
            assert line in text, (view, line)


def test_pages_end(looks):
    """No page is longer than 13 screens, but for the list of all names. What is folded does not count."""
    heights = {name: seen["height"] for name, seen in looks["desktop"].items() if name != "genindex.html"}
    assert {name: height for name, height in heights.items() if height > 12_000} == {}


def test_sidebar_is_short(looks):
    assert {seen["entries"] for seen in looks["desktop"].values()} <= set(range(6, 13))


def test_links(looks, html, address):
    findings = []
    for name, seen in looks["desktop"].items():
        for link in seen["links"]:
            target = urllib.parse.urlsplit(link)
            if f"{target.scheme}://{target.netloc}" != address:
                continue
            path, anchor = (urllib.parse.unquote(target.path).lstrip("/"), urllib.parse.unquote(target.fragment))
            if not (html / path).is_file():
                findings.append(f"{name}: no page {path}")
            elif anchor and path in looks["desktop"] and anchor not in looks["desktop"][path]["anchors"]:
                findings.append(f"{name}: no anchor {path}#{anchor}")
    assert findings == []


def test_no_page_logs_an_error(looks, browser):
    assert [each["message"] for each in browser.get_log("browser")] == []


@pytest.mark.parametrize("words", SEARCHES)
def test_search(browser, address, words):
    show_as(browser, DESKTOP, "light")
    browser.get(f"{address}/search.html?q={urllib.parse.quote(words)}")
    wait = WebDriverWait(browser, 120)
    found = wait.until(
        lambda browser: browser.execute_script(
            "const all = document.querySelectorAll('#search-results ul.search > li a'), "
            "summary = document.querySelector('#search-results .search-summary');"
            "return /found/.test(summary?.innerText) && [...all].map(each => each.href)"
        )
    )
    pages = [urllib.parse.urlsplit(link).path.lstrip("/") for link in found]
    assert pages[0] == f"{SEARCHES[words]}.html"
