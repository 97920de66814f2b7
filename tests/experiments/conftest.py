import random

import pytest

WORDS = "the of and to in a is that be this with which by it have".split()


@pytest.fixture
def documents():
    """Twenty texts of about 600 bytes, with letters of more than one byte in them."""
    draw = random.Random(0)
    return [
        ("\n".join(" ".join(draw.choices(WORDS, k=8)) for _ in range(20)) + f"\nfin é {i}").encode()
        for i in range(20)
    ]


@pytest.fixture
def folder_of_text(tmp_path, documents):
    """Those texts as files of a folder."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index, document in enumerate(documents):
        (folder / f"{index:02d}.txt").write_bytes(document)
    return folder
