"""Commands show the old runs as recorded: some views always, all of them at night."""

import pytest

from tests.recorded.compare import changed, recorded_blocks
from tests.recorded.views import RUNS, blocks, file_of

SAMPLE = ("audit", "audit without a prompt", "watch, screen", "diagnose")

releases = pytest.mark.parametrize("release", RUNS)


@releases
def test_some_views_are_as_recorded(release: str) -> None:
    recorded = recorded_blocks(file_of(release))

    found = changed(file_of(release), recorded, blocks(release, SAMPLE))
    assert not found, found


@pytest.mark.nightly
@releases
def test_every_view_is_as_recorded(release: str) -> None:
    recorded = recorded_blocks(file_of(release))

    found = changed(file_of(release), recorded, blocks(release))
    assert not found, found
