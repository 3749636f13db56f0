"""Amounts of memory, seconds and mode strings: what is read, how it is shown, what is refused."""

from __future__ import annotations

import itertools

import pytest

from benchmarks.modes import MONET_MODES
from monet_like.errors import MonetError, UsageError
from monet_like.ir.mode import WORDS, dropit_share, dropit_word, is_lossy, parse_mode
from monet_like.ir.units import GIB, KIB, MIB, format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (10, 10 * 2**30),
        ("5.5", 5_905_580_032),
        (".5", 2**29),
        (1e-06, 1073),
        ("1e1", 10 * 2**30),
        ("565MB", 592_445_440),
        ("  8   gb ", 8 * 2**30),
        ("1.5 KiB", 1536),
        ("1 TB", 2**40),
        ("1 B", 1),
    ],
)
def test_parse_bytes(text: str | float, expected: int) -> None:
    found = parse_bytes(text)
    assert found == expected
    assert type(found) is int


@pytest.mark.parametrize("text", ["0", "0.0", 0, "0 MB", "0.4 B", "1e-12"])
def test_amounts_out_of_range(text: str | float) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert str(caught.value) == f"memory budget {text!r} must be more than 0; give GB as a number, such as 10"


@pytest.mark.parametrize("text", ["1e400", "1e300 TB", "8388608 TB", 2.0**34])
def test_amounts_that_no_memory_has(text: str | float) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert str(caught.value) == f"memory budget {str(text)!r} is more than any memory; give GB as a number, such as 10"


@pytest.mark.parametrize(
    "text",
    ["", " ", "abc", "-1", -1, "-1 GB", "+1", "10 GBB", "10 parsecs", "1,5", "1 2", "GB", "0x10", "nan", "inf", "-inf"]
    + ["10%", "1_000", "1.2.3", "\u0663", "10 GB MB", float("nan"), float("inf"), True, None],
)
def test_not_an_amount(text: str | float) -> None:
    with pytest.raises(UsageError) as caught:
        parse_bytes(text)
    assert str(caught.value) == (
        f"memory budget {text!r} is not an amount of memory; give GB as a number (10, 5.5) "
        'or an amount with its unit ("565 MB", "8 GB")'
    )


def test_usage_errors_are_value_errors_of_the_family() -> None:
    with pytest.raises(ValueError) as caught:
        parse_bytes("abc")
    assert isinstance(caught.value, MonetError)


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KB"),
        (MIB - 1, "1024.0 KB"),
        (592_445_440, "565.0 MB"),
        (GIB, "1.00 GB"),
        (-2 * GIB, "-2.00 GB"),
    ],
)
def test_format_bytes(count: int, expected: str) -> None:
    assert format_bytes(count) == expected


@pytest.mark.parametrize("count", [565 * MIB, 10 * GIB, 12 * KIB, 7])
def test_shown_amounts_can_be_typed_again(count: int) -> None:
    assert parse_bytes(format_bytes(count)) == count


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (61.5, "61.50 s"),
        (1.0, "1.00 s"),
        (0.001, "1.0 ms"),
        (7.8e-6, "7.8 us"),
        (-0.5, "-500.0 ms"),
    ],
)
def test_format_seconds(seconds: float, expected: str) -> None:
    assert format_seconds(seconds) == expected


def test_any_combination_in_any_order() -> None:
    for count in range(1, len(WORDS) + 1):
        for words in itertools.permutations(WORDS, count):
            assert parse_mode("_".join(words)) == set(words)
            assert parse_mode("_".join((*words, "normal"))) == set(words)
    assert parse_mode("normal") == frozenset()


@pytest.mark.parametrize(
    ("mode", "word"),
    [
        ("inplace_conv_multiwya_newnode", "multiwya"),
        ("", ""),
        ("conv_", ""),
        ("NORMAL", "NORMAL"),
        ("inplace-conv", "inplace-conv"),
    ],
)
def test_unknown_words(mode: str, word: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_mode(mode)
    assert str(caught.value) == (
        f"mode {mode!r} has an unknown word {word!r}; a mode is some of inplace, conv, multiway, newnode, normal "
        "joined by '_', such as inplace_conv_multiway_newnode or normal; lossy caches are lowp16, lowp8 and dropit0.9; "
        "offload admits copies on the host, algorithms those of cuDNN, nhwc has convolutions in channels-last; "
        "registered variants may have words of their own (here: none)"
    )


@pytest.mark.parametrize("mode", ["conv_conv", "inplace_normal_multiway_normal", "dropit0.9_dropit0.5"])
def test_repeated_words(mode: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_mode(mode)
    assert str(caught.value) == (
        f"mode {mode!r} repeats a word; give each of inplace, conv, multiway, newnode, normal, lowp16, lowp8, dropit, "
        "offload, algorithms, nhwc at most once"
    )


def test_lossy_words_are_in_no_mode_of_themselves() -> None:
    assert not any(is_lossy(mode) for mode in MONET_MODES)
    assert not {"lowp16", "lowp8"} & set(WORDS)
    assert parse_mode("inplace_dropit0.9_lowp8") == {"inplace", "dropit0.9", "lowp8"}
    for mode in ("dropit0.9", "normal_lowp16", "conv_lowp8", "dropit0"):
        assert is_lossy(mode)


def test_offload_is_exact_and_in_no_mode_of_itself() -> None:
    assert parse_mode("conv_offload") == {"conv", "offload"}
    assert not is_lossy("inplace_offload") and is_lossy("offload_lowp8")
    assert "offload" not in WORDS and not any("offload" in mode for mode in MONET_MODES)


@pytest.mark.parametrize(
    ("mode", "share"), [("dropit0.9", 0.9), ("dropit.5_conv", 0.5), ("dropit0", 0.0), ("dropit0.", 0.0)]
)
def test_the_share_to_drop(mode: str, share: float) -> None:
    word = dropit_word(parse_mode(mode))
    assert word is not None and dropit_share(word) == share
    assert dropit_word(parse_mode("inplace_conv")) is None


@pytest.mark.parametrize(
    "share", ["", "1", "1.0", "17", "-0.5", "nan", "inf", "1e-1", "0.5.5", " 0.5", "0,5", "\u0663", "."]
)
def test_shares_that_are_none(share: str) -> None:
    mode = f"conv_dropit{share}"
    with pytest.raises(UsageError) as caught:
        parse_mode(mode)
    assert str(caught.value) == (
        f"mode {mode!r} drops {share!r} of the elements; give a share of at least 0 and below 1 after dropit, such as "
        "dropit0.9"
    )
