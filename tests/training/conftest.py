"""Pictures to learn from."""

import pytest

from tests.training.toys import make_photos


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder of class folders, which nobody changes."""
    return str(make_photos(tmp_path_factory.mktemp("photos") / "photos"))
