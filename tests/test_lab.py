"""``make lab`` serves JupyterLab to this machine alone, and only to who has the token."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def _answer(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=30) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_lab_listens_on_the_loopback_and_asks_for_its_token(tmp_path):
    runtime, settings = tmp_path / "runtime", tmp_path / "config"
    settings.mkdir()
    # a port of its own and no browser window; everything else as a user would get it
    (settings / "jupyter_server_config.json").write_text(
        json.dumps({"ServerApp": {"open_browser": False, "port": 0}})
    )
    environment = os.environ | {
        "JUPYTER_RUNTIME_DIR": str(runtime),
        "JUPYTER_CONFIG_DIR": str(settings),
    }
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        ["make", "lab"], cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
    )
    try:
        found: list[Path] = []
        while not found and process.poll() is None:
            time.sleep(0.2)
            found = list(runtime.glob("jpserver-*.json"))
        assert found, (tmp_path / "log").read_text()
        time.sleep(0.5)  # the record is written before it is complete
        server = json.loads(found[0].read_text())
        assert server["hostname"] == "127.0.0.1" and len(server["token"]) >= 32
        listing = f"{server['url']}api/contents/notebooks"
        assert _answer(listing)[0] == 403
        status, body = _answer(f"{listing}?token={server['token']}")
        assert status == 200 and "00_tour.ipynb" in body
        assert _answer(f"{server['url']}lab?token={server['token']}")[0] == 200
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        log.close()
