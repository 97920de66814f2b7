"""Parser of `--mechanisms`."""

import pytest

from effattn import registry
from effattn.nn import TransformerConfig
from experiments.harness.mechanisms import parse, sizes
from experiments.harness.naming import folder_name


def mixers(text, layers=3, heads=4, window=16, is_causal=True, length=64):
    return parse(text, layers, heads, window, length, is_causal)


def test_every_causal_mechanism_by_its_name():
    for name in registry.names("causal"):
        found = mixers(name)
        TransformerConfig(vocab_size=9, num_layers=3, features=16, num_heads=4, mixer=found)
        windowed = registry.get(name).options.get("local_window_size") is not None
        expected = of_length(64).get(name, {})
        assert found == ({"name": name, **expected},) * 3
        assert not windowed or expected["local_window_size"] == (15, 0)


def of_length(length, window=16, is_causal=True):
    return sizes(length, window, is_causal)


def test_options_that_are_not_given_follow_the_length():
    short, long = of_length(64, None), of_length(4096, None)
    assert short["sliding_window"] == {"local_window_size": (15, 0)}
    assert long["sliding_window"] == {"local_window_size": (1023, 0)}
    bidirectional = of_length(4096, None, is_causal=False)["longformer"]
    assert bidirectional == {"local_window_size": (512, 511), "global_tokens": 64}
    (window, _) = long["mixture_of_mechanisms"]["mechanisms"]
    assert window == {"name": "sliding_window", "local_window_size": (1023, 0)}
    for name, option in (
        ("longformer", "global_tokens"),
        ("sparse_transformer", "stride"),
        ("block_sparse", "block_size"),
        ("bigbird", "block_size"),
        ("hierarchical", "segment_size"),
        ("block_linformer", "block_size"),
        ("long_short", "window_size"),
        ("lsh", "chunk_length"),
        ("routing", "num_clusters"),
    ):
        assert (short[name][option], long[name][option]) == (8, 64)
    for name, option in (
        ("linformer", "num_projected"),
        ("nystrom", "num_landmarks"),
        ("recurrent_memory", "segment_size"),
    ):
        assert (short[name][option], long[name][option]) == (16, 1024)
    for length in (64, 4096):
        found = of_length(length)
        assert found["routing"]["num_clusters"] * found["routing"]["cluster_size"] == length
        assert found["cosformer"]["max_length"] == length
        assert found["hierarchical"]["segment_size"] > found["hierarchical"]["num_summaries"]


def test_options_that_are_given_replace_those_of_the_length():
    assert mixers("lsh,num_buckets=2")[0] == {"name": "lsh", "num_buckets": 2, "chunk_length": 8}
    assert mixers("sliding_window,local_window_size=(3,0)", window=None)[0] == {
        "name": "sliding_window",
        "local_window_size": (3, 0),
    }
    (group, _) = mixers("lsh+softmax")[0]["heads"]
    assert group == {"name": "lsh", "num_buckets": 8, "chunk_length": 8, "num_heads": 2}


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("length", [1, 2, 5, 16, 100, 1000])
def test_options_of_any_length_are_positive(length, is_causal):
    for options in of_length(length, None, is_causal).values():
        for name, value in options.items():
            if name == "local_window_size":
                assert min(value) >= 0
            elif name != "mechanisms":
                assert value >= 1


def test_options_turns_and_shares():
    (mixer,) = set(map(str, mixers("bigbird,block_size=8,num_global_blocks=(1, 1),seed=3")))
    assert mixer == str(
        {"name": "bigbird", "block_size": 8, "num_global_blocks": (1, 1), "seed": 3}
    )
    (mixer,) = set(map(str, mixers("longformer,local_window_size=4,global_tokens=(0, 9)")))
    assert mixer == str({"name": "longformer", "local_window_size": 4, "global_tokens": (0, 9)})
    (mixer,) = set(map(str, mixers("block_linformer,block_size=16,sharing='none'")))
    own = {"block_size": 16, "num_projected": 2, "sharing": "none"}
    assert mixer == str({"name": "block_linformer", **own})
    assert [m["name"] for m in mixers("softmax/linear")] == ["softmax", "linear", "softmax"]
    first, second, _ = mixers("softmax+linear/softmax")
    assert [g["name"] for g in first["heads"]] == ["softmax", "linear"]
    assert [g["num_heads"] for g in first["heads"]] == [2, 2]
    assert second == {"name": "softmax"}
    assert [m["name"] for m in mixers("convolution*2/softmax")] == [*["convolution"] * 2, "softmax"]
    assert not {"/", "*"} & set(folder_name("softmax*2/linear"))


