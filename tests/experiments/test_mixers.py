"""What `--mechanisms` says."""

import pytest

from effattn import registry
from effattn.nn import TransformerConfig
from experiments.common.mixers import folder_name, parse


def mixers(text, layers=3, heads=4, window=16):
    return parse(text, layers, heads, window)


def test_every_causal_mechanism_by_its_name():
    for name in registry.names("causal"):
        found = mixers(name)
        TransformerConfig(vocab_size=9, num_layers=3, features=16, num_heads=4, mixer=found)
        windowed = "local_window_size" in registry.get(name).options
        assert (
            found == ({"name": name, **({"local_window_size": (15, 0)} if windowed else {})},) * 3
        )


def test_options_turns_and_shares():
    (mixer,) = set(map(str, mixers("bigbird,block_size=8,num_global_blocks=(1, 1),seed=3")))
    assert mixer == str(
        {"name": "bigbird", "block_size": 8, "num_global_blocks": (1, 1), "seed": 3}
    )
    (mixer,) = set(map(str, mixers("block_linformer,block_size=16,sharing='none'")))
    assert mixer == str({"name": "block_linformer", "block_size": 16, "sharing": "none"})
    assert [m["name"] for m in mixers("softmax/linear")] == ["softmax", "linear", "softmax"]
    first, second, _ = mixers("softmax+linear/softmax")
    assert [g["name"] for g in first["heads"]] == ["softmax", "linear"]
    assert [g["num_heads"] for g in first["heads"]] == [2, 2]
    assert second == {"name": "softmax"}
    assert "/" not in folder_name("softmax/linear")


@pytest.mark.parametrize(
    "text, message",
    [
        ("sotfmax", "unknown mechanism 'sotfmax'; causal ones are softmax, "),
        ("softmax/", "unknown mechanism ''"),
        ("bigbird,blocksize=8", "'bigbird' has no option blocksize; its options are block_size, "),
        ("bigbird,block_size=", "block_size='' is not a number"),
        ("bigbird,block_size=eight", "block_size='eight' is not a number"),
        ("softmax/linear/softmax/linear", "has 4 kinds of layers, and there are 3 layers"),
        ("softmax+linear+softmax", "shares 4 heads among 3 mechanisms"),
    ],
)
def test_what_it_cannot_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        mixers(text)
