import pytest

from effattn.advice import quality


@pytest.fixture(scope="module", autouse=True)
def no_quality(tmp_path_factory):
    """The tests do not depend on the packaged results: there is no file of measured quality."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "PATH", tmp_path_factory.mktemp("quality") / "quality.json")
        yield
