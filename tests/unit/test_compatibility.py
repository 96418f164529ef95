"""Which nodes may exchange KV: each field that matters is compared, named and shown."""

from dataclasses import fields, replace

import pytest

from common.compatibility import MUST_BE_EQUAL, describe_difference, differing_fields, profile_of
from common.engines.interface import Capabilities, ModelIdentity
from common.messages import HelloRefused, NodeProfile
from transport.codec import Header, decode, encode

NEGOTIATED = {"max_tokens", "chunk_tokens"}
PROFILE = NodeProfile("m/135M", "aa" * 16, "bb" * 16, 30, 3, 64, 49_152, "float32", "half", 768, 128)


def changed(name: str) -> NodeProfile:
    value = getattr(PROFILE, name)
    return replace(PROFILE, **{name: value + 1 if isinstance(value, int) else f"{value}-other"})


def test_a_node_is_compatible_with_its_like() -> None:
    assert differing_fields(PROFILE, replace(PROFILE)) == ()


@pytest.mark.parametrize("name", [item.name for item in fields(NodeProfile)])
def test_each_field_is_either_negotiated_or_named_when_it_alone_differs(name: str) -> None:
    expected = () if name in NEGOTIATED else (name,)
    assert differing_fields(PROFILE, changed(name)) == expected
    assert differing_fields(changed(name), PROFILE) == expected


def test_same_geometry_with_other_weights_or_another_tokenizer_is_refused() -> None:
    assert {"weights_digest", "tokenizer_digest"} <= set(MUST_BE_EQUAL)


def test_all_differing_fields_are_named_with_both_values() -> None:
    theirs = replace(PROFILE, layers=24, dtype="float16", rope_form="interleaved", max_tokens=5)
    names = differing_fields(PROFILE, theirs)
    assert names == ("layers", "dtype", "rope_form")
    assert describe_difference(PROFILE, theirs, names) == (
        "layers: 30 here, 24 there; dtype: float32 here, float16 there; "
        "rope_form: half here, interleaved there; "
        "what to do: start both nodes with the same --model and the same kind of --backend "
        "(emulated ones with the same --emulated-seed), and give both nodes the same --dtype"
    )


@pytest.mark.parametrize(
    ("name", "flag"), [("dtype", "--dtype"), ("weights_digest", "--model"), ("rope_form", "backends")]
)
def test_a_difference_comes_with_what_to_do_about_it(name: str, flag: str) -> None:
    text = describe_difference(PROFILE, changed(name), (name,))
    assert flag in text.split("what to do: ")[1]


def test_the_longest_description_still_travels() -> None:
    longest = NodeProfile("x" * 256, *["y" * 64] * 2, *[2**63 - 1] * 4, *["z" * 64] * 2, 2**63 - 1, 2**63 - 1)
    shortest = NodeProfile("", "", "", 0, 0, 0, 0, "", "", 0, 0)
    names = differing_fields(longest, shortest)
    assert names == MUST_BE_EQUAL
    refused = HelloRefused(False, describe_difference(longest, shortest, names), names)
    assert decode(encode(Header(None, 0), refused))[1] == refused


def test_a_profile_says_what_the_engine_declares() -> None:
    identity = ModelIdentity("model", "weights", "tokenizer", 1, 2, 3, 4)
    capabilities = Capabilities(identity, "float16", "interleaved", 5, 6, lanes=7)
    assert profile_of(capabilities) == NodeProfile(
        model_id="model",
        weights_digest="weights",
        tokenizer_digest="tokenizer",
        layers=1,
        kv_heads=2,
        head_dim=3,
        vocab_size=4,
        dtype="float16",
        rope_form="interleaved",
        max_tokens=5,
        chunk_tokens=6,
    )
