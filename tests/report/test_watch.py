"""The live page: served to this machine only, drawn when something changed, seen to grow in a real browser."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from chrome import opened
from command import protofed

from protofed import Experiment, run
from protofed.errors import UserError
from protofed.report import live as watching
from protofed.report.live import Live, serving, unfinished

pytestmark = pytest.mark.usefixtures("all_cores")

PLAN = ("rounds=3", "clients=4", "evaluate.pm=0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is over; tests change copies of it."""
    return run(Experiment.load("demo", *PLAN), tmp_path_factory.mktemp("runs") / "first").folder


def get(port: int, path: str = "/data.json", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def state(folder: Path) -> dict[str, tuple[int, int]]:
    """Every file with when it was changed, and folders too."""
    return {
        str(p): (p.stat().st_mtime_ns, p.stat().st_size if p.is_file() else 0) for p in [folder, *folder.rglob("*")]
    }


def test_only_this_machine_is_served(finished: Path) -> None:
    with serving([finished], 0) as server:
        port = server.server_port
        assert server.server_address[0] == "127.0.0.1"
        for host in (f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port + 1}", ""):
            status, _, body = get(port, "/data.json", Host=host)
            assert (status, body) == (403, b"Only for this machine.\n"), host
        status, headers, _ = get(port, "/data.json", Host=f"localhost:{port}")
        assert status == 200
        assert "Access-Control-Allow-Origin" not in headers
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert get(port, "/../pyproject.toml")[0] == get(port, "/experiment.toml")[0] == 404


def test_nothing_is_drawn_again_unless_something_changed(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(finished, "run"))
    (folder / "summary.json").unlink()
    drawn = list[int]()
    draw = watching._draw
    monkeypatch.setattr(watching, "_draw", lambda *words: (drawn.append(1), draw(*words))[1])
    monkeypatch.setattr(watching, "PAUSE", 0.0)
    with serving([folder], 0) as server:
        before = state(folder)
        status, headers, body = get(server.server_port)
        live = json.loads(body)["live"]
        assert (status, live["round"], live["rounds"], live["left"]) == (200, 3, 3, 1)
        assert get(server.server_port, If_None_Match=headers["ETag"])[::2] == (304, b"")
        assert get(server.server_port, "/")[0] == 200
        assert len(drawn) == 1
        line = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1]) | {"round": 4}
        assert state(folder) == before, "a watch writes nothing"
        with open(folder / "rounds.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n" + json.dumps(line)[:20])  # and the next one is half written
        status, again, body = get(server.server_port, If_None_Match=headers["ETag"])
        assert (status, json.loads(body)["live"]["round"], len(drawn)) == (200, 4, 2)
        assert again["ETag"] != headers["ETag"]


