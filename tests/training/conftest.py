"""Training images."""

import pytest

from tests.training.toys import make_photos


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a directory of class folders, which no test changes."""
    return str(make_photos(tmp_path_factory.mktemp("photos") / "photos"))
