"""Pictures of the docs, of a run by a browser: python -m tests.pictures RUN writes threestep/plugins/report/report.png.

RUN is the folder of a whole run, such as runs/quickstart (bash scripts/quickstart.sh). Needs Chromium (Debian: apt-get
install chromium). The page names folders by their last parts, so no path of the machine is in a picture.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.support.browser import opened_browser
from threestep.plugins.report.writing import write_report

PAGE = Path(__file__).parents[1] / "threestep" / "plugins" / "report"
WIDTH, HEIGHT = 1180, 1120


def write_pictures(run: Path) -> None:
    with tempfile.TemporaryDirectory() as folder, opened_browser() as browser:
        page = write_report([run], Path(folder) / "report.html")
        assert str(Path.home()) not in page.read_text(encoding="utf-8").partition('id="settings"')[0]
        browser.ask("Emulation.setScrollbarsHidden", hidden=True)
        browser.show(page.as_uri(), WIDTH, HEIGHT)
        browser.wait("document.querySelector('.plot svg')")
        (PAGE / "report.png").write_bytes(browser.picture())


if __name__ == "__main__":
    write_pictures(Path(sys.argv[1]))
