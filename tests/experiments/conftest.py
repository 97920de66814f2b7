import random

import pytest

WORDS = "the of and to in a is that be this with which by it have".split()


@pytest.fixture(scope="session")
def documents():
    """Twenty texts of about 600 bytes, with letters of several bytes."""
    draw = random.Random(0)
    return [
        ("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(20)) + f"\nfin é {i}").encode()
        for i in range(20)
    ]


@pytest.fixture
def folder_of_text(tmp_path, documents):
    """Folder with the texts as files."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index, document in enumerate(documents):
        (folder / f"{index:02d}.txt").write_bytes(document)
    return folder


class Lines:
    """Replacement of the progress display of one run, which records all calls."""

    stopping = False

    def __init__(self):
        self.steps, self.losses, self.evaluations, self.warnings = [], [], [], []

    def begin(self, name, step):
        return self

    def warn(self, text):
        self.warnings.append(text)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def step(self, step, loss, tokens_per_second):
        self.steps.append(step)
        self.losses.append(loss)

    def evaluated(self, headline, record):
        self.evaluations.append((headline, record))


@pytest.fixture
def lines():
    return Lines()
