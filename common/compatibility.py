"""Which two nodes may exchange KV.

Decides what must be equal at HELLO and what is negotiated; used by the prefill node on HELLO and by the
decode node on HELLO_OK. It must never guess: a field that differs is named, and nothing is converted
silently.
"""

from common import limits
from common.engines.interface import Capabilities
from common.messages import HelloRefused, NodeProfile

MUST_BE_EQUAL = (
    "model_id",
    "weights_digest",
    "tokenizer_digest",
    "layers",
    "kv_heads",
    "head_dim",
    "vocab_size",
    "dtype",
    "rope_form",
)


def profile_of(capabilities: Capabilities) -> NodeProfile:
    """The profile that a node with this engine declares."""
    identity = capabilities.identity
    return NodeProfile(
        model_id=identity.model_id,
        weights_digest=identity.weights_digest,
        tokenizer_digest=identity.tokenizer_digest,
        layers=identity.layers,
        kv_heads=identity.kv_heads,
        head_dim=identity.head_dim,
        vocab_size=identity.vocab_size,
        dtype=capabilities.dtype,
        rope_form=capabilities.rope_form,
        max_tokens=capabilities.max_tokens,
        chunk_tokens=capabilities.chunk_tokens,
    )


def differing_fields(ours: NodeProfile, theirs: NodeProfile) -> tuple[str, ...]:
    """Names of the fields that must be equal and are not."""
    return tuple(name for name in MUST_BE_EQUAL if getattr(ours, name) != getattr(theirs, name))


def describe_difference(ours: NodeProfile, theirs: NodeProfile, fields: tuple[str, ...]) -> str:
    """One readable clause per differing field, and what to do about them."""
    clauses = [f"{name}: {getattr(ours, name)} here, {getattr(theirs, name)} there" for name in fields]
    return "; ".join([*clauses, f"what to do: {_remedy(fields)}"])


def _remedy(fields: tuple[str, ...]) -> str:
    """What makes two nodes alike that differ in these fields."""
    remedies = []
    if set(fields) - {"dtype", "rope_form"}:
        remedies.append(
            "start both nodes with the same --model and the same kind of --backend (emulated ones with the "
            "same --emulated-seed)"
        )
    if "dtype" in fields:
        remedies.append("give both nodes the same --dtype")
    if "rope_form" in fields and len(fields) == 1:
        remedies.append("use backends that rotate positions alike")
    return ", and ".join(remedies)


def mismatch_refusal(ours: NodeProfile, theirs: NodeProfile | None) -> HelloRefused | None:
    """The prefill node's answer to a decode node that it cannot work with; None when it can."""
    if theirs is None:
        return HelloRefused(False, "a decode node must declare its profile", ("profile",))
    fields = differing_fields(ours, theirs)
    if not fields:
        return None
    detail = "prefill node and decode node differ in " + describe_difference(ours, theirs, fields)
    return HelloRefused(False, detail[: limits.DETAIL_CHARACTERS], fields)