def test_a_run_that_has_not_begun_and_a_folder_of_runs(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PAUSE", 0.0)
    later = Path("runs")
    with serving([later], 0) as server:
        shown = json.loads(get(server.server_port)[2])
        assert (shown["live"]["runs"], shown["methods"]) == (0, [])
        assert unfinished([later]) is None
        shutil.copytree(finished, later / "first")
        shutil.copytree(finished, later / "second")
        plan = later / "second" / "experiment.toml"
        plan.write_text(plan.read_text().replace("seed = 0", "seed = 1"))
        (later / "second" / "summary.json").unlink()
        live = json.loads(get(server.server_port)[2])["live"]
        assert (live["runs"], live["left"], live["round"], live["rounds"]) == (2, 1, 6, 6)
        assert unfinished([later]) == 1


def test_a_sweep_is_at_its_end_when_all_its_cells_are(finished: Path) -> None:
    out = Path("out")
    shutil.copytree(finished, out / "a")
    (out / "cells.json").write_text(json.dumps([{"folder": f, "labels": {"method": f}} for f in "abc"]))
    assert unfinished([out]) == 2  # which have not begun
    (out / "b.failed.txt").write_text("why\n")
    assert unfinished([out]) == 1
    shutil.copytree(finished, out / "c")
    assert unfinished([out]) == 0
    (out / "cells.json").write_text("{")
    assert unfinished([out]) == 0
    done = protofed("watch", "out/cells.json", "--until-finished")
    assert done.returncode == 2
    assert "out/cells.json is a file" in done.stderr


def test_what_cannot_be_drawn_is_said_and_the_watch_goes_on(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(finished, "run"))
    monkeypatch.setattr(watching, "PAUSE", 0.0)
    with serving([folder], 0) as server:
        assert get(server.server_port)[0] == 200
        kept = folder.rename("elsewhere")
        folder.write_text("a file where a folder was")
        status, _, body = get(server.server_port)
        assert status == 200
        assert json.loads(body)["left_out"]
        folder.unlink()
        kept.rename(folder)
        assert json.loads(get(server.server_port)[2])["live"]["runs"] == 1
    assert capfd.readouterr().err == ""


def test_a_run_that_ends_while_it_is_drawn_is_not_finished_yet(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(shutil.copytree(finished, "run"))
    (folder / "summary.json").unlink()
    read = watching.gather
    monkeypatch.setattr(watching, "PAUSE", 0.0)
    monkeypatch.setattr(
        watching, "gather", lambda paths: (read(paths), shutil.copy(finished / "summary.json", folder))[0]
    )
    live = Live([folder])
    assert live.now().data["live"]["left"] == 1, "the page says what its numbers are of"
    monkeypatch.setattr(watching, "gather", read)
    assert live.now().data["live"]["left"] == 0


def test_a_run_without_a_round_is_not_finished(finished: Path) -> None:
    shutil.copytree(finished, "runs/first")
    begun = Path(shutil.copytree(finished, "runs/second"))
    (begun / "summary.json").unlink()
    (begun / "rounds.jsonl").write_text("")
    live = Live([Path("runs")]).now().data["live"]
    assert (live["runs"], live["left"], live["out"]) == (1, 1, 0)


def test_a_slow_drawing_is_not_followed_by_a_long_pause(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PAUSE", 1e6)
    live = Live([finished])
    live.now()
    assert live.next - time.monotonic() <= 5


def test_a_port_in_use(finished: Path) -> None:
    with serving([finished], 0) as first, serving([finished], first.server_port) as second:
        assert second.server_port > first.server_port
        assert get(second.server_port, "/nothing")[0] == 404
    with pytest.raises(UserError, match="no port from 70000 on"), serving([finished], 70000):
        pass


def test_many_pages_ask_at_once_and_one_thread_draws(finished: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    live = Live([finished])
    with ThreadPoolExecutor(8) as pool:
        shown = list(pool.map(lambda _: live.now(), range(8)))
    assert all(one is shown[0] for one in shown)


# in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(tmp_path_factory.mktemp("profile"), "--window-size=1200,900") as browser:
        yield browser


SLOWLY = """
import time
from protofed import cli
from protofed.runs import selection as module
draw = module.draw_cohort
module.draw_cohort = lambda *words: (time.sleep(0.2), draw(*words))[1]  # before every round
cli.main()
"""


def start(*words: str, by: str = "from protofed import cli; cli.main()") -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", by, *words], stdout=subprocess.PIPE, text=True)


def until(what: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)
    return found


PLOT = "document.querySelector('#accuracy .plot')"
POINTS = f"return {PLOT}.data[0].x.length"
RANGE = f"return {PLOT}.layout.yaxis.range"
ROUND = "return Number(document.getElementById('live').textContent.match(/round (\\d+) of 4000/)?.[1] || 0)"


def zoom(browser: Any, held: Callable[[], Any]) -> list[float]:
    """Drag over a part of the first figure, as a reader does, and `held` before letting go; the range it then shows."""
    from selenium.webdriver import ActionChains

    area = until(lambda: browser.find_elements("css selector", "#accuracy .plot .nsewdrag"))[0]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", area)
    before = browser.execute_script(RANGE)
    ActionChains(browser).move_to_element(area).click_and_hold().move_by_offset(90, 60).perform()
    held()
    ActionChains(browser).release().perform()
    until(lambda: browser.execute_script(RANGE) != before)
    return list(browser.execute_script(RANGE))


@pytest.mark.browser
def test_a_zoom_outlives_new_data_also_if_it_comes_during_the_drag(
    browser: Any, finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(finished, "run"))
    (folder / "summary.json").unlink()
    line = json.loads((folder / "rounds.jsonl").read_text().splitlines()[-1])
    monkeypatch.setattr(watching, "PAUSE", 0.0)

    def play(number: int) -> None:
        with open(folder / "rounds.jsonl", "a") as file:
            file.write(json.dumps(line | {"round": number, "pm_v": 0.5}) + "\n")  # twice, and it can be chosen

    def held() -> None:
        play(4)
        until(lambda: browser.execute_script("return hand.waiting.length"))  # the page has it
        assert browser.execute_script(POINTS) == 3, "nothing is drawn below a hand"

    with serving([folder], 0) as server:
        browser.get(server.url)
        until(lambda: browser.execute_script(f"return !!{PLOT}?.data"))
        zoomed = zoom(browser, held)
        for points in (4, 5):
            until(lambda points=points: browser.execute_script(POINTS) == points)
            assert browser.execute_script(RANGE) == pytest.approx(zoomed)
            play(points + 1)
        until(lambda: browser.execute_script(POINTS) == 6)
        assert "PM(V)" in browser.find_element("css selector", "#accuracy .controls").text
        shutil.copy(finished / "summary.json", folder)  # a note is no longer true, and there are numbers of the end
        until(lambda: browser.execute_script("return document.getElementById('live').dataset.state") == "finished")
        assert "Not finished" not in browser.find_element("id", "accuracy").text
        assert browser.execute_script(RANGE) == pytest.approx(zoomed)
        assert browser.get_log("browser") == []


@pytest.mark.browser
def test_the_page_says_what_there_is_to_wait_for(browser: Any, finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "PAUSE", 0.0)
    run = Path("run")

    def says(words: str) -> None:
        until(lambda: words in browser.find_element("id", "live").text, 20)

    Path("empty").mkdir()
    Path("file").touch()
    for name, words in {
        "empty": "waiting for a run; left out: empty: holds no run",
        "file": "nothing to show: 1",
    }.items():
        with serving([name], 0) as server:
            browser.get(server.url)
            says(words)
    with serving([run], 0) as server:
        browser.get(server.url)
        says("waiting for a run; left out: run: there is no such folder")
        shutil.copytree(finished, run)
        (run / "summary.json").write_text("{")
        says("nothing to show: 1 left out")
        (run / "summary.json").unlink()
        (run / "rounds.jsonl").touch()
        says("live: round 3 of 3")
        for path in run.iterdir():
            os.utime(path, (time.time() - 1000,) * 2)
        says("round 3 of 3; no change for 17 min: it may have stopped")
        run.rename("elsewhere")
        says("there is no such folder")
    with serving([finished, run], 0) as server:
        browser.get(server.url)
        says("finished: round 3 of 3; 1 left out")


@pytest.mark.browser
def test_the_page_follows_a_run(browser: Any) -> None:
    """A watch on a port in use, begun before the run; the page grows without being loaded again, and ends when told."""
    processes = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        try:
            port = str(taken.getsockname()[1])
            processes.append(watch := start("watch", "run", "--port", port, "--until-finished"))
            processes.append(
                work := start("run", "demo", "rounds=4000", "clients=6", "evaluate.pm=0", "--out", "run", by=SLOWLY)
            )
            assert watch.stdout is not None
            assert watch.stdout.readline() == f"port {port} is in use\n"
            url = next(word for word in watch.stdout.readline().split() if word.startswith("http://127.0.0.1:"))
            browser.get(url)
            browser.execute_script("window.loadedOnce = true")
            first = until(lambda: browser.execute_script(ROUND))
            until(lambda: browser.execute_script(f"return !!{PLOT}?.data"))
            browser.execute_script("document.querySelector('details').open = true")
            drawn = browser.execute_script(POINTS)
            until(lambda: browser.execute_script(ROUND) > first + 5)
            until(lambda: browser.execute_script(POINTS) > drawn + 5)
            assert browser.execute_script("return document.querySelector('details').open")
            work.send_signal(signal.SIGINT)
            assert work.wait(60) == 130
            assert browser.execute_script("return window.loadedOnce === true")
            assert browser.get_log("browser") == []
            assert watch.poll() is None, "a run that was stopped is not finished"
            watch.send_signal(signal.SIGINT)
            assert watch.wait(30) == 0
            assert "the watch has ended" in watch.stdout.read()
        finally:
            for process in processes:
                if process.poll() is None:
                    os.kill(process.pid, signal.SIGKILL)
                process.wait()
                assert process.stdout is not None
                process.stdout.close()


def test_a_watch_ends_by_itself_when_all_is_finished(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from protofed.cli import app
    from protofed.cli import watch as command

    monkeypatch.setattr(command, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(command, "LOOK_SECONDS", 0.1)
    monkeypatch.setattr(os, "nice", lambda step: 0)  # for this process it would last
    done = CliRunner().invoke(app, ["watch", str(finished), "--port", "0", "--until-finished"])
    assert done.exit_code == 0, done.output
    assert "all runs are finished" in done.output


def test_a_watch_ends_after_open_pages_have_the_end(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from protofed.cli import watch as command

    monkeypatch.setattr(command, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(command, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(watching, "PAUSE", 0.0)
    folder = Path(shutil.copytree(finished, "run"))
    (folder / "summary.json").unlink()
    with serving([folder], 0) as server:
        first, second = (get(server.server_port, Page=page)[1]["ETag"] for page in "ab")
        ends = threading.Thread(target=command._wait, args=([folder], server.live))
        ends.start()
        shutil.copy(finished / "summary.json", folder)
        for page, tag in (("a", first), ("b", second)):
            ends.join(0.5)
            assert ends.is_alive(), page
            assert get(server.server_port, Page=page, If_None_Match=tag)[0] == 200
        ends.join(10)
        assert not ends.is_alive()
        (folder / "summary.json").touch()  # and nobody asks
        with monkeypatch.context() as patch:
            patch.setattr(watching, "AWAY", 0.2)
            command._wait([folder], server.live)
        assert server.live.behind()
