"""A real JupyterLab for the browser tests, started once, without the user's own settings.

def test_something(open_notebook):
    book = open_notebook(["from tplab import Mesh", "Mesh(tp=4)"], theme="dark")
    expect(book.output(1)).to_contain_text("Mesh(tp=4)")
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nbformat
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

expect.set_options(timeout=30_000)  # milliseconds; kernels are slow on a busy machine

_THEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

_SERVER_CONFIG = """
from jupyterlab.galata import configure_jupyter_server
configure_jupyter_server(c)
c.ServerApp.port = {port}
c.ServerApp.root_dir = {root!r}
c.ServerApp.allow_root = True
c.LabApp.workspaces_dir = {workspaces!r}
c.LabApp.user_settings_dir = {settings!r}
"""

_SETTINGS = {
    # Also draw cells that are out of sight, so that a test can examine any output.
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none"},
    "@jupyterlab/apputils-extension/notification": {"checkForUpdates": False, "fetchNews": "false"},
    "@jupyterlab/docmanager-extension/plugin": {"autosave": False},
}


@dataclass(frozen=True)
class JupyterLab:
    """A running server: its address, and the folder of its notebooks."""

    url: str
    root: Path

    def request(self, method: str, path: str) -> bytes:
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.read()

    def shut_down_kernels(self) -> None:
        for session in json.loads(self.request("GET", "/api/sessions")):
            self.request("DELETE", f"/api/sessions/{session['id']}")


@pytest.fixture(scope="session")
def jupyter_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JupyterLab]:
    home = tmp_path_factory.mktemp("jupyter")
    folders = {name: home / name for name in ("root", "workspaces", "settings", "config", "data", "runtime", "ipython")}
    for folder in folders.values():
        folder.mkdir()
    for name, values in _SETTINGS.items():
        file = folders["settings"] / f"{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = home / "jupyter_server_config.py"
    config.write_text(
        _SERVER_CONFIG.format(
            port=port,
            root=str(folders["root"]),
            workspaces=str(folders["workspaces"]),
            settings=str(folders["settings"]),
        )
    )
    environment = {
        **os.environ,
        "JUPYTER_CONFIG_DIR": str(folders["config"]),
        "JUPYTER_CONFIG_PATH": str(Path(__file__).parents[2] / "labs" / "jupyter"),  # as in an installed tplab
        "JUPYTER_DATA_DIR": str(folders["data"]),
        "JUPYTER_RUNTIME_DIR": str(folders["runtime"]),
        "IPYTHONDIR": str(folders["ipython"]),
    }
    log = home / "server.log"
    command = [sys.executable, "-m", "jupyter", "lab", f"--config={config}"]
    with log.open("w") as sink:
        server = subprocess.Popen(command, env=environment, stdout=sink, stderr=sink, stdin=subprocess.DEVNULL)
    lab = JupyterLab(f"http://127.0.0.1:{port}", folders["root"])
    try:
        _wait_for(lab, server, log)
        yield lab
    finally:
        server.terminate()  # also ends its kernels
        try:
            server.wait(15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_for(lab: JupyterLab, server: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with code {server.returncode}:\n{log.read_text()[-4000:]}")
        try:
            lab.request("GET", "/api")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not answer within 120 s:\n{log.read_text()[-4000:]}")


@dataclass(frozen=True)
class Notebook:
    """A notebook open in JupyterLab. Cells are counted from 0, text cells included."""

    page: Page
    path: Path

    @property
    def panel(self) -> Locator:
        return self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")

    def cell(self, index: int) -> Locator:
        return self.panel.locator(".jp-Notebook .jp-Cell").nth(index)

    def output(self, index: int) -> Locator:
        """The output of a code cell: text, picture or widget."""
        return self.cell(index).locator(".jp-OutputArea-output")

    def run_all(self, timeout_seconds: float = 120) -> None:
        """Run every cell and wait until the kernel is idle; a cell that raises is an error here too."""
        self.page.set_default_timeout(timeout_seconds * 1000)
        try:
            self.page.evaluate("() => window.jupyterapp.commands.execute('notebook:run-all-cells')")
            self.page.wait_for_function(
                "() => window.jupyterapp.shell.currentWidget.sessionContext.session?.kernel?.status === 'idle'"
            )
        finally:
            self.page.set_default_timeout(30_000)
        raised = self.panel.locator("[data-mime-type='application/vnd.jupyter.error'], [data-mime-type$='stderr']")
        if raised.count():
            raise AssertionError("a cell raised or wrote to stderr:\n" + "\n".join(raised.all_inner_texts()))

    def change_theme(self, theme: Literal["light", "dark"]) -> None:
        self.page.evaluate(_CHANGE_THEME, _THEMES[theme])
        light = "true" if theme == "light" else "false"
        self.page.wait_for_function("light => document.body.dataset.jpThemeLight === light", arg=light)

    def run(self, code: str) -> str:
        """Run `code` in the notebook's kernel, outside any cell; return what it printed."""
        return self.page.evaluate(_RUN_CODE, code)


