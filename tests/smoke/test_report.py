"""The report: made from a run, made again without decoding, and opened in a browser."""

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from inference.page.tables import write_csv
from tests.browser import BROWSER, look
from tests.folders import save_tiny_target
from tests.scripts import Done, run_script

pytestmark = pytest.mark.slow

HOSTILE = "<script>document.title='broken'</script><img src=x onerror=\"document.title='broken'\">"
CATEGORY = "a $x_{$ & <i>b [/bold]"  # for matplotlib, a browser and rich
LINES = [
    {"question_id": "</script><b>1", "category": CATEGORY, "turns": [HOSTILE]},
    {"question_id": 2, "category": "=1+1", "turns": ["x = 1"]},
    {"question_id": 3, "category": "chat", "turns": ["and in the end"]},
]
DRAFTERS = ("ngram:gamma=3", "self_window:growth=static,branching=3.2.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose prompts are hostile."""
    pytest.importorskip("matplotlib")
    place = tmp_path_factory.mktemp("run")
    target = save_tiny_target(place / "target", num_hidden_layers=2)
    prompts = place / "set.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    options = ["--max-new-tokens", "24", "--repeats", "1", "--warmup", "1"]
    for drafter in DRAFTERS:
        options += ["--drafter", drafter]
    where = ("--target", str(target), "--prompts", str(prompts), "--out", str(place / "out"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("inference.bench._COST_SAMPLES", 1)
        done = run_script("benchmark.py", *where, *options)
    assert done.returncode == 0, done.stderr
    return place / "out"


def read(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "benchmark.json").read_text())


def test_the_page_says_how_sure_it_is(folder: Path) -> None:
    """The best speed-up has its interval; a run too short to judge its baseline says so."""
    page, run = (folder / "report.html").read_text(), read(folder)
    best = max(run["drafters"], key=lambda one: one["speedup"])
    low, high = best["speedup_interval"]
    assert f"best speed-up, {low:.2f}-{high:.2f}: " in page
    assert run["baseline"]["check"]["judged"] is False
    assert "not judged: too few rounds, or a toy of a target" in page
    assert f"; {run['date']}</p>" in page


def test_traces_add_up_to_what_is_reported(folder: Path) -> None:
    rows = pq.read_table(folder / "traces.parquet").to_pylist()
    for one in read(folder)["drafters"]:
        rounds = [r for r in rows if r["drafter"] == one["name"] and r["round"]]
        assert sum(len(r["emitted"]) for r in rounds) == one["tokens"]
        assert len(rounds) == one["rounds"]
        assert sum(r["seconds"] for r in rounds) == pytest.approx(one["seconds"])
        for row in rounds:
            assert row["path"][0] == 0
            drafted = [row["tokens"][node] for node in row["path"][1:]]
            assert row["emitted"][: len(drafted)] == drafted
            assert all(row["parents"][b] == a for a, b in pairwise(row["path"]))
    sums = read(folder)["drafters"][0]["by_prompt"]
    assert [one["question_id"] for one in sums] == ["</script><b>1", "2", "3"]


def test_tables_and_plots_lie_beside_the_page(folder: Path) -> None:
    with (folder / "drafters.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [line["name"] for line in lines] == list(DRAFTERS)
    assert float(lines[0]["tau"]) == read(folder)["drafters"][0]["tau"]
    with (folder / "categories.csv").open() as file:  # no spreadsheet may run a category
        assert {line["category"] for line in csv.DictReader(file)} >= {"'=1+1", "chat"}
    assert r"self\_window & static 3.2.1" in (folder / "table.tex").read_text()
    for name in ("speedup", "survival", "categories", "verify_cost"):
        assert (folder / "plots" / f"{name}.png").stat().st_size > 1000
        assert (folder / "plots" / f"{name}.svg").read_text().rstrip().endswith("</svg>")


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
def test_no_cell_is_a_formula(start: str, tmp_path: Path) -> None:
    write_csv(tmp_path / "x.csv", [{"category": f"{start}1+1", "tau": -1.5}])
    with (tmp_path / "x.csv").open(newline="") as file:
        assert list(csv.DictReader(file)) == [{"category": f"'{start}1+1", "tau": "-1.5"}]


def test_the_page_is_made_again_without_decoding(folder: Path, tmp_path: Path) -> None:
    done = run_script("report.py", str(folder), "--out", str(tmp_path))
    assert (done.returncode, done.stderr) == (0, f"wrote {tmp_path}/report.html\n")
    assert (tmp_path / "report.html").read_text() == (folder / "report.html").read_text()


def test_an_older_file_without_newer_figures_is_shown(folder: Path, tmp_path: Path) -> None:
    result = read(folder)
    del result["command"], result["baseline"]["distinct_4"]
    for one in result["drafters"]:
        del one["distinct_4"], one["by_prompt"]
    (tmp_path / "benchmark.json").write_text(json.dumps(result))
    assert run_script("report.py", str(tmp_path)).returncode == 0
    page = (tmp_path / "report.html").read_text()
    assert "No traces beside" in page
    assert "does not hold the command" in page


def test_without_the_extra_one_line_says_how_to_get_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.page.files.find_spec", lambda name: None)
    done = run_script("report.py", str(folder), "--out", str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "pip install 'specdrafters[report]'" in done.stderr
    assert (tmp_path / "table.tex").exists()


def test_texts_of_prompts_are_harmless(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "<script>document" not in page
    assert "<img src=x" not in page
    assert "<i>b" not in page
    assert "https://" not in page.replace("https://matplotlib.org/", "")


def test_a_run_against_itself_is_no_regression_and_a_worse_one_is(
    folder: Path, tmp_path: Path
) -> None:
    def compare(*options: str) -> Done:
        return run_script("compare.py", str(folder), *options, "--fail-on-regression")

    assert compare(str(folder)).returncode == 0
    worse = read(folder)
    for one in worse["drafters"]:
        one["speedup"] *= 0.5
        for prompt in one["by_prompt"]:
            prompt["seconds"] *= 2
    (tmp_path / "benchmark.json").write_text(json.dumps(worse))
    done = compare(str(tmp_path))
    assert done.returncode == 1
    assert done.stderr.count("regression in") == len(DRAFTERS)
    found = json.loads(compare(str(tmp_path), "--json").stdout)[0]
    assert [one["speedup"]["ratio"] for one in found["drafters"]] == pytest.approx([0.5, 0.5])
    assert {one["tau"]["verdict"] for one in found["drafters"]} == {"same"}
    (tmp_path / "benchmark.json").write_text(json.dumps(worse | {"drafters": []}))
    done = compare(str(tmp_path))  # nothing was compared, so nothing was found to be well
    assert done.returncode == 2
    assert "no drafter of one method and shape in common" in done.stderr


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here: apt-get install chromium")
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, True)])
def test_the_page_opens_in_a_browser(folder: Path, tmp_path: Path, width: int, dark: bool) -> None:
    script = """
      const at = (id) => page.getElementById(id), seen = [];
      at("replay-which").value = "3";
      at("replay-which").dispatchEvent(new Event("change"));
      const count = () => at("replay-count").textContent;
      seen.push(count());
      at("replay-next").click();
      seen.push(count());
      return { seen, title: page.title, svgs: page.querySelectorAll("figure svg").length,
               nodes: page.querySelectorAll("#replay-tree rect").length,
               taken: page.querySelectorAll("#replay-tree .n-accepted").length,
               question: (at("replay-which").value = "0",
                 at("replay-which").dispatchEvent(new Event("change")),
                 at("replay-question").textContent) };
    """
    seen = look(folder / "report.html", tmp_path, width=width, dark=dark, script=script)
    assert seen.console == []
    assert seen.sideways == 0  # nothing scrolls sideways but tables in their own boxes
    assert seen.background == ("rgb(18, 22, 27)" if dark else "rgb(246, 247, 249)")
    assert seen.found["title"].startswith("Drafters of ")
    assert seen.found["question"] == HOSTILE
    assert seen.found["svgs"] == 6
    before, after = seen.found["seen"]
    assert "15 drafted, " in before
    assert before != after
    assert seen.found["nodes"] > seen.found["taken"]


@pytest.mark.parametrize(
    "changes", [{"drafters": [{"name": "x"}]}, {"drafters": "x"}, {"verify_cost": {"unknown": 1.0}}]
)
def test_a_file_that_was_changed_by_hand_is_one_line(
    folder: Path, tmp_path: Path, changes: dict[str, object]
) -> None:
    changed = tmp_path / "benchmark.json"
    changed.write_text(json.dumps(read(folder) | changes))
    for script, *given in (
        ("report.py", str(changed), "--out", str(tmp_path / "out")),
        ("compare.py", str(folder), str(changed)),
        ("plan.py", "speedup", "--benchmark", str(changed)),
    ):
        done = run_script(script, *given)
        assert "verify_cost" in changes or done.returncode == 2
        assert len(done.stderr.splitlines()) <= 1 or done.returncode == 0
