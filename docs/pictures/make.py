"""The README's pictures, from a real run: `python -m docs.pictures.make runs/mixed_demo`.

Needs Chromium. The viewer shows the first search trajectory of the last step.
"""

import asyncio
import sys
from pathlib import Path

from tests.browser import open_page, viewing
from tests.json_lines import read_lines

HERE = Path(__file__).parent
SIZE = (1280, 640)


async def make(run: Path) -> None:
    """Write `report.png` and `viewer.png` here."""
    async with open_page(run / "report.html", SIZE) as page:
        await page.evaluate("report.drawn")
        await page.screenshot(HERE / "report.png")
    step = max(int(path.stem) for path in (run / "trajectories").glob("*.jsonl"))
    lines = read_lines(run / "trajectories" / f"{step}.jsonl")
    line = next(i for i, t in enumerate(lines, 1) if t["source"] == "nq" and t["calls"])
    with viewing(run) as url:
        async with open_page(f"{url}#{step}.{line}", SIZE) as page:
            await page.until("document.querySelector('.trajectory')")
            await page.screenshot(HERE / "viewer.png")


if __name__ == "__main__":
    asyncio.run(make(Path(sys.argv[1])))