_CHANGE_THEME = "theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })"

_RUN_CODE = """async (code) => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const future = kernel.requestExecute({ code, store_history: false });
  let text = '';
  future.onIOPub = (message) => {
    if (message.header.msg_type === 'stream') text += message.content.text;
    if (message.header.msg_type === 'error') text += message.content.traceback.join('\\n');
  };
  const reply = await future.done;
  if (reply.content.status !== 'ok') throw new Error(text);
  return text;
}"""


@pytest.fixture(scope="session")
def lab_page(browser: Browser, jupyter_lab: JupyterLab) -> Iterator[Page]:
    """JupyterLab in the browser. Loading it takes seconds, so all tests share this page, one after the other."""
    context = browser.new_context()
    yield context.new_page()
    context.close()


@pytest.fixture
def open_notebook(lab_page: Page, jupyter_lab: JupyterLab) -> Iterator[Callable[..., Notebook]]:
    """`open_notebook(cells, theme="light", reduced_motion=False, run=True)` -> Notebook, with its cells run.

    `cells` is a list of code cells, or the path of a notebook, which is copied. Each notebook has its own kernel.
    """
    page = lab_page

    def open_(
        cells: Sequence[str] | Path,
        theme: Literal["light", "dark"] = "light",
        reduced_motion: bool = False,
        run: bool = True,
    ) -> Notebook:
        if isinstance(cells, Path):
            book = nbformat.read(cells, as_version=4)
        else:
            book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
            book.metadata.kernelspec = {"name": "python3", "display_name": "Python 3", "language": "python"}
        path = jupyter_lab.root / f"{time.monotonic_ns()}.ipynb"
        nbformat.write(book, path)
        page.set_viewport_size({"width": 1280, "height": 720})
        page.emulate_media(color_scheme=theme, reduced_motion="reduce" if reduced_motion else "no-preference")
        if not page.evaluate(_IS_READY):
            page.goto(f"{jupyter_lab.url}/lab?reset")
            page.wait_for_function(_IS_READY)
        page.evaluate(_OPEN, path.name)
        notebook = Notebook(page, path)
        notebook.panel.wait_for()
        notebook.change_theme(theme)
        page.wait_for_function(
            "() => window.jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
        )
        if run:
            notebook.run_all()
        return notebook

    yield open_
    page.evaluate(_CLOSE)
    jupyter_lab.shut_down_kernels()


# A dialog that a test has left open would obstruct the next test, which therefore reloads JupyterLab.
_IS_READY = """() => {
  const has = (command) => window.jupyterapp?.commands.hasCommand(command);
  return has("docmanager:open") && has("apputils:change-theme") && !document.querySelector(".jp-Dialog");
}"""

_OPEN = """async (path) => {
  const { commands, restored, shell } = window.jupyterapp;
  await restored;
  shell.collapseLeft();
  await commands.execute("docmanager:open", { path, factory: "Notebook" });
}"""

_CLOSE = """async () => {
  for (const panel of [...window.jupyterapp.shell.widgets("main")]) {
    await panel.sessionContext?.shutdown();
    panel.dispose();  // to close it would ask whether to save it
  }
}"""