def test_a_long_name_of_a_folder_is_cut_and_stays_its_own(tmp_path):
    windows = [f"sliding_window,local_window_size=({2**n - 1},0)" for n in range(12)]
    long, other = "/".join(windows), "/".join([*windows[:-1], "softmax"])
    assert folder_name(long) != folder_name(other)
    for text in (long, other):
        (tmp_path / f"{folder_name(text)}-rate0.0006180339887498949-seed2147483647").mkdir()


@pytest.mark.parametrize("name", registry.names("bidirectional"))
def test_windows_of_bidirectional_ones_are_half_on_each_side(name):
    (found,) = mixers(name, layers=1, is_causal=False)
    windowed = registry.get(name).options.get("local_window_size") is not None
    expected = of_length(64, is_causal=False).get(name, {})
    assert found == {"name": name, **expected}
    assert not windowed or expected["local_window_size"] == (8, 7)


def test_windows_are_no_longer_than_the_context():
    for window in (64, 65, 10**12):
        assert mixers("sliding_window", window=window)[0]["local_window_size"] == (63, 0)
    (found,) = mixers("sliding_window", layers=1, window=10**12, is_causal=False)
    assert found["local_window_size"] == (63, 63)


def test_the_plus_of_an_exponent_belongs_to_its_number():
    assert mixers("softmax,scale=1e+3")[0] == {"name": "softmax", "scale": 1000.0}
    (first, *_) = mixers("softmax,scale=1.E+3+linear")
    assert [group["name"] for group in first["heads"]] == ["softmax", "linear"]


def test_options_of_a_mixer_of_its_own():
    (found,) = mixers("linformer,num_projected=4,method='mean'", layers=1, is_causal=False)
    assert found == {"name": "linformer", "num_projected": 4, "method": "mean"}


@pytest.mark.parametrize(
    ("text", "is_causal", "message"),
    [
        ("nystrom", True, "'nystrom' lacks 'causal'.* that have it: softmax, "),
        ("sparse_transformer", False, "'sparse_transformer' lacks 'bidirectional'.* have it: s"),
        ("sotfmax", False, "unknown mechanism 'sotfmax'; bidirectional mechanisms are softmax, "),
    ],
)
def test_the_wrong_direction_gets_the_advice_of_the_registry(text, is_causal, message):
    with pytest.raises(ValueError, match=message):
        mixers(text, is_causal=is_causal)


@pytest.mark.parametrize(
    "text, message",
    [
        ("sotfmax", "unknown mechanism 'sotfmax'; causal mechanisms are softmax, "),
        ("softmax/", "unknown mechanism ''"),
        ("bigbird,blocksize=8", "'bigbird' has no option blocksize; its options are block_size, "),
        ("lstm,hidden=8", "'lstm' has no option hidden; its options are implementation"),
        ("bigbird,block_size=", "option block_size must be a Python literal, .* got ''"),
        ("bigbird,block_size=eight", "option block_size must be a Python literal, .* got 'eight'"),
        ("softmax/linear/softmax/linear", "names 4 layers, but --layers is 3"),
        ("softmax*0/linear", r"'softmax\*0' must have a number of layers after the \*, 1 or more"),
        ("softmax*two", "must have a number of layers after the"),
        ("softmax*99999999999", "names 99999999999 layers, but --layers is 3"),
        ("softmax,name='linear'", "'softmax' has no option name; its options are"),
        ("bigbird,block_size=8,block_size=16", "gives block_size twice; give it once"),
        ("softmax,", "'softmax,' has an option without a name; write NAME,OPTION=VALUE"),
        ("bigbird,block_size={[]:1}", "must be a Python literal, such as 8, True, 'word' or"),
        ("softmax+linear+softmax", "number of mechanisms in .* must divide --heads 4, got 3"),
    ],
)
def test_what_it_cannot_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        mixers(text)


@pytest.mark.parametrize(
    ("text", "length", "message"),
    [
        ("axial,height=5,width=5", 100, "height times width to be the 100 pixels .* got 5 and 5"),
        ("grid", 99, "needs height and width, as 99 is no square number"),
    ],
)
def test_patterns_of_images_cover_the_image(text, length, message):
    with pytest.raises(ValueError, match=message):
        parse(text, 1, 1, None, length)
